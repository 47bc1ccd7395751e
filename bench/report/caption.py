"""What a reader must be told beside a table: what the figures are of, how they were got, what speaks against
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.analysis.bound import each_of_row, most_tokens_per_second
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import cumulative, line_of, measured
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.warnings import warnings
from bench.format import GIB, floor, listed, number, plain, ratio, with_interval
from bench.report.table import Method
from bench.stats import LEAST_ROUNDS, LOUD, MOST_ROUNDS_UNTIL, noise_floor
from gpt2.config.toggles import HOST, Toggles
from gpt2.config.workload import Workload


def other_step(row: Row, board: Scoreboard) -> bool:
    """Whether the row's optimiser steps are of another size than the first row's."""
    return row.tokens_per_step is not None and row.tokens_per_step != board.rows[0].tokens_per_step


def other_method(row: Row, board: Scoreboard) -> bool:
    """Whether the row's peak memory was found out otherwise than the first row's."""
    first = next((r.peak_memory_method for r in board.rows if r.peak_memory_bytes is not None), None)
    return row.peak_memory_bytes is not None and row.peak_memory_method != first


def derived_peak(board: Scoreboard) -> bool:
    """Whether the peak is arithmetic, not a datasheet's."""
    found = measured(board.records)
    return found is not None and found.peak_flops_kind == "derived"


MATHS = Method(
    "Maths is equal where a step is GPT-2's with float32 weights, but for the rounding of its matrix "
    "products."
)


def caption(board: Scoreboard) -> list[str]:
    """Of the scoreboard itself, a line for each matter."""
    machine, workload = board.environment, board.records[0].workload
    found = measured(board.records)
    lines = [f"{_machine(board)}.", *_nodes(board)]
    parameters = f" ({found.parameters:,} parameters)" if found else ""
    steps = sorted({row.tokens_per_step for row in board.rows if row.tokens_per_step})
    size = f", {steps[0]:,} tokens per optimiser step" if len(steps) == 1 else ""
    lines.append(f"{workload['model']}{parameters} on {workload['data']}, T = {workload['seq_len']}{size}.")
    if len(steps) > 1:
        others: dict[int, list[str]] = {}
        for row in board.rows:
            if row.tokens_per_step and other_step(row, board):
                others.setdefault(row.tokens_per_step, []).append(row.rung)
        sizes = ", ".join(f"{size:,} ({listed(names)})" for size, names in others.items())
        lines.append(f"† Tokens per optimiser step: {board.rows[0].tokens_per_step or 0:,}, but {sizes}.")
    lines += [
        *_swept(board),
        *_counting(board),
        *_verdicts(board),
        MATHS,
        *_until(board),
        *_mfu(board),
        *_ceilings(board),
    ]
    lines += [*_memory(board), *_reserved(board), *_chips(board), *_kernels(board), *_efficiency(board)]
    if machine.variables:
        lines.append(
            "Set: " + ", ".join(f"{name}={value}" for name, value in sorted(machine.variables.items())) + "."
        )
    lines += _errors(board)
    lines += fastest(board)
    lines += [f"Warning: {warning}." for warning in warnings(board)]
    if board.source:
        commit = f" of commit {machine.commit[:12]}" if machine.commit else ""
        lines.append(
            f"From {board.source.as_posix()}, measured by code {machine.code_hash[:12]}{commit}. Each record "
            "there holds the command that runs its rung again."
        )
    return [Method(plain(line)) if isinstance(line, Method) else plain(line) for line in lines]


def _errors(board: Scoreboard) -> list[str]:
    """Why rungs are not ok, those alike on one line."""
    rungs: dict[str, list[str]] = {}
    for row in board.rows:
        if row.error:
            rungs.setdefault(f"{status_of(row)}: {row.error.strip().splitlines()[0]}", []).append(row.rung)
    return [f"{_all_or(names, board)}: {error}" for error, names in rungs.items()]


def _all_or(rungs: Sequence[str], board: Scoreboard) -> str:
    """Those rungs by name, unless they are all there are."""
    return "all rungs" if len(rungs) == len(board.rows) > 1 else listed(rungs)


def _memory(board: Scoreboard) -> list[str]:
    methods = [row.peak_memory_method for row in board.rows if row.peak_memory_bytes is not None]
    if not methods:
        return []
    line = f"Peak memory: {methods[0]}, of the rank that needed most."
    others = sorted({method for method in methods if method and method != methods[0]})
    return [f"{line} ‡ But {'; '.join(others)}: do not compare." if others else Method(line)]


def _kernels(board: Scoreboard) -> list[str]:
    """Which attention kernel each rung ran, where it did not materialise the scores itself."""
    rungs: dict[str, list[str]] = {}
    for records in cumulative(board.records):
        found = measured(records)
        if found and found.attention_kernel:
            rungs.setdefault(found.attention_kernel, []).append(records[0].rung)
    each = [f"{kernel} ({_all_or(names, board)})" for kernel, names in rungs.items()]
    return [f"Attention kernels seen: {'; '.join(each)}."] if each else []


def _reserved(board: Scoreboard) -> list[str]:
    """What torch's allocator held of a device's memory, used or not."""
    held = [r.measurement.reserved_memory_bytes for r in board.records if r.measurement]
    most = max((each for each in held if each is not None), default=None)
    return (
        [f"Reserved by torch's allocator: up to {most / GIB:.2f} GiB on one device."]
        if most is not None
        else []
    )


def _chips(board: Scoreboard) -> list[str]:
    """What TPUs told of themselves just after windows."""
    after = [chip for r in board.records if r.measurement for chip in r.measurement.chips_after or ()]
    if not after:
        return []
    busy = sorted(chip.duty_cycle_percent for chip in after)
    most = max(chip.memory_bytes for chip in after) / GIB
    return [
        f"After windows the chips told of {busy[0]:.0f} to {busy[-1]:.0f} % duty and up to {most:.2f} GiB in "
        "use."
    ]


def _efficiency(board: Scoreboard) -> list[str]:
    over = {row.rung: row.efficiency_over for row in board.rows if row.efficiency_over}
    if not over:
        return []
    each = "; ".join(f"{plain(rung)} over {plain(single)}" for rung, single in over.items())
    return [f"Efficiency: tokens per second and device over those of a rung alike on fewer devices: {each}."]


def _counting(board: Scoreboard) -> list[str]:
    ended = sum(record.status != "interrupted" for record in board.records)
    processes = f"{ended} processes" if ended != 1 else "1 process"
    rounds = f"{board.rounds} rounds" if board.rounds > 1 else "1 round"
    interval = (
        "± is the 95 % t interval" if board.rounds >= LEAST_ROUNDS else "too few rounds for an interval"
    )
    method = "TPS: tokens per second of the timed window, geometric mean over rounds; speed-ups paired within rounds"
    return [f"{processes}, each fresh: {rounds} over the rungs.", Method(f"{method}; {interval}.")]


def _verdicts(board: Scoreboard) -> list[str]:
    """How far two figures must lie apart to differ."""
    control, last = board.control, board.last_control
    if board.rounds < LEAST_ROUNDS:
        again = f" The first rung again (A/A control) ran {control.value:.3f}x as fast." if control else ""
        again += f" The last rung again ran {last.value:.3f}x as fast." if last else ""
        needed = f"Not replicated: verdicts need {LEAST_ROUNDS} rounds or more.{again}"
        return [needed] if len(board.rows) > 1 else []
    if board.delta is None:
        rounds = f"{control.rounds} round{'s are' if control.rounds > 1 else ' is'}" if control else ""
        here = f"of the A/A control only {rounds} here" if control else "there is no A/A control"
        return [f"No verdicts: {here}, and nothing else tells noise from a difference."]
    again = {"first": control, "last": last}
    ran = {
        name: with_interval(f"{each.value:.3f}x", each)
        for name, each in again.items()
        if noise_floor(each) and each
    }
    (name, ratio), *other = ran.items()
    lines = [
        f"Noise floor: {floor(board.delta)}. The {name} rung again, at the end of each round (A/A control), "
        f"ran {ratio} as fast{''.join(f', and the {name} one {ratio}' for name, ratio in other)}.",
        Method(
            "Verdicts on the rung before: same, if the interval lies within the noise floor; faster or "
            "slower, if it excludes 1; else unclear."
        ),
    ]
    if any(each and each.low and each.high and not each.low <= 1 <= each.high for each in again.values()):
        lines.append(
            "Warning: the A/A control's interval excludes 1: the machine drifts within rounds by more than "
            "its intervals allow for; let it settle and run again."
        )
    if board.delta > LOUD:
        lines.append(
            f"Warning: the noise floor is above {LOUD:.0%}, too high to call anything the same. Quieten the "
            f"machine (bench doctor) or take more rounds ({'--repeats 10' if board.swept else '--until 2%'})."
        )
    return lines


def _until(board: Scoreboard) -> list[str]:
    """Whether a run that was to go on until its intervals are narrow got there."""
    width = board.records[-1].protocol.get("until")
    if width is None or board.interrupted:
        return []
    if board.rounds < MOST_ROUNDS_UNTIL:
        return [f"Rounds were added until every interval was ±{width:.1%} or narrower."]
    return [f"Rounds were to be added until every interval is ±{width:.1%}; {MOST_ROUNDS_UNTIL} did not do."]


def _mfu(board: Scoreboard) -> list[str]:
    found = measured(board.records)
    if not found:
        return []
    counted = f"{found.flops_per_token:,} FLOPs per token ({found.flops_formula})"
    if not found.peak_flops_bf16 and not found.peak_flops_dtype:
        why = found.peak_flops_source or ""
        if found.peak_flops_kind == "derived":
            why = f"no peak is known for what these rungs multiply; {why}"
        return [f"MFU is absent: {why}. {counted}."]
    others = ", ".join(
        f"{name} {flops:,} (x {flops / found.flops_per_token:.3f})"
        for name, flops in Workload(**board.records[0].workload).other_flops_per_token.items()
    )
    lines: list[str] = []
    if found.peak_flops_bf16:
        peak = f"{_whose_peak(board)} dense bfloat16 peak of {found.peak_flops_bf16 / 1e12:.4g} TFLOP/s"
    else:
        lines.append(
            "No dense bfloat16 peak is known of this chip, and so no MFU (bf16): --peak-tflops gives one."
        )
        peak = "a dense peak"
    lines.append(
        Method(f"MFU = {counted} x TPS / {peak} ({found.peak_flops_source}). By other conventions: {others}.")
    )
    own = {
        m.product_format: m.peak_flops_dtype
        for m in (r.measurement for r in board.records)
        if m and m.product_format and m.peak_flops_dtype
    }
    if own:
        peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in sorted(own.items()))
        lines.append(
            Method(f"Own format: over the dense peak of what the rung multiplies, in TFLOP/s: {peaks}.")
        )
    if derived_peak(board):
        said = "A derived peak is arithmetic, not a datasheet's: do not rank this MFU against other machines."
        lines.append(Method(said))
    if any(row.hfu is not None for row in board.rows):
        lines.append(Method("HFU counts what is computed a second time to save memory; MFU does not."))
    return lines


def _whose_peak(board: Scoreboard) -> str:
    """Of what the peaks add up."""
    first = next(record for record in board.records if record.measurement)
    if first.toggles.all["device"] == HOST or first.environment.xla_on_cpu:
        return "each node's CPU's" if board.environment.nodes else "the CPU's"  # however many ranks share it
    return "each device's"


def _ceilings(board: Scoreboard) -> list[str]:
    lines = []
    for device, ceiling in board.ceilings.items():
        best = ceiling.product
        each = " and ".join(f"{rate / 1e12:.3g}" for rate in ceiling.rates)
        many = len(ceiling.rates)
        when = {1: "once", 2: "in the first and the last round"}.get(many, f"in {many} processes")
        when = f"taken from {ceiling.elsewhere}" if ceiling.elsewhere else when
        lines.append(
            f"Measured ceiling of this {device}: {each} TFLOP/s, {when}, sustained by {best.title} "
            f"{best.m} x {best.k} x {best.n} in {best.number_format}."
        )
        if max(ceiling.rates) > (1 + 2 * LOUD) * min(ceiling.rates):
            lines.append(
                f"Warning: the measured ceiling of this {device} drifted within the run; its share is rough."
            )
    if (leader := board.fastest) and leader.tokens_per_step:
        most = [most_tokens_per_second(least, leader.tokens_per_step) for least in each_of_row(board, leader)]
        if known := [number(each) for each in most if each is not None]:
            lines.append(
                f"Bound of {leader.rung}, were its products and AdamW's traffic all of a step, at what each "
                f"such process measured of all its layers' products and of memory: {' and '.join(known)} "
                "tokens per second (bench roofline tells what is counted)."
            )
    for record in board.records:
        if record.kind == "ceiling" and record.status != "ok" and record.error:
            lines.append(f"Measured ceiling: {record.status}: {record.error.splitlines()[0]}")
    return lines


def fastest(board: Scoreboard) -> list[str]:
    """Which rung that is, as surely as this run tells: nothing of a run with a single sound one."""
    best = board.fastest
    if best is None or len(board.sound) < 2:
        return []
    times = "the first rung" if best is board.rows[0] else f"{ratio(best.speedup)} the first rung"
    fast = f"{plain(best.rung)}, {times}"
    if best.tps is None or best.tps.low is None:
        return [f"Fastest so far of those that nothing is held against, not replicated: {fast}."]
    most = f"Most tokens per second of those that nothing is held against: {fast}"
    if board.delta is None:
        return [f"{most}; without an A/A control of {LEAST_ROUNDS} rounds none is surely the fastest."]
    if alike := board.as_fast:
        over = listed([row.rung for row in alike])
        return [
            f"{most}. Its lead over {over} does not surely exceed the noise floor of {floor(board.delta)}."
        ]
    return [f"Fastest of those that nothing is held against: {fast}."]


def _machine(board: Scoreboard) -> str:
    e = board.environment
    flags = f" with {' '.join(e.cpu_flags)}" if e.cpu_flags else ""
    clock = f" of {e.cpu_mhz / 1000:.1f} GHz" if e.cpu_mhz else ""
    cpu = f"{e.cpu}, {e.cpu_cores} cores{clock}{flags}"
    chip = cpu if e.chip == e.cpu else f"{e.chip} ({e.device_count} here; {cpu})"
    chip = f"{e.nodes} nodes, each: {chip}" if e.nodes else chip
    versions = "".join(f", {name} {version}" for name, version in sorted(e.versions.items()))
    return f"{chip}, {e.memory_bytes / GIB:.1f} GiB; torch {e.torch}{versions}, Python {e.python}, {e.os}"


def _nodes(board: Scoreboard) -> list[str]:
    """Of a run over several nodes, which rungs took more than one."""
    over: dict[int, list[str]] = {}
    for records in cumulative(board.records):
        nodes = max(record.toggles.nodes for record in records)
        over.setdefault(nodes, []).append(records[0].rung)
    each = [f"{listed(rungs)} on {nodes}" for nodes, rungs in sorted(over.items()) if nodes > 1]
    if not board.environment.nodes:
        return []
    return [
        f"Ranks on more than one node: {'; '.join(each)}." if each else "No rung ran on more than one node."
    ]


def _swept(board: Scoreboard) -> Iterator[str]:
    """What must be said of a sweep, and of batches that were too large."""
    if board.swept:
        yield (
            "A sweep: each row is one rung with other values; speed-ups and losses are held to the first. "
            "The rung before is the next smaller batch of the same toggles or else the first row."
        )
        fewer = [row for row in board.rows if row.tps and row.tps.rounds < board.rounds]
        dropped = [row for row in fewer if row.dropped]
        if dropped:
            names = "; ".join(plain(row.rung) for row in dropped)
            yield f"Far slower in the first round, or with something held against them, so not run in each: {names}."
        if cut := [plain(row.rung) for row in fewer if row not in dropped]:
            yield f"Not run in round {board.rounds}, in which the sweep ended: {'; '.join(cut)}."
    groups: dict[Toggles, list[Row]] = {}
    for row in board.own.rows:
        groups.setdefault(line_of(row.toggles, board.records[0].workload), []).append(row)
    for rows in groups.values():
        fails = [row.toggles.micro_batch_size for row in rows if row.status == "out_of_memory"]
        fits = [row for row in rows if row.tps]
        largest = max(fits, key=lambda row: row.toggles.micro_batch_size, default=None)
        if fails and largest and largest.toggles.micro_batch_size < min(fails):
            size = largest.toggles.micro_batch_size
            yield f"Largest batch that ran: {size} ({plain(largest.rung)}); {min(fails)} ran out of memory."
