"""NVIDIA GPUs, and AMD GPUs, which torch also calls cuda."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch.profiler import ProfilerActivity

from gpt2.config.toggles import BASELINE, Toggles
from gpt2.device.base import Batch, PeakMemory
from gpt2.device.gpu import Gpu
from gpt2.hardware.host import missing_package
from gpt2.prefetch import Prefetched, how_many


class Cuda(Gpu):
    """One NVIDIA or AMD GPU."""

    kind = "cuda"
    api = torch.cuda
    noun = "CUDA device"
    absent = "torch finds no CUDA device here; choose cpu, or install a CUDA build of torch"
    ddp_backend = "nccl"
    profiler_activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    # Outside torch's allocator, the driver, cuBLAS and NCCL report it in words of their own.
    out_of_memory = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        super().__init__(toggles, local_rank)
        self._cuda_graphs = toggles.cuda_graphs or toggles.launch == "graph"

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        value = getattr(toggles, toggle)
        capability = torch.cuda.get_device_capability(self.torch_device)
        ampere, hopper = capability >= (8, 0), capability >= (9, 0)
        if (toggle, value) == ("autocast", "bfloat16") and not ampere:
            return f"{self.chip()} has no bfloat16 units (Ampere and later have); choose float16"
        if (toggle, value) == ("matmul_precision", "high") and not ampere:
            return f"{self.chip()} has no TF32 units (Ampere and later have); choose highest"
        if toggle == "attention" and value in ("flash", "cudnn") and not ampere:
            return f"{self.chip()} is older than this kernel (Ampere and later); choose efficient"
        if (toggle, value) == ("reductions", "apart"):
            from torch._inductor import config

            if not hasattr(config.triton, "mix_order_reduction"):
                return f"torch {torch.__version__} mixes none; choose mixed, which is the same there"
        if toggle == "float8" and value != "none" and capability < (8, 9):
            return f"{self.chip()} has no float8 units (Ada and Hopper have); choose none"
        if toggle in ("float8", "int8") and value != "none" and not find_spec("torchao"):
            return "torchao is not here; pip install torchao, or choose none"
        if toggle in ("cross_entropy", "bias_gradient") and value == "triton" and not find_spec("triton"):
            other = "closed_form" if toggle == "cross_entropy" else "torch"
            install = "pip install triton (torch's builds for GPUs bring it)"
            return f"Triton is not here; {install}, or choose {other}"
        if toggle == "cross_entropy" and value in ("quack", "cut") and not ampere:
            return f"{self.chip()} is older than this kernel (Ampere and later); choose triton"
        if (toggle, value) == ("layer_norm", "quack") and not ampere:
            return f"{self.chip()} is older than this kernel (Ampere and later); choose torch"
        if (toggle, value) == ("attention", "flash4") and not hopper:
            return f"{self.chip()} is older than this kernel (Hopper and later); choose cudnn or flash"
        if reason := missing_package(toggle, value):
            return reason
        if (toggle, value) == ("attention", "flash3"):
            if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
                return f"torch {torch.__version__} does not know FlashAttention-3; take 2.11, or choose cudnn"
            if capability[0] != 9:
                return f"{self.chip()} is no Hopper GPU; choose cudnn or flash"
            if not find_spec("flash_attn_interface"):
                source = "build hopper/ of github.com/Dao-AILab/flash-attention"
                return f"its package is not here; {source}, or choose cudnn"
        return super().refuses(toggle, toggles)

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        def pinned(batch: Batch) -> Batch:
            torch.cuda.set_device(self.torch_device)  # per thread; else the first device gets a context
            return _pinned(batch[0]), _pinned(batch[1])

        return Prefetched(
            batches, pinned, ahead=lambda batch: how_many(sum(tokens.nbytes for tokens in batch))
        )

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        # From pinned memory the copy is queued like any other work; from pageable memory the driver may wait.
        # Batches that feed() has pinned are not copied again.
        return _pinned(tokens).to(self.torch_device, non_blocking=True)

    def compilations(self) -> int:
        # Recording a CUDA graph takes time as compiling does; Inductor records anew where an input's address
        # changes. Where its module is not imported, it recorded nothing.
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        manager = trees.get_manager(self.torch_device.index, create_if_none_exists=False) if trees else None
        steps = sys.modules.get("gpt2.training.step_graph")
        recordings = manager.debug_fail_counter if manager else 0
        recordings += steps.StepGraph.recordings if steps else 0
        return super().compilations() + recordings

    def reset_peak_memory(self) -> None:
        self._retries = self._alloc_retries()
        super().reset_peak_memory()

    def peak_memory(self) -> PeakMemory:
        peak = replace(super().peak_memory(), alloc_retries=self._alloc_retries() - self._retries)
        if self._cuda_graphs:  # whose memory pool does not count as allocated (pytorch issue 121932)
            return replace(peak, bytes=peak.reserved_bytes, method="reserved, window (torch.cuda)")
        return peak

    def segments(self) -> tuple[int, int]:
        found = torch.cuda.memory_snapshot()
        return sum(segment["is_expandable"] for segment in found), len(found)

    def _alloc_retries(self) -> int:
        return torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0)

    def energy_joules(self) -> float | None:
        import pynvml

        # NVML numbers all devices of the machine, torch those in CUDA_VISIBLE_DEVICES; both know the UUID.
        uuid = f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"
        with contextlib.suppress(pynvml.NVMLError):  # no driver library, or older than Volta
            pynvml.nvmlInit()
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3
        return None

    def versions(self) -> dict[str, str]:
        import pynvml  # the NVIDIA driver's own library; needed on NVIDIA machines only

        if torch.version.hip:  # an AMD GPU, which torch calls cuda
            return {"rocm": str(torch.version.hip)}
        found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        if torch.distributed.is_nccl_available():
            from torch.cuda import nccl

            found["nccl"] = ".".join(map(str, nccl.version()))
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        return found


def _pinned(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous and in pinned memory.

    If its rows had gaps, the copy to the device would go through pageable memory.
    """
    return tokens.contiguous().pin_memory()
