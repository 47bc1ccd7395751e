"""Proofs of toggles that change how a step is composed."""

from __future__ import annotations

import re
import sys
from collections import Counter

from gpt2.model.tuned_linear import chosen as arrangements
from gpt2.proofs.evidence import Finding, StepEvidence, built_for, counted
from gpt2.training.optimizer import CompiledAdamW


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
