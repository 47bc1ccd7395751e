"""Our attention kernel for CPUs, against torch's attention; and what compiles it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device import check
from gpt2.device.cpu import Cpu
from gpt2.hardware import host
from gpt2.model import brgemm
from gpt2.model.brgemm import BrgemmAttention
from gpt2.model.model import by_heads

kernel = pytest.mark.skipif(bool(host.missing_brgemm("float32")), reason=str(host.missing_brgemm("float32")))
narrow_kernel = pytest.mark.skipif(
    bool(host.missing_brgemm("bfloat16")), reason=str(host.missing_brgemm("bfloat16"))
)
TORCHS = by_heads(partial(F.scaled_dot_product_attention, is_causal=True))


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def qkv_of(B: int, T: int, n_head: int, head_dim: int) -> Tensor:
    return torch.randn(B, T, 3, n_head, head_dim, generator=torch.Generator().manual_seed(0))


def with_gradient(function: Callable[..., Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv.detach().clone().requires_grad_()
    result = function(leaf)
    result.backward(torch.linspace(-1, 2, result.numel()).view(result.shape).to(result.dtype))
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def errors(function: Callable[..., Tensor], qkv: Tensor) -> list[float]:
    """Of the result and of the gradients of q, k and v, relative to torch's in float64."""
    (found, gradient), (true, true_gradient) = (
        with_gradient(function, qkv),
        with_gradient(TORCHS, qkv.double()),
    )
    pairs = [(found, true), *zip(gradient.unbind(2), true_gradient.unbind(2), strict=True)]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


SHAPES = pytest.mark.parametrize(
    "shape",
    [(1, 1024, 3, 64), (2, 300, 2, 80), (3, 65, 2, 16), (1, 31, 1, 2), (2, 64, 12, 64), (2, 2, 1, 18)],
)


@kernel
@SHAPES
def test_result_and_gradients_are_torchs_for_any_length_width_and_number_of_threads(
    shape: tuple[int, ...], threads: int
) -> None:
    assert max(errors(BrgemmAttention.apply, qkv_of(*shape))) < 2e-6


@narrow_kernel
@SHAPES
def test_in_bfloat16_too(shape: tuple[int, ...], threads: int) -> None:
    assert max(errors(BrgemmAttention.apply, qkv_of(*shape).bfloat16())) < 2**-7  # two roundings


@narrow_kernel
@pytest.mark.parametrize("largest_score", [5, 40, 80])
@pytest.mark.parametrize("T", [512, 333])
def test_in_bfloat16_it_errs_a_tenth_more_than_torchs_kernel_at_most_whatever_the_scores(
    T: int, largest_score: int
) -> None:
    qkv = qkv_of(1, T, 4, 64)
    qkv[:, :, 0] *= largest_score / 5
    narrow = qkv.bfloat16()
    for mine, torchs in zip(errors(BrgemmAttention.apply, narrow), errors(TORCHS, narrow), strict=True):
        assert mine < 1.1 * torchs


@kernel
def test_a_single_token_attends_to_itself() -> None:
    qkv = qkv_of(2, 1, 3, 16)
    result, gradient = with_gradient(BrgemmAttention.apply, qkv)
    assert torch.equal(result, qkv[:, :, 2])
    assert torch.allclose(gradient[:, :, :2], torch.zeros(()), atol=1e-6)


@kernel
def test_a_nan_reaches_the_queries_that_see_it_and_no_other_head_or_earlier_block() -> None:
    for which in range(3):
        qkv = qkv_of(1, 100, 2, 16)
        qkv[0, 70, which, 1, 3] = float("nan")
        result, _ = with_gradient(BrgemmAttention.apply, qkv)
        lost = result.isnan().any(-1)[0]
        queries = slice(70, 71) if which == 0 else slice(70, 100)
        assert lost[queries, 1].all()
        assert not lost[:, 0].any()
        assert not lost[:64].any()


@kernel
def test_compiled_code_calls_it_with_gradients_of_any_layout() -> None:
    qkv = qkv_of(2, 48, 2, 16)

    def function(qkv: Tensor) -> Tensor:
        return BrgemmAttention.apply(qkv * 2).transpose(1, 2) * 3  # whose gradient lies head by head

    compiled = torch.compile(function, fullgraph=True)
    for mine, eager in zip(with_gradient(compiled, qkv), with_gradient(function, qkv), strict=True):
        torch.testing.assert_close(mine, eager)


@kernel
@pytest.mark.slow
def test_it_is_compiled_once_for_a_machine_and_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    build = brgemm.library.__wrapped__
    build()
    (made,) = (tmp_path / "new").iterdir()
    when = made.stat().st_mtime_ns
    build()
    assert (tmp_path / "new" / made.name).stat().st_mtime_ns == when


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell script the C++ compiler, with an empty cache for what it compiles."""

    def of(script: str) -> None:
        (tmp_path / "cxx").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cxx").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    return of


@kernel
def test_a_compiler_that_fails_is_told_of_in_one_line_and_leaves_nothing(tmp_path, compiler) -> None:
    compiler("echo 'x.cpp:1: error: no such header' >&2; exit 1")
    with pytest.raises(
        UnsupportedToggle, match=r"cannot compile attention.cpp: x.cpp:1: error: no such header; choose"
    ):
        brgemm.library.__wrapped__()
    assert list((tmp_path / "cache").iterdir()) == []


@kernel
def test_what_the_library_refuses_is_an_error_and_not_the_end_of_the_process(monkeypatch) -> None:
    class Refuses:
        @staticmethod
        def attention_float32(*arguments: object) -> bytes:
            return b"could not generate a kernel"

    monkeypatch.setattr("gpt2.model.brgemm.library", lambda: Refuses)
    with pytest.raises(RuntimeError, match="attention: brgemm: could not generate a kernel"):
        BrgemmAttention.apply(qkv_of(1, 8, 1, 16))


@pytest.mark.parametrize(
    "qkv",
    [
        torch.zeros(1, 8, 3, 1, 15),
        torch.zeros(0, 8, 3, 1, 16),
        torch.zeros(1, 8, 3, 1, 16, dtype=torch.float64),
    ],
    ids=["odd width", "no sequence", "float64"],
)
def test_what_it_has_no_kernel_for_is_refused_by_shape_and_format(qkv: Tensor) -> None:
    with pytest.raises(
        RuntimeError, match=r"attention: brgemm: no kernel for torch.float\d\d of \(\d, 8, 3, 1, 1\d\)"
    ):
        BrgemmAttention.apply(qkv)


@kernel
def test_a_compiler_that_is_killed_and_a_folder_that_takes_nothing_are_told_of(
    tmp_path, compiler, monkeypatch
) -> None:
    compiler("kill -9 $$")
    with pytest.raises(
        UnsupportedToggle, match=r"cannot compile attention.cpp: it ended with exit code -9; choose"
    ):
        brgemm.library.__wrapped__()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cxx"))
    with pytest.raises(
        UnsupportedToggle, match=r"exists.*; set TORCHINDUCTOR_CACHE_DIR to a folder that can be"
    ):
        brgemm.library.__wrapped__()


@kernel
def test_a_library_that_cannot_be_loaded_is_named(compiler) -> None:
    compiler('for last; do :; done; echo torn > "$last"')
    with pytest.raises(
        UnsupportedToggle, match=r"cannot load .*cache/attention-\w+.so: .*; delete it, or see that"
    ):
        brgemm.library.__wrapped__()


def test_a_cpu_without_the_units_is_refused_with_what_to_choose(monkeypatch) -> None:
    monkeypatch.setattr(host, "flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    with pytest.raises(
        UnsupportedToggle, match=r"no avx512_bf16 or amx_bf16, which its bfloat16 needs; choose blocks"
    ):
        check(Toggles(attention="brgemm", autocast="bfloat16"), Cpu())
    with pytest.raises(UnsupportedToggle, match=r"no such kernel for float16; choose sdpa"):
        check(Toggles(attention="brgemm", autocast="float16"), Cpu())
    monkeypatch.setattr(host.platform, "machine", lambda: "arm64")
    with pytest.raises(UnsupportedToggle, match=r"x86 CPUs under Linux only; choose blocks"):
        check(Toggles(attention="brgemm"), Cpu())
