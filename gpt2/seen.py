"""What a proof of effect looks at: a training, and the ops of one of its steps."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gpt2.breakdown import STEP
from gpt2.ops import Op, Product, kernel_formats, products
from gpt2.parallel import is_shard, release
from gpt2.toggles import Toggles
from gpt2.train import Training


def loaded_libraries() -> str:
    """Paths of all files that this process has mapped; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text()
    return ""


def page_faults_of_a_tensor(size: int = 2**27) -> tuple[int, int]:
    """Page faults that it costs to make and fill a tensor of `size` bytes, and how many pages it has."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(size, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, size // resource.getpagesize()


def cores_of_pinned_threads() -> set[int]:
    """Logical processors that one of this process's threads may not leave; empty where the system does not tell."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it may have ended
            allowed = os.sched_getaffinity(int(thread.name))
            found |= allowed if len(allowed) == 1 else set()
    return found


@dataclass(frozen=True)
class Seen:
    """A training and the ops of one of its steps, and what follows from them."""

    training: Training
    ops: list[Op]

    @property
    def toggles(self) -> Toggles:
        return self.training.toggles

    @property
    def rows(self) -> int:
        """Tokens of one forward pass in this process."""
        return self.toggles.sequences * self.training.workload.seq_len

    @cached_property
    def products(self) -> list[Product]:
        return products(self.ops)

    @cached_property
    def linear(self) -> list[Product]:
        """Products of a linear layer, forward and backward; those within attention are batched."""
        return [product for product in self.products if not product.batched]

    @cached_property
    def formats(self) -> list[str]:
        """Number formats of the linear products, or where the host saw none, of the matrix kernels."""
        return [product.number_format for product in self.linear] or kernel_formats(self.ops)

    @cached_property
    def heads(self) -> list[Product]:
        """The lm_head's product of each forward pass: no other has so many columns and so short a sum."""
        config = self.training.model.config
        return [p for p in self.linear if p.n >= config.vocab_size and p.k == config.n_embd]

    @cached_property
    def forward_rows(self) -> list[int]:
        """Tokens of each forward pass."""
        if self.toggles.cross_entropy == "linear":  # which takes the lm_head's product in chunks
            config = self.training.model.config
            first = [p.m for p in self.linear if (p.k, p.n) == (config.n_embd, 3 * config.n_embd)]  # of each layer
            return first[:: config.n_layer * (2 if config.recompute == "block" else 1)]
        if self.heads:
            return [head.m for head in self.heads]
        # A compiled graph's inputs are seen even where its kernels are not; tokens and targets are two of them.
        whole = [
            torch.Size(shape).numel()
            for op in self.named("CompiledFunction")
            for dtype, shape in zip(op.dtypes, op.shapes, strict=False)
            if dtype == "long int" and len(shape) == 2
        ]
        return whole[::2]

    @cached_property
    def graph_launches(self) -> int:
        """CUDA graphs replayed."""
        return sum(op.name in ("cudaGraphLaunch", "hipGraphLaunch") for op in self.ops)

    def named(self, name: str) -> list[Op]:
        return [op for op in self.ops if op.name == name]

    def exchanges(self, kind: str) -> int:
        """Times that this rank told all others something, or was told: gather, reduce_scatter, broadcast, ..."""
        return sum(op.name.startswith("c10d::") and kind in op.name for op in self.ops)

    @property
    def optimizer_elements(self) -> int:
        """Weights whose averages AdamW keeps on this rank."""
        optimizer = self.training.optimizer
        states = getattr(optimizer, "optim", optimizer).state.values()  # a sharded optimiser holds this rank's own
        averages = (state["exp_avg"] for state in states)
        return sum((each.to_local() if is_shard(each) else each).numel() for each in averages)

    @cached_property
    def compiled_regions(self) -> tuple[int, int]:
        """Compiled functions that ran before the optimiser's step, and within it."""
        names = [op.name for op in self.ops]
        step = next((place for place, name in enumerate(names) if name.startswith(STEP)), len(names))
        before, within = (
            sum(name.startswith("Torch-Compiled Region") for name in part) for part in (names[:step], names[step:])
        )
        return before, within

    @cached_property
    def wide_kept(self) -> int:
        """Activations of the MLPs' width that one more forward pass keeps for its backward pass."""
        assert self.training.micro_batch is not None
        wide, kept = 4 * self.training.model.config.n_embd, set()
        weights = {parameter.data_ptr() for parameter in self.training.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if wide in tensor.shape and tensor.numel() == self.rows * wide:
                kept.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), self.training.autocast():
            loss = self.training.model(*self.training.micro_batch)
        release(self.training.model)
        del loss  # and with it what was kept, which until now had addresses of its own
        return len(kept - weights)

    @cached_property
    def residual_dtype(self) -> torch.dtype:
        """Of what the last layer is given in one more forward pass, of one sequence: eager code may not fit more."""
        assert self.training.micro_batch is not None
        x, y = (tokens[:1] for tokens in self.training.micro_batch)
        found: list[torch.dtype] = []
        model = self.training.model
        hook = model.h[-1].register_forward_pre_hook(lambda block, inputs: found.append(inputs[0].dtype))
        try:
            with torch.no_grad(), self.training.autocast(), torch.compiler.set_stance("force_eager"):
                model(x, y)
        finally:
            hook.remove()
            release(model)
        return found[-1]

    @cached_property
    def functions(self) -> frozenset[str]:
        """What the loss of one sequence is computed by in eager code: autograd's names of the functions behind it."""
        assert self.training.micro_batch is not None
        x, y = (tokens[:1] for tokens in self.training.micro_batch)
        model = self.training.model
        with self.training.autocast(), torch.compiler.set_stance("force_eager"):
            last = model(x, y).grad_fn
        found, left = set(), [last]
        while left:
            if (node := left.pop()) is not None and node not in found:
                found.add(node)
                left += [before for before, _ in node.next_functions]
        release(model)
        return frozenset(node.name() for node in found)

    @cached_property
    def product_error(self) -> float:
        """Relative error of one float32 product on the device, as torch is set now."""
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
        exact = a.double() @ b.double()
        device = self.training.device.torch_device
        found = (a.to(device) @ b.to(device)).cpu().double()
        return ((found - exact).norm() / exact.norm()).item()
