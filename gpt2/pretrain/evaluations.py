"""Evaluations between the steps of a long run: validation loss, HellaSwag and text samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpt2.config.validation import ConfigError
from gpt2.config.workload import TEXT_VOCABULARY
from gpt2.evals import hellaswag
from gpt2.evals.generate import generate, stream_text
from gpt2.evals.validation_loss import Validation
from gpt2.pretrain import checkpoint_tensors
from gpt2.pretrain.config import TrainingRun
from gpt2.pretrain.datasets import Data
from gpt2.pretrain.metrics import Event
from gpt2.text import encoded
from gpt2.training import distributed
from gpt2.training.train import Training


class CutShort(Exception):
    """The run must end before the evaluation is complete."""


LONG_VALIDATION = 20
"""Steps in whose time a validation is worth a word, as nothing else is said until its end."""
TOP_K = 50
"""top_k of the samples taken during a run; `gpt2 sample` offers more options."""


class Evaluations:
    """All evaluations of a run; inputs are loaded at construction, so that problems show at the start.

    Raises ConfigError, DataError, and what gpt2.evals.hellaswag.load() raises.
    """

    def __init__(self, run: TrainingRun, training: Training, data: Data) -> None:
        self.asked = asked = run.evaluation
        self.steps, self.training, self.corpus = run.steps, training, data.facts["name"]
        held_out = data.validation
        self.validation = Validation(held_out, training, asked.val_tokens) if held_out else None
        self.judged_by = [held_out.sha256, self.validation.tokens] if held_out and self.validation else None
        """sha256 and number of the validation tokens; losses on other tokens are not comparable."""
        self._announced = False
        """Whether it was said, if there is cause, that a validation takes long."""
        self.prompts: list[tuple[str, list[int]]] = []
        self.examples: list[hellaswag.Example] = []
        reads_text = run.workload.config.vocab_size == TEXT_VOCABULARY
        if (asked.sample_every or asked.hellaswag_every) and not reads_text:
            raise ConfigError(
                f"model {run.workload.model} has no vocabulary for text; set evaluation.sample_every and "
                "evaluation.hellaswag_every to 0"
            )
        if asked.sample_every:
            self.prompts = [(prompt, encoded(prompt)) for prompt in asked.prompts]
        if asked.hellaswag_every:
            self.examples = hellaswag.load()

    def at(self, step: int, to_end: Callable[[], bool]) -> Iterator[Event]:
        """Make the evaluations due before step `step` and yield their events; all ranks call this together.

        to_end: returns whether this process was asked to end the run. A single process stops at once; several
        stop together between two evaluations. Either raises CutShort.
        """
        asked, processes = self.asked, self.training.toggles.processes

        def heed(*_: int) -> None:
            if processes == 1 and to_end():
                raise CutShort

        for every, wanted, evaluate in (
            (asked.val_every, self.validation, self._validation),
            (asked.hellaswag_every, self.examples, self._hellaswag),
            (asked.sample_every, self.prompts, self._samples),
        ):
            if wanted and self._due(every, step):
                if any(distributed.gather(to_end(), processes)):
                    raise CutShort
                yield from evaluate(step, heed)

    def due(self, step: int) -> bool:
        """Return whether an evaluation is due before step `step`."""
        asked = self.asked
        intervals = (asked.val_every, asked.hellaswag_every, asked.sample_every)
        return any(self._due(every, step) for every in intervals)

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step >= self.steps)

    def _validation(self, step: int, heed: Callable[..., None]) -> Iterator[Event]:
        assert self.validation
        # A token takes a third of its time in training, where the backward pass is twice the forward pass.
        as_steps = self.validation.tokens / (
            3 * self.training.toggles.tokens_per_step(self.validation.seq_len)
        )
        if as_steps >= LONG_VALIDATION and not self._announced:
            long = f"validating on {self.validation.tokens:,} tokens takes as long as {as_steps:,.0f} steps"
            yield Event(kind="note", step=step, values={"text": f"{long}: see evaluation.val_tokens"})
        self._announced = True
        start = time.perf_counter()
        loss = self.validation.loss(heed)
        corpus, tokens = self.validation.corpus, self.validation.tokens
        values = {"loss": loss, "tokens": tokens, "corpus": corpus.name, "sha256": corpus.sha256}
        yield self._event("val", step, start, values)

    def _hellaswag(self, step: int, heed: Callable[..., None]) -> Iterator[Event]:
        start, training = time.perf_counter(), self.training
        score = hellaswag.evaluate(
            checkpoint_tensors.plain(training),
            self.examples,
            style=self.asked.hellaswag_style,
            device=training.device,
            autocast=training.autocast,
            batch_size=4 * training.toggles.sequences,
            rank=distributed.rank(),
            processes=training.toggles.processes,
            progress=heed,
        )
        values = {name: getattr(score, name) for name in ("style", "acc", "acc_norm", "examples")}
        yield self._event("hellaswag", step, start, {**values, "corpus": self.corpus})

    def _samples(self, step: int, heed: Callable[..., None]) -> Iterator[Event]:
        model = checkpoint_tensors.plain(self.training)
        for prompt, tokens in self.prompts:
            heed()
            start = time.perf_counter()
            found = generate(
                model,
                torch.tensor([tokens]),
                max_tokens=self.asked.sample_tokens,
                top_k=TOP_K,
                seed=self.training.workload.seed,
                autocast=self.training.autocast,
            )
            text = "".join(stream_text(int(token) for token in found))
            yield self._event("sample", step, start, {"prompt": prompt, "text": text})

    def _event(self, kind: Any, step: int, start: float, values: dict[str, Any]) -> Event:
        return Event(kind=kind, step=step, values={**values, "seconds": time.perf_counter() - start})
