"""Proofs of toggles for number formats and attention."""

from __future__ import annotations

import re

import torch

from gpt2.config.toggles import Toggles
from gpt2.model.attention import BLOCK
from gpt2.proofs.evidence import Finding, StepEvidence, built_for, counted
from gpt2.proofs.profiler import fused_attention

EXACT_PRODUCT = 1.5e-6
"""Largest relative error of a float32 matmul that counts as exact.

It is about 3e-7 in float32, 4e-6 as three bfloat16 matmuls, 4e-4 in TF32 and 2e-3 in bfloat16.
"""


def autocast(step: StepEvidence) -> Finding:
    wanted = step.toggles.autocast
    if step.formats:
        taken = sum(found == wanted or (wanted, found) == ("float32", "tf32") for found in step.formats)
        evidence = f"{taken} of {len(step.formats)} linear products took {wanted} inputs"
        return Finding(taken == len(step.formats), evidence)
    one = torch.ones(1, 1, device=step.training.device.torch_device)
    with step.training.autocast():
        given = str((one @ one).dtype).removeprefix("torch.")
    evidence = f"generated kernels do not tell their format; a product in its place gave {given}"
    return Finding(given == wanted, evidence)


def matmul_precision(step: StepEvidence) -> Finding:
    wanted, exact = step.toggles.matmul_precision, step.product_error < EXACT_PRODUCT
    probe = f"a float32 product is {'exact' if exact else 'rounded'}: relative error {step.product_error:.0e}"
    found = step.training.device.matmul_precision()
    if found != wanted:
        return Finding(False, f"torch's setting is {found}; {probe}")
    asked = wanted != Toggles().matmul_precision
    if asked and step.formats and not {"float32", "tf32"} & set(step.formats):
        return Finding(False, f"no float32 product ran: autocast made all of them {step.formats[0]}")
    if exact == asked:
        return Finding(False, f"torch's setting is {found}, but {probe}")
    return Finding(True, probe)


def attention(step: StepEvidence) -> Finding:
    wanted, T = step.toggles.attention, step.training.workload.seq_len
    fused = fused_attention(step.ops)
    ran = ", ".join(fused.values())
    scores = sum(p.batched and (p.m, p.n) == (T, T) for p in step.matmuls)
    materialised = f"scores materialised: {scores} products of {T} x {T}" if scores else "no fused kernel ran"
    if wanted in ("explicit", "math") and fused:
        return Finding(False, f"torch replaced it by {ran}")
    if wanted == "explicit":
        return Finding(True, materialised)
    if wanted == "math":
        if step.named("aten::_scaled_dot_product_attention_math"):
            return Finding(True, f"math kernel: {materialised}")
        compiled = step.toggles.compile != "eager"  # its code has the kernel's matmuls, but not its name
        return Finding(compiled, f"{'compiled math kernel: ' if compiled else ''}{materialised}")
    if wanted == "blocks":
        backward = [op.name for op in step.ops if re.search("attention.*_backward", op.name)]
        blocks = sum(p.batched and p.m == p.n == min(BLOCK, T) for p in step.matmuls)
        ran = f"ran {ran}, and {counted(blocks, 'product')} of blocks" if fused else materialised
        return Finding(set(fused) == {"flash"} and not backward and blocks > 0, ran)
    if wanted == "brgemm":
        forward, back = (len(step.named(f"gpt2::attention{which}")) for which in ("", "_backward"))
        ran = f"{counted(forward, 'call')} of it forward, {back} backward" if forward else materialised
        return Finding(forward > 0 and back > 0 and not fused and not scores, ran)
    if wanted == "flash4":
        forward, back = (len(step.named(f"gpt2::flash4_attention{which}")) for which in ("", "_backward"))
        if step.graph_launches:  # a CUDA graph's replay does not name its ops
            built = step.training.model.config.attention
            return Finding(set(fused) == {"flash"} and built == wanted, f"ran {ran}")
        ran = f"{counted(forward, 'call')} of it forward, {back} backward" if forward else ran or materialised
        return Finding(forward > 0 and back > 0, ran)
    if wanted == "flex":
        kernels = sum(op.on_device and "flex_attention" in op.name for op in step.ops)
        return Finding(kernels > 0 and not fused, f"{counted(kernels, 'kernel')} of FlexAttention ran")
    if wanted == "flash3":
        active = torch.nn.attention.current_flash_attention_impl()
        evidence = f"{ran or materialised}, by {active or 'torch'}"
        return Finding(set(fused) == {"flash"} and active == "FA3", evidence)
    if wanted == "sdpa":
        chose = f"ran {ran}" if fused else f"torch chose its math kernel: {materialised}"
        return Finding(bool(fused), chose)
    return Finding(set(fused) == {wanted}, f"ran {ran}" if fused else materialised)


def residual(step: StepEvidence) -> Finding:
    if step.training.model.config.residual == "float32":  # nothing is cast, so there is no op to look for
        return built_for(step, "residual")
    found = str(step.residual_dtype).removeprefix("torch.")
    return Finding(found == step.toggles.residual, f"the last layer is given {found}")


def weights(step: StepEvidence) -> Finding:
    matrices = [p for p in step.training.model.parameters() if p.dim() >= 2]
    right = sum(p.dtype == getattr(torch, step.toggles.weights) for p in matrices)
    return Finding(right == len(matrices), f"{right} of {len(matrices)} matrices are {step.toggles.weights}")


def float8(step: StepEvidence) -> Finding:
    ran = sum(op.name == "aten::_scaled_mm" or (op.on_device and "e4m3" in op.name) for op in step.ops)
    return Finding((ran > 0) == (step.toggles.float8 != "none"), f"{counted(ran, 'product')} in float8")


def int8(step: StepEvidence) -> Finding:
    ran = sum("int8_mm" in op.name if op.on_device else op.name == "aten::_int_mm" for op in step.ops)
    return Finding((ran > 0) == (step.toggles.int8 != "none"), f"{counted(ran, 'product')} of 8-bit integers")


def weight_casts(step: StepEvidence) -> Finding:
    copies = getattr(step.training.optimizer, "copies", {})
    right = sum(torch.equal(weight.to(copy.dtype), copy) for weight, copy in copies.items())
    if step.toggles.weight_casts == "forward":
        return Finding(not copies, f"{len(copies)} matrices have copies")
    evidence = f"{right} of {len(copies)} matrices lie as {step.toggles.autocast}, too"
    return Finding(right == len(copies) > 0, evidence)
