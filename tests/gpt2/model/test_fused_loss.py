"""The loss by a Triton kernel: this, by Triton's interpreter without a GPU, and what is around it.

Trainings here run on a CPU, where the same operator is made of torch's functions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernels import by_kernels
from torch import Tensor
from trainings import FOUR, WORKLOAD, assert_trains_alike
from trainings import start_on_a_cpu as start

from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import GRADIENT_TOLERANCE
from gpt2.config.workload import PRESETS
from gpt2.model import fused_loss
from gpt2.model.fused_loss import FusedCrossEntropy
from gpt2.model.model import build
from gpt2.proofs.gradients import gradient_difference
from gpt2.proofs.profiler import profile
from gpt2.proofs.prove import prove
from gpt2.training.memory_estimate import estimate

pytestmark = pytest.mark.usefixtures("process_settings")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {
    "one row": (1, 509, 0, 3.0),
    "one column": (2, 1, 0, 3.0),
    "one block": (3, 8192, 0, 3.0),
    "unpadded": (5, 50257, 0, 3.0),
    "padded": (5, 50304, 47, 3.0),
    "blocks of pads": (3, 20000, 15000, 3.0),
    "huge": (5, 9001, 0, 1e4),
    "tiny": (5, 9001, 0, 1e-4),
}
"""Rows, columns, how many of these are pads at the end, and the size of the logits."""


def case(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and targets; the first row's target is the first class, the last row's the last."""
    rows, columns, pads, size = CASES[name]
    generator = torch.Generator().manual_seed(0)
    logits = size * torch.randn(rows, columns, generator=generator).clamp(-1, 1)
    logits[:, columns - pads :] = -torch.inf
    targets = torch.randint(columns - pads, (rows,), generator=generator)
    targets[0] = 0
    targets[-1] = columns - pads - 1
    return logits.to(dtype), targets


def with_gaps(logits: Tensor) -> Tensor:
    """The same logits in rows that are seven elements apart, filled with 5."""
    wide = torch.full((len(logits), logits.size(1) + 7), 5.0, dtype=logits.dtype, device=logits.device)
    wide[:, :-7] = logits
    return wide[:, :-7]


def by_triton(device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Losses and gradients of each case by the kernel, with what else is asked of it."""

    def ran(logits: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        logits = logits.to(device)
        losses = fused_loss._by_triton(logits, targets.to(device), scale)
        return losses.cpu(), logits.cpu()

    found = {f"{name} {dtype}": ran(*case(name, dtype)) for name in CASES for dtype in DTYPES}
    logits, targets = case("one row", torch.float32)
    found["scaled"] = ran(logits, targets, 8.0)
    late = torch.full((1, 9000), -torch.inf)
    late[:, 8500:] = 0.0
    found["impossible at first"] = ran(late, torch.tensor([8999]))
    found["no class"] = ran(torch.zeros(2, 10), torch.tensor([-100, 10]))
    gaps = with_gaps(case("padded", torch.bfloat16)[0].to(device))
    losses = fused_loss._by_triton(gaps, case("padded", torch.bfloat16)[1].to(device), 1.0)
    found["gaps"] = losses.cpu(), gaps.as_strided((len(gaps), gaps.stride(0)), gaps.stride()).cpu()
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    return by_kernels(by_triton, tmp_path_factory.mktemp("kernel"))


def by_torch(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, targets = case(name, dtype)
    losses = torch.ops.gpt2.cross_entropy_(logits, targets, 1.0)
    return losses, logits


def assert_exact(found: tuple[Tensor, Tensor], name: str, dtype: torch.dtype) -> None:
    """Held to F.cross_entropy in float64."""
    losses, gradient = found[0], found[1].clone()
    logits, targets = case(name, dtype)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    expected.mean().backward()
    assert wide.grad is not None
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=2e-6)
    # Triton's interpreter rounds to bfloat16 towards zero. float16 has no smaller numbers than 6e-8.
    tolerances = {torch.float32: (2e-5, 1e-30), torch.bfloat16: (2**-7, 1e-30), torch.float16: (2e-3, 1e-7)}
    rtol, atol = tolerances[dtype]
    chosen = torch.arange(len(targets)), targets
    # p - 1 cancels.
    torch.testing.assert_close(gradient.double()[chosen], wide.grad[chosen], rtol=rtol, atol=1e-7)
    gradient[chosen] = wide.grad[chosen] = 0.0
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_the_kernel_are_torchs_in_float64(
    name: str, dtype: torch.dtype, kernel: dict[str, tuple[Tensor, Tensor]]
) -> None:
    assert_exact(kernel[f"{name} {dtype}"], name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_the_operator_on_a_cpu_are_torchs_in_float64(
    name: str, dtype: torch.dtype
) -> None:
    assert_exact(by_torch(name, dtype), name, dtype)


@pytest.mark.parametrize("name", ["padded", "blocks of pads"])
def test_the_kernels_gradient_of_pads_is_zero(name: str, kernel: dict[str, tuple[Tensor, Tensor]]) -> None:
    _, columns, pads, _ = CASES[name]
    for dtype in DTYPES:
        _, gradient = kernel[f"{name} {dtype}"]
        assert (gradient[:, columns - pads :] == 0).all()


def test_classes_may_be_possible_in_the_kernels_second_block_alone(
    kernel: dict[str, tuple[Tensor, Tensor]],
) -> None:
    losses, gradient = kernel["impossible at first"]
    torch.testing.assert_close(losses, torch.full((1,), 500.0).log())
    assert (gradient[:, :8500] == 0).all()
    torch.testing.assert_close(gradient[0, 8500:-1], torch.full((499,), 1 / 500))


def test_the_kernel_multiplies_the_gradient_by_its_scale(kernel: dict[str, tuple[Tensor, Tensor]]) -> None:
    torch.testing.assert_close(kernel["scaled"][1], 8 * kernel["one row torch.float32"][1])


def test_the_kernel_writes_nothing_between_rows(kernel: dict[str, tuple[Tensor, Tensor]]) -> None:
    losses, rows = kernel["gaps"]
    expected_losses, gradient = kernel["padded torch.bfloat16"]
    assert torch.equal(losses, expected_losses)
    assert torch.equal(rows[:-1, :-7], gradient[:-1])
    assert (rows[:-1, -7:] == 5).all()


def test_a_target_that_is_no_class_makes_the_kernels_loss_nan(
    kernel: dict[str, tuple[Tensor, Tensor]],
) -> None:
    assert kernel["no class"][0].isnan().all()


def test_the_operator_declares_what_it_mutates() -> None:
    logits, targets = case("one row", torch.float32)
    torch.library.opcheck(torch.ops.gpt2.cross_entropy_.default, (logits, targets, 1.0))


def layer(rows: int = 60, width: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of an lm_head with 509 classes and 3 pads, its weights, its bias, and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    head = 0.3 * torch.randn(512, width, generator=generator)
    bias = torch.zeros(512)
    bias[509:] = -torch.inf
    return x, head, bias, torch.randint(509, (rows,), generator=generator)


def differentiated(
    x: Tensor, head: Tensor, dtype: torch.dtype, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients of x and head where the loss's own is `factor`."""
    _, _, bias, targets = layer(*x.shape)
    x, head = (each.clone().requires_grad_() for each in (x, head))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = FusedCrossEntropy.apply(x, head, bias, targets)
    (factor * loss).backward()
    assert x.grad is not None
    assert head.grad is not None
    return loss.detach(), x.grad, head.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow_head", [False, True], ids=["head as it is", "head in that format"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 2.0**13])
def test_lm_head_and_loss_in_one_have_torchs_gradients(
    factor: float, narrow_head: bool, dtype: torch.dtype
) -> None:
    x, head, bias, targets = layer()
    head = head.to(dtype) if narrow_head else head
    loss, to_x, to_head = differentiated(x, head, dtype, factor)
    exact_x, exact_head = (each.to(dtype).double().requires_grad_() for each in (x, head))
    expected = F.cross_entropy(exact_x @ exact_head.t() + bias.double(), targets)
    (factor * expected).backward()
    assert loss.dtype == torch.float32
    assert (to_x.dtype, to_head.dtype) == (x.dtype, head.dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == torch.float32 else 5e-4)
    for found, wide in ((to_x, exact_x), (to_head, exact_head)):
        assert wide.grad is not None
        assert (found - wide.grad).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * wide.grad.norm()
    assert not to_head[509:].any()


def test_float16_gradients_of_a_large_batch_do_not_vanish() -> None:
    x, head, *_ = layer(rows=32768, width=8)
    _, *narrow = differentiated(x, head, torch.float16, 1.0)
    _, *wide = differentiated(x, head, torch.float32, 1.0)
    for found, expected in zip(narrow, wide, strict=True):
        assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("gaps", [0, 3])
def test_compiled_code_has_one_tensor_of_the_logits_size_for_logits_and_gradient(gaps: int) -> None:
    """Neither a copy for the mutation nor, where the matmul's result has gaps, one to close these."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.compiler.reset()
    x, head, bias, targets = layer()
    x.requires_grad_()
    head.requires_grad_()

    def loss(x: Tensor, head: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if not gaps:
                return FusedCrossEntropy.apply(x, head, bias, targets)
            logits = F.linear(x, head)[:, :-gaps]  # as torch.compile pads a matmul and cuts its result
            return torch.ops.gpt2.cross_entropy_(logits.detach(), targets, 1.0).mean() + 0 * x.sum()

    compiled = torch.compile(loss, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x, head))
    code = "\n".join(codes)
    assert "gpt2.cross_entropy_.default(" in code
    made = [line for line in code.splitlines() if "= empty_strided" in line]
    of_logits = [line for line in made if "(60, 512)" in line or "(60, 509)" in line]
    assert len(of_logits) == 1, of_logits


def test_compiled_gradients_are_the_eager_ones() -> None:
    torch.compiler.reset()
    x, head, bias, targets = layer()
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for function in (FusedCrossEntropy.apply, torch.compile(FusedCrossEntropy.apply, fullgraph=True)):
            leaves = [each.clone().requires_grad_() for each in (x, head)]
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = function(*leaves, bias, targets)
            (loss / 2).backward()
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=1e-6)


TRITON = replace(FOUR, cross_entropy="triton")
REGIONS = {"compile": "default", "compile_region": "block"}
CASTS = {"adamw": "compiled", "clip": "in_step", "weight_casts": "optimizer", "tied_gradient": "rows"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_multiple": 64},
        {"tied_gradient": "rows", "recompute": "block"},
        {"grad_accum_steps": 3},
        {"autocast": "bfloat16"},
        {"autocast": "float16"},
        {"autocast": "float16", "tied_gradient": "rows", "grad_accum_steps": 2},
        {"autocast": "bfloat16", "vocab_multiple": 64, "residual": "bfloat16", **CASTS},
        {"autocast": "bfloat16", "adamw": "compiled", "weights": "bfloat16"},
        {**REGIONS, "autocast": "bfloat16", "tied_gradient": "rows"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_it_trains_as_the_loss_by_torch_does(changes: dict) -> None:
    torchs = replace(FOUR, **{**changes, "compile": "eager", "compile_region": "model"})
    assert_trains_alike(replace(TRITON, **changes), torchs)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16", "float16"])
def test_its_gradients_are_held_to_those_of_torchs_loss(autocast: str) -> None:
    training = start(replace(TRITON, autocast=autocast, vocab_multiple=64))
    next(training)
    assert training.micro_batch is not None
    difference = gradient_difference(training, *training.micro_batch)
    assert difference < GRADIENT_TOLERANCE[training.toggles.precision_class()]
    assert training.model.config.plain.cross_entropy == "torch"


def test_without_gradients_its_loss_is_that_of_the_logits() -> None:
    config = replace(PRESETS["tiny"], cross_entropy="triton", padded_vocab_size=512)
    model = build(config, 0, torch.device("cpu"))
    tokens = torch.randint(509, (2, 65), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        loss, logits = model(x, y), model.logits(x)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten()))


@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_its_proof_counts_the_kernels_of_a_step(grad_accum_steps: int) -> None:
    training = start(replace(TRITON, grad_accum_steps=grad_accum_steps))
    next(training)
    ops = profile(lambda: next(training), training.device)
    found = prove(training, ops)
    times = {1: "1 time", 2: "2 times"}[grad_accum_steps]
    evidence = f"eager code differentiates by FusedCrossEntropyBackward; the kernel ran {times}"
    assert (found["cross_entropy"].took_effect, found["cross_entropy"].evidence) == (True, evidence)
    assert all(finding.took_effect for finding in found.values())
    missed = prove(training, [op for op in ops if op.name != "gpt2::cross_entropy_"])["cross_entropy"]
    assert not missed.took_effect


def test_it_needs_the_memory_of_one_logits_less_than_the_closed_form() -> None:
    toggles = Toggles(device="cuda", autocast="bfloat16", micro_batch_size=2)
    mine, closed = (
        estimate(WORKLOAD, replace(toggles, cross_entropy=value)).activations
        for value in ("triton", "closed_form")
    )
    logits = 2 * WORKLOAD.seq_len * 509 * 2
    assert closed - mine == pytest.approx(logits, rel=0.05)
