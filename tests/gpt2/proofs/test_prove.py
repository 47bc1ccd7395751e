"""Each toggle's proof, on steps that really ran here, and on made-up op lists for what cannot run here."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from _pytest.mark import ParameterSet
from trainings import COMPANIONS, FAST, FOUR, FROM_THE_START, every_value, start

import gpt2.model.tuned_linear
from gpt2.config.constraints import check
from gpt2.config.devices import HOST
from gpt2.config.toggles import Toggles
from gpt2.hardware.host import missing_brgemm
from gpt2.proofs.evidence import Finding, StepEvidence
from gpt2.proofs.profiler import Op, attention_kernel, fused_attention, kernel_formats, matmuls, profile
from gpt2.proofs.prove import PROOFS, loaded_libraries, prove
from gpt2.training.stages import model_config
from gpt2.training.train import Training

pytestmark = pytest.mark.usefixtures("process_settings", "own_compile_cache")

AMX = torch.cpu._is_amx_tile_supported()
"""Whether the CPU has it; without, oneDNN computes products of float32 exactly, whatever is set."""


@pytest.fixture(autouse=True)
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products so small gain nothing by being shared out, nor on one thread: here they are all the same."""
    monkeypatch.setattr(gpt2.model.tuned_linear, "_fastest", lambda *operands: "rows in 2")


def test_products_that_are_all_fastest_whole_are_said_to_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2.model.tuned_linear, "_chosen", {})
    monkeypatch.setattr(gpt2.model.tuned_linear, "_fastest", lambda *operands: "whole")
    training = start(replace(FOUR, products="tuned"))
    found = prove(training, profile(lambda: next(training), training.device))["products"]
    assert found == Finding(True, findings(products="whole")["products"].evidence)


def findings(**changes: object) -> dict[str, Finding]:
    """Of the second step of a tiny training."""
    return _findings(tuple(changes.items()))


@cache
def _findings(changes: tuple[tuple[str, object], ...]) -> dict[str, Finding]:
    torch.compiler.reset()
    training = start(replace(FOUR, **dict(changes)))
    next(training)
    return prove(training, profile(lambda: next(training), training.device))


REGIONS = {"compile": "default", "compile_region": "block"}


def case(changes: Mapping[str, object], *wanted: str) -> ParameterSet:
    """A case of a test; a slow one where the changes ask for compiled code."""
    compiled = "compile" in changes or changes.get("adamw") == "compiled"
    marks = [pytest.mark.slow] if compiled else []
    if changes.get("matmul_precision") == "medium":
        marks.append(pytest.mark.skipif(not AMX, reason="without AMX products of float32 stay exact"))
    name = ",".join(f"{toggle}={value}" for toggle, value in changes.items())
    return pytest.param(changes, *wanted, marks=marks, id="-".join([name or "baseline", *wanted[:1]]))


def test_every_toggle_has_a_proof() -> None:
    assert list(PROOFS) == [toggle.name for toggle in fields(Toggles)]


def test_every_value_that_cpus_take_is_tried_with_what_it_needs_of_others() -> None:
    hints = get_type_hints(Toggles)
    for toggle in fields(Toggles):
        for value in get_args(hints[toggle.name]):
            only = toggle.metadata["only"].get(value)
            if toggle.name in FROM_THE_START or (only and HOST not in only.devices):
                continue
            if isinstance(value, str):  # raises where COMPANIONS lacks what the value needs
                check(replace(FOUR, **{toggle.name: value}, **COMPANIONS.get((toggle.name, value), {})))


@pytest.mark.parametrize("changes", [case(changes) for changes in every_value()])
def test_a_value_that_takes_effect_is_proved_and_the_baseline_of_all_others_too(changes: dict) -> None:
    assert {name: found for name, found in findings(**changes).items() if not found.took_effect} == {}


LINEAR = {"cross_entropy": "linear"}
OF, ROUNDED = "of the 4 activations of the MLPs", "a float32 product is rounded"


@pytest.mark.parametrize(
    ("changes", "toggle", "evidence"),
    [
        case({}, "autocast", "27 of 27 linear products took float32 inputs"),
        case({"autocast": "bfloat16"}, "autocast", "27 of 27 linear products took bfloat16 inputs"),
        case({"compile": "default"}, "autocast", "27 of 27 linear products took float32 inputs"),
        case({}, "attention", "scores materialised: 4 products of 64 x 64"),
        case({"compile": "default"}, "attention", "scores materialised: 4 products of 64 x 64"),
        case({"attention": "math"}, "attention", "math kernel: scores materialised: 4 products of 64 x 64"),
        case({"attention": "sdpa"}, "attention", "ran _scaled_dot_product_flash_attention_for_cpu"),
        case({"compile": "default"}, "compile", "2 compiled graphs ran, 0 graph breaks"),
        case({"compile": "default"}, "compile_region", "0 compiled graphs ran for each layer"),
        case(REGIONS, "compile_region", "2 of 6 compiled graphs ran for each layer"),
        case(REGIONS, "compile", "6 compiled graphs ran, 0 graph breaks"),
        case(REGIONS | {"recompute": "gelu"}, "recompute", f"a forward pass keeps 2 {OF}"),
        case(REGIONS | {"recompute": "block"}, "recompute", f"a forward pass keeps 0 {OF}"),
        case({"matmul_precision": "medium"}, "matmul_precision", f"{ROUNDED}: relative error 2e-03"),
        case({"adamw": "foreach"}, "adamw", "2 calls of _foreach_addcdiv_, none fused"),
        case({"adamw": "fused"}, "adamw", "2 calls of _fused_adamw_"),
        case({}, "adamw", "28 calls of addcdiv_, one for each tensor"),
        case({}, "sharding", "this rank holds 100% of the optimiser's state and whole weights"),
        case({"vocab_multiple": 64}, "vocab_multiple", "512 rows for 509 tokens; lm_head gave 512 columns"),
        case({}, "recompute", f"a forward pass keeps 4 {OF}"),
        case({"recompute": "gelu"}, "recompute", f"a forward pass keeps 2 {OF}"),
        case({"recompute": "block"}, "recompute", f"a forward pass keeps 0 {OF}"),
        case({}, "micro_batch_size", "forward passes of 4 x 64 tokens"),
        case({"compile": "default"}, "micro_batch_size", "forward passes of 4 x 64 tokens"),
        case({"grad_accum_steps": 2}, "grad_accum_steps", "2 forward passes in the step"),
        case(LINEAR | {"recompute": "block"}, "grad_accum_steps", "1 forward pass in the step"),
        case(LINEAR | {"compile": "default"}, "grad_accum_steps", "1 forward pass in the step"),
        case({}, "device", "28 of 28 tensors of weights lie there"),
        case({}, "world_size", "1 rank, 0 all-reduces seen in the step"),
        case({"threads": 2}, "threads", "torch computes with 2 threads"),
    ],
)
def test_evidence_says_what_was_seen(changes: dict, toggle: str, evidence: str) -> None:
    assert findings(**changes)[toggle].evidence == evidence


EVERYTHING: dict[str, object] = {"autocast": "bfloat16", "attention": "flash", "compile": "default"}
EVERYTHING |= {"adamw": "fused", "vocab_multiple": 64, "recompute": "gelu", "grad_accum_steps": 2}


@pytest.mark.slow
def test_all_proofs_hold_together_in_compiled_code() -> None:
    assert all(found.took_effect for found in findings(**EVERYTHING).values())


@pytest.mark.slow
def test_all_proofs_hold_together_at_the_top_of_the_ladder_for_cpus() -> None:
    top = {each.name: getattr(FAST, each.name) for each in fields(Toggles)}
    assert {name: found for name, found in findings(**top).items() if not found.took_effect} == {}


def test_compiled_adamw_that_ran_uncompiled_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    training = start(replace(FOUR, adamw="compiled"))
    found = prove(training, profile(lambda: next(training), training.device))
    assert found["adamw"] == Finding(False, "no update was seen")
    assert found["compile"] == Finding(True, "nothing compiled ran")


@pytest.mark.slow
def test_compiled_adamw_whose_norm_is_not_compiled_is_the_only_compiled_code() -> None:
    training = start(replace(FOUR, adamw="compiled"))
    optimizer: Any = training.optimizer
    optimizer.norm_is_compiled = False  # as on CUDA
    found = prove(training, profile(lambda: next(training), training.device))
    assert found["adamw"].took_effect
    assert found["compile"] == Finding(True, "nothing compiled ran")


@pytest.mark.skipif(AMX, reason="this CPU rounds such products")
def test_reduced_float32_products_are_found_inert_where_the_cpu_computes_them_exactly_all_the_same() -> None:
    found = findings(matmul_precision="medium")["matmul_precision"]
    assert not found.took_effect
    said, error = found.evidence.rsplit(" ", 1)
    assert said == "torch's setting is medium, but a float32 product is exact: relative error"
    assert float(error) < 1e-6  # 2e-07 on some CPUs, 4e-07 on others


def test_reduced_float32_products_after_autocast_are_found_inert() -> None:
    found = findings(autocast="bfloat16", matmul_precision="medium")["matmul_precision"]
    assert found == Finding(False, "no float32 product ran: autocast made all of them bfloat16")


# --- toggles that did not take effect, staged on a real step


@pytest.fixture(scope="module")
def plain() -> tuple[Training, list[Op]]:
    training = start(FOUR)
    next(training)
    return training, profile(lambda: next(training), training.device)


def claim(plain: tuple[Training, list[Op]], **changes: object) -> dict[str, Finding]:
    """What the proofs say where a step was the baseline's, but the toggles claim more."""
    training, ops = plain
    claimed = SimpleNamespace(**{**vars(training), "toggles": replace(training.toggles, **changes)})
    return prove(claimed, ops)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"device": "mps"}, "0 of 28 tensors of weights lie there"),
        ({"autocast": "bfloat16"}, "0 of 27 linear products took bfloat16 inputs"),
        ({"matmul_precision": "medium"}, "torch's setting is highest; a float32 product is exact"),
        ({"attention": "sdpa"}, "torch chose its math kernel: scores materialised: 4 products of 64 x 64"),
        ({"attention": "math"}, "scores materialised: 4 products of 64 x 64"),
        ({"attention": "flash"}, "scores materialised: 4 products of 64 x 64"),
        ({"compile": "default"}, "nothing compiled ran: torch fell back to eager code"),
        ({"adamw": "fused"}, "28 calls of addcdiv_, one for each tensor"),
        ({"sharding": "zero1"}, "this rank holds 100% of the optimiser's state; 0 broadcasts of weights"),
        ({"sharding": "zero2"}, "100% of the optimiser's state and its rows of 0 of 28 tensors of weights"),
        ({"vocab_multiple": 64}, "509 is already a multiple: nothing to pad"),
        ({"recompute": "gelu"}, "a forward pass keeps 4 of the 4 activations"),
        ({"recompute": "block"}, "a forward pass keeps 4 of the 4 activations"),
        ({"micro_batch_size": 8}, "forward passes of 4 x 64 tokens"),
        ({"grad_accum_steps": 2}, "1 forward pass in the step"),
        ({"world_size": 2}, "1 rank, 0 all-reduces seen in the step"),
        ({"threads": 99}, "torch computes with"),
        ({"adamw": "compiled"}, "28 calls of addcdiv_, one for each tensor"),
        ({"clip": "in_step"}, "gradients were scaled before AdamW's step"),
        ({"tied_gradient": "rows"}, "rows added to the lm_head's gradient 0 times"),
        ({"products": "tuned"}, "0 products"),
        ({"products": "onednn"}, "0 products by oneDNN"),
        ({"gelu": "sigmoid"}, "eager code differentiates by GeluBackward0"),
        ({"cross_entropy": "closed_form"}, "eager code differentiates by NllLossBackward0"),
        (
            {"cross_entropy": "triton"},
            "eager code differentiates by NllLossBackward0; the kernel ran 0 times",
        ),
        (
            {"bias_gradient": "triton"},
            "biases summed with GELU's gradient 0 times, with those of q, k and v 0",
        ),
        ({"cross_entropy": "quack"}, "eager code differentiates by NllLossBackward0; the kernel ran 0 times"),
        ({"layer_norm": "liger"}, "eager code differentiates by NativeLayerNormBackward0"),
        ({"attention": "flash4"}, "scores materialised: 4 products of 64 x 64"),
        ({"int8": "rowwise"}, "0 products of 8-bit integers"),
        ({"compile_region": "block"}, "0 of 0 compiled graphs ran for each layer"),
        ({"residual": "bfloat16"}, "the model is built for float32"),
        ({"weights": "bfloat16"}, "0 of 10 matrices are bfloat16"),
        ({"float8": "tensorwise"}, "0 products in float8"),
        ({"weight_casts": "optimizer"}, "0 of 0 matrices lie as float32, too"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_toggle_without_effect_is_found_out(changes: dict, evidence: str, plain: tuple) -> None:
    (toggle,) = changes
    found = claim(plain, **changes)[toggle]
    assert not found.took_effect
    assert evidence in found.evidence


def test_sdpa_that_falls_back_to_its_math_kernel_is_found_inert() -> None:
    training = start(replace(FOUR, attention="sdpa"))
    torch.backends.cuda.enable_flash_sdp(False)
    found = prove(training, profile(lambda: next(training), training.device))["attention"]
    assert found == Finding(False, "torch chose its math kernel: scores materialised: 4 products of 64 x 64")


def test_explicit_attention_that_was_replaced_is_found_inert(plain: tuple) -> None:
    training, ops = plain
    replaced = [*ops, Op("aten::_scaled_dot_product_efficient_attention", [], [])]
    found = prove(training, replaced)["attention"]
    assert found == Finding(False, "torch replaced it by _scaled_dot_product_efficient_attention")


def test_a_reduced_precision_that_leaked_in_is_found_at_highest(plain: tuple) -> None:
    torch.set_float32_matmul_precision("medium")
    found = claim(plain)["matmul_precision"]
    assert not found.took_effect
    assert "torch's setting is medium" in found.evidence


def test_a_vocabulary_that_is_a_multiple_already_is_found_inert() -> None:
    from gpt2.config.workload import GPT2Config
    from gpt2.model.model import build

    toggles = Toggles(vocab_multiple=64)
    config = model_config(toggles, GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=8, vocab_size=128))
    training = SimpleNamespace(toggles=toggles, model=build(config, 0, torch.device("cpu")))
    found = PROOFS["vocab_multiple"](StepEvidence(training, []))  # type: ignore[arg-type]
    assert found == Finding(False, "128 is already a multiple: nothing to pad")


def test_the_functions_of_a_loss_are_read_while_the_loss_is_there() -> None:
    """A function in Python tells of others only while its result lives: seen with torch 2.11 on CUDA."""

    class Loss:
        grad_fn: object

    class Node:
        def __init__(self, loss: Loss) -> None:
            self.loss = weakref.ref(loss)

        @property
        def next_functions(self) -> list[tuple[object, int]]:
            assert self.loss() is not None
            return []

        def name(self) -> str:
            return "CrossEntropyBackward"

    class Model:
        def modules(self) -> list[object]:
            return []

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> Loss:
            loss = Loss()
            loss.grad_fn = Node(loss)
            return loss

    batch = torch.zeros(1, 1), torch.zeros(1, 1)
    training = SimpleNamespace(micro_batch=batch, model=Model(), autocast=contextlib.nullcontext)
    assert StepEvidence(training, []).functions == {"CrossEntropyBackward"}  # type: ignore[arg-type]


# --- CUDA, by hand: the names are those that its profiler shows


def kernels(*names: str) -> list[Op]:
    return [Op(name, [], [], on_device=True) for name in names]


FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64, 4> >"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)"
)
LAUNCH = Op("cudaGraphLaunch", [], [])


@pytest.mark.parametrize(("kind", "name"), [("flash", FLASH), ("cudnn", CUDNN), ("efficient", EFFICIENT)])
def test_attention_under_cuda_graphs_is_told_by_its_kernel(kind: str, name: str, plain: tuple) -> None:
    assert fused_attention(kernels(name)) == {kind: name}
    training, _ = plain
    claimed = SimpleNamespace(**{**vars(training), "toggles": replace(FOUR, device="cuda", attention=kind)})
    found = PROOFS["attention"](StepEvidence(claimed, [LAUNCH, *kernels(name)]))  # type: ignore[arg-type]
    assert found == Finding(True, f"ran {name}")


@pytest.mark.parametrize(
    ("name", "number_format"),
    [
        ("nvjet_tst_128x256_64x6_2x1_2cta_v_bz_TNT", "bfloat16"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "float16"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x3_nn", "bfloat16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "bfloat16"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn", "float16"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x64_stage3", "tf32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3", "float32"),
        ("ampere_sgemm_128x64_nn", "float32"),
        ("triton_tem_fused_addmm_3", None),
        (EFFICIENT, None),
        (CUDNN, None),
    ],
)
def test_the_number_format_of_a_matrix_kernel_is_read_from_its_name(
    name: str, number_format: str | None
) -> None:
    assert kernel_formats(kernels(name)) == ([number_format] if number_format else [])


def graphed(plain: tuple, ops: list[Op], **changes: object) -> dict[str, Finding]:
    training, _ = plain
    toggles = replace(FOUR, device="cuda", compile="reduce-overhead", **changes)
    compiled = [
        Op("Torch-Compiled Region: 0/0", [], []),
        Op("CompiledFunction", ["long int", "float", "long int"], [[4, 64], [509, 64], [4, 64]]),
    ]
    seen = StepEvidence(SimpleNamespace(**{**vars(training), "toggles": toggles}), [*compiled, *ops])  # type: ignore[arg-type]
    return {name: proof(seen) for name, proof in PROOFS.items()}


def test_under_cuda_graphs_kernels_and_the_inputs_of_the_graph_prove_the_toggles(plain: tuple) -> None:
    ops = [LAUNCH, LAUNCH, *kernels("nvjet_tst_64x8_TNT", "nvjet_tst_64x8_NNN")]
    found = graphed(plain, ops, autocast="bfloat16")
    assert found["autocast"] == Finding(True, "2 of 2 linear products took bfloat16 inputs")
    assert found["compile"].took_effect
    assert "2 CUDA graphs launched" in found["compile"].evidence
    assert found["micro_batch_size"] == Finding(True, "forward passes of 4 x 64 tokens")
    assert found["grad_accum_steps"].took_effect


def test_cuda_graphs_that_were_asked_for_but_not_launched_are_found_out(plain: tuple) -> None:
    found = graphed(plain, [])["compile"]
    assert not found.took_effect
    assert "no CUDA graph was launched" in found.evidence


def test_columns_summed_by_kernels_of_their_own_prove_reductions_apart(plain: tuple) -> None:
    name = "triton_red_fused__to_copy_native_layer_norm_backward_view_2"
    found = [graphed(plain, ops, reductions="apart")["reductions"] for ops in (kernels(name, name), [])]
    assert [each.took_effect for each in found] == [True, False]
    assert found[0].evidence.startswith("2 kernels")


def test_products_of_apple_s_linear_layer_are_read_as_products() -> None:
    op = Op("aten::linear", ["c10::Half", "c10::Half", "c10::Half"], [[4, 64, 32], [128, 32], [128]])
    (product,) = matmuls([op])
    assert (product.m, product.k, product.n, product.number_format) == (256, 32, 128, "float16")


def test_apple_s_linear_layers_are_read_beside_the_products_of_its_attention() -> None:
    linear = Op("aten::linear", ["float", "float", "float"], [[4, 64, 32], [128, 32], [128]])
    scores = Op("aten::bmm", ["float", "float"], [[16, 64, 8], [16, 8, 64]])
    found = [(p.m, p.k, p.n, p.batched) for p in matmuls([linear, scores])]
    assert found == [(64, 8, 64, True), (256, 32, 128, False)]


def test_an_op_that_autocast_passes_on_counts_once() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 8)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.functional.linear(x, w)

    linear = [op for op in profile(step, start(FOUR).device) if op.name == "aten::linear"]
    assert [op.dtypes[0] for op in linear] == ["c10::BFloat16"]


OURS = pytest.param(
    "brgemm", "brgemm", marks=pytest.mark.skipif(bool(missing_brgemm("float32")), reason="none here")
)


@pytest.mark.parametrize(
    ("chosen", "kernel"), [("explicit", None), ("sdpa", "flash"), ("math", "math"), OURS]
)
def test_the_attention_kernel_is_the_one_that_ran(
    chosen: str, kernel: str | None, process_settings: None
) -> None:
    training = start(replace(FOUR, attention=chosen))
    assert attention_kernel(profile(lambda: next(training), training.device)) == kernel


def test_files_in_memory_whose_names_are_no_utf_8_keep_no_proof_from_being_taken(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff.bin")
    with open(path, "w+b") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert "\\xff.bin" in loaded_libraries()
