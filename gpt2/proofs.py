"""Did each toggle take effect? Read from one profiled step, from torch's flags and counters, and from small probes.

    ops = profile(lambda: next(training), training.device)
    for toggle, finding in prove(training, ops).items(): ...

A field of Toggles is proved by the function of PROOFS that bears its name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from gpt2.attention import BLOCK
from gpt2.ops import Op, fused_attention
from gpt2.optimizer import CompiledAdamW
from gpt2.parallel import is_shard
from gpt2.products import chosen as arrangements
from gpt2.seen import Seen, loaded_libraries, page_faults_of_a_tensor
from gpt2.stages import ALLOCATORS
from gpt2.stages import threads as wanted_threads
from gpt2.toggles import Toggles
from gpt2.train import Training


@dataclass(frozen=True)
class Finding:
    """Whether a toggle did what it says, at whatever value it had, and by what that was seen."""

    took_effect: bool
    evidence: str


EXACT_PRODUCT = 1.5e-6
"""A float32 product's relative error is about 3e-7; as three bfloat16 products 4e-6, TF32 4e-4, bfloat16 2e-3."""


def device(seen: Seen) -> Finding:
    parameters = list(seen.training.model.parameters())
    there = sum(parameter.device.type == seen.toggles.device for parameter in parameters)
    kernels = sum(op.on_device for op in seen.ops)
    ran = f"; {kernels:,} kernels ran there" if kernels else ""
    backend = seen.training.device.versions().get("xla_backend")
    where = f"there, by XLA's backend for {backend}" if backend else "there"
    return Finding(there == len(parameters), f"{there} of {len(parameters)} tensors of weights lie {where}{ran}")


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
    return Finding(given == wanted, f"generated kernels do not tell their format; a product in its place gave {given}")


def matmul_precision(seen: Seen) -> Finding:
    wanted, exact = seen.toggles.matmul_precision, seen.product_error < EXACT_PRODUCT
    probe = f"a float32 product is {'exact' if exact else 'rounded'}: relative error {seen.product_error:.0e}"
    found = seen.training.device.matmul_precision()
    if found != wanted:
        return Finding(False, f"torch's setting is {found}; {probe}")
    if exact != (wanted == Toggles().matmul_precision):
        return Finding(False, f"torch's setting is {found}, but {probe}")
    if not exact and seen.formats and not {"float32", "tf32"} & set(seen.formats):
        return Finding(False, f"no float32 product ran: autocast made all of them {seen.formats[0]}")
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
        compiled = seen.toggles.compile != "eager"  # which holds the kernel's products and not its name
        return Finding(compiled, f"{'compiled math kernel: ' if compiled else ''}{materialised}")
    if wanted == "blocks":
        backward = [op.name for op in seen.ops if re.search("attention.*_backward", op.name)]
        blocks = sum(p.batched and p.m == p.n == min(BLOCK, T) for p in seen.products)
        ran = f"ran {ran}, and {_count(blocks, 'product')} of blocks" if fused else materialised
        return Finding(set(fused) == {"flash"} and not backward and blocks > 0, ran)
    if wanted == "sdpa":
        return Finding(True, f"ran {ran}") if fused else Finding(False, f"torch chose its math kernel: {materialised}")
    return Finding(set(fused) == {wanted}, f"ran {ran}" if fused else materialised)


def compile(seen: Seen) -> Finding:
    regions = sum(op.name.startswith("Torch-Compiled Region") for op in seen.ops)
    if isinstance(seen.training.optimizer, CompiledAdamW):
        regions -= 2  # its norm and its update, whatever the model is
    if seen.toggles.compile == "eager":
        return Finding(not regions, f"{regions} compiled regions ran" if regions else "nothing compiled ran")
    if not regions:
        return Finding(False, "nothing compiled ran: torch fell back to eager code")
    graphs = len({op.name for op in seen.ops if "CompiledFxGraph" in op.name})
    counters = sys.modules["torch._dynamo.utils"].counters
    breaks = sum(counters["graph_break"].values())
    ran = f"{_count(graphs, 'compiled graph')} ran, {_count(breaks, 'graph break')}"
    if seen.toggles.cuda_graphs and not seen.graph_launches:
        return Finding(False, f"{ran}, but no CUDA graph was launched")
    if seen.graph_launches:
        ran += f", {_count(seen.graph_launches, 'CUDA graph')} launched"
    if tuned := counters["inductor"]["select_algorithm_autotune"]:
        return Finding(True, f"{ran}, {_count(tuned, 'product')} autotuned")
    cached = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    if seen.toggles.compile.startswith("max-autotune") and not cached and not any(op.on_device for op in seen.ops):
        return Finding(False, f"{ran}, but there was no product to autotune")  # on a GPU other kernels are tuned too
    return Finding(True, ran)


def adamw(seen: Seen) -> Finding:
    fused = len(seen.named("aten::_fused_adamw_"))
    foreach = len(seen.named("aten::_foreach_addcdiv_"))  # clipping uses foreach ops too, but not this one
    single = len(seen.named("aten::addcdiv_"))
    compiled = isinstance(seen.training.optimizer, CompiledAdamW)
    ran = "fused" if fused else "foreach" if foreach else "for_loop" if single else "compiled" if compiled else "none"
    evidence = {
        "compiled": "the whole step is a compiled function, no update was seen apart",
        "fused": f"{_count(fused, 'call')} of _fused_adamw_",
        "foreach": f"{_count(foreach, 'call')} of _foreach_addcdiv_, none fused",
        "for_loop": f"{_count(single, 'call')} of addcdiv_, one for each tensor",
        "none": "no update was seen",
    }
    return Finding(ran == seen.toggles.adamw, evidence[ran])


def sharding(seen: Seen) -> Finding:
    parameters = list(seen.training.model.parameters())
    kept, elements = seen.optimizer_elements, sum(parameter.numel() for parameter in parameters)
    spread = sum(map(is_shard, parameters))
    gathers, scatters = seen.exchanges("gather"), seen.exchanges("reduce_scatter")
    ran = f"this rank holds {kept / elements:.0%} of the optimiser's state"
    if seen.toggles.shards_gradients:
        # One gather for each block and one for the rest; where weights are not kept, again for the backward pass.
        forward = (seen.training.model.config.n_layer + 1) * seen.toggles.grad_accum_steps
        ran += (
            f" and its rows of {spread} of {len(parameters)} tensors of weights; {_count(gathers, 'all-gather')} for "
            f"{forward} in the forward passes, {_count(scatters, 'reduce-scatter')}"
        )
        right = spread == len(parameters) and gathers == forward * (2 if seen.toggles.sharding == "fsdp2" else 1)
        return Finding(right and kept < elements and scatters > 0, ran)
    if seen.toggles.sharding == "zero1":
        broadcasts = seen.exchanges("broadcast")
        return Finding(kept < elements and broadcasts > 0, f"{ran}; {_count(broadcasts, 'broadcast')} of weights")
    return Finding(kept == elements and not spread, f"{ran} and whole weights")


def vocab_multiple(seen: Seen) -> Finding:
    config = seen.training.model.config
    logical, padded = config.vocab_size, seen.training.model.wte.weight.size(0)
    columns = sorted({head.n for head in seen.heads})
    ran = f"; lm_head gave {', '.join(f'{n}' for n in columns)} columns" if columns else ""
    if seen.toggles.vocab_multiple == 1:
        return Finding(padded == logical, f"{padded} rows{ran}")
    if padded == logical:
        return Finding(False, f"{logical} is already a multiple: nothing to pad")
    right = padded % seen.toggles.vocab_multiple == 0 and padded > logical and all(n == padded for n in columns)
    return Finding(right, f"{padded} rows for {logical} tokens{ran}")


def recompute(seen: Seen) -> Finding:
    config = seen.training.model.config
    wanted, layers = seen.toggles.recompute, config.n_layer
    if seen.training.device.lazy:
        return Finding(config.recompute == wanted, f"the model is built for {config.recompute}")
    if seen.rows == config.n_embd and (seen.toggles.autocast != "float32" or seen.toggles.shards_gradients):
        evidence = f"the model is built for {config.recompute}; its activations look like copies of weights"
        return Finding(config.recompute == wanted, evidence)
    # A layer's MLP has two such activations: what GELU takes and what it gives.
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
    return Finding(passes == seen.toggles.grad_accum_steps, f"{_count(passes, 'forward pass', 'es')} in the step")


def world_size(seen: Seen) -> Finding:
    if seen.toggles.processes < seen.toggles.world_size:
        assert seen.training.micro_batch is not None
        devices = seen.training.device.spread(seen.training.micro_batch[0])
        launched = seen.training.device.launches()
        together = launched is not None and 0 < launched.together == launched.programs
        ran = "all programs ran on all of them" if together else "not all programs ran on all of them"
        right = devices == seen.toggles.world_size and together
        return Finding(right, f"the rows of a batch lie on {_count(devices, 'device')}; {ran}")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if together else 1
    kind, name = ("reduce_scatter", "reduce-scatter") if seen.toggles.shards_gradients else ("allreduce", "all-reduce")
    exchanges = seen.exchanges(kind)
    right = ranks == seen.toggles.world_size and (ranks > 1) == (exchanges > 0)
    return Finding(right, f"{_count(ranks, 'rank')}, {_count(exchanges, name)} seen in the step")


def cross_entropy(seen: Seen) -> Finding:
    return _built_for(seen, "cross_entropy")


def gelu(seen: Seen) -> Finding:
    return _built_for(seen, "gelu")


def _built_for(seen: Seen, name: str) -> Finding:
    built = getattr(seen.training.model.config, name)
    return Finding(built == getattr(seen.toggles, name), f"the model is built for {built}")


def tied_gradient(seen: Seen) -> Finding:
    added = len(seen.named("gpt2::add_rows"))
    evidence = f"rows added to the lm_head's gradient {_count(added, 'time')}"
    return Finding(added == (seen.toggles.grad_accum_steps if seen.toggles.tied_gradient == "rows" else 0), evidence)


def products(seen: Seen) -> Finding:
    shared = [op for op in seen.ops if op.name == "gpt2::product"]
    if seen.toggles.products == "whole":
        return Finding(not shared, "each product was handed over whole")
    shapes = ", ".join(f"{number} {name}" for name, number in arrangements().items())
    evidence = f"{_count(len(shared), 'product')}, the fastest way for their shapes: {shapes}"
    return Finding(bool(shared) and set(arrangements()) != {"whole"}, evidence)


def clip(seen: Seen) -> Finding:
    given = getattr(seen.training.optimizer, "grad_scale", None) is not None
    evidence = "AdamW was given the scale of the gradients" if given else "gradients were scaled before AdamW's step"
    return Finding(given == (seen.toggles.clip == "in_step"), evidence)


def weight_casts(seen: Seen) -> Finding:
    copies = getattr(seen.training.optimizer, "copies", {})
    right = sum(torch.equal(weight.to(copy.dtype), copy) for weight, copy in copies.items())
    if seen.toggles.weight_casts == "forward":
        return Finding(not copies, f"{len(copies)} matrices have copies")
    return Finding(right == len(copies) > 0, f"{right} of {len(copies)} matrices lie as {seen.toggles.autocast}, too")


def allocator(seen: Seen) -> Finding:
    mapped = loaded_libraries()
    loaded = [name for name, library in ALLOCATORS.items() if f"lib{library}" in mapped]
    faults, pages = page_faults_of_a_tensor()
    evidence = f"{', '.join(loaded) or 'the C library'}; a tensor of {pages} pages took {faults} page faults"
    wanted = seen.toggles.allocator
    if wanted == "thp":
        return Finding(not loaded and faults < pages // 8, evidence)
    return Finding(loaded == ([wanted] if wanted in ALLOCATORS else []), evidence)


def threads(seen: Seen) -> Finding:
    count = torch.get_num_threads()
    return Finding(count == wanted_threads(seen.toggles), f"torch computes with {_count(count, 'thread')}")


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


PROOFS: dict[str, Callable[[Seen], Finding]] = {
    proof.__name__: proof
    for proof in (
        device,
        autocast,
        matmul_precision,
        attention,
        compile,
        adamw,
        sharding,
        vocab_multiple,
        recompute,
        micro_batch_size,
        grad_accum_steps,
        world_size,
        cross_entropy,
        tied_gradient,
        gelu,
        products,
        clip,
        weight_casts,
        allocator,
        threads,
    )
}


def prove(training: Training, ops: list[Op]) -> dict[str, Finding]:
    """A finding for each toggle, baseline values included. `ops`: those of one step of this very training."""
    seen = Seen(training, ops)
    return {toggle.name: PROOFS[toggle.name](seen) for toggle in fields(Toggles)}
