"""Time another trainer by the progress lines that it prints, and write an Outcome.

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
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.host.standstill import uneven
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.ladder.peers import CANNOT_RUN, PEERS, LogLine, Peer, PeerRung
from bench.process.pty_process import Program, Usage
from bench.process.supervisor import CACHE, MARK
from bench.process.worker_side import (
    ProgressFile,
    age,
    compile_cache,
    exit_code,
    give_way,
    leave_with_runner,
    mark_compile_cache,
    write,
)
from bench.records.measurement import CacheState, Measurement, Rank
from bench.records.record import Outcome, Status
from bench.run.command import add_ladder_arguments, add_outcome_argument, loaded
from bench.run.peers.checkout import MissingPeer, locate_and_check, origin, peer_variables, processors
from bench.run.peers.trainer_log import LogError, LogRelay, LogTiming, TrainerLog
from gpt2.config.toggles import HOST
from gpt2.config.workload import FLOPS_FORMULA
from gpt2.terminal import use_streams
from gpt2.training.reexec import without_own_path
from gpt2.training.stages import threads

CLAIM_TOLERANCE = 0.05
"""Relative difference between a peer's own step times and ours above which a warning says so."""
LAST_SECONDS = 3.0
"""Seconds before the time limit, at which the runner ends this process, to report what is known."""
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|Memory allocation failed|"
    r"std::bad_alloc|RESOURCE_EXHAUSTED|CUBLAS_STATUS_ALLOC_FAILED"
)
"""Matches a line of a failed program that ran out of memory."""


def main() -> int:
    """Return 0 if the peer was measured, 1 if it could not be, 2 if the ladder is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.external", description="Measure a ladder's external rung."
    )
    add_ladder_arguments(parser)
    add_outcome_argument(parser)
    arguments = parser.parse_args()
    use_streams()  # the peer's log may hold what the encoding of this locale lacks
    try:
        ladder = loaded(arguments)
        rung = ladder.rung(arguments.rung)
        if rung.external is None:
            raise LadderError(f"{ladder.path}: rung {rung.name!r} is not external; bench.worker measures it")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.out.unlink(missing_ok=True)  # of an earlier run
    give_way()
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job would ignore SIGINT
        signal.signal(number, lambda signum, frame: sys.exit(1))  # ends the peer, too
    outcome = _run(ladder, rung, rung.external, arguments.out)
    write(arguments.out, outcome)
    return exit_code(outcome)


def _run(ladder: Ladder, rung: Rung, external: PeerRung, out: Path) -> Outcome:
    peer, limit = PEERS[external.peer], ladder.protocol.timeout_seconds
    try:
        folder, words = locate_and_check(external, rung.toggles, ladder.path)
    except MissingPeer as error:
        return Outcome(status="unsupported", error=str(error))
    mark = os.environ.get(MARK, f"{out.resolve()} {os.getpid()}")  # its own if no runner gave one
    environ = {**without_own_path(), **peer_variables(rung.toggles, peer, os.environ.get(CACHE)), MARK: mark}
    deadline = time.perf_counter() + max(limit / 2, limit - LAST_SECONDS) - age()
    cache, started = compile_cache(), time.perf_counter()
    with Program(words, folder, environ, processors(rung.toggles, peer)) as program:
        leave_with_runner(program.end)
        usage, relay = Usage(program, on_gpu=rung.toggles.device != HOST), LogRelay(folder, external.folder)
        log = TrainerLog(program, peer, external.tokens_per_step, origin(peer, folder, words), relay)
        timing = LogTiming(ladder.protocol)
        try:
            _follow(log.lines(deadline), timing, usage, ProgressFile(out), external.tokens_per_step)
        except LogError as error:
            return Outcome(status="failed", error=f"{peer.title}: {error}", peer_version=log.version)
        finally:
            relay.end()
        if not timing.enough:
            status, error = _unfinished(peer, program, list(relay.last), timing, limit)
            return Outcome(status=status, error=error, peer_version=log.version)
        usage.note_allocated(log.memory_bytes)
        warnings = _warnings(peer, program, timing)
        cache = cache if mark_compile_cache() else None
    startup = timing.lines[0].at - started
    return Outcome(
        status="ok",
        measurement=_measurement(ladder, external, timing, usage, startup, cache),
        resolved={"threads": threads(rung.toggles)},
        warnings=warnings,
        peer_version=log.version,
    )


def _follow(
    lines: Iterable[LogLine], timing: LogTiming, usage: Usage, tell: ProgressFile, tokens_per_step: int
) -> None:
    """Take progress lines until the window is complete or they end. Raises LogError.

    Work done here delays the peer's next step: usage is sampled at the ends of blocks only.
    """
    tell("first step", 0, None)
    for line in lines:
        in_window, blocks = timing.in_window, len(timing.block_seconds)
        timing.take(line)
        if not timing.in_window:
            tell("warm-up", line.step, None)
        elif not in_window:
            usage.begin()
            tell("window", line.step, None)
        elif len(timing.block_seconds) > blocks and timing.block_steps:
            usage.sample()
            tell("window", line.step, tokens_per_step * timing.block_steps / timing.block_seconds[-1])
        if timing.complete:
            return


def _unfinished(
    peer: Peer, program: Program, last: Sequence[str], timing: LogTiming, limit: float
) -> tuple[Status, str]:
    """Return status and error of a peer that has not trained for a whole window.

    last: the end of its log. limit: in seconds.
    """
    title = peer.title
    done = f"{len(timing.lines)} progress lines and {len(timing.block_seconds)} blocks"
    if program.exit_code is None:
        before = ["before that:", *last[:-1]] if len(last) > 1 else []
        tail = "\n".join([f"its last line: {last[-1]}", *before] if last else ["it printed nothing"])
        if not timing.lines:
            what = f"{title} printed no progress line in the format of docs/peers.md"
            return "timeout", f"{what} within protocol.timeout_seconds {limit:g}; {tail}"
        return "timeout", f"{title} had printed {done} at protocol.timeout_seconds {limit:g}; {tail}"
    end = f"{title} {program.ending}"
    if program.exit_code == CANNOT_RUN:
        return "unsupported", f"{title}: {last[-1]}" if last else end
    if program.killed_for_memory:
        return "out_of_memory", end
    reason = next((text for text in reversed(last) if OUT_OF_MEMORY.search(text)), None)
    if program.exit_code and reason:
        return "out_of_memory", f"{end}: {reason}"
    if program.exit_code:
        return "failed", f"{end}, after {done}{f': {last[-1]}' if last else ''}"
    more = "tell it to take more steps" if timing.lines else "is it the command that trains?"
    return "failed", f"{end}, after {done}, too few for a window: {more}"


def _warnings(peer: Peer, program: Program, timing: LogTiming) -> list[str]:
    seconds = timing.block_seconds
    warnings = uneven(seconds, f"{peer.title} was stopped, waited, or did something besides training")
    steps, claims = timing.block_steps, _claims(peer, timing)
    if steps and claims:
        ours = sum(seconds) / len(seconds) / steps
        claimed = sum(claims) / len(claims)
        if abs(ours / claimed - 1) > CLAIM_TOLERANCE:
            warnings.append(
                f"{peer.title}'s own log says {1e3 * claimed:.4g} ms per step, and by the arrival of its "
                f"lines a step took {1e3 * ours:.4g} ms: what it does between steps counts here"
            )
    if program.exit_code:
        warnings.append(f"after the window: {peer.title} {program.ending}")
    return warnings


def _claims(peer: Peer, timing: LogTiming) -> list[float] | None:
    """Return step durations of the window by the peer's own account; None if they do not cover it."""
    if peer.times_last_step_only and timing.step_seconds is None:
        return None
    return timing.claimed_seconds


def _measurement(
    ladder: Ladder,
    external: PeerRung,
    timing: LogTiming,
    usage: Usage,
    startup_seconds: float,
    cache: CacheState | None,
) -> Measurement:
    seconds, peak = timing.block_seconds, usage.peak
    norms = [line.grad_norm for line in timing.lines if line.grad_norm is not None]
    workload = ladder.workload
    return Measurement(
        tokens_per_step=external.tokens_per_step,
        block_steps=timing.block_steps,
        block_seconds=seconds,
        step_seconds=timing.step_seconds,
        claimed_step_seconds=_claims(PEERS[external.peer], timing),
        startup_seconds=startup_seconds,
        first_step_seconds=None,
        compile_cache=cache,
        warmup_steps=timing.warmup_steps,
        losses=[line.loss for line in timing.lines],
        grad_norms=norms,
        peak_memory_bytes=peak,
        peak_memory_method=usage.method,
        gpu_memory_bytes=usage.peak_memory_bytes if usage.on_gpu else None,
        reserved_memory_bytes=None,
        run_peak_memory_bytes=usage.allocator_bytes or usage.run_peak_memory_bytes,
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
