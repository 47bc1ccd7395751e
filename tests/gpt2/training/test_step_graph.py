"""A whole step as one CUDA graph, without a GPU: a recording is a fake that runs when replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trainings import FOUR, start

from gpt2.config.validation import ConfigError
from gpt2.pretrain.config import build
from gpt2.proofs.evidence import StepEvidence
from gpt2.proofs.prove import PROOFS
from gpt2.training.step_graph import EAGER_STEPS, StepGraph

CPU = torch.device("cpu")


class Recorder:
    """torch.cuda's part: what is computed within a recording is not run, but by each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recordings = 0
        self.modes: list[str] = []
        self.recording = False
        self.recorded: Callable[[], object] = lambda: None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr("torch.cuda.Stream", lambda: stream)
        monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
        monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.recorded()))
        monkeypatch.setattr("torch.cuda.graph", self.graph)

    @contextlib.contextmanager
    def graph(self, graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        self.recordings += 1
        self.modes.append(capture_error_mode)
        self.recording = True
        yield
        self.recording = False


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


class Doubling:
    """A step that doubles its tokens in place of training on them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.ran = recorder, 0
        self.result = torch.zeros(())

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, _ = next(batches)

        def run() -> None:
            self.ran += 1
            self.result.copy_(2 * x.sum())

        if self.recorder.recording:
            self.recorder.recorded = run
        else:
            run()
        return self.result, self.result


def batch(value: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((1,), value), torch.zeros(1))]


def test_a_step_is_recorded_once_after_the_first_ones_and_replayed_with_each_new_batch(
    recorder: Recorder,
) -> None:
    compute = Doubling(recorder)
    step = StepGraph(compute, CPU)
    losses = [step(batch(value))[0].item() for value in range(EAGER_STEPS + 4)]
    assert losses == [2.0 * value for value in range(EAGER_STEPS + 4)]
    assert (recorder.recordings, step.replays, compute.ran) == (1, 4, EAGER_STEPS + 4)


def test_a_loss_that_was_returned_stays_when_the_recording_is_replayed(recorder: Recorder) -> None:
    step = StepGraph(Doubling(recorder), CPU)
    for value in range(EAGER_STEPS):
        step(batch(value))
    first, _ = step(batch(5.0))
    step(batch(6.0))
    assert first.item() == 10.0


def test_other_threads_may_pin_memory_during_the_recording(recorder: Recorder) -> None:
    step = StepGraph(Doubling(recorder), CPU)
    for value in range(EAGER_STEPS + 1):
        step(batch(value))
    assert recorder.modes == ["thread_local"]


def test_a_step_can_be_run_op_by_op_after_the_recording(recorder: Recorder) -> None:
    step = StepGraph(Doubling(recorder), CPU)
    for value in range(EAGER_STEPS + 1):
        step(batch(value))
    assert step(batch(7.0), replay=False)[0].item() == 14.0
    assert step.replays == 1


def test_what_may_refuse_a_step_cannot_be_asked_by_a_recording(recorder: Recorder) -> None:
    training = start(FOUR)
    training.graph = StepGraph(training._compute, CPU)
    training.accept = lambda loss, norm: True
    with pytest.raises(AssertionError):
        next(training)


def test_a_guard_that_skips_steps_is_refused_with_a_recorded_step_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="guard cannot skip one; choose stop or report"):
        build(
            {
                "name": "a",
                "steps": 1,
                "workload": {"model": "tiny", "seq_len": 64},
                "toggles": {"device": "cuda", "adamw": "fused", "launch": "graph"},
                "guard": {"spike": "skip"},
            },
            "here",
        )


def test_a_recording_counts_as_a_compilation_so_that_it_is_not_timed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepGraph, "recordings", 0)
    step = StepGraph(Doubling(recorder), CPU)
    counts = []
    for value in range(EAGER_STEPS + 2):
        step(batch(value))
        counts.append(StepGraph.recordings)
    assert counts == [0] * EAGER_STEPS + [1, 1]


def test_a_learning_rate_that_is_a_tensor_is_changed_where_it_lies() -> None:
    training = start(FOUR)
    lr = torch.tensor(9.0)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    next(training)
    assert training.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(training.workload.lr)


@pytest.mark.parametrize(("replays", "took_effect"), [(0, False), (7, True)])
def test_replays_prove_that_steps_were_launched_as_a_graph(replays: int, took_effect: bool) -> None:
    toggles = SimpleNamespace(launch="graph")
    training = SimpleNamespace(toggles=toggles, graph=SimpleNamespace(replays=replays), number=10)
    found = PROOFS["launch"](StepEvidence(training, []))  # type: ignore[arg-type]
    assert (found.took_effect, found.evidence) == (
        took_effect,
        f"{replays} of 10 steps ran as one CUDA graph",
    )
