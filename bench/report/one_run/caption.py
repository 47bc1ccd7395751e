"""Notes beneath a scoreboard: what its figures are of, how they were made, and their caveats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache

from bench.analysis.bound import limit_tps
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import group_by, measured, measurements, without_batch
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.warnings import warnings
from bench.format import (
    GIB,
    floor,
    listed,
    number,
    plain,
    plural,
    status_word,
    times,
    whole_percent,
    with_interval,
)
from bench.ladder.ladder import Ladder, load
from bench.ladder.shipped import QUICK, shipped
from bench.records.measurement import Measurement
from bench.records.record import Record
from bench.report.table import MethodNote
from bench.stats import HIDDEN, LEAST_ROUNDS, LOUD, SAME
from gpt2.config.toggles import HOST
from gpt2.config.workload import Workload


def first_step_tokens(board: Scoreboard) -> int | None:
    """Tokens per optimiser step of the first row that has any."""
    return next((row.tokens_per_step for row in board.rows if row.tokens_per_step), None)


def other_step(row: Row, board: Scoreboard) -> bool:
    """Whether the row's optimiser steps are of another size than the first one's."""
    return row.tokens_per_step is not None and row.tokens_per_step != first_step_tokens(board)


def other_method(row: Row, board: Scoreboard) -> bool:
    """Whether the row's peak memory was measured otherwise than the first row's."""
    first = next((r.peak_memory_method for r in board.rows if r.peak_memory_bytes is not None), None)
    return row.peak_memory_bytes is not None and row.peak_memory_method != first


def of_derived_peak(row: Row, board: Scoreboard) -> bool:
    """Whether the row's MFU, in bfloat16 or its own format, is over an arithmetic peak, not a datasheet's."""
    derived = [r for r in board.records if r.measurement and r.measurement.peak_flops_kind == "derived"]
    devices = {record.toggles.as_toggles.device for record in derived}
    return _has_mfu(row) and row.toggles.device in devices


def derived_peak(board: Scoreboard) -> bool:
    """Whether all MFU here is over such peaks: a ladder of several devices may have both kinds."""
    derived = [of_derived_peak(row, board) for row in board.rows if _has_mfu(row)]
    return bool(derived) and all(derived)


def _has_mfu(row: Row) -> bool:
    return row.mfu is not None or row.mfu_own is not None


MATHS = MethodNote(
    "Maths is equal where only the rounding of matmuls differs from GPT-2 with float32 weights."
)
LIMIT = MethodNote(
    "Of limit: share of the speed that the fastest rung would have if its matmuls, attention and AdamW ran "
    "at the best rates measured, and all else took no time (bench roofline LADDER has that of each rung)."
)


def caption(board: Scoreboard) -> list[str]:
    """Notes of the scoreboard itself, a line for each matter."""
    machine, workload = board.environment, board.workload
    m = measured(board.records)
    lines = [f"{_machine(board)}.", *_nodes(board)]
    parameters = f" ({m.parameters:,} parameters)" if m else ""
    steps = sorted({row.tokens_per_step for row in board.rows if row.tokens_per_step})
    size = f", {steps[0]:,} tokens per optimiser step" if len(steps) == 1 else ""
    lines.append(f"{workload['model']}{parameters} on {workload['data']}, T = {workload['seq_len']}{size}.")
    if len(steps) > 1:
        others = [row for row in board.rows if other_step(row, board)]
        by_size = group_by(others, lambda row: row.tokens_per_step)
        sizes = ", ".join(
            f"{size:,} ({listed([row.rung for row in rows])})" for size, rows in by_size.items()
        )
        lines.append(f"† Tokens per optimiser step: {first_step_tokens(board):,}, but {sizes}.")
    lines += [*_swept(board), *_counting(board), *_verdicts(board), MATHS, *_mfu(board)]
    lines += [*_ceilings(board), *_memory(board), *_kernels(board)]
    lines += _efficiency(board)
    if machine.variables:
        lines.append(
            f"Set: {', '.join(f'{name}={value}' for name, value in sorted(machine.variables.items()))}."
        )
    lines += [*_errors(board), *fastest_claim(board)]
    lines += [f"Warning: {warning}." for warning in warnings(board)]
    if board.source:
        commit = f" of commit {machine.commit[:12]}" if machine.commit else ""
        lines.append(
            f"From {board.source.as_posix()}, measured by code {machine.code_hash[:12]}{commit}. Each record "
            "there holds the command that runs its rung again."
        )
    return [MethodNote(plain(line)) if isinstance(line, MethodNote) else plain(line) for line in lines]


def _errors(board: Scoreboard) -> list[str]:
    """Why rungs are not ok, equal reasons on one line."""
    failed = [(row, row.why) for row in board.rows if row.why]
    by_error = group_by(
        failed,
        lambda pair: pair[1] if pair[0].inert_rounds is not None else f"{status_of(pair[0])}: {pair[1]}",
    )
    return [f"{_all_or([row.rung for row, _ in rows], board)}: {error}" for error, rows in by_error.items()]


def _all_or(rungs: Sequence[str], board: Scoreboard) -> str:
    """Names of the rungs, or "all rungs"."""
    return "all rungs" if len(rungs) == len(board.rows) > 1 else listed(rungs)


def _memory(board: Scoreboard) -> Iterator[str]:
    methods = [row.peak_memory_method for row in board.rows if row.peak_memory_bytes is not None]
    if methods:
        line = f"Peak memory: {methods[0]}, of the rank that needed most."
        others = sorted({method for method in methods if method and method != methods[0]})
        yield f"{line} ‡ But {'; '.join(others)}: do not compare." if others else MethodNote(line)


def _kernels(board: Scoreboard) -> Iterator[str]:
    """Which attention kernel each rung ran, where it did not materialise the scores."""
    first = [(row, measured(board.records_of(row))) for row in board.rows]
    seen = [(row.rung, m.attention_kernel) for row, m in first if m and m.attention_kernel]
    by_kernel = group_by(seen, lambda pair: pair[1])
    kernels = [
        f"{kernel} ({_all_or([name for name, _ in pairs], board)})" for kernel, pairs in by_kernel.items()
    ]
    if kernels:
        yield f"Attention kernels seen: {'; '.join(kernels)}."


def _efficiency(board: Scoreboard) -> Iterator[str]:
    over = {row.rung: row.efficiency_over for row in board.rows if row.efficiency_over}
    if over:
        pairs = "; ".join(f"{plain(rung)} over {plain(single)}" for rung, single in over.items())
        alike = "tokens per second and device over those of a rung alike on fewer devices"
        yield f"Efficiency: {alike}: {pairs}."


def _counting(board: Scoreboard) -> Iterator[str]:
    """How many processes ran, and how their speeds were averaged."""
    tries = sum(record.kind == "scout" for record in board.records)
    processes, rounds = plural(board.processes, "process", "processes"), plural(board.rounds, "round")
    tried = f"; before them {plural(tries, 'try', 'tries')}, which chose the rungs"
    yield f"{processes}, each fresh: {rounds} over the rungs{tried if tries else ''}."
    few = board.rounds < LEAST_ROUNDS
    interval = "too few rounds for an interval" if few else "± is the 95 % t interval"
    method = "TPS: tokens per second of the timed window, geometric mean over rounds"
    yield MethodNote(f"{method}; speed-ups paired within rounds; {interval}.")


def _verdicts(board: Scoreboard) -> Iterator[str]:
    """The noise floor, and how verdicts follow from it."""
    control, last = board.control, board.last_control
    if board.rounds < LEAST_ROUNDS:
        note = f"Not replicated: verdicts need {LEAST_ROUNDS} rounds or more."
        note += f" The first rung again (A/A control) ran {control.value:.3f}x as fast." if control else ""
        note += f" The last rung again ran {last.value:.3f}x as fast." if last else ""
        if len(board.rows) > 1:
            yield note
        return
    if board.delta is None:
        rounds = f"{control.rounds} round{'s are' if control.rounds > 1 else ' is'}" if control else ""
        here = f"of the A/A control only {rounds} here" if control else "there is no A/A control"
        yield f"No verdicts: {here}, and nothing else tells noise from a difference."
        return
    controls = [
        (name, c) for name, c in (("first", control), ("last", last)) if c and c.half_width is not None
    ]
    (name, ran), *other = [(name, with_interval("{:.3f}x".format, c)) for name, c in controls]
    yield (
        f"Noise floor: {floor(board.delta)}. The {name} rung again, at the end of each round (A/A control), "
        f"ran {ran} as fast{''.join(f', and the {name} one {ran}' for name, ran in other)}."
    )
    within = f"no difference, if it lies within ±{SAME:.0%}"
    rule = f"faster or slower, if the whole interval lies beyond the noise floor; else {within}; else unclear"
    scatter = "The floor is by the scatter between rounds of our rungs, each over the one before in the table"
    yield MethodNote(f"Verdicts on the rung before: {rule}. {scatter}, and of the controls.")
    yield from (f"Warning: {warning}" for warning in noise_warnings(board))


def _mfu(board: Scoreboard) -> Iterator[str]:
    """The formula and the denominators of MFU, or why there is none."""
    found = measurements(board.records)
    if not found:
        return
    first = next((m for m in found if m.peak_flops_bf16 and m.peak_flops_kind != "derived"), found[0])
    counted = f"{first.flops_per_token:,} FLOPs per token ({first.flops_formula})"
    if board.beaten and not board.peaks:
        yield f"MFU is absent: a matmul here beat the derived peak, which is therefore wrong. {counted}."
        return
    if not first.peak_flops_bf16 and not first.peak_flops_dtype:
        unknown = "no peak is known for what these rungs multiply; " * (first.peak_flops_kind == "derived")
        yield f"MFU is absent: {unknown}{first.peak_flops_source or ''}. {counted}."
        return
    peak = "a dense peak"
    if first.peak_flops_bf16:
        whose, teraflops = _whose_peak(board, first), first.peak_flops_bf16 / 1e12
        peak = f"{whose} dense bfloat16 peak of {teraflops:.4g} TFLOP/s"
    else:
        yield "No dense bfloat16 peak is known of this chip, and so no MFU (bf16): --peak-tflops gives one."
    formula = f"MFU = {counted} x TPS / {peak} ({first.peak_flops_source})"
    others = ", ".join(
        f"{name} {flops:,} (x {flops / first.flops_per_token:.3f})"
        for name, flops in Workload(**board.workload).other_flops_per_token.items()
    )
    yield MethodNote(f"{formula}. By other conventions: {others}.")
    used = {m.product_format for m in measurements(board.records)}
    own = {name: peak for (_, name), peak in board.peaks.items() if name and name in used}
    if own:
        peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in sorted(own.items()))
        over = "over the dense peak of what the rung multiplies, in TFLOP/s"
        yield MethodNote(f"Own format: {over}: {peaks}.")
    if derived := [row.rung for row in board.rows if of_derived_peak(row, board)]:
        which = "" if derived_peak(board) else f" (of {listed(derived)})"
        arithmetic = f"A derived peak{which} is arithmetic, not a datasheet's"
        yield MethodNote(f"{arithmetic}: do not rank this MFU against other machines.")
    if any(row.hfu is not None for row in board.rows):
        yield MethodNote("HFU counts what is computed a second time to save memory; MFU does not.")


def _whose_peak(board: Scoreboard, measurement: Measurement) -> str:
    """What the peaks that add up belong to."""
    first = next(record for record in board.records if record.measurement is measurement)
    if first.toggles.as_toggles.device == HOST or first.environment.xla_on_cpu:
        return "each node's CPU's" if board.environment.nodes else "the CPU's"  # however many ranks share it
    return "each device's"


def _ceilings(board: Scoreboard) -> Iterator[str]:
    """The measured ceiling of each kind of device, and what it allows the fastest rung."""
    for device, ceiling in board.ceilings.items():
        best, rates = ceiling.best[0], " and ".join(f"{rate / 1e12:.3g}" for rate in ceiling.rates)
        count = len(ceiling.rates)
        when = {1: "once", 2: "in the first and the last round"}.get(count, f"in {count} processes")
        when = f"taken from {ceiling.elsewhere}" if ceiling.elsewhere else when
        yield (
            f"Measured ceiling of this {device}: {rates} TFLOP/s, {when}, sustained by {best.title} "
            f"{best.m} x {best.k} x {best.n} in {best.number_format}."
        )
    if board.fastest and limit_tps(board, board.fastest):
        yield LIMIT
    for record in board.records:
        if record.kind == "ceiling" and record.status != "ok" and record.error:
            yield f"Measured ceiling: {status_word(record.status)}: {record.error.splitlines()[0]}"


def fastest_claim(board: Scoreboard, *, signs: bool = True) -> list[str]:
    """Which rung is the fastest, and how sure that is; empty for a run with fewer than two sound rungs.

    signs: with those of mark(), which only a scoreboard explains.
    """
    best = board.fastest
    if best is None or len(board.sound) < 2:
        return []
    return [f"{fastest_in_words(board, best, signs=signs)}. How sure: {certainty(board, best)}."]


def fastest_in_words(board: Scoreboard, best: Row, *, signs: bool = True) -> str:
    """The fastest rung and its speed-up over the first; of a single sound rung only its speed."""
    if len(board.sound) < 2:
        return rung_and_speed(best)
    speed_and_mark = f"{rung_and_speed(best)} {mark(best, board) if signs else ''}".rstrip()
    over = board.over_first(best)
    first = plain(board.rows[0].rung)
    if board.swept:
        first = "the first row" if signs else "the first candidate"
    times_first = f", {times(over.value)} over {first}" if over else ""
    most = max(board.sound, key=lambda row: row.mean_tps)
    higher = "" if most is best else f"; the mean of {rung_and_speed(most)}, is higher, from other rounds"
    return f"Fastest: {speed_and_mark}{times_first}{higher}"


def rung_and_speed(row: Row) -> str:
    return f"{plain(row.rung)}, {number(row.mean_tps)} tokens/s"


def mark(row: Row, board: Scoreboard) -> str:
    """Signs behind a row: † another step than the first one's, * other maths, ! a caveat."""
    marks = "†" * (row.loss is not None and other_step(row, board)) + "*" * row.other_maths
    return marks + "!" * (row.status == "ok" and bool(row.caveats) and not row.other_maths)


def more_rounds(board: Scoreboard, options: str) -> str:
    """The command for more rounds, written out where it needs no options of the run's own."""
    if board.ladder == QUICK:  # which begins anew
        last = max(board.records, key=lambda record: record.time)
        took = datetime.fromisoformat(last.time) - datetime.fromisoformat(board.begun)
        seconds = took.total_seconds() + (last.process_seconds or 0.0)
        needed = seconds * LEAST_ROUNDS / min(board.rounds, LEAST_ROUNDS)
        return f"bench quick --minutes {5 * math.ceil(needed / 300)}"
    command = f"bench run {board.ladder}" if _has_no_options(board.records[0]) else "repeat it with"
    return f"{command} --resume {options}"


def _has_no_options(record: Record) -> bool:
    """Whether a run is as `bench run` makes it of a ladder that comes with the tool, without an option."""
    ladder = _shipped(record.ladder)
    if ladder is None or ladder.hash != record.ladder_hash or record.chosen or record.ablate:
        return False
    protocol = ladder.protocol.of_windows()
    return all(record.protocol.get(key, value) == value for key, value in protocol.items())


@cache  # runs of a ladder are many in a report, and reading its file takes long
def _shipped(name: str) -> Ladder | None:
    return next((load(path) for path in shipped() if path.stem == name), None)


def certainty(board: Scoreboard, best: Row) -> str:
    """How much faster the fastest rung is than the first, and than which others it is not clearly faster."""
    if board.delta is None:
        if board.rounds < LEAST_ROUNDS:
            longer = more_rounds(board, f"--repeats {LEAST_ROUNDS}")
            given = "1 round gives" if board.rounds == 1 else f"{board.rounds} rounds give"
            return f"{given} no interval; {LEAST_ROUNDS} do ({longer})"
        return "not known; that takes the first rung run again in each round (A/A control)"
    first, ties = board.rows[0], board.ties
    words, over_first = [], best.speedup if best is not first else None
    if over_first and over_first.low is not None and over_first.high is not None:
        over = "" if board.swept else f" over {plain(first.rung)}"
        beyond = ", not wholly beyond the noise floor" if first in ties else ""
        words.append(f"{over_first.low:.2f}x to {over_first.high:.2f}x{over} (95 % interval){beyond}")
        ties = [row for row in ties if row is not first]  # of which that tells
    if ties:
        words.append(f"not clearly faster than {listed([row.rung for row in ties])}")
    return "; ".join(words) or "faster than every other rung"


def noise_warnings(board: Scoreboard) -> Iterator[str]:
    """Warnings that follow from the A/A controls."""
    if any(control and control.excludes_one for control in (board.control, board.last_control)):
        yield "The machine drifted within rounds: let it settle, and measure again."
    if board.delta is not None and board.delta > LOUD:
        hidden = HIDDEN * board.delta
        below = f"most differences below {whole_percent(hidden)}" if hidden < 1 else "all differences"
        longer = "--repeats 10" if board.swept else more_rounds(board, "--until 2%")
        yield f"Noise hides {below}: try bench doctor, or {longer}."


def _machine(board: Scoreboard) -> str:
    e = board.environment
    flags = f" with {' '.join(e.cpu_flags)}" if e.cpu_flags else ""
    clock = f" of {e.cpu_mhz / 1000:.1f} GHz" if e.cpu_mhz else ""
    clock += f" ({e.measured_cpu_mhz / 1000:.1f} GHz measured)" if e.measured_cpu_mhz else ""
    cpu = f"{e.cpu}, {e.cpu_cores} cores{clock}{flags}"
    chip = cpu if e.chip == e.cpu else f"{e.chip} ({e.device_count} here; {cpu})"
    chip = f"{e.nodes} nodes, each: {chip}" if e.nodes else chip
    versions = "".join(f", {name} {version}" for name, version in sorted(e.versions.items()))
    return f"{chip}, {e.memory_bytes / GIB:.1f} GiB; torch {e.torch}{versions}, Python {e.python}, {e.os}"


def _nodes(board: Scoreboard) -> Iterator[str]:
    """Which rungs of a run over several nodes took more than one."""
    if not board.environment.nodes:
        return
    by_nodes = group_by(board.rows, lambda row: max(r.toggles.nodes for r in board.records_of(row)))
    several = [
        f"{listed([row.rung for row in rows])} on {nodes}"
        for nodes, rows in sorted(by_nodes.items())
        if nodes > 1
    ]
    if several:
        yield f"Ranks on more than one node: {'; '.join(several)}."
    else:
        yield "No rung ran on more than one node."


def _swept(board: Scoreboard) -> Iterator[str]:
    """Notes on a sweep, and on batches that were too large."""
    if board.swept:
        yield (
            "A sweep: each row is one rung with other values, compared with the first. "
            "The rung before is the next smaller batch of the same toggles or else the first row."
        )
        fewer = [row for row in board.rows if row.tps and row.tps.rounds < board.rounds]
        if dropped := [plain(row.rung) for row in fewer if row.dropped]:
            why = "Far slower in the first round, or with a caveat"
            yield f"{why}, so not run in each: {'; '.join(dropped)}."
        if unfinished := [plain(row.rung) for row in fewer if not row.dropped]:
            yield f"Not run in round {board.rounds}, in which the sweep ended: {'; '.join(unfinished)}."
    yield from largest_batches(board)


def largest_batches(board: Scoreboard) -> Iterator[str]:
    """The largest batch that ran of each set of alike rungs, where a larger one ran out of memory."""
    for rows in group_by(board.own.rows, lambda row: without_batch(row.toggles, board.workload)).values():
        too_large = [row.toggles.micro_batch_size for row in rows if row.status == "out_of_memory"]
        ran = [row for row in rows if row.tps]
        largest = max(ran, key=lambda row: row.toggles.micro_batch_size, default=None)
        if too_large and largest and largest.toggles.micro_batch_size < min(too_large):
            size = f"{largest.toggles.micro_batch_size} ({plain(largest.rung)})"
            yield f"Largest batch that ran: {size}; {min(too_large)} ran out of memory."
