"""Kernels of other projects, by stand-ins that compute with torch: what is around them, on a CPU.

Liger Kernel's own code runs by Triton's interpreter where both packages are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import interpreted
from torch import Tensor
from trainings import FOUR, WORKLOAD, assert_trains_alike
from trainings import start_on_a_cpu as start

from gpt2.config.constraints import check
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from gpt2.config.workload import PRESETS
from gpt2.hardware.host import missing_package
from gpt2.model.model import LayerNorm, build
from gpt2.proofs.gradients import gradient_difference
from gpt2.proofs.profiler import attention_kernel, profile
from gpt2.proofs.prove import LOSS_OPS, prove
from gpt2.training.memory_estimate import estimate

pytestmark = pytest.mark.usefixtures("process_settings")

LOSSES = ["liger", "quack", "cut"]


def differentiate(logits: Tensor, targets: Tensor) -> Tensor:
    """Each row's loss; the logits become the gradient of their sum."""
    shares, at = logits.float().log_softmax(dim=-1), targets[:, None]
    logits.copy_(shares.exp().scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32)))
    return -shares.gather(1, at).squeeze(1)


def liger_forward(
    logits: Tensor,
    target: Tensor,
    weight: None,
    ignore: int,
    z: float,
    smoothing: float,
    reduction: str,
    *others: Any,
) -> tuple[Tensor, None]:
    assert logits.requires_grad, "no gradient is written"
    assert (weight, ignore, z, smoothing, reduction, *others) == (None, -100, 0.0, 0.0, "none", None, False)
    return differentiate(logits.detach(), target).to(logits.dtype), None


def quack_forward(
    x: Tensor, target: Tensor, *, return_dx: bool, inplace_backward: bool
) -> tuple[Tensor, Tensor]:
    assert return_dx
    assert inplace_backward
    assert x.stride(1) == 1
    assert x.size(1) % 8 == 0, "its loads are not aligned"
    return differentiate(x, target), x


class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        logits = (e[:, None] * c).sum(-1)  # no matmul that a profile shows, as in a kernel
        losses = differentiate(logits, targets)
        ctx.save_for_backward(e, c, logits)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        e, c, to_logits = ctx.saved_tensors
        factor = grad_outputs[0] / len(e)
        return ((to_logits @ c) * factor).to(e.dtype), ((to_logits.t() @ e) * factor).to(c.dtype), None


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        assert weight.dtype == bias.dtype == torch.float32
        rows, width = x.flatten(0, -2), [x.size(-1)]
        out, mean, reciprocal = torch.ops.aten.native_layer_norm(rows.float(), width, weight, bias, eps)
        ctx.save_for_backward(rows, weight, bias, mean, reciprocal)
        return out.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (gradient,) = grad_outputs
        to_x, to_weight, to_bias = normed_backward(gradient.flatten(0, -2), *ctx.saved_tensors)
        return to_x.view(gradient.shape), to_weight, to_bias, None


def normed_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, reciprocal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    to_x, to_weight, to_bias = torch.ops.aten.native_layer_norm_backward(
        gradient.float(), x.float(), [x.size(-1)], mean, reciprocal, weight, bias, [True, True, True]
    )
    return to_x.to(x.dtype), to_weight, to_bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, return_rstd: bool, return_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    assert x.dim() == 2
    assert weight.dtype == bias.dtype == torch.float32
    assert return_rstd
    assert return_mean
    out, mean, reciprocal = torch.ops.aten.native_layer_norm(x.float(), [x.size(1)], weight, bias, eps)
    return out.to(x.dtype), reciprocal.flatten(), mean.flatten()


def layernorm_bwd(
    x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert dout.dtype == x.dtype
    assert dout.is_contiguous()
    return normed_backward(dout, x, weight, torch.zeros_like(weight), mean[:, None], rstd[:, None])


def scores(q: Tensor, k: Tensor) -> Tensor:
    T = q.size(1)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    found = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / q.size(-1) ** 0.5
    return found.masked_fill(future, -torch.inf)


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool
) -> tuple[Tensor, Tensor, None, None]:
    assert causal
    assert return_lse
    assert q.shape == k.shape == v.shape
    found = scores(q, k)
    out = torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), v.float()).to(q.dtype).contiguous()
    return out, found.logsumexp(-1), None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, causal: bool, **places: Tensor
) -> tuple[Tensor, ...]:
    assert causal
    assert dout.is_contiguous()
    assert dout.dtype == q.dtype
    share, gradient = (scores(q, k) - lse[..., None]).exp(), dout.float()
    of_share = torch.einsum("bqhd,bkhd->bhqk", gradient, v.float())
    of_scores = (
        share * (of_share - (gradient * out.float()).sum(-1).transpose(1, 2)[..., None]) / q.size(-1) ** 0.5
    )
    places["dq"].copy_(torch.einsum("bhqk,bkhd->bqhd", of_scores, k.float()))
    places["dk"].copy_(torch.einsum("bhqk,bqhd->bkhd", of_scores, q.float()))
    places["dv"].copy_(torch.einsum("bhqk,bqhd->bkhd", share, gradient))
    return places["dq"], places["dk"], places["dv"]


def cut_forward(e: Tensor, c: Tensor, targets: Tensor, *, impl: str) -> Tensor:
    assert impl == "cce_exact"
    assert targets.max() < len(c) == 509, "padding rows"
    return LinearCrossEntropyFunction.apply(e, c, targets)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for all packages."""
    functions: dict[str, dict[str, Callable[..., Any]]] = {
        "liger_kernel": {},
        "liger_kernel.ops": {"cross_entropy_forward": liger_forward},
        "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": LigerLayerNormFunction},
        "quack": {},
        "quack.rmsnorm": {"layernorm_fwd": layernorm_fwd, "layernorm_bwd": layernorm_bwd},
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd},
        "quack.cross_entropy": {"cross_entropy_fwd": quack_forward},
        "cut_cross_entropy": {"linear_cross_entropy": cut_forward},
    }
    for name, members in functions.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


PADDED = replace(FOUR, vocab_multiple=64)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_accum_steps": 3},
        {"autocast": "bfloat16", "tied_gradient": "rows", "recompute": "block"},
        {"autocast": "bfloat16", "adamw": "compiled", "weights": "bfloat16"},
        {"autocast": "bfloat16", "compile": "default"},
        {"compile": "default", "compile_region": "block"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_it_trains_as_the_loss_by_torch_does(changes: dict, loss: Any) -> None:
    torchs = replace(PADDED, **{**changes, "compile": "eager", "compile_region": "model"})
    assert_trains_alike(replace(PADDED, cross_entropy=loss, **changes), torchs)


@pytest.mark.parametrize("loss", ["liger", "cut"])
def test_the_vocabulary_need_not_be_padded(loss: Any) -> None:
    assert_trains_alike(replace(FOUR, cross_entropy=loss), FOUR)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_its_gradients_are_held_to_those_of_torchs_loss(loss: Any, autocast: Any) -> None:
    training = start(replace(PADDED, cross_entropy=loss, autocast=autocast))
    next(training)
    assert training.micro_batch is not None
    difference = gradient_difference(training, *training.micro_batch)
    assert difference < GRADIENT_TOLERANCE[training.toggles.precision_class()]
    assert training.model.config.plain.cross_entropy == "torch"


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_rows_get_no_gradient(loss: Any) -> None:
    model = build(replace(PRESETS["tiny"], cross_entropy=loss, padded_vocab_size=512), 0, torch.device("cpu"))
    tokens = torch.randint(509, (2, 65), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert model.wte.weight.grad is not None
    assert not model.wte.weight.grad[509:].any()
    assert model.wte.weight.grad[:509].any()


@pytest.mark.parametrize("loss", ["liger", "quack"])
def test_compiled_code_stays_in_one_piece_with_one_tensor_of_the_logits_size(loss: str) -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    from gpt2.model.fused_loss import FusedCrossEntropy

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(rows, 24, generator=generator).requires_grad_() for rows in (60, 512))
    targets = torch.randint(512, (60,), generator=generator)
    compiled = torch.compile(
        lambda *leaves: FusedCrossEntropy.apply(*leaves, None, targets, loss), fullgraph=True
    )
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x, head))
    code = "\n".join(codes)
    assert f"gpt2.{loss}_cross_entropy_.default(" in code
    assert sum("= empty_strided" in line and "(60, 512)" in line for line in code.splitlines()) == 1


@pytest.mark.parametrize("loss", ["liger", "quack"])
def test_its_operator_declares_what_it_mutates(loss: str) -> None:
    operator = getattr(torch.ops.gpt2, f"{loss}_cross_entropy_").default
    torch.library.opcheck(operator, (torch.randn(5, 16), torch.tensor([0, 3, 15, 7, 1])))


@pytest.mark.parametrize("grad_accum_steps", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_its_proof_counts_the_kernels_of_a_step(loss: Any, grad_accum_steps: int) -> None:
    training = start(replace(PADDED, cross_entropy=loss, grad_accum_steps=grad_accum_steps))
    next(training)
    ops = profile(lambda: next(training), training.device)
    found = prove(training, ops)
    times = {1: "1 time", 2: "2 times"}[grad_accum_steps]
    function = "LinearCrossEntropyFunction" if loss == "cut" else "FusedCrossEntropy"
    evidence = f"eager code differentiates by {function}Backward; the kernel ran {times}"
    assert (found["cross_entropy"].took_effect, found["cross_entropy"].evidence) == (True, evidence)
    assert all(finding.took_effect for finding in found.values()), found
    missed = prove(training, [op for op in ops if op.name != LOSS_OPS[loss]])["cross_entropy"]
    assert not missed.took_effect


@pytest.mark.parametrize("loss", LOSSES)
def test_its_memory_is_estimated_without_its_package(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel.ops", "quack.cross_entropy", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)
    toggles = Toggles(device="cuda", autocast="bfloat16", micro_batch_size=2)
    both = (replace(toggles, cross_entropy=each) for each in (loss, "triton"))
    mine, triton = (estimate(WORKLOAD, each).activations for each in both)
    logits = 2 * WORKLOAD.seq_len * 509 * 2
    assert triton - mine == (logits if loss == "cut" else 0)


APART = [{"layer_norm": "liger"}, {"layer_norm": "quack"}, {"attention": "flash4"}]


@pytest.mark.slow
@pytest.mark.parametrize("change", APART, ids=lambda change: " ".join(change.values()))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"autocast": "bfloat16", "residual": "bfloat16", "recompute": "block"},
        {"autocast": "bfloat16", "bias_gradient": "triton"},
        {"autocast": "bfloat16", "compile": "default"},
        {"autocast": "bfloat16", "compile": "default", "bias_gradient": "triton"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_it_trains_as_torchs_kernel_does(changes: dict, change: Any) -> None:
    torchs = replace(FOUR, **{**changes, "compile": "eager", "bias_gradient": "torch"})
    assert_trains_alike(replace(FOUR, **changes, **change), torchs)


@pytest.mark.parametrize("change", APART, ids=lambda change: " ".join(change.values()))
def test_its_gradients_are_held_to_torchs(change: Any) -> None:
    training = start(replace(FOUR, **change, autocast="bfloat16"))
    next(training)
    assert training.micro_batch is not None
    difference = gradient_difference(training, *training.micro_batch)
    assert difference < GRADIENT_TOLERANCE["bfloat16"]
    assert training.model.config.plain.layer_norm == "torch"
    assert training.model.config.plain.attention in ("explicit", "sdpa")


@pytest.mark.parametrize("change", APART, ids=lambda change: " ".join(change.values()))
def test_its_proof_sees_it_in_a_step(change: Any) -> None:
    training = start(replace(FOUR, **change))
    next(training)
    ops = profile(lambda: next(training), training.device)
    found = prove(training, ops)
    assert all(finding.took_effect for finding in found.values()), found
    (toggle,) = change
    if toggle == "attention":
        assert found[toggle].evidence == "2 calls of it forward, 2 backward"
        assert attention_kernel(ops) == "flash4"
    torchs = {"layer_norm": "torch", "attention": "sdpa"}[toggle]
    training.toggles = replace(training.toggles, **{toggle: torchs})
    assert not prove(training, ops)[toggle].took_effect


@pytest.mark.parametrize("kernel", ["liger", "quack"])
def test_layer_norms_of_a_narrow_residual_stream_stay_narrow_and_sum_in_float32(kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 1024, 64, generator=generator) + 1).bfloat16().requires_grad_()
    gradient = (torch.randn(4, 1024, 64, generator=generator) + 1).bfloat16()
    wide, mine = torch.nn.LayerNorm(64).double(), LayerNorm(64, kernel)
    wide(x.detach().double()).backward(gradient.double())
    out = mine(x)
    assert out.dtype == torch.bfloat16
    out.backward(gradient)
    for a, b in zip(mine.parameters(), wide.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-3)  # of sums of some thousands


@pytest.mark.parametrize(
    "change", [*APART, {"int8": "rowwise"}], ids=lambda change: " ".join(change.values())
)
def test_memory_is_estimated_without_any_package(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel.ops.layer_norm", "quack.rmsnorm", "flash_attn.cute.interface", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    toggles = Toggles(device="cuda", autocast="bfloat16", attention="flash", micro_batch_size=2)
    mine, torchs = (estimate(WORKLOAD, each).activations for each in (replace(toggles, **change), toggles))
    assert mine == pytest.approx(torchs, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "flash4"}, "set autocast"),
        ({"int8": "rowwise"}, "needs autocast: bfloat16"),
        ({"int8": "rowwise", "autocast": "bfloat16", "float8": "rowwise"}, "needs float8: none"),
        ({"cross_entropy": "liger", "autocast": "float16"}, "overflow in float16; choose triton"),
        ({"cross_entropy": "quack"}, "rows of 50257 are not aligned; set vocab_multiple"),
        (
            {"cross_entropy": "liger", "compile": "reduce-overhead"},
            "a CUDA graph cannot record; choose triton",
        ),
        (
            {"cross_entropy": "cut", "launch": "graph", "adamw": "fused"},
            "a CUDA graph cannot record; choose triton",
        ),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_what_a_library_cannot_do_is_refused(changes: dict, reason: str) -> None:
    toggle, value = next(iter(changes.items()))
    with pytest.raises(UnsupportedToggle, match=f"^{toggle}: {value}: .*{reason}"):
        check(Toggles(device="cuda", **changes))


@pytest.mark.parametrize(
    ("toggle", "value", "reason"),
    [
        (
            "cross_entropy",
            "liger",
            "its package liger_kernel is not here; pip install liger-kernel, or choose triton",
        ),
        ("cross_entropy", "quack", 'pip install "quack-kernels[cu13]"'),
        ("layer_norm", "liger", "pip install liger-kernel, or choose torch"),
        ("attention", "flash4", 'pip install "flash-attn-4[cu13]>=4.0.0b30"'),
        ("cross_entropy", "cut", "git+https://github.com/apple/ml-cross-entropy"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(
    toggle: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2.hardware.host.find_spec", lambda name: None)
    assert reason in str(missing_package(toggle, value))


def test_a_cut_cross_entropy_without_its_exact_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("cut_cross_entropy", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("gpt2.hardware.host.find_spec", lambda name: spec)
    assert "this cut_cross_entropy has no exact form" in str(missing_package("cross_entropy", "cut"))
    (tmp_path / "cce_utils.py").touch()
    assert missing_package("cross_entropy", "cut") is None


def test_a_library_without_what_it_is_compiled_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"quack": ModuleSpec("quack", None)}
    monkeypatch.setattr("gpt2.hardware.host.find_spec", here.get)
    assert "its package cutlass is not here; pip install" in str(missing_package("cross_entropy", "quack"))


def test_other_values_need_no_package() -> None:
    assert missing_package("cross_entropy", "triton") is None


@pytest.mark.slow
@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_linear_layers_of_8_bit_integers_learn_nearly_what_the_baseline_learns(autocast: Any) -> None:
    pytest.importorskip("torchao")
    narrow, wide = start(replace(FOUR, int8="rowwise", autocast=autocast)), start(FOUR)
    tolerance = LOSS_TOLERANCE[narrow.toggles.precision_class()]
    for number in range(8):
        a, b = next(narrow), next(wide)
        assert a.loss.item() == pytest.approx(b.loss.item(), rel=tolerance.losses)
        assert a.loss.item() != b.loss.item()
        if not number:
            assert a.loss.item() == pytest.approx(b.loss.item(), rel=tolerance.first_loss)
            assert a.grad_norm.item() == pytest.approx(b.grad_norm.item(), rel=tolerance.first_grad_norm)
    found = prove(narrow, profile(lambda: next(narrow), narrow.device))["int8"]
    # Three for each of 8 layers.
    assert (found.took_effect, found.evidence) == (True, "24 products of 8-bit integers")


@pytest.mark.slow
def test_compiled_linear_layers_of_8_bit_integers_have_the_eager_ones_gradients() -> None:
    pytest.importorskip("torchao")
    training = start(replace(FOUR, int8="rowwise", autocast="bfloat16", compile="default"))
    next(training)
    assert training.micro_batch is not None
    assert gradient_difference(training, *training.micro_batch) < GRADIENT_TOLERANCE["float8"]
    assert training.model.config.plain.int8 == "rowwise"


LIGER = """
import sys, torch
from triton.runtime import interpreter
from gpt2.model.kernel_libraries import _by_liger
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # numpy makes no number of an array of one any more
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patched
found = {}
for dtype in (torch.float32, torch.bfloat16):
    for columns, pads in ((509, 0), (50257, 0), (50304, 47), (40000, 30000)):
        generator = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(3, columns, generator=generator)
        logits[:, columns - pads :] = -torch.inf
        logits = logits.to(dtype)
        targets = torch.tensor([0, columns - pads - 1, 17])
        given = logits.clone()
        found[f"{dtype} {columns}"] = (_by_liger(logits, targets), logits, given, targets)
torch.save(found, sys.argv[1])
"""


@pytest.mark.skipif(
    not (find_spec("liger_kernel") and find_spec("triton")), reason="pip install liger-kernel triton"
)
def test_ligers_own_kernel_has_torchs_losses_and_gradients_and_zeros_for_pads(tmp_path: Path) -> None:
    for losses, gradient, given, targets in interpreted(LIGER, tmp_path / "found.pt").values():
        wide = given.double().requires_grad_()
        expected = F.cross_entropy(wide, targets, reduction="none")
        expected.sum().backward()
        assert wide.grad is not None
        rounding = 2**-7 if given.dtype == torch.bfloat16 else 1e-5  # the interpreter rounds towards zero
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=rounding, atol=rounding)
        torch.testing.assert_close(gradient.double(), wide.grad, rtol=rounding, atol=1e-6)
        assert not gradient[given.isneginf()].any()
