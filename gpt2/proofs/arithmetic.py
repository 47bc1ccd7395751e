"""Proofs of toggles for number formats and attention."""

from __future__ import annotations

import re

import torch

from gpt2.config.toggles import Toggles
from gpt2.model.attention import BLOCK
from gpt2.proofs.evidence import Seen
from gpt2.proofs.finding import Finding, built_for, counted
from gpt2.proofs.profiler import fused_attention

EXACT_PRODUCT = 1.5e-6
"""Largest relative error of a float32 matmul that counts as exact.

It is about 3e-7 in float32, 4e-6 as three bfloat16 matmuls, 4e-4 in TF32 and 2e-3 in bfloat16.
"""


def autocast(seen: Seen) -> Finding:
    wanted = seen.toggles.autocast
    if seen.formats:
        taken = sum(found == wanted or (wanted, found) == ("float32", "tf32") for found in seen.formats)
        return Finding(
            taken == len(seen.formats), f"{taken} of {len(seen.formats)} linear products took {wanted} inputs"
        )
    one = torch.ones(1, 1, device=seen.training.device.torch_device)
    with seen.training.autocast():
        given = str((one @ one).dtype).removeprefix("torch.")
    return Finding(
        given == wanted, f"generated kernels do not tell their format; a product in its place gave {given}"
    )


def matmul_precision(seen: Seen) -> Finding:
    wanted, exact = seen.toggles.matmul_precision, seen.product_error < EXACT_PRODUCT
    probe = f"a float32 product is {'exact' if exact else 'rounded'}: relative error {seen.product_error:.0e}"
    found = seen.training.device.matmul_precision()
    if found != wanted:
        return Finding(False, f"torch's setting is {found}; {probe}")
    asked = wanted != Toggles().matmul_precision
    if asked and seen.formats and not {"float32", "tf32"} & set(seen.formats):
        return Finding(False, f"no float32 product ran: autocast made all of them {seen.formats[0]}")
    if exact == asked:
        return Finding(False, f"torch's setting is {found}, but {probe}")
    return Finding(True, probe)


def attention(seen: Seen) -> Finding:
    wanted, T = seen.toggles.attention, seen.training.workload.seq_len
    fused = fused_attention(seen.ops)
    ran = ", ".join(fused.values())
    scores = sum(p.batched and (p.m, p.n) == (T, T) for p in seen.products)
    materialised = f"scores materialised: {scores} products of {T} x {T}" if scores else "no fused kernel ran"
    if wanted in ("explicit", "math") and fused:
        return Finding(False, f"torch replaced it by {ran}")
    if wanted == "explicit":
        return Finding(True, materialised)
    if wanted == "math":
        if seen.named("aten::_scaled_dot_product_attention_math"):
            return Finding(True, f"math kernel: {materialised}")
        compiled = (
            seen.toggles.compile != "eager"
        )  # compiled code contains the kernel's matmuls, but not its name
        return Finding(compiled, f"{'compiled math kernel: ' if compiled else ''}{materialised}")
    if wanted == "blocks":
        backward = [op.name for op in seen.ops if re.search("attention.*_backward", op.name)]
        blocks = sum(p.batched and p.m == p.n == min(BLOCK, T) for p in seen.products)
        ran = f"ran {ran}, and {counted(blocks, 'product')} of blocks" if fused else materialised
        return Finding(set(fused) == {"flash"} and not backward and blocks > 0, ran)
    if wanted == "brgemm":
        forward, back = (len(seen.named(f"gpt2::attention{which}")) for which in ("", "_backward"))
        ran = f"{counted(forward, 'call')} of it forward, {back} backward" if forward else materialised
        return Finding(forward > 0 and back > 0 and not fused and not scores, ran)
    if wanted == "flash4":
        forward, back = (len(seen.named(f"gpt2::flash4_attention{which}")) for which in ("", "_backward"))
        if seen.graph_launches:  # a CUDA graph's replay does not name its ops
            return Finding(
                set(fused) == {"flash"} and seen.training.model.config.attention == wanted, f"ran {ran}"
            )
        ran = f"{counted(forward, 'call')} of it forward, {back} backward" if forward else ran or materialised
        return Finding(forward > 0 and back > 0, ran)
    if wanted == "flex":
        kernels = sum(op.on_device and "flex_attention" in op.name for op in seen.ops)
        return Finding(kernels > 0 and not fused, f"{counted(kernels, 'kernel')} of FlexAttention ran")
    if wanted == "flash3":
        active = torch.nn.attention.current_flash_attention_impl()
        return Finding(
            set(fused) == {"flash"} and active == "FA3", f"{ran or materialised}, by {active or 'torch'}"
        )
    if wanted == "sdpa":
        return (
            Finding(True, f"ran {ran}")
            if fused
            else Finding(False, f"torch chose its math kernel: {materialised}")
        )
    return Finding(set(fused) == {wanted}, f"ran {ran}" if fused else materialised)


def residual(seen: Seen) -> Finding:
    if seen.training.model.config.residual == "float32":  # nothing is cast, so there is no op to look for
        return built_for(seen, "residual")
    found = str(seen.residual_dtype).removeprefix("torch.")
    return Finding(found == seen.toggles.residual, f"the last layer is given {found}")


def weights(seen: Seen) -> Finding:
    matrices = [p for p in seen.training.model.parameters() if p.dim() >= 2]
    right = sum(p.dtype == getattr(torch, seen.toggles.weights) for p in matrices)
    return Finding(right == len(matrices), f"{right} of {len(matrices)} matrices are {seen.toggles.weights}")


def float8(seen: Seen) -> Finding:
    ran = sum(op.name == "aten::_scaled_mm" or (op.on_device and "e4m3" in op.name) for op in seen.ops)
    return Finding((ran > 0) == (seen.toggles.float8 != "none"), f"{counted(ran, 'product')} in float8")


def int8(seen: Seen) -> Finding:
    ran = sum("int8_mm" in op.name if op.on_device else op.name == "aten::_int_mm" for op in seen.ops)
    return Finding((ran > 0) == (seen.toggles.int8 != "none"), f"{counted(ran, 'product')} of 8-bit integers")


def weight_casts(seen: Seen) -> Finding:
    copies = getattr(seen.training.optimizer, "copies", {})
    right = sum(torch.equal(weight.to(copy.dtype), copy) for weight, copy in copies.items())
    if seen.toggles.weight_casts == "forward":
        return Finding(not copies, f"{len(copies)} matrices have copies")
    return Finding(
        right == len(copies) > 0, f"{right} of {len(copies)} matrices lie as {seen.toggles.autocast}, too"
    )
