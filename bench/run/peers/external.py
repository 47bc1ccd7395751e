"""Time another trainer by the progress lines that it prints, and write the Outcome to a file.

Run by bench.run.runner in a fresh process per repetition; alone too, where its checkout is at hand:
    python -m bench.external ladders/peers-cpu.yaml "nanoGPT float32" --out m.json
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.host.standstill import uneven
from bench.ladder.ladder import Ladder, LadderError, Rung, load
from bench.ladder.peers import CANNOT_RUN, PEERS, Line, Peer, PeerRung
from bench.process.log_relay import Log
from bench.process.pty_process import Program, Usage
from bench.process.supervisor import CACHE, MARK
from bench.process.worker_side import (
    Progress,
    age,
    compile_cache,
    compile_cache_filled,
    give_way,
    leave_with_runner,
    write,
)
from bench.records.measurement import Measurement, Rank
from bench.records.record import Outcome, Status
from bench.run.peers.checkout import MissingPeer, found, origin
from bench.run.peers.child_env import processors, variables
from bench.run.peers.log_timing import ArrivalError, Arrivals
from gpt2.config.toggles import HOST
from gpt2.config.workload import FLOPS_FORMULA
from gpt2.training.reexec import without_own_path
from gpt2.training.stages import threads

CLAIM_TOLERANCE = 0.05
"""Relative difference of a peer's own step times from ours above which a warning says so."""
LAST_SECONDS = 3.0
"""Before the time limit, at which the runner ends this process: to say what is known by then."""
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|Memory allocation failed|std::bad_alloc|"
    r"RESOURCE_EXHAUSTED|CUBLAS_STATUS_ALLOC_FAILED"
)
"""In the last lines of a program that has failed."""


def main() -> int:
    """Returns 0 when the peer was measured, 1 when it could not be, 2 when the ladder is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.external", description="Measure a ladder's external rung."
    )
    parser.add_argument("ladder", type=Path)
    parser.add_argument("rung", help="its name")
    parser.add_argument("--out", type=Path, required=True, help="file to write the outcome to")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as for bench run")
    arguments = parser.parse_args()
    try:
        ladder = load(arguments.ladder, arguments.set)
        rung = ladder.rung(arguments.rung)
        if rung.external is None:
            raise LadderError(
                f"{ladder.path}: rung {rung.name!r} is no external one; bench.worker measures it"
            )
    except LadderError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.out.unlink(missing_ok=True)  # of an earlier run
    give_way()
    for each in (signal.SIGTERM, signal.SIGINT):  # which a shell's background job would ignore
        signal.signal(each, lambda signum, frame: sys.exit(1))  # in order, with the peer
    outcome = _run(ladder, rung, rung.external, arguments.out)
    write(arguments.out, outcome)
    if outcome.error:
        print(outcome.error, file=sys.stderr)
    return 0 if outcome.status == "ok" else 1


@dataclass
class Watch:
    """One peer while it trains."""

    external: PeerRung
    program: Program
    usage: Usage
    log: Log
    arrivals: Arrivals
    tell: Progress
    origin: str | None
    """The commit of its checkout, or a hash of its script."""
    told: str | None = None
    """Of its version, by its log."""

    @property
    def peer(self) -> Peer:
        return PEERS[self.external.peer]

    @property
    def version(self) -> str | None:
        return ", ".join(filter(None, (self.told, self.origin))) or None

    def follow(self, deadline: float) -> None:
        """Take its lines until the window is complete, it ends, or time is up. Raises ArrivalError."""
        self.tell("first step", 0, None)
        for at, text in self.program.lines(deadline):
            text = self.log.take(text)
            if line := self.peer.read(text, at):
                self._heed(line)
                if self.arrivals.complete:
                    return
            elif (tokens := self.peer.tokens_of(text)) not in (None, self.external.tokens_per_step):
                wanted = f"{self.external.tokens_per_step:,}"
                raise ArrivalError(
                    f"its steps are of {tokens:,} tokens, by its log, and the ladder says {wanted}"
                )
            self.told = self.peer.version_of(text) or self.told
            self.usage.hear(self.peer.memory_of(text))

    def _heed(self, line: Line) -> None:
        """A progress line. What is looked at then, its next step's time pays for: little, and not at each
        line.
        """
        arrivals = self.arrivals
        timed, blocks = arrivals.timing, len(arrivals.block_seconds)
        arrivals.take(line)
        if not arrivals.timing:
            self.tell("warm-up", line.step, None)
        elif not timed:
            self.usage.begin()
            self.tell("window", line.step, None)
        elif len(arrivals.block_seconds) > blocks and arrivals.block_steps:
            self.usage.look()
            tokens = self.external.tokens_per_step * arrivals.block_steps
            self.tell("window", line.step, tokens / arrivals.block_seconds[-1])


def _run(ladder: Ladder, rung: Rung, external: PeerRung, out: Path) -> Outcome:
    peer, limit = PEERS[external.peer], ladder.protocol.timeout_seconds
    try:
        folder, words = found(external, rung.toggles, ladder.path)
    except MissingPeer as error:
        return Outcome(status="unsupported", error=str(error))
    mark = os.environ.get(MARK, f"{out.resolve()} {os.getpid()}")  # the runner's; alone, one of its own
    environ = {**without_own_path(), **variables(rung.toggles, peer, os.environ.get(CACHE)), MARK: mark}
    deadline = time.perf_counter() + max(limit / 2, limit - LAST_SECONDS) - age()
    cache, started = compile_cache(), time.perf_counter()
    with Program(words, folder, environ, processors(rung.toggles, peer)) as program:
        leave_with_runner(program.end)
        usage, log = Usage(program, on_gpu=rung.toggles.device != HOST), Log(folder, external.folder)
        watch = Watch(
            external,
            program,
            usage,
            log,
            Arrivals(ladder.protocol),
            Progress(out),
            origin(peer, folder, words),
        )
        try:
            watch.follow(deadline)
        except ArrivalError as error:
            return Outcome(status="failed", error=f"{peer.title}: {error}", peer_version=watch.version)
        finally:
            log.end()
        arrivals = watch.arrivals
        if not arrivals.enough:
            status, error = _unfinished(peer, program, log, arrivals, limit)
            return Outcome(status=status, error=error, peer_version=watch.version)
        warnings = _warnings(peer, program, arrivals)
        cache = cache if compile_cache_filled() else None
    startup = arrivals.lines[0].at - started
    return Outcome(
        status="ok",
        measurement=_measurement(ladder, external, arrivals, usage, startup, cache),
        resolved={"threads": threads(rung.toggles)},
        warnings=warnings,
        peer_version=watch.version,
    )


def _unfinished(
    peer: Peer, program: Program, log: Log, arrivals: Arrivals, limit: float
) -> tuple[Status, str]:
    """How a peer ended that has not trained for a whole window, or did not end."""
    title, last = peer.title, list(log.last)
    done = f"{len(arrivals.lines)} progress lines and {len(arrivals.block_seconds)} blocks"
    if program.exit_code is None:
        before = ["before that:", *last[:-1]] if len(last) > 1 else []
        tail = "\n".join([f"its last line: {last[-1]}", *before] if last else ["it printed nothing"])
        if not arrivals.lines:
            what = f"{title} printed no progress line as docs/peers.md has them"
            return "timeout", f"{what} within protocol.timeout_seconds {limit:g}; {tail}"
        return "timeout", f"{title} had printed {done} at protocol.timeout_seconds {limit:g}; {tail}"
    end = f"{title} {program.ending}"
    if program.exit_code == CANNOT_RUN:
        return "unsupported", f"{title}: {last[-1]}" if last else end
    if program.killed_for_memory:
        return "out_of_memory", end
    if program.exit_code and (
        said := next((text for text in reversed(last) if OUT_OF_MEMORY.search(text)), None)
    ):
        return "out_of_memory", f"{end}: {said}"
    if program.exit_code:
        return "failed", f"{end}, after {done}{f': {last[-1]}' if last else ''}"
    more = "tell it to take more steps" if arrivals.lines else "is it the command that trains?"
    return "failed", f"{end}, after {done}, too few for a window: {more}"


def _warnings(peer: Peer, program: Program, arrivals: Arrivals) -> list[str]:
    seconds = arrivals.block_seconds
    found = uneven(seconds, f"{peer.title} was stopped, waited, or did something besides training")
    steps, claims = arrivals.block_steps, _claims(peer, arrivals)
    if steps and claims:
        ours = sum(seconds) / len(seconds) / steps
        theirs = sum(claims) / len(claims)
        if abs(ours / theirs - 1) > CLAIM_TOLERANCE:
            found.append(
                f"{peer.title}'s own log says {1e3 * theirs:.4g} ms per step, and by the arrival of its "
                f"lines a step took {1e3 * ours:.4g} ms: what it does between steps counts here"
            )
    if program.exit_code:
        found.append(f"after the window: {peer.title} {program.ending}")
    return found


def _claims(peer: Peer, arrivals: Arrivals) -> list[float] | None:
    """Steps' durations by the peer's own account; None where that tells nothing of the window."""
    if peer.times_last_step_only and arrivals.step_seconds is None:
        return None
    return arrivals.claimed_seconds


def _measurement(
    ladder: Ladder,
    external: PeerRung,
    arrivals: Arrivals,
    usage: Usage,
    startup_seconds: float,
    cache: Literal["cold", "warm"] | None,
) -> Measurement:
    seconds, peak = arrivals.block_seconds, usage.peak
    norms = [line.grad_norm for line in arrivals.lines if line.grad_norm is not None]
    workload = ladder.workload
    return Measurement(
        tokens_per_step=external.tokens_per_step,
        block_steps=arrivals.block_steps,
        block_seconds=seconds,
        step_seconds=arrivals.step_seconds,
        claimed_step_seconds=_claims(PEERS[external.peer], arrivals),
        startup_seconds=startup_seconds,
        first_step_seconds=None,
        compile_cache=cache,
        warmup_steps=arrivals.warmup_steps,
        losses=[line.loss for line in arrivals.lines],
        grad_norms=norms,
        peak_memory_bytes=peak,
        peak_memory_method=usage.method,
        gpu_memory_bytes=usage.peak_memory_bytes if usage.on_gpu else None,
        reserved_memory_bytes=None,
        run_peak_memory_bytes=usage.told_bytes or usage.run_peak_memory_bytes,
        alloc_retries=None,
        recompiles=None,
        other_cores=usage.other_cores,
        data_wait_seconds=None,
        ranks=[Rank(block_seconds=seconds, peak_memory_bytes=peak)],
        parameters=workload.config.parameters,
        flops_per_token=workload.flops_per_token,
        flops_formula=FLOPS_FORMULA,
        peak_flops_bf16=None,
        peak_flops_source="that of the ladder's own rungs",
    )
