"""Proofs of toggles that change how a step is composed."""

from __future__ import annotations

import re
import sys
from collections import Counter

from gpt2.model.tuned_linear import chosen as arrangements
from gpt2.proofs.evidence import Seen
from gpt2.proofs.finding import Finding, built_for, counted
from gpt2.training.optimizer import CompiledAdamW


def compile(seen: Seen) -> Finding:
    regions, of_optimizer = seen.compiled_regions
    optimizer = seen.training.optimizer
    if of_optimizer and isinstance(optimizer, CompiledAdamW) and optimizer.norm_is_compiled:
        regions -= 1  # the gradient norm, which belongs to the optimiser
    if seen.toggles.compile == "eager":
        return Finding(not regions, f"{regions} compiled regions ran" if regions else "nothing compiled ran")
    if not regions:
        return Finding(False, "nothing compiled ran: torch fell back to eager code")
    graphs = len({op.name for op in seen.ops if "CompiledFxGraph" in op.name})
    counters = sys.modules["torch._dynamo.utils"].counters
    breaks = sum(counters["graph_break"].values())
    ran = f"{counted(graphs, 'compiled graph')} ran, {counted(breaks, 'graph break')}"
    if seen.toggles.cuda_graphs and not seen.graph_launches:
        return Finding(False, f"{ran}, but no CUDA graph was launched")
    if seen.graph_launches:
        ran += f", {counted(seen.graph_launches, 'CUDA graph')} launched"
    if tuned := counters["inductor"]["select_algorithm_autotune"]:
        return Finding(True, f"{ran}, {counted(tuned, 'product')} autotuned")
    cached = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    if (
        seen.toggles.compile.startswith("max-autotune")
        and not cached
        and not any(op.on_device for op in seen.ops)
    ):
        return Finding(
            False, f"{ran}, but there was no product to autotune"
        )  # on a GPU, other kernels are tuned too
    return Finding(True, ran)


def compile_region(seen: Seen) -> Finding:
    runs = Counter(op.name for op in seen.ops if "CompiledFxGraph" in op.name)
    layers = seen.training.model.config.n_layer * seen.toggles.grad_accum_steps
    repeated = sum(count >= layers for count in runs.values())
    if seen.toggles.compile_region == "block":
        ran = f"{repeated} of {counted(len(runs), 'compiled graph')} ran for each layer"
        return Finding(repeated >= 2, ran)  # the forward and the backward pass of a block
    if seen.toggles.world_size > 1:  # the pieces between exchanges may be alike by chance
        return Finding(True, "ranks cut the graph where they exchange")
    return Finding(not repeated or layers == 1, f"{counted(repeated, 'compiled graph')} ran for each layer")


def reductions(seen: Seen) -> Finding:
    """A kernel that sums over columns alone is a loop over rows, which Inductor's name for it tells."""
    apart = sum(
        op.on_device and bool(re.match("triton_red.*layer_norm_backward", op.name)) for op in seen.ops
    )
    wanted = seen.toggles.reductions == "apart"
    evidence = f"{counted(apart, 'kernel')} of LayerNorms' backward pass only summed over columns"
    return Finding(apart > 0 if wanted else True, evidence)


def launch(seen: Seen) -> Finding:
    replays = seen.training.graph.replays if seen.training.graph else 0
    evidence = f"{replays} of {counted(seen.training.number, 'step')} ran as one CUDA graph"
    return Finding((replays > 0) == (seen.toggles.launch == "graph"), evidence)


def adamw(seen: Seen) -> Finding:
    fused = len(seen.named("aten::_fused_adamw_"))
    foreach = len(seen.named("aten::_foreach_addcdiv_"))  # clipping uses foreach ops too, but not this one
    single = len(seen.named("aten::addcdiv_"))
    compiled = isinstance(seen.training.optimizer, CompiledAdamW) and seen.compiled_regions[1]
    ran = (
        "fused"
        if fused
        else "foreach"
        if foreach
        else "for_loop"
        if single
        else "compiled"
        if compiled
        else "none"
    )
    evidence = {
        "compiled": "a compiled function ran in the optimiser's step, no update was seen apart",
        "fused": f"{counted(fused, 'call')} of _fused_adamw_",
        "foreach": f"{counted(foreach, 'call')} of _foreach_addcdiv_, none fused",
        "for_loop": f"{counted(single, 'call')} of addcdiv_, one for each tensor",
        "none": "no update was seen",
    }
    return Finding(ran == seen.toggles.adamw, evidence[ran])


def clip(seen: Seen) -> Finding:
    given = getattr(seen.training.optimizer, "grad_scale", None) is not None
    evidence = (
        "AdamW was given the scale of the gradients" if given else "gradients were scaled before AdamW's step"
    )
    return Finding(given == (seen.toggles.clip == "in_step"), evidence)


def vocab_multiple(seen: Seen) -> Finding:
    config = seen.training.model.config
    logical, padded = config.vocab_size, seen.training.model.wte.weight.size(0)
    columns = sorted({head.n for head in seen.heads})
    ran = f"; lm_head gave {', '.join(f'{n}' for n in columns)} columns" if columns else ""
    if seen.toggles.vocab_multiple == 1:
        return Finding(padded == logical, f"{padded} rows{ran}")
    if padded == logical:
        return Finding(False, f"{logical} is already a multiple: nothing to pad")
    right = (
        padded % seen.toggles.vocab_multiple == 0 and padded > logical and all(n == padded for n in columns)
    )
    return Finding(right, f"{padded} rows for {logical} tokens{ran}")


def recompute(seen: Seen) -> Finding:
    config = seen.training.model.config
    wanted, layers = seen.toggles.recompute, config.n_layer
    if seen.training.device.lazy:
        return Finding(config.recompute == wanted, f"the model is built for {config.recompute}")
    if seen.rows == config.n_embd and (seen.toggles.autocast != "float32" or seen.toggles.shards_gradients):
        evidence = f"the model is built for {config.recompute}; its activations look like copies of weights"
        return Finding(config.recompute == wanted, evidence)
    # A layer's MLP has two such activations: GELU's input and output.
    evidence = f"a forward pass keeps {seen.wide_kept} of the {2 * layers} activations of the MLPs"
    if wanted == "none":
        by_compiler = seen.wide_kept < 2 * layers and seen.toggles.compile != "eager"
        return Finding(seen.wide_kept == 2 * layers or by_compiler, evidence)
    return Finding(seen.wide_kept == {"gelu": layers, "block": 0}[wanted], evidence)


def micro_batch_size(seen: Seen) -> Finding:
    T = seen.training.workload.seq_len
    sizes = sorted({rows / T for rows in seen.forward_rows})
    evidence = f"forward passes of {', '.join(f'{size:g}' for size in sizes)} x {T} tokens"
    return Finding(sizes == [seen.toggles.sequences], evidence if sizes else "no forward pass was told apart")


def grad_accum_steps(seen: Seen) -> Finding:
    passes = len(seen.forward_rows)
    return Finding(
        passes == seen.toggles.grad_accum_steps, f"{counted(passes, 'forward pass', 'es')} in the step"
    )


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
"""Autograd's name of the backward function, by value of the toggle: cross_entropy; gelu; gelu where
bias_gradient is triton; layer_norm.
"""
LOSS_OPS = {
    "triton": "gpt2::cross_entropy_",
    "liger": "gpt2::liger_cross_entropy_",
    "quack": "gpt2::quack_cross_entropy_",
    "cut": "LinearCrossEntropyFunction",
}
"""The op that runs a kernel of the loss, by value of cross_entropy."""


def cross_entropy(seen: Seen) -> Finding:
    found = _differentiated(seen, "cross_entropy", LOSSES)
    name = LOSS_OPS.get(seen.toggles.cross_entropy)
    if name is None or seen.graph_launches:  # a CUDA graph's replay does not name its ops
        return found
    ran = len(seen.named(name))
    evidence = f"{found.evidence}; the kernel ran {counted(ran, 'time')}"
    return Finding(found.took_effect and ran == seen.toggles.grad_accum_steps, evidence)


def gelu(seen: Seen) -> Finding:
    return _differentiated(seen, "gelu", GELUS if seen.toggles.bias_gradient == "torch" else BIASED_GELUS)


def layer_norm(seen: Seen) -> Finding:
    return _differentiated(seen, "layer_norm", LAYER_NORMS)


def _differentiated(seen: Seen, name: str, functions: dict[str, str]) -> Finding:
    """Check the autograd functions of the model's eager code, because compiled kernels do not show them."""
    if seen.training.device.lazy:  # a lazy device would have to compile another program
        return built_for(seen, name)
    found = sorted(seen.functions.intersection(functions.values()))
    wanted = functions.get(getattr(seen.toggles, name))
    ran = f"eager code differentiates by {', '.join(found)}" if found else "eager code has none of the others"
    return Finding(found == ([wanted] if wanted else []), ran)


def tied_gradient(seen: Seen) -> Finding:
    if seen.graph_launches:  # a CUDA graph's replay does not name its ops
        return built_for(seen, "tied_gradient")
    added = len(seen.named("gpt2::add_rows"))
    evidence = f"rows added to the lm_head's gradient {counted(added, 'time')}"
    return Finding(
        added == (seen.toggles.grad_accum_steps if seen.toggles.tied_gradient == "rows" else 0), evidence
    )


def bias_gradient(seen: Seen) -> Finding:
    if seen.graph_launches:  # a CUDA graph's replay does not name its ops
        return built_for(seen, "bias_gradient")
    gelus, joins = (len(seen.named(f"gpt2::{name}")) for name in ("gelu_backward", "join_gradients"))
    layers = seen.training.model.config.n_layer * seen.toggles.grad_accum_steps
    wanted = layers if seen.toggles.bias_gradient == "triton" else 0
    evidence = (
        f"biases summed with GELU's gradient {counted(gelus, 'time')}, with those of q, k and v {joins}"
    )
    return Finding(gelus == joins == wanted, evidence)


def products(seen: Seen) -> Finding:
    shared = [op for op in seen.ops if op.name == "gpt2::product"]
    tuned = seen.toggles.products == "tuned"
    if not tuned or (shared and set(arrangements()) == {"whole"}):  # whole may be the fastest for every shape
        return Finding(tuned or not shared, "each product was handed over whole")
    shapes = ", ".join(f"{number} {name}" for name, number in arrangements().items())
    return Finding(
        bool(shared), f"{counted(len(shared), 'product')}, the fastest way for their shapes: {shapes}"
    )
