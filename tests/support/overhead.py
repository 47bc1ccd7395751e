"""What the harness costs: its windows against a bare training loop, in turn, on one model and optimiser.

    python tests/support/overhead.py --model gpt2 --rounds 20 --out overhead.json

writes the tokens per second of both by round, and their paired ratio with its interval.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.ladder.ladder import Protocol
from bench.stats import paired_ratio
from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS, Workload
from gpt2.training.stages import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = PRESETS[arguments.model]
    workload = Workload(model=arguments.model, seq_len=config.n_ctx)
    toggles = Toggles(autocast="bfloat16", attention="sdpa", adamw="fused", micro_batch_size=1)
    os.environ.update(environment(toggles))

    import torch

    from bench.host.environment import describe
    from bench.process.worker_side import ProgressFile
    from bench.run.measure import Waiting, measure
    from gpt2.data.batches import Batches, open_corpus
    from gpt2.device import Cpu
    from gpt2.training.train import micro_batches, train

    device = Cpu()
    corpus = open_corpus("synthetic", vocab_size=config.vocab_size, seed=workload.seed)
    tokens = toggles.tokens_per_step(workload.seq_len)
    batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
    data = Waiting(micro_batches(batches, toggles))
    training = train(workload, toggles, device, data)
    protocol = Protocol(
        min_warmup_steps=1, block_seconds=arguments.seconds / 5, blocks=5, max_window_seconds=3600
    )
    progress = ProgressFile(arguments.out)

    def harness() -> float:
        start = time.perf_counter()
        window = measure(training, device, protocol, data, progress=progress)
        walls.append(tokens * len(window.history) / (time.perf_counter() - start))
        assert window.block_steps is not None
        return tokens * window.block_steps * len(window.block_seconds) / sum(window.block_seconds)

    def bare() -> float:
        """What anyone would write, on the harness's own objects."""
        model, optimizer = training.model, training.optimizer
        parameters = list(model.parameters())
        source: Iterator = micro_batches(batches, toggles)
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < arguments.seconds or steps < 5:
            x, y = next(source)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, workload.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
        return tokens * steps / (time.perf_counter() - start)

    walls: list[float] = []
    """Tokens per second of each measure() as a whole, with what its TPS leaves out between blocks."""
    found: dict[str, dict[int, float]] = {"harness": {}, "bare loop": {}}
    arms: list[tuple[str, Callable[[], float]]] = [("harness", harness), ("bare loop", bare)]
    bare()
    harness()  # both warm now
    walls.clear()
    for number in range(1, arguments.rounds + 1):
        for name, arm in arms if number % 2 else reversed(arms):  # neither always follows the other
            found[name][number] = arm()
    found["harness, between its blocks too"] = dict(enumerate(walls, start=1))
    ratio, whole = (
        paired_ratio(found[arm], found["bare loop"]) for arm in ("harness", "harness, between its blocks too")
    )
    assert ratio is not None
    assert whole is not None
    result = {
        "command": f"python tests/support/overhead.py --model {arguments.model} --rounds {arguments.rounds} "
        f"--seconds {arguments.seconds:g} --out {arguments.out.name}",
        "harness_over_bare_loop": asdict(ratio),
        "harness_between_its_blocks_too_over_bare_loop": asdict(whole),
        "tokens_per_second": found,
        "environment": describe(device).model_dump(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
