"""Biases summed by Triton kernels: these, by Triton's interpreter without a GPU, and what is around.

Trainings here run on a CPU, where the same operators are made of torch's functions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernels import by_kernels
from torch import Tensor
from trainings import FOUR, assert_trains_alike
from trainings import start_on_a_cpu as start

from gpt2.config.toggles import UnsupportedToggle
from gpt2.config.tolerances import GRADIENT_TOLERANCE
from gpt2.config.workload import PRESETS
from gpt2.device import find
from gpt2.model import bias_gradients
from gpt2.model.bias_gradients import BiasedGelu, BiasedSplit, rows_per_program
from gpt2.model.model import Block
from gpt2.proofs.gradients import gradient_difference
from gpt2.proofs.profiler import profile
from gpt2.proofs.prove import prove

pytestmark = pytest.mark.usefixtures("process_settings")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MATRICES = {
    "one number": (1, 1),
    "a block": (16, 256),
    "rows left over": (37, 256),
    "columns left over": (50, 700),
}
"""Rows and columns."""
HEADS = {
    "one number": (1, 1, 1, 1),
    "GPT-2's heads": (2, 20, 3, 64),
    "an odd width of heads": (3, 7, 5, 20),
    "columns left over": (2, 16, 3, 100),
}
"""B, T, n_head, head_dim."""

Pair = tuple[Tensor, Tensor]


def matrix(name: str, dtype: torch.dtype) -> Pair:
    """A gradient of GELU's result, and GELU's input, some of whose numbers are large."""
    generator = torch.Generator().manual_seed(0)
    gradient, wide = torch.randn(2, *MATRICES[name], generator=generator)
    wide *= 3
    wide[-1] *= 50
    return gradient.to(dtype), wide.to(dtype)


def heads(name: str, dtype: torch.dtype, laid_out: str = "as q, k, v are") -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, (B, T, n_head, head_dim)."""
    B, T, n_head, head_dim = HEADS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, T, n_head, head_dim, generator=generator).to(dtype)
    if laid_out == "each in another way":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = torch.stack([v, v], dim=-1)[..., 0]
    return q, k, v


def with_gaps(matrix: Tensor) -> Tensor:
    """The same matrix in rows that are seven elements apart, filled with 5."""
    return F.pad(matrix, (0, 7), value=5.0)[:, :-7]


def by_triton(device: str) -> dict[str, Pair]:
    """Gradients and sums of each case by the kernels."""

    def ran(function: str, *inputs: Tensor) -> Pair:
        written, sums = getattr(bias_gradients, function)(*(each.to(device) for each in inputs))
        return written.cpu(), sums.cpu()

    found = {}
    for dtype in DTYPES:
        found |= {f"gelu, {name} {dtype}": ran("_gelu_by_triton", *matrix(name, dtype)) for name in MATRICES}
        found |= {f"join, {name} {dtype}": ran("_join_by_triton", *heads(name, dtype)) for name in HEADS}
    gradient, wide = matrix("rows left over", torch.float32)
    found["gaps"] = ran("_gelu_by_triton", with_gaps(gradient), with_gaps(with_gaps(wide)))
    found["sequences"] = ran("_gelu_by_triton", gradient[:36].view(3, 12, -1), wide[:36].view(3, 12, -1))
    for name in HEADS:
        found[f"strides, {name}"] = ran("_join_by_triton", *heads(name, torch.float32, "each in another way"))
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return by_kernels(by_triton, tmp_path_factory.mktemp("kernels"))


def assert_gelu(found: Pair, gradient: Tensor, wide: Tensor) -> None:
    """Held to F.gelu in float64."""
    written, sums = found
    x = wide.double().requires_grad_()
    F.gelu(x, approximate="tanh").backward(gradient.double())
    assert x.grad is not None
    # Triton's interpreter rounds to bfloat16 towards zero.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2e-3}[wide.dtype]
    assert written.dtype == wide.dtype
    assert written.is_contiguous()
    torch.testing.assert_close(written.double(), x.grad, rtol=rtol, atol=4e-6)
    # Each sum is of numbers that are not rounded yet, so that it is as good in any format.
    assert sums.dtype == torch.float32
    assert len(sums) == -(-wide.flatten(0, -2).size(0) // rows_per_program(*wide.flatten(0, -2).shape))
    torch.testing.assert_close(sums.double().sum(0), x.grad.flatten(0, -2).sum(0), rtol=1e-5, atol=2e-5)


def assert_joined(found: Pair, q: Tensor, k: Tensor, v: Tensor) -> None:
    written, sums = found
    B, T, n_head, head_dim = q.shape
    assert written.is_contiguous()
    assert torch.equal(written, torch.stack([q, k, v], dim=2))
    assert sums.dtype == torch.float32
    assert len(sums) == -(-B * T // rows_per_program(B * T, 3 * n_head * head_dim))
    exact = written.double().sum((0, 1)).flatten()
    torch.testing.assert_close(sums.double().sum(0), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_gelus_gradient_and_sums_by_the_kernel_are_torchs_in_float64(
    name: str, dtype: torch.dtype, kernels: dict[str, Pair]
) -> None:
    assert_gelu(kernels[f"gelu, {name} {dtype}"], *matrix(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_gelus_gradient_and_sums_by_the_operator_on_a_cpu_are_torchs_in_float64(
    name: str, dtype: torch.dtype
) -> None:
    assert_gelu(torch.ops.gpt2.gelu_backward(*matrix(name, dtype)), *matrix(name, dtype))


def test_the_kernel_of_gelu_takes_rows_with_gaps(kernels: dict[str, Pair]) -> None:
    expected = kernels["gelu, rows left over torch.float32"]
    assert all(map(torch.equal, kernels["gaps"], expected))


def test_the_kernel_of_gelu_takes_a_batch_of_sequences(kernels: dict[str, Pair]) -> None:
    gradient, wide = (each[:36].view(3, 12, -1) for each in matrix("rows left over", torch.float32))
    assert_gelu(kernels["sequences"], gradient, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_the_kernel_copies_q_k_and_v_side_by_side_and_sums_them(
    name: str, dtype: torch.dtype, kernels: dict[str, Pair]
) -> None:
    assert_joined(kernels[f"join, {name} {dtype}"], *heads(name, dtype))


@pytest.mark.parametrize("name", HEADS)
def test_the_kernel_takes_q_k_and_v_of_any_strides(name: str, kernels: dict[str, Pair]) -> None:
    assert_joined(kernels[f"strides, {name}"], *heads(name, torch.float32, "each in another way"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_the_operator_on_a_cpu_copies_q_k_and_v_side_by_side_and_sums_them(
    name: str, dtype: torch.dtype
) -> None:
    assert_joined(torch.ops.gpt2.join_gradients(*heads(name, dtype)), *heads(name, dtype))


def test_the_operators_declare_what_they_return() -> None:
    gradient, wide = matrix("rows left over", torch.bfloat16)
    torch.library.opcheck(torch.ops.gpt2.gelu_backward.default, (with_gaps(gradient), wide))
    for laid_out in ("as q, k, v are", "each in another way"):
        torch.library.opcheck(
            torch.ops.gpt2.join_gradients.default, heads("GPT-2's heads", torch.bfloat16, laid_out)
        )


@pytest.mark.parametrize(("rows", "taken"), [(1, 16), (1024, 16), (8192, 64), (65536, 256), (2**20, 256)])
def test_programs_take_fewer_rows_of_a_small_batch_so_that_there_are_enough_of_them(
    rows: int, taken: int
) -> None:
    assert rows_per_program(rows, 3072) == taken


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    """Its results, and the gradients of its inputs for an arbitrary gradient of each result."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    results = function(*leaves)
    results = [results] if isinstance(results, Tensor) else list(results)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in results]
    found = torch.autograd.grad(results, leaves, given)
    return [*(each.detach() for each in results), *found]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_after_the_matmul_has_the_gradient_that_it_would_have_in_it(dtype: torch.dtype) -> None:
    _, x = matrix("columns left over", torch.float32)
    generator = torch.Generator().manual_seed(1)
    weight, bias = 0.05 * torch.randn(120, 700, generator=generator), torch.randn(120, generator=generator)

    def gelu(x: Tensor, weight: Tensor, bias: Tensor, mine: bool) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            wide = F.linear(x, weight, bias.detach() if mine else bias)
            return BiasedGelu.apply(wide, bias) if mine else F.gelu(wide, approximate="tanh")

    def split(x: Tensor, weight: Tensor, bias: Tensor, mine: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            qkv = F.linear(x, weight, bias.detach() if mine else bias).view(5, 10, 3, 4, 10)
            return BiasedSplit.apply(qkv, bias) if mine else qkv.unbind(2)

    for function in (gelu, split):
        mine, torchs = (
            with_gradients(partial(function, mine=which), x, weight, bias) for which in (True, False)
        )
        for a, b in zip(mine, torchs, strict=True):
            assert a.dtype == b.dtype
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
            assert (a - b).norm() <= tolerance * b.norm()


def test_q_k_and_v_are_views_of_the_layers_result() -> None:
    qkv = torch.randn(2, 5, 3, 2, 8, requires_grad=True)
    parts = BiasedSplit.apply(qkv, torch.zeros(48, requires_grad=True))
    assert [part.data_ptr() - qkv.data_ptr() for part in parts] == [0, 64, 128]
    assert {part.stride() for part in parts} == {(240, 48, 8, 1)}


def compiled_backward(bias_gradient: str, attention: str) -> str:
    """Inductor's code of a block's backward pass, for 3 sequences of 40 tokens."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.compiler.reset()
    config = replace(PRESETS["tiny"], attention=attention, bias_gradient=bias_gradient)
    block = torch.compile(Block(config), fullgraph=True)
    x, future = torch.randn(3, 40, 64, requires_grad=True), torch.ones(40, 40, dtype=torch.bool).triu(1)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x, future if attention == "explicit" else None)

    _, codes = run_fw_bw_and_get_code(forward)
    return codes[-1]


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_compiled_code_makes_no_copies_around_the_kernels(attention: str) -> None:
    code = compiled_backward("triton", attention)
    assert code.count("= torch.ops.gpt2.gelu_backward.default(") == 1
    assert code.count("= torch.ops.gpt2.join_gradients.default(") == 1
    made = [line.strip() for line in code.splitlines() if "= empty_strided" in line]
    wide = [line for line in made if "(120, 256)" in line or "(3, 40, 256)" in line]
    assert len(wide) == 1, wide  # the gradient of GELU's result
    assert not [
        line for line in made if "(120, 192)" in line or "(3, 40, 6, 32)" in line or "(3, 40, 3," in line
    ]


TRITON = replace(FOUR, bias_gradient="triton")
CASTS = {"adamw": "compiled", "clip": "in_step", "weight_casts": "optimizer", "tied_gradient": "rows"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "sdpa", "recompute": "block"},
        {"recompute": "gelu", "grad_accum_steps": 3},
        {"autocast": "bfloat16", "recompute": "gelu"},
        {"autocast": "float16", "attention": "sdpa"},
        {"autocast": "bfloat16", "attention": "sdpa", "cross_entropy": "triton", **CASTS},
        {"autocast": "bfloat16", "adamw": "compiled", "weights": "bfloat16"},
        {"autocast": "bfloat16", "attention": "sdpa", "compile": "default", "compile_region": "block"},
        {"autocast": "bfloat16", "attention": "sdpa", "compile": "default", "recompute": "gelu"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_it_trains_as_with_biases_by_torch(changes: dict) -> None:
    torchs = replace(FOUR, **{**changes, "compile": "eager", "compile_region": "model"})
    assert_trains_alike(replace(TRITON, **changes), torchs)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16", "float16"])
def test_its_gradients_are_held_to_torchs(autocast: str) -> None:
    training = start(replace(TRITON, autocast=autocast))
    next(training)
    assert training.micro_batch is not None
    difference = gradient_difference(training, *training.micro_batch)
    assert difference < GRADIENT_TOLERANCE[training.toggles.precision_class()]
    assert training.model.config.plain.bias_gradient == "torch"


def test_an_error_in_the_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = bias_gradients._sums
    monkeypatch.setattr(bias_gradients, "_sums", lambda matrix: 1.1 * sums(matrix))
    training = start(TRITON)
    next(training)
    assert training.micro_batch is not None
    assert gradient_difference(training, *training.micro_batch) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    "changes", [{}, {"grad_accum_steps": 2}, {"recompute": "gelu"}, {"recompute": "block"}]
)
def test_its_proof_counts_the_kernels_of_a_step(changes: dict) -> None:
    training = start(replace(TRITON, **changes))
    next(training)
    ops = profile(lambda: next(training), training.device)
    found = prove(training, ops)
    times = 2 * training.toggles.grad_accum_steps
    evidence = f"biases summed with GELU's gradient {times} times, with those of q, k and v {times}"
    assert (found["bias_gradient"].took_effect, found["bias_gradient"].evidence) == (True, evidence)
    assert [name for name, finding in found.items() if not finding.took_effect] == []
    for name in ("gpt2::gelu_backward", "gpt2::join_gradients"):
        assert not prove(training, [op for op in ops if op.name != name])["bias_gradient"].took_effect


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gelu": "sigmoid"}, "bias_gradient: triton: needs gelu: tanh"),
        ({"autocast": "bfloat16", "float8": "tensorwise"}, "bias_gradient: triton: needs float8: none"),
    ],
)
def test_what_sums_no_biases_is_refused_beside_it(changes: dict, reason: str) -> None:
    with pytest.raises(UnsupportedToggle, match=reason):
        find(replace(TRITON, device="cuda", **changes))
