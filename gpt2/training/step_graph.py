"""One optimiser step as a single CUDA graph, so that the host launches it once instead of kernel by kernel.

At small batches a step's kernels take less time than their launches. torch.compile's own CUDA graphs
(compile: reduce-overhead) hold the forward and the backward pass only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.device.base import Batch

Compute = Callable[[Iterator[Batch]], tuple[Tensor, Tensor]]
"""Takes one optimiser step with micro-batches on the device, and returns its loss and gradient norm."""

EAGER_STEPS = 2
"""Steps that run before the recording: they compile, choose kernels and allocate what stays."""


class StepGraph:
    """Runs a step kernel by kernel at first, then records it once and replays the recording.

    A recording reads and writes the same memory each time. Micro-batches are therefore copied into tensors
    that stay, weights and optimiser state must stay where they are, and whatever changes between steps, such
    as the learning rate, must be a tensor on the device.
    """

    recordings = 0
    """Of all steps in this process so far."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._taken = 0
        self._batches: list[Batch] = []
        self._results: tuple[Tensor, Tensor] | None = None
        self.replays = 0
        """Steps that ran as one replay of the recording."""

    def __call__(self, batches: Sequence[Batch], *, replay: bool = True) -> tuple[Tensor, Tensor]:
        """Take one step and return its loss and gradient norm, which the next step does not overwrite.

        batches: on the device or, pinned, on the host; all steps must have the same shapes. replay: False
        runs this step kernel by kernel, as a profiler needs to see its ops.
        """
        self._copy(batches)
        self._taken += 1
        if not replay or self._taken <= EAGER_STEPS:
            return self._on_its_stream(lambda: self._compute(iter(self._batches)))
        if self._graph is None:
            self._record()
        assert self._graph is not None
        assert self._results is not None
        self._graph.replay()
        self.replays += 1
        loss, norm = self._results
        return loss.clone(), norm.clone()

    def _copy(self, batches: Sequence[Batch]) -> None:
        if not self._batches:
            self._batches = [
                (torch.empty_like(x, device=self._device), torch.empty_like(y, device=self._device))
                for x, y in batches
            ]
        for mine, given in zip(self._batches, batches, strict=True):
            for tensor, source in zip(mine, given, strict=True):
                tensor.copy_(source, non_blocking=True)

    def _on_its_stream(self, run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Run on the stream that is recorded later, because libraries keep workspaces for each stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return results

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # thread_local: meanwhile another thread pins the next batches, which a global capture would forbid.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._results = self._compute(iter(self._batches))
        self._graph = graph
        StepGraph.recordings += 1
