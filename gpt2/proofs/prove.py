"""Verify that each toggle took effect: from one profiled step, torch's flags and counters, and small probes.

    ops = profile(lambda: next(training), training.device)
    for toggle, finding in prove(training, ops).items(): ...

Each field of Toggles is verified by the function of its name. What it can go by, the strongest first: the
ops of the step, with number formats and shapes (StepEvidence.ops, .matmuls); what torch or the system tells
of this process (flags, counters, loaded libraries); the autograd graph of the same model in eager code, for
what compiled code hides (_differentiated); what the model was built for (built_for), which proves least.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from gpt2.config.toggles import Toggles
from gpt2.hardware.host import ALLOCATORS, huge_pages, usable_cores
from gpt2.model.attention import BLOCK
from gpt2.model.tuned_linear import chosen as arrangements
from gpt2.proofs.evidence import Finding, StepEvidence, built_for, counted
from gpt2.proofs.profiler import Op, fused_attention
from gpt2.training.distributed import is_shard
from gpt2.training.optimizer import CompiledAdamW
from gpt2.training.stages import threads as wanted_threads
from gpt2.training.train import Training


def prove(training: Training, ops: list[Op]) -> dict[str, Finding]:
    """Return a finding for each toggle, baseline values included. `ops`: those of one of its steps."""
    evidence = StepEvidence(training, ops)
    return {name: proof(evidence) for name, proof in PROOFS.items()}


# --- What a process has from its start: device, ranks, memory, threads


def device(step: StepEvidence) -> Finding:
    parameters = list(step.training.model.parameters())
    there = sum(parameter.device.type == step.toggles.device for parameter in parameters)
    kernels = sum(op.on_device for op in step.ops)
    ran = f"; {kernels:,} kernels ran there" if kernels else ""
    backend = step.training.device.versions().get("xla_backend")
    where = f"there, by XLA's backend for {backend}" if backend else "there"
    evidence = f"{there} of {len(parameters)} tensors of weights lie {where}{ran}"
    return Finding(there == len(parameters), evidence)


def world_size(step: StepEvidence) -> Finding:
    if step.toggles.processes < step.toggles.world_size:
        assert step.training.micro_batch is not None
        devices = step.training.device.spread(step.training.micro_batch[0])
        launched = step.training.device.launches()
        together = launched is not None and 0 < launched.together == launched.programs
        ran = "all programs ran on all of them" if together else "not all programs ran on all of them"
        right = devices == step.toggles.world_size and together
        return Finding(right, f"the rows of a batch lie on {counted(devices, 'device')}; {ran}")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if together else 1
    name = "reduce-scatter" if step.toggles.shards_gradients else "all-reduce"
    exchanges = step.exchanges("reduce_scatter" if step.toggles.shards_gradients else "allreduce")
    right = ranks == step.toggles.world_size and (ranks > 1) == (exchanges > 0)
    return Finding(right, f"{counted(ranks, 'rank')}, {counted(exchanges, name)} seen in the step")


def sharding(step: StepEvidence) -> Finding:
    parameters = list(step.training.model.parameters())
    kept, elements = step.optimizer_elements, sum(parameter.numel() for parameter in parameters)
    spread = sum(map(is_shard, parameters))
    gathers, scatters = step.exchanges("gather"), step.exchanges("reduce_scatter")
    ran = f"this rank holds {kept / elements:.0%} of the optimiser's state"
    if step.toggles.shards_gradients:
        # One gather per block and one for the rest; fsdp2 gathers again for the backward pass.
        forward = (step.training.model.config.n_layer + 1) * step.toggles.grad_accum_steps
        ran += (
            f" and its rows of {spread} of {len(parameters)} tensors of weights; "
            f"{counted(gathers, 'all-gather')} for {forward} in the forward passes, "
            f"{counted(scatters, 'reduce-scatter')}"
        )
        wanted = forward * (2 if step.toggles.sharding == "fsdp2" else 1)
        right = spread == len(parameters) and gathers == wanted
        return Finding(right and kept < elements and scatters > 0, ran)
    if step.toggles.sharding == "zero1":
        broadcasts = step.exchanges("broadcast")
        ran += f"; {counted(broadcasts, 'broadcast')} of weights"
        return Finding(kept < elements and broadcasts > 0, ran)
    return Finding(kept == elements and not spread, f"{ran} and whole weights")


def loaded_libraries() -> str:
    """Return the memory map of this process as text; empty where the system does not provide it."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text(errors="backslashreplace")
    return ""


def allocator(step: StepEvidence) -> Finding:
    if segments := step.training.device.segments():
        evidence = f"{segments[0]} of {counted(segments[1], 'segment')} of memory can grow"
        return Finding((segments[0] > 0) == (step.toggles.allocator == "expandable"), evidence)
    mapped = loaded_libraries()
    loaded = [name for name, library in ALLOCATORS.items() if f"lib{library}" in mapped]
    before, size = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 2**27
    torch.empty(size, dtype=torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pages = size // resource.getpagesize()
    evidence = f"{', '.join(loaded) or 'the C library'}; a tensor of {pages} pages took {faults} page faults"
    wanted = step.toggles.allocator
    if wanted == "thp":
        if huge_pages() == "always":
            return Finding(False, "the system gives huge pages to everybody, asked for or not")
        return Finding(not loaded and faults < pages // 8, evidence)
    return Finding(loaded == ([wanted] if wanted in ALLOCATORS else []), evidence)


def affinity(step: StepEvidence) -> Finding:
    places: set[int] = set()  # logical processors that a thread of this process does not leave
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread may have ended
            allowed = os.sched_getaffinity(int(thread.name))
            places |= allowed if len(allowed) == 1 else set()
    count = torch.get_num_threads()
    there = f"{counted(len(places), 'core')} with a thread that stays there"
    evidence = f"{there}, for {counted(count, 'thread')}"
    pinned = len(places) >= count
    return Finding(pinned == (step.toggles.affinity == "pinned") or usable_cores() == 1, evidence)


def threads(step: StepEvidence) -> Finding:
    count = torch.get_num_threads()
    return Finding(count == wanted_threads(step.toggles), f"torch computes with {counted(count, 'thread')}")


# --- Number formats and attention

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


# --- How a step is composed


def compile(step: StepEvidence) -> Finding:
    regions, of_optimizer = step.compiled_regions
    optimizer = step.training.optimizer
    if of_optimizer and isinstance(optimizer, CompiledAdamW) and optimizer.norm_is_compiled:
        regions -= 1  # the gradient norm, which belongs to the optimiser
    if step.toggles.compile == "eager":
        return Finding(not regions, f"{regions} compiled regions ran" if regions else "nothing compiled ran")
    if not regions:
        return Finding(False, "nothing compiled ran: torch fell back to eager code")
    graphs = len({op.name for op in step.ops if "CompiledFxGraph" in op.name})
    counters = sys.modules["torch._dynamo.utils"].counters
    breaks = sum(counters["graph_break"].values())
    ran = f"{counted(graphs, 'compiled graph')} ran, {counted(breaks, 'graph break')}"
    if step.toggles.cuda_graphs and not step.graph_launches:
        return Finding(False, f"{ran}, but no CUDA graph was launched")
    if step.graph_launches:
        ran += f", {counted(step.graph_launches, 'CUDA graph')} launched"
    if tuned := counters["inductor"]["select_algorithm_autotune"]:
        return Finding(True, f"{ran}, {counted(tuned, 'product')} autotuned")
    cached = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    on_device = any(op.on_device for op in step.ops)  # where other kernels are tuned too
    if step.toggles.compile.startswith("max-autotune") and not cached and not on_device:
        return Finding(False, f"{ran}, but there was no product to autotune")
    return Finding(True, ran)


def compile_region(step: StepEvidence) -> Finding:
    runs = Counter(op.name for op in step.ops if "CompiledFxGraph" in op.name)
    layers = step.training.model.config.n_layer * step.toggles.grad_accum_steps
    repeated = sum(count >= layers for count in runs.values())
    if step.toggles.compile_region == "block":
        ran = f"{repeated} of {counted(len(runs), 'compiled graph')} ran for each layer"
        return Finding(repeated >= 2, ran)  # the forward and the backward pass of a block
    if step.toggles.world_size > 1:  # the pieces between exchanges may be alike by chance
        return Finding(True, "ranks cut the graph where they exchange")
    return Finding(not repeated or layers == 1, f"{counted(repeated, 'compiled graph')} ran for each layer")


def reductions(step: StepEvidence) -> Finding:
    """A kernel that sums over columns alone is a loop over rows, which Inductor's name for it tells."""
    kernels = [op.name for op in step.ops if op.on_device]
    apart = sum(bool(re.match("triton_red.*layer_norm_backward", name)) for name in kernels)
    evidence = f"{counted(apart, 'kernel')} of LayerNorms' backward pass only summed over columns"
    return Finding(apart > 0 or step.toggles.reductions == "mixed", evidence)


def launch(step: StepEvidence) -> Finding:
    replays = step.training.graph.replays if step.training.graph else 0
    evidence = f"{replays} of {counted(step.training.number, 'step')} ran as one CUDA graph"
    return Finding((replays > 0) == (step.toggles.launch == "graph"), evidence)


def adamw(step: StepEvidence) -> Finding:
    fused = len(step.named("aten::_fused_adamw_"))
    foreach = len(step.named("aten::_foreach_addcdiv_"))  # clipping uses foreach ops too, but not this one
    single = len(step.named("aten::addcdiv_"))
    compiled = isinstance(step.training.optimizer, CompiledAdamW) and step.compiled_regions[1]
    ops = {"fused": fused, "foreach": foreach, "for_loop": single, "compiled": compiled}
    ran = next((name for name, count in ops.items() if count), "none")
    evidence = {
        "compiled": "a compiled function ran in the optimiser's step, no update was seen apart",
        "fused": f"{counted(fused, 'call')} of _fused_adamw_",
        "foreach": f"{counted(foreach, 'call')} of _foreach_addcdiv_, none fused",
        "for_loop": f"{counted(single, 'call')} of addcdiv_, one for each tensor",
        "none": "no update was seen",
    }
    return Finding(ran == step.toggles.adamw, evidence[ran])


def clip(step: StepEvidence) -> Finding:
    given = getattr(step.training.optimizer, "grad_scale", None) is not None
    apart = "gradients were scaled before AdamW's step"
    evidence = "AdamW was given the scale of the gradients" if given else apart
    return Finding(given == (step.toggles.clip == "in_step"), evidence)


def vocab_multiple(step: StepEvidence) -> Finding:
    config = step.training.model.config
    logical, padded = config.vocab_size, step.training.model.wte.weight.size(0)
    columns = sorted({head.n for head in step.heads})
    ran = f"; lm_head gave {', '.join(f'{n}' for n in columns)} columns" if columns else ""
    if step.toggles.vocab_multiple == 1:
        return Finding(padded == logical, f"{padded} rows{ran}")
    if padded == logical:
        return Finding(False, f"{logical} is already a multiple: nothing to pad")
    right = padded % step.toggles.vocab_multiple == 0 and all(n == padded for n in columns)
    return Finding(right and padded > logical, f"{padded} rows for {logical} tokens{ran}")


def recompute(step: StepEvidence) -> Finding:
    config = step.training.model.config
    wanted, layers = step.toggles.recompute, config.n_layer
    if step.training.device.lazy:
        return built_for(step, "recompute")
    if step.rows == config.n_embd and (step.toggles.autocast != "float32" or step.toggles.shards_gradients):
        evidence = f"the model is built for {config.recompute}; its activations look like copies of weights"
        return Finding(config.recompute == wanted, evidence)
    # A layer's MLP has two such activations: GELU's input and output.
    evidence = f"a forward pass keeps {step.wide_kept} of the {2 * layers} activations of the MLPs"
    if wanted == "none":
        by_compiler = step.wide_kept < 2 * layers and step.toggles.compile != "eager"
        return Finding(step.wide_kept == 2 * layers or by_compiler, evidence)
    return Finding(step.wide_kept == {"gelu": layers, "block": 0}[wanted], evidence)


def micro_batch_size(step: StepEvidence) -> Finding:
    T = step.training.workload.seq_len
    sizes = sorted({rows / T for rows in step.forward_rows})
    evidence = f"forward passes of {', '.join(f'{size:g}' for size in sizes)} x {T} tokens"
    return Finding(sizes == [step.toggles.sequences], evidence if sizes else "no forward pass was told apart")


def grad_accum_steps(step: StepEvidence) -> Finding:
    passes = len(step.forward_rows)
    evidence = f"{counted(passes, 'forward pass', 'es')} in the step"
    return Finding(passes == step.toggles.grad_accum_steps, evidence)


LOSSES = {
    "torch": "NllLossBackward0",
    "closed_form": "CrossEntropyBackward",
    **dict.fromkeys(("triton", "liger", "quack"), "FusedCrossEntropyBackward"),
    "cut": "LinearCrossEntropyFunctionBackward",
}
GELUS = {"tanh": "GeluBackward0", "sigmoid": "SigmoidGeluBackward"}
BIASED_GELUS = GELUS | {"tanh": "BiasedGeluBackward"}
LAYER_NORMS = {
    "torch": "NativeLayerNormBackward0",
    "liger": "LigerLayerNormFunctionBackward",
    "quack": "QuackLayerNormBackward",
}
"""Autograd's backward function by value of cross_entropy, gelu (biased: by Triton) and layer_norm."""
LOSS_OPS = {
    "triton": "gpt2::cross_entropy_",
    "liger": "gpt2::liger_cross_entropy_",
    "quack": "gpt2::quack_cross_entropy_",
    "cut": "LinearCrossEntropyFunction",
}
"""The op that runs a kernel of the loss, by value of cross_entropy."""


def cross_entropy(step: StepEvidence) -> Finding:
    found = _differentiated(step, "cross_entropy", LOSSES)
    name = LOSS_OPS.get(step.toggles.cross_entropy)
    if name is None or step.graph_launches:  # a CUDA graph's replay does not name its ops
        return found
    ran = len(step.named(name))
    evidence = f"{found.evidence}; the kernel ran {counted(ran, 'time')}"
    return Finding(found.took_effect and ran == step.toggles.grad_accum_steps, evidence)


def gelu(step: StepEvidence) -> Finding:
    return _differentiated(step, "gelu", GELUS if step.toggles.bias_gradient == "torch" else BIASED_GELUS)


def layer_norm(step: StepEvidence) -> Finding:
    return _differentiated(step, "layer_norm", LAYER_NORMS)


def _differentiated(step: StepEvidence, name: str, functions: dict[str, str]) -> Finding:
    """Check the autograd functions of the model's eager code, because compiled kernels do not show them."""
    if step.training.device.lazy:  # a lazy device would have to compile another program
        return built_for(step, name)
    found = sorted(step.functions.intersection(functions.values()))
    wanted = functions.get(getattr(step.toggles, name))
    ran = f"eager code differentiates by {', '.join(found)}" if found else "eager code has none of the others"
    return Finding(found == ([wanted] if wanted else []), ran)


def tied_gradient(step: StepEvidence) -> Finding:
    if step.graph_launches:  # a CUDA graph's replay does not name its ops
        return built_for(step, "tied_gradient")
    added = len(step.named("gpt2::add_rows"))
    evidence = f"rows added to the lm_head's gradient {counted(added, 'time')}"
    wanted = step.toggles.grad_accum_steps if step.toggles.tied_gradient == "rows" else 0
    return Finding(added == wanted, evidence)


def bias_gradient(step: StepEvidence) -> Finding:
    if step.graph_launches:  # a CUDA graph's replay does not name its ops
        return built_for(step, "bias_gradient")
    gelus, joins = (len(step.named(f"gpt2::{name}")) for name in ("gelu_backward", "join_gradients"))
    layers = step.training.model.config.n_layer * step.toggles.grad_accum_steps
    wanted = layers if step.toggles.bias_gradient == "triton" else 0
    with_gelu = f"biases summed with GELU's gradient {counted(gelus, 'time')}"
    evidence = f"{with_gelu}, with those of q, k and v {joins}"
    return Finding(gelus == joins == wanted, evidence)


def products(step: StepEvidence) -> Finding:
    shared = [op for op in step.ops if op.name == "gpt2::product"]
    if step.toggles.products == "onednn":
        by_onednn = len(step.named("gpt2::onednn_product"))
        return Finding(by_onednn > 0 and not shared, f"{counted(by_onednn, 'product')} by oneDNN")
    tuned = step.toggles.products == "tuned"
    if not tuned or (shared and set(arrangements()) == {"whole"}):  # whole may be the fastest for every shape
        return Finding(tuned or not shared, "each product was handed over whole")
    shapes = ", ".join(f"{number} {name}" for name, number in arrangements().items())
    ways = f"{counted(len(shared), 'product')}, the fastest way for their shapes: {shapes}"
    return Finding(bool(shared), ways)


def _proof_of(toggle: str) -> Callable[[StepEvidence], Finding]:
    if toggle not in globals():
        raise LookupError(
            f"toggle {toggle} has no proof: add a function of that name to gpt2/proofs/prove.py"
        )
    return globals()[toggle]


PROOFS: dict[str, Callable[[StepEvidence], Finding]] = {
    toggle.name: _proof_of(toggle.name) for toggle in fields(Toggles)
}
"""By toggle, the function of its name."""
