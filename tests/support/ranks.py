"""One rank of a group that stays up: trains what each line of standard input asks for, and answers.

Tests start it once per rank (see Ranks) and ask many questions: starting Python and torch costs more than
they do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.hardware.host import free_port
from gpt2.training.stages import environment

HERE = Path(__file__).parent
PATIENCE = 120.0
"""Seconds until ranks that wait for each other count as stuck."""


class Ranks:
    """Several ranks, each in a process of its own, that answer one question after the other together."""

    def __init__(self, world_size: int) -> None:
        shared = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_PORT": free_port(),
            "LOCAL_RANK": 0,
        }
        env = {
            **os.environ,
            **environment(Toggles(world_size=world_size)),
            **{name: str(value) for name, value in shared.items()},
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
        }
        self.world_size = world_size
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(world_size)],
                env={**env, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def ask(
        self, toggles: Toggles, workload: Workload, *, steps: int = 3, **more: Any
    ) -> list[dict[str, Any]]:
        """What each rank answers, rank 0 first; see answer()."""
        question = json.dumps(
            {"toggles": asdict(toggles), "workload": asdict(workload), "steps": steps, **more}
        )
        for process in self.processes:
            assert process.stdin is not None
            print(question, file=process.stdin, flush=True)
        limit = threading.Timer(PATIENCE, self.end)
        limit.start()
        # Some versions of gloo print words of their own.
        lines = [next((line for line in p.stdout if line[0] == "{"), "") for p in self.processes if p.stdout]
        limit.cancel()
        assert all(lines), "a rank ended, or all were stuck; what they wrote to standard error says why"
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def buckets_of(size: int | None) -> Iterator[None]:
    """Have replicas exchange gradients in pieces of so many bytes, as larger models' are by default."""
    import torch

    distributed: Any = torch.distributed
    replica, first = torch.nn.parallel.DistributedDataParallel, distributed._DEFAULT_FIRST_BUCKET_BYTES
    if size:
        smaller: Any = functools.partial(replica, bucket_cap_mb=size / 2**20)
        torch.nn.parallel.DistributedDataParallel = smaller
        distributed._DEFAULT_FIRST_BUCKET_BYTES = size
    yield
    torch.nn.parallel.DistributedDataParallel = replica
    distributed._DEFAULT_FIRST_BUCKET_BYTES = first


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Train some steps; what came of it, as JSON can hold it."""
    import torch
    from trainings import start

    from gpt2.proofs.evidence import StepEvidence
    from gpt2.proofs.gradients import gradient_difference
    from gpt2.proofs.profiler import profile
    from gpt2.proofs.prove import prove
    from gpt2.training.distributed import full_tensor, ranks_agree

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    toggles, workload = Toggles(**question["toggles"]), Workload(**question["workload"])
    training = start(toggles, workload, rank=int(os.environ["RANK"]) if toggles.world_size > 1 else 0)
    if os.environ["RANK"] == str(question.get("faulty_rank")):
        with torch.no_grad():
            training.model.get_parameter("h.0.mlp.c_fc.bias")[0] += 1e-6
    found = [[s.loss.item(), s.grad_norm.item()] for s in itertools.islice(training, question["steps"])]
    result: dict[str, Any] = {
        "losses": [loss for loss, _ in found],
        "grad_norms": [norm for _, norm in found],
        "ranks_agree": ranks_agree(training.model, toggles.processes),
        "optimizer_bytes": 2 * 4 * StepEvidence(training, []).optimizer_elements,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "graphs": torch._dynamo.utils.counters["aot_autograd"]["total"],
        "gradient_buffers": len(
            {p.grad.untyped_storage().data_ptr() for p in training.model.parameters() if p.grad is not None}
        ),
    }
    if question.get("weights"):
        result["weights"] = [full_tensor(p.detach()).flatten().tolist() for p in training.model.parameters()]
    if question.get("proofs"):
        findings = prove(training, profile(lambda: next(training), training.device))
        result["proofs"] = {
            name: [finding.took_effect, finding.evidence] for name, finding in findings.items()
        }
    if question.get("gradients"):
        assert training.micro_batch is not None
        result["gradient_difference"] = gradient_difference(training, *training.micro_batch)
    result["after"] = next(training).loss.item()
    return result


def main() -> None:
    from gpt2.device import Cpu
    from gpt2.training.distributed import process_group

    with process_group(Toggles(world_size=int(sys.argv[1])), Cpu()):
        for line in sys.stdin:
            question = json.loads(line)
            with buckets_of(question.get("bucket_bytes")):
                print(json.dumps(answer(question)), flush=True)
        os._exit(0)  # as bench.worker leaves


if __name__ == "__main__":
    main()
