"""Train one rung and print a line for each step, for bench.run.turns.paused_process.

python -m bench.run.turns.step_printer ladders/smoke.yaml baseline
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.ladder.ladder import LadderError
from bench.ladder.peers import CANNOT_RUN
from bench.run.command import add_ladder_arguments, loaded
from gpt2.config.toggles import UnsupportedToggle
from gpt2.data.batches import Batches, DataError, open_corpus
from gpt2.training.reexec import enter_environment


def main() -> int:
    """Train until killed; return 69 if the rung cannot run here, 2 if the ladder is wrong, 1 without data."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run.turns.step_printer", description="Train one rung of a ladder."
    )
    add_ladder_arguments(parser)
    parser.add_argument("--data", type=Path, help="where the ladder's corpus lies")
    arguments = parser.parse_args()
    try:
        ladder = loaded(arguments)
        rung = ladder.rung(arguments.rung)
    except LadderError as error:
        print(error)
        return 2
    enter_environment(rung.toggles, "bench.run.turns.step_printer")

    from bench.host.feasibility import check_time
    from gpt2.device import find
    from gpt2.training.train import micro_batches, train

    workload, toggles = ladder.workload, rung.toggles
    try:
        device = find(toggles)
        check_time(ladder, toggles)
        corpus = open_corpus(
            workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=arguments.data
        )
        tokens = toggles.tokens_per_step(workload.seq_len)
        batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
        steps = train(workload, toggles, device, device.feed(micro_batches(batches, toggles)))
    except UnsupportedToggle as error:
        print(error)
        return CANNOT_RUN
    except DataError as error:
        print(error)
        return 1
    for number, step in enumerate(steps):
        device.synchronize()
        print(f"step {number}: loss {step.loss.item():.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
