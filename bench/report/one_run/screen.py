"""The answer of one run on one screen: how fast each rung is, what gave most, and how far the limit is.

for line in screen(board, width=100): console.print(line)
text = screen_markdown(board)

At most MOST_COLUMNS wide, no cell wrapped; every figure is that of the full tables, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from statistics import median

from rich.console import RenderableType

from bench.analysis.attribution import attribution
from bench.analysis.bound import bound_of, limit_tps
from bench.analysis.row import NOT_CARRIED, Row, status_of
from bench.analysis.run_records import group_by, tps_by_round, varying
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.warnings import beyond_peak, ended_early, warnings
from bench.format import (
    GIB,
    bare_ratio,
    in_shell,
    judged_briefly,
    listed,
    number,
    plain,
    plural,
    speed,
    status_word,
    times,
    training_time,
    verdict_word,
    whole_percent,
)
from bench.ladder.ladder import AGAIN
from bench.ladder.shipped import QUICK
from bench.records.record import ROOFLINE
from bench.report.brief import MOST_COLUMNS, MOST_NOTES, Brief
from bench.report.one_run.caption import (
    certainty,
    derived_peak,
    fastest_in_words,
    first_step_tokens,
    largest_batches,
    mark,
    noise_warnings,
    of_derived_peak,
    other_method,
    other_step,
    rung_and_speed,
)
from bench.report.one_run.tables import TOKENS, WORK, hours_to_10b, price_of, profiled, work_of
from bench.report.table import Column, Table
from bench.report.titles import machine_title, task_title
from bench.stats import paired_ratio, verdict
from gpt2.config.toggles import Toggles

BAR_COLUMNS = 10
FEW, SOME = 4, 12
"""Numbers of rows up to which there is room to say of each what it switches on, and of the fastest."""
EIGHTHS = " ▏▎▍▌▋▊▉"
MFU, OF_LIMIT, DERIVED_MFU = "MFU", "of limit", "MFU, derived"
"""What a rung's speed may be compared with; see share_of_limit()."""
BEYOND_LIMIT = ": the rates were measured in a slower hour, or by slower kernels than the rung's"
"""What is said of a rung that is faster than its limit."""


def screen(
    board: Scoreboard,
    width: int = MOST_COLUMNS,
    *,
    notes: bool = False,
    price_per_hour: float | None = None,
    others: Sequence[str] = (),
) -> list[RenderableType]:
    """Lines for a terminal of `width` columns; a narrower one is taken to have LEAST_COLUMNS.

    notes: whether all warnings are shown, not only the MOST_NOTES that matter most. price_per_hour: of the
    machine, by which the cost of training is stated; by default that which the run was given. others: what
    there is to say of other runs; by default where those of its folder are shown.
    """
    answer, about = _head(board)
    hints = []
    if board.source:
        more = "Each change alone, all columns" if attribution(board) else "All columns"
        hints.append(f"{more}: bench report {in_shell(board.source)} --full")
        hints += others or _others_beside(board.source)
    shown = Brief(
        answer=answer,
        about=about,
        table=_table(board),
        findings=[*marks(board), *_legend(board), *findings(board, price_per_hour)],
        warnings=warnings_by_weight(board),
        rest="--notes",
        hints=hints,
    )
    return shown.lines(width, every_warning=notes)


def _others_beside(source: Path) -> Iterator[str]:
    """Where the other runs of a file's folder are shown; nothing where it holds none."""
    runs = [file for file in source.parent.glob("[!.]*.jsonl") if not file.name.startswith(ROOFLINE)]
    if any(file.name != source.name for file in runs):
        yield f"Compare with the other runs in its folder: bench report {in_shell(source.parent)}"


def keeps(board: Scoreboard) -> str:
    """Which changes of the rungs above it a rung keeps; empty for a sweep, whose rows are independent."""
    if board.swept:
        return ""
    if board.ladder == QUICK:
        has = "Each rung has settings of its own: the second those that most people switch on"
        return f"{has}, the last the best known for this machine."
    if any(row.status == NOT_CARRIED for row in board.rows):
        return "Short tries chose the rungs, each on top of those kept before; rounds measured them anew."
    ours = " of ours" if any(row.external for row in board.rows) else ""
    return f"Each rung{ours} adds its change to those above."


def _legend(board: Scoreboard) -> list[str]:
    """A line on what a rung keeps and what intervals, noise and verdicts mean, as far as there are any."""
    said = []
    if kept := keeps(board):
        passed = any(row.status == "inert" for row in board.taken[:-1])
        said.append(f"{kept[:-1]}; each compared with the last that had an effect." if passed else kept)
    if any(row.tps and row.tps.low is not None for row in board.taken):
        said.append("±: 95 % interval.")
    if board.delta is not None:
        said.append("Noise floor: how far two equal rungs may differ.")
    if any(row.verdict == "unclear" for row in board.rows):
        said.append("Unclear: not wholly beyond that.")
    return [" ".join(said)] if said else []


def screen_markdown(board: Scoreboard, level: str = "###", *, price_per_hour: float | None = None) -> str:
    """The same as Markdown, without bars, under a heading of that level."""
    answer, about = _head(board)
    said = [*marks(board), *_legend(board), *findings(board, price_per_hour, settings=True)]
    said += [f"Warning: {warning}" for warning in warnings_by_weight(board)[:MOST_NOTES]]
    table = replace(_table(board, terminal=False).differing(), first=[*answer, *about], notes=said)
    return table.to_markdown(level)


def _head(board: Scoreboard) -> tuple[list[str], list[str]]:
    """First lines, and what stands beneath them: of a sweep the fastest values, of a ladder what was run."""
    best = board.fastest
    if not board.swept or best is None:
        return [title(board)], []
    sure = [f"How sure: {certainty(board, best)}."] if len(board.sound) > 1 else []
    return [" ".join([f"{fastest_in_words(board, best)}.", *sure, *largest_batches(board)])], [title(board)]


def title(board: Scoreboard) -> str:
    """The model, the machine, the torch, the rounds and the noise, in one line."""
    task = task_title(board)
    parts = [
        f"{task}{',' if ', T = ' in task else ''} on {machine_title(board)}",
        f"torch {board.environment.torch.partition('+')[0]}",
        f"{plural(board.rounds, 'round')}{', interrupted' if board.interrupted else ''}",
    ]
    if board.delta is not None:
        parts.append(f"noise floor {_noise(board.delta)}")
    return " · ".join(parts)


def _noise(delta: float) -> str:
    return whole_percent(delta, "±") if delta < 1 else "above 100 %"


def limit_of(board: Scoreboard, row: Row) -> str:
    """A rung's share of the peak or of the limit, with which it is; empty where neither is known."""
    name, share = share_of_limit(board)
    return f"{whole_percent(share(row))} {name}" if share(row) is not None else ""


def _table(board: Scoreboard, *, terminal: bool = True, intervals: bool = True) -> Table:
    """terminal: with bars, and with a narrow form. intervals: with those of gains."""
    rows = board.taken
    fastest = max((row.tps.value for row in rows if row.tps and why_not_counted(row) is None), default=0.0)
    share_title, share = share_of_limit(board)
    about = "MFU: share of the chip's dense bfloat16 peak, by its datasheet." if share_title == MFU else ""
    bar_of = Column[Row](
        " ", lambda row: bar(row.tps.value / fastest) if row.tps and fastest else "", words=True, drop=2
    )
    names = [Column[Row](n, attrgetter(f"toggles.{n}"), words=True) for n in swept_toggles(board)]
    columns = [
        *(names or [Column[Row]("rung", lambda row: row.rung, words=True)]),
        Column[Row]("tokens/s", lambda row: speed(row.tps)),
        *([bar_of] if terminal else []),
        _gain_column(board, with_interval=intervals),
        Column[Row]("over first", lambda row: "1.00x" if row is rows[0] else bare_ratio(row.speedup), drop=6),
        Column[Row](share_title, lambda row: whole_percent(share(row)), drop=5, about=about),
        Column[Row]("memory", lambda row: _memory(row, board), drop=4),
        Column[Row]("loss", lambda row: f"{row.loss:.3f}" if row.loss is not None else "", drop=1),
    ]
    return Table(
        title=board.title,
        columns=columns,
        rows=rows,
        names=len(names) or 1,
        instead=_in_place,
        mark=lambda row: mark(row, board),
        narrow=_table(board, intervals=False) if terminal and intervals else None,
        narrow_for="over first",
    )


def _gain_column(board: Scoreboard, *, with_interval: bool) -> Column[Row]:
    title, about = "over rung before", ""
    swept = swept_toggles(board)
    if "micro_batch_size" in swept:
        without = ", else over the first row" if len(swept) > 1 else ""
        title, about = "over before", f"over before: over the next smaller batch{without}."
    elif board.swept:
        title = "over first row"

    def gain(row: Row) -> str:
        if with_interval:
            return judged_briefly(row.gain, row.verdict)
        return f"{bare_ratio(row.gain)} {verdict_word(row.verdict)}".strip()

    return Column(title, gain, about=about)


def swept_toggles(board: Scoreboard) -> list[str]:
    """Names of the toggles in which the rows of a sweep differ; none for a ladder."""
    return varying(*(row.toggles for row in board.rows)) if board.swept else []


def _in_place(row: Row) -> str | None:
    """What stands in place of a row's figures: its speed, where it has one, and why it does not count."""
    words = why_not_counted(row)
    return f"{speed(row.tps)}, not counted: {words}" if words and row.tps else words


def share_of_limit(board: Scoreboard) -> tuple[str, Callable[[Row], float | None]]:
    """The share that tells how near a rung is to the limit: its title, and the share of a row.

    That is of the chip's peak by its datasheet, else of the fastest rung's limit by the rates measured here,
    else of a derived peak.
    """
    if any(row.mfu is not None for row in board.rows) and not derived_peak(board):
        return MFU, lambda row: None if of_derived_peak(row, board) else row.mfu
    if (best := board.fastest) and (most := limit_tps(board, best)):
        return OF_LIMIT, lambda row: row.tps and row.mean_tps / most
    return DERIVED_MFU, lambda row: row.mfu


def why_not_counted(row: Row) -> str | None:
    """What stands in place of a rung's figures; None where they are sound."""
    words = status_of(row)
    if row.status in ("ok", "external") and row.tps:
        return None  # warnings() names one that was expected to fail
    if row.status == NOT_CARRIED:
        return words
    if row.expect == row.status:
        return f"{words}, as expected"
    why = plain(row.why)
    if row.status == "inert" and why:
        return why
    return f"{words}: {why}" if why else words


def findings(
    board: Scoreboard, price_per_hour: float | None = None, *, settings: bool = False
) -> Iterator[str]:
    """The fastest rung, how sure that is, what gave most, how far the limit is, what a step is spent on.

    settings: whether the fastest rung's settings are told even where there are many rows.
    """
    if not board.swept:
        yield from largest_batches(board)
    best = board.fastest
    if best is None:
        yield from _left_out(board)
        return
    time = f"10B tokens take {training_time(TOKENS, best.mean_tps)}"
    if (price := price_of(board, price_per_hour)) is not None:
        time += f", {number(price * hours_to_10b(best.mean_tps))} at {price:g} per hour"
    if board.swept:
        yield f"{time}."
        yield from _in_common(board)
    else:
        yield f"{fastest_in_words(board, best)}. {time}."
    if len(board.sound) > 1:
        if alike := fastest_of_first_step(board, best):
            over = f", {judged_briefly(alike.speedup, None)}" if alike.speedup else ""
            yield f"With {first_step_tokens(board):,} tokens per step: {rung_and_speed(alike)}{over}."
        if not board.swept:
            yield f"How sure: {certainty(board, best)}."
            if board.delta is not None:
                yield f"Largest clear gains: {_gained(board, best)}."
    yield _limit(board, best)
    if spent := _most_spent(board, best):
        yield f"The fastest rung's time: {', '.join(spent)}."
    if not board.swept:
        yield from _switched_on(board, best, settings=settings)
    yield from _left_out(board)


def _switched_on(board: Scoreboard, best: Row, *, settings: bool) -> Iterator[str]:
    """All that the fastest rung sets beside the device, as --set takes it; with few rows, that of each."""
    rows = board.taken
    shown = rows[1:] if len(rows) <= FEW else [best] if settings or len(rows) <= SOME else []
    for row in shown:
        changed = varying(Toggles(device=row.toggles.device), row.toggles)
        if changed and row.tps and not row.external:
            yield f"Settings of {plain(row.rung)}: {_values(row.toggles, changed)}."


def _in_common(board: Scoreboard) -> Iterator[str]:
    """What all rows of a sweep switch on."""
    toggles, swept = board.rows[0].toggles, swept_toggles(board)
    changed = [name for name in varying(Toggles(device=toggles.device), toggles) if name not in swept]
    if changed:
        yield f"Settings of all rows: {_values(toggles, changed)}."


def _values(toggles: Toggles, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={getattr(toggles, name)}" for name in names)


def _left_out(board: Scoreboard) -> Iterator[str]:
    """The rungs that have no row: with `carry: if_faster`, those that gained nothing or cannot run here."""
    without = [row for row in board.rows if row.passed_over]
    tries = group_by(without, lambda row: plain(row.rung.removesuffix(AGAIN)))
    tried = {
        name: [row.tried for row in rows if row.tried is not None]
        for name, rows in tries.items()
        if any(row.status == NOT_CARRIED for row in rows)
    }
    if tried:
        best_first = sorted(tried, key=lambda name: max(tried[name], default=0.0), reverse=True)
        said = [" ".join([name, ", then ".join(map(times, tried[name]))]).strip() for name in best_first]
        yield f"Tried and left out, slower or no clear gain: {'; '.join(said)}."
    for scout in (record.scout for record in board.records if record.scout and record.scout.together):
        came = "Kept as a group by short tries" if scout.carried else "Left out, as a group too"
        if not scout.carried and scout.check != "ok":
            came += f" ({status_word(scout.check)})"
        if scout.ratio is not None:
            came += f", {times(scout.ratio)} together{_noise_of_try(scout.floor)}"
        yield f"{came}, where alone none was clearly faster: {plain(listed(scout.together))}."
    if refused := [name for name, rows in tries.items() if all(row.status == "unsupported" for row in rows)]:
        why = "(bench report --full says why)"
        yield f"Could not run on this machine or with what was kept until then {why}: {listed(refused)}."


def _noise_of_try(floor: float | None) -> str:
    """The noise that a try had to exceed: another than the noise floor of the rounds."""
    return f" (noise of the tries {whole_percent(floor, '±')})" if floor is not None else ""


def fastest_of_first_step(board: Scoreboard, best: Row) -> Row | None:
    """The fastest rung that takes as many tokens per step as the first one, where `best` takes others."""
    if not other_step(best, board):
        return None
    alike = board.fastest_of([row for row in board.sound if not other_step(row, board)])
    return alike if alike is not board.rows[0] else None


def most_gained(board: Scoreboard) -> list[Row]:
    """The three rungs with the largest clear gains over the rung before, the best first.

    A rung that is no faster than one above it gained nothing: it makes good what another lost.
    """
    fastest = accumulate((row.mean_tps for row in board.sound), max)
    gains = [
        row
        for row, best in zip(board.sound, fastest, strict=True)
        if row.gain and row.verdict == "faster" and row.mean_tps == best
    ]
    return sorted(gains, key=lambda row: row.gain.value if row.gain else 0.0, reverse=True)[:3]


def _limit(board: Scoreboard, best: Row) -> str:
    """The fastest rung's limit and its share of that, or why it is not known."""
    if (most := limit_tps(board, best)) is None:
        least = bound_of(board, best)
        return f"Limit: {least.absent if least and least.absent else 'not measured here'} (bench roofline)."
    share = best.mean_tps / most
    reached = f"{whole_percent(share)} reached{BEYOND_LIMIT if share > 1 else ''}"
    of_what = "the fastest rung's matmuls, attention and AdamW alone"
    measured = "each at the best rate measured on this machine"
    return f"Limit: {number(most)} tokens/s ({reached}): {of_what}, {measured}."


def _gained(board: Scoreboard, best: Row) -> str:
    """What gained most over the rung before, and what all after the last of those did, if that is clear."""
    gained = most_gained(board)
    said = [f"{plain(row.rung)} {bare_ratio(row.gain)}" for row in gained]
    last = max(gained, key=lambda row: row.index, default=None)
    if last and sum(last.index < row.index <= best.index for row in board.sound) > 1:
        ratio = paired_ratio(*(tps_by_round(board.records_of(row)) for row in (best, last)))
        if ratio and verdict(ratio, board.delta) == "faster":
            together = f"all after {plain(last.rung)} together {judged_briefly(ratio, None)}"
            said.append(f"{together} {mark(best, board)}".rstrip())
    if said:
        return "; ".join(said)
    over = board.over_first(best)
    judged = all(row in board.sound for row in board.taken if row.index <= best.index)
    if judged and board.ladder != QUICK and over and verdict(over, board.delta) == "faster":
        return (
            f"none of a single rung; all together {judged_briefly(over, None)} {mark(best, board)}".rstrip()
        )
    return "none beyond the noise"


def _most_spent(board: Scoreboard, row: Row) -> list[str]:
    """Kinds of work that take most of a step, with their shares."""
    records = board.records_of(row)
    if not (spent := work_of(records)):
        return []
    whole = median(sum(kinds.values()) for kinds in profiled(records).values())
    words = {"products": "matmuls", "optimizer": "AdamW"}
    named = [(kind, seconds / whole) for kind, seconds in spent if kind not in ("other", "rest")][:3]
    shown = {words.get(kind, WORK[kind][0].lower()): share for kind, share in named if share >= 0.05}
    said = [f"{name} {whole_percent(share)}" for name, share in shown.items()]
    rest = 1 - sum(shown.values())
    return [*said, f"all else {whole_percent(rest)}"] if said and rest >= 0.01 else said


def marks(board: Scoreboard) -> Iterator[str]:
    """What the marks behind rows mean."""
    shown = "".join(mark(row, board) for row in board.taken)
    if "†" in shown:
        others = dict.fromkeys(row.tokens_per_step for row in board.taken if "†" in mark(row, board))
        sizes = " or ".join(f"{size:,}" for size in others) if len(others) <= 2 else "Other numbers of"
        yield f"† {sizes} tokens per step, not {first_step_tokens(board):,}, so losses do not compare."
    if "*" in shown:
        yield "* Changes the maths: another training, never called the fastest."
    if "!" in shown:
        yield "! A warning is about it; never called the fastest."


def warnings_by_weight(board: Scoreboard) -> list[str]:
    """What speaks against the figures, first what can change them most."""
    found = [*beyond_peak(board), *ended_early(board), *noise_warnings(board)]
    return [plain(line) for line in dict.fromkeys([*found, *warnings(board)])]


def bar(share: float, columns: int = BAR_COLUMNS) -> str:
    """A bar of whole and partial blocks; a share of 1 is as long as `columns`."""
    whole, part = divmod(round(8 * columns * share), 8)
    return "█" * whole + (EIGHTHS[part] if part else "")


def _memory(row: Row, board: Scoreboard) -> str:
    """Peak memory; empty where another method measured it than the first rung's, which does not compare."""
    size = row.peak_memory_bytes
    if size is None or other_method(row, board):
        return ""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"
