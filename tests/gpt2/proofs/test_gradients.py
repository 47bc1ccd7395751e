from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from trainings import FOUR, start

from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from gpt2.model.autograd import A, B
from gpt2.model.model import GPT2
from gpt2.proofs.evidence import StepEvidence
from gpt2.proofs.gradients import (
    EAGER_SEQUENCES,
    GradientCheck,
    _exact_gradients,
    gradient_difference,
    gradients,
)
from gpt2.training.train import Training

pytestmark = pytest.mark.usefixtures("process_settings")

CASTS = {"adamw": "compiled", "clip": "in_step", "weight_casts": "optimizer"}


def difference(training: Training) -> float:
    assert training.micro_batch is not None
    return gradient_difference(training, *training.micro_batch)


def faulty(scale: float, place: int = -1) -> Callable:
    """A backend of torch.compile whose backward graph scales one of the gradients."""
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        return graph.forward

    def backward(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        def run(*arguments: Tensor) -> list[Tensor | None]:
            gradients = list(graph.forward(*arguments))
            places = [index for index, gradient in enumerate(gradients) if gradient is not None]
            gradients[places[place]] = gradients[places[place]] * scale
            return gradients

        return run

    return aot_autograd(fw_compiler=_boxed(forward), bw_compiler=_boxed(backward))


def _boxed(compiler: Callable) -> Callable:
    from functorch.compile import make_boxed_func  # type: ignore[attr-defined]

    return lambda graph, inputs: make_boxed_func(compiler(graph, inputs))


def trained(scale: float, autocast: str = "float32", place: int = -1) -> Training:
    """Two steps with a backend of our own: quick to compile, and with a fault in it unless scale is 1."""
    torch.compiler.reset()
    training = start(replace(FOUR, autocast=autocast))
    training.model.compile(backend=faulty(scale, place))
    next(training)
    next(training)
    return training


@pytest.mark.slow
def test_eager_gradients_are_taken_with_sums_in_float32_and_the_setting_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[object]] = {}
    taken = gradients

    def noted(
        training: Training, model: GPT2, x: Tensor, y: Tensor, stance: str, sequences: int
    ) -> Sequence[Tensor]:
        matmul = torch.backends.cuda.matmul
        seen[stance] = [
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ]
        return taken(training, model, x, y, stance, sequences)

    monkeypatch.setattr("gpt2.proofs.gradients.gradients", noted)
    difference(trained(1.0))
    assert seen == {"fail_on_recompile": [True, True], "force_eager": [False, False]}
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.slow
@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_gradients_of_sound_compiled_code_are_within_the_tolerance(autocast: str) -> None:
    assert difference(trained(1.0, autocast)) < GRADIENT_TOLERANCE[autocast]


@pytest.mark.parametrize(
    ("autocast", "place"), [("float32", -1), ("bfloat16", -1), ("float32", 5), ("float32", 0)]
)
def test_one_gradient_that_is_a_tenth_too_large_is_found(autocast: str, place: int) -> None:
    found = difference(trained(1.1, autocast, place))
    assert found == pytest.approx(0.1, rel=0.1)
    assert found > GRADIENT_TOLERANCE[autocast]


def error_of(training: Training) -> float | None:
    assert training.micro_batch is not None
    return GradientCheck(training, *training.micro_batch).error_over_eager()


@pytest.fixture
def no_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any parameter's difference is too large."""
    for precision in GRADIENT_TOLERANCE:
        monkeypatch.setitem(GRADIENT_TOLERANCE, precision, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "least", "most"), [(1.001, 0.5, 1.5), (1.1, 10.0, 1e3)])
def test_an_error_as_small_as_rounding_is_as_far_from_float32_as_eager_code_and_a_fault_many_times_as_far(
    scale: float, least: float, most: float, no_tolerance: None
) -> None:
    found = error_of(trained(scale, "bfloat16"))
    assert found is not None
    assert least < found < most


def test_gradients_within_the_tolerance_have_no_error_to_explain() -> None:
    assert error_of(trained(1.0, "bfloat16")) == 0.0


ROUNDED = [
    {"autocast": "bfloat16", **CASTS, "tied_gradient": "rows"},
    {"autocast": "bfloat16", "residual": "bfloat16"},
    {"autocast": "bfloat16", "recompute": "block"},
    {"autocast": "float16"},
    {"matmul_precision": "medium"},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ROUNDED, ids=str)
def test_a_gelu_of_ours_is_as_exact_as_torchs_and_one_with_a_fault_is_not(
    changes: dict[str, str], no_tolerance: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "matmul_precision" in changes and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 units, without which every precision is float32's own")
    found = []
    for coefficient in (A, 0.8 * A):
        monkeypatch.setattr("gpt2.model.autograd.A", coefficient)
        training = start(replace(FOUR, gelu="sigmoid", **changes))
        next(training)
        found.append(error_of(training))
    assert found[0] < 2 < found[1]


@pytest.mark.parametrize(
    "changes", [{}, {"autocast": "bfloat16", "adamw": "compiled", "weights": "bfloat16"}], ids=str
)
def test_where_float32_gives_no_reference_no_error_is_told(changes: dict[str, str]) -> None:
    training = start(replace(FOUR, **changes))
    next(training)
    assert error_of(training) is None


def test_an_error_that_has_no_bound_is_told_as_a_number(no_tolerance: None) -> None:
    found = error_of(trained(float("nan"), "bfloat16"))
    assert found == 1e6


def test_gradients_in_float32_are_those_of_the_weights_at_full_precision() -> None:
    training = start(replace(FOUR, autocast="bfloat16", matmul_precision="medium"))
    next(training)
    assert training.micro_batch is not None
    exact = _exact_gradients(training, *training.micro_batch)
    plain = start(FOUR)
    plain.model.load_state_dict(training.model.state_dict())
    torch.set_float32_matmul_precision("highest")
    expected = gradients(plain, plain.model, *training.micro_batch, "force_eager", 1)
    for a, b in zip(exact, expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-5


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_in_float32_leave_modes_and_leaves_as_they_were(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = start(replace(FOUR, autocast="bfloat16", matmul_precision="medium", attention="sdpa"))
    next(training)
    assert training.micro_batch is not None
    torch.backends.cuda.enable_flash_sdp(False)
    before = training.autocast, training.leaves
    if fails:
        monkeypatch.setattr("gpt2.proofs.gradients.gradients", None)
    with pytest.raises(TypeError) if fails else nullcontext():
        _exact_gradients(training, *training.micro_batch)
    assert (training.autocast, training.leaves) == before
    assert torch.get_float32_matmul_precision() == "medium"
    assert not torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.slow
def test_gradients_by_inductor_are_within_the_tolerance() -> None:
    torch.compiler.reset()
    training = start(replace(FOUR, compile="default"))
    next(training)
    assert 0 < difference(training) < GRADIENT_TOLERANCE["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 7, 8, 9, 16, 20])
@pytest.mark.parametrize(
    "changes", [{}, {"autocast": "float16"}, {"autocast": "bfloat16", "tied_gradient": "rows", **CASTS}]
)
def test_gradients_of_a_batch_in_parts_are_those_of_the_whole(
    sequences: int, changes: dict[str, str]
) -> None:
    training = start(replace(FOUR, micro_batch_size=sequences, **changes))
    next(training)
    assert training.micro_batch is not None
    whole, parts = (
        gradients(training, training.model, *training.micro_batch, "force_eager", at_a_time)
        for at_a_time in (sequences, EAGER_SEQUENCES)
    )
    assert len(whole) == len(parts) == len(training.leaves)
    tolerance = GRADIENT_TOLERANCE[training.toggles.precision_class()] / 10
    for a, b in zip(whole, parts, strict=True):
        assert ((a - b).norm() / a.norm()).item() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "taken"), [(1, [1]), (8, [8]), (9, [8, 1]), (20, [8, 8, 4])])
def test_eager_code_takes_no_more_than_eight_sequences_and_compiled_code_all(
    sequences: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    training = start(replace(FOUR, micro_batch_size=sequences))
    training.model.compile(backend=faulty(1.0))
    next(training)
    seen: list[tuple[str, int]] = []
    forward = GPT2.__call__

    def spy(model: GPT2, tokens: Tensor, targets: Tensor) -> Tensor:
        seen.append(("trained" if model is training.model else "eager", len(tokens)))
        return forward(model, tokens, targets)

    monkeypatch.setattr(GPT2, "__call__", spy)
    assert difference(training) < GRADIENT_TOLERANCE["float32"]
    assert seen == [("trained", sequences), *(("eager", number) for number in taken)]


@pytest.mark.parametrize("sequences", [9, 20])
def test_a_fault_is_found_whatever_the_parts(sequences: int) -> None:
    torch.compiler.reset()
    training = start(replace(FOUR, micro_batch_size=sequences))
    training.model.compile(backend=faulty(1.1))
    next(training)
    assert difference(training) == pytest.approx(0.1, rel=0.1)


def test_the_residual_stream_is_looked_at_in_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(replace(FOUR, micro_batch_size=20, autocast="bfloat16", residual="bfloat16"))
    next(training)
    rows: list[int] = []
    forward = GPT2.embed
    monkeypatch.setattr(
        GPT2, "embed", lambda model, tokens: rows.append(len(tokens)) or forward(model, tokens)
    )
    assert StepEvidence(training, []).residual_dtype == torch.bfloat16
    assert rows == [1]


OURS = {"attention": "blocks", "cross_entropy": "closed_form", "tied_gradient": "rows"}
OURS |= {"gelu": "sigmoid", "products": "tuned"}


@pytest.mark.parametrize(
    "changes", [{}, {"autocast": "bfloat16", **CASTS}, {"autocast": "bfloat16", "recompute": "gelu"}]
)
def test_gradients_of_our_own_functions_are_those_of_torchs(changes: dict[str, str]) -> None:
    training = start(replace(FOUR, **OURS | changes))
    next(training)
    assert 0 < difference(training) < GRADIENT_TOLERANCE[training.toggles.precision_class()]


def test_an_error_in_a_function_of_ours_is_found_in_eager_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2.model.autograd.B", 0.9 * B)  # a coefficient of GELU's
    training = start(replace(FOUR, gelu="sigmoid"))
    next(training)
    assert difference(training) > GRADIENT_TOLERANCE["float32"]


@pytest.mark.slow
def test_comparing_gradients_leaves_the_training_as_it_was() -> None:
    other = trained(1.0)
    expected = [next(other).loss.item() for _ in range(3)]
    training = trained(1.0)
    compiled = training.device.compilations()
    difference(training)
    assert training.device.compilations() == compiled
    assert all(parameter.grad is None for parameter in training.model.parameters())
    with torch.compiler.set_stance("fail_on_recompile"):
        losses = [next(training).loss.item() for _ in range(3)]
    assert losses == expected


@pytest.mark.slow
def test_comparing_gradients_refuses_to_compile_anew() -> None:
    training = trained(1.0)
    assert training.micro_batch is not None
    with pytest.raises(RuntimeError, match="recompile"):
        gradient_difference(training, *(tokens[:3] for tokens in training.micro_batch))
    next(training)


def test_each_precision_has_a_tolerance_for_gradients() -> None:
    assert set(GRADIENT_TOLERANCE) == set(LOSS_TOLERANCE)
