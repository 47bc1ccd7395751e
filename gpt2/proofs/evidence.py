"""Evidence for the proofs of effect: the ops of one step and facts derived from them; and their findings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from gpt2.config.toggles import Toggles
from gpt2.proofs.breakdown import STEP
from gpt2.proofs.profiler import Matmul, Op, kernel_formats, matmuls
from gpt2.training.distributed import is_shard, release
from gpt2.training.train import Training


@dataclass(frozen=True)
class Finding:
    """The result of a proof: whether a toggle's value, baseline or not, is in effect, and the evidence."""

    took_effect: bool
    evidence: str


@dataclass(frozen=True)
class StepEvidence:
    """A training, the ops of one of its steps, and facts derived from them."""

    training: Training
    ops: list[Op]

    @property
    def toggles(self) -> Toggles:
        return self.training.toggles

    @property
    def rows(self) -> int:
        """Tokens per forward pass of this process."""
        return self.toggles.sequences * self.training.workload.seq_len

    @cached_property
    def matmuls(self) -> list[Matmul]:
        """All matmuls that the host launched."""
        return matmuls(self.ops)

    @cached_property
    def linear(self) -> list[Matmul]:
        """Matmuls of linear layers, forward and backward; those of attention are batched."""
        return [product for product in self.matmuls if not product.batched]

    @cached_property
    def formats(self) -> list[str]:
        """Number formats of the linear layers' matmuls or, where the host saw none, of the matmul kernels."""
        return [product.number_format for product in self.linear] or kernel_formats(self.ops)

    @cached_property
    def heads(self) -> list[Matmul]:
        """The lm_head's matmul of each forward pass, told by its many columns and short inner dimension."""
        config = self.training.model.config
        return [p for p in self.linear if p.n >= config.vocab_size and p.k == config.n_embd]

    @cached_property
    def forward_rows(self) -> list[int]:
        """Tokens of each forward pass in the step."""
        if self.toggles.cross_entropy == "linear":  # the lm_head's matmul runs in chunks
            config = self.training.model.config
            qkv = config.n_embd, 3 * config.n_embd  # the first matmul of each layer
            first = [p.m for p in self.linear if (p.k, p.n) == qkv]
            return first[:: config.n_layer * (2 if config.recompute == "block" else 1)]
        if self.toggles.cross_entropy == "cut":  # the kernel that has the lm_head's matmul in it
            return [op.shapes[0][0] for op in self.named("LinearCrossEntropyFunction")]
        if self.heads:
            return [head.m for head in self.heads]
        # A compiled graph's inputs, with tokens and targets, are visible even where its kernels are not.
        whole = [
            torch.Size(shape).numel()
            for op in self.named("CompiledFunction")
            for dtype, shape in zip(op.dtypes, op.shapes, strict=False)
            if dtype == "long int" and len(shape) == 2
        ]
        return whole[::2]

    @cached_property
    def graph_launches(self) -> int:
        """Number of CUDA graph replays."""
        return sum(op.name in ("cudaGraphLaunch", "hipGraphLaunch") for op in self.ops)

    def named(self, name: str) -> list[Op]:
        """Return the ops of this name."""
        return [op for op in self.ops if op.name == name]

    def exchanges(self, kind: str) -> int:
        """Return this rank's number of collectives of a kind: gather, reduce_scatter, broadcast, ..."""
        return sum(op.name.startswith("c10d::") and kind in op.name for op in self.ops)

    @property
    def optimizer_elements(self) -> int:
        """Number of weights whose AdamW averages this rank keeps."""
        optimizer = self.training.optimizer
        states = getattr(optimizer, "optim", optimizer).state.values()  # a sharded optimiser's inner one
        averages = (state["exp_avg"] for state in states)
        return sum((each.to_local() if is_shard(each) else each).numel() for each in averages)

    @cached_property
    def compiled_regions(self) -> tuple[int, int]:
        """Number of compiled functions that ran before the optimiser's step, and within it."""
        names = [op.name for op in self.ops]
        step = next((place for place, name in enumerate(names) if name.startswith(STEP)), len(names))
        before, within = (
            sum(name.startswith("Torch-Compiled Region") for name in part)
            for part in (names[:step], names[step:])
        )
        return before, within

    @cached_property
    def wide_kept(self) -> int:
        """Number of activations of the MLPs' inner width that one more forward pass keeps."""
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
        del loss  # frees the kept activations, whose addresses had to stay distinct until now
        return len(kept - weights)

    def _sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.training.micro_batch is not None
        x, y = self.training.micro_batch
        return x[:1], y[:1]

    @cached_property
    def residual_dtype(self) -> torch.dtype:
        """Dtype of the last layer's input, from one more eager forward pass of one sequence."""
        x, y = self._sequence()
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
        """Names of the autograd functions behind the eager loss of one sequence."""
        x, y = self._sequence()
        model = self.training.model
        with self.training.autocast(), torch.compiler.set_stance("force_eager"):
            loss = model(x, y)  # kept: a function written in Python tells nothing once its result is gone
        found, left = set(), [loss.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in found:
                found.add(node)
                left += [before for before, _ in node.next_functions]
        names = frozenset(node.name() for node in found)
        del loss
        release(model)
        return names

    @cached_property
    def product_error(self) -> float:
        """Relative error of a float32 matmul on the device with torch's current settings."""
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
        exact = a.double() @ b.double()
        device = self.training.device.torch_device
        found = (a.to(device) @ b.to(device)).cpu().double()
        return ((found - exact).norm() / exact.norm()).item()


def counted(number: int, what: str, plural: str = "s") -> str:
    """Return a number with its noun in the right form: 1 kernel, 2 kernels."""
    return f"{number:,} {what}{'' if number == 1 else plural}"


def built_for(step: StepEvidence, name: str) -> Finding:
    """Return whether the model was built with the toggle's value, for toggles that leave no other trace."""
    built = getattr(step.training.model.config, name)
    return Finding(built == getattr(step.toggles, name), f"the model is built for {built}")
