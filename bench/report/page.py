"""Runs as one self-contained HTML file: the answer and a chart first, every table one click away.

The charts are drawn by the page's own script from the data within it: figures and their texts come from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bench.analysis.attribution import GAINS, Attribution, Gain, attribution
from bench.analysis.bound import limit_tps
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import group_by, measurements, varying
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import faster_elsewhere, fastest_rung
from bench.analysis.turns import Turns
from bench.format import (
    floor,
    gib,
    judged,
    judged_briefly,
    loss,
    number,
    plain,
    plural,
    ratio,
    times,
    tokens_per_second,
    verdict_word,
    whole_percent,
)
from bench.records.published import Published
from bench.records.record import Record
from bench.report.assembly import Report
from bench.report.folder import FASTER, faster_in_words, stems
from bench.report.one_run.caption import first_step_tokens
from bench.report.one_run.peers import peer_results
from bench.report.one_run.screen import (
    MFU,
    fastest_of_first_step,
    findings,
    keeps,
    marks,
    share_of_limit,
    swept_toggles,
    title,
    warnings_by_weight,
    why_not_counted,
)
from bench.report.one_run.tables import WORK, gain_text, work_of
from bench.report.several_runs.atlas import parted
from bench.report.several_runs.tables import fastest_published
from bench.report.several_runs.trainers import machines_of, task_of
from bench.report.table import Table
from bench.report.titles import hardware_title, machine_titles, model_title_of, told_apart
from bench.stats import Estimate
from gpt2.config.toggles import Toggles
from gpt2.files.strict_json import dumps

HERE = Path(__file__).parent
NO_TASK = ", which does not say what model was trained"
Share = tuple[str, Callable[[Row], str]]
"""What the speeds of a run are shares of, and a rung's share in words."""


def page(report: Report) -> str:
    """The file's text. What comes from results files is text in it, never markup or script."""
    boards = report.boards
    chosen = boards.index(max(boards, key=_tells_most)) if boards else 0
    shown = {
        "chosen": chosen,
        "runs": [
            {
                "address": quote(stem, errors="replace"),
                **_run(board, hardware, report.price_per_hour),
                "elsewhere": _elsewhere(board, boards),
            }
            for stem, board, hardware in zip(stems(boards), boards, machine_titles(boards), strict=True)
        ],
        "machines": list(_machines(report)),
        "published": [_published(table) for table in report.published],
        "turns": list(_turns(report.turns)),
    }
    data = dumps(shown).replace("<", "\\u003c")  # no text may end the script
    # Only this page's own script may run, and a hash of what it shows is as good as a random number for that.
    nonce = sha256(data.encode()).hexdigest()[:24]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["plain"] = plain
    template = environment.from_string((HERE / "page.html").read_text(encoding="utf-8"))
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return template.render(
        shown=shown,
        atlas=parted(report.atlas) if report.atlas else (),
        several_runs=[*report.opening, *report.several_runs],
        published=report.published,
        folded=[_tables(board, tables) for board, tables in zip(boards, report.runs, strict=True)],
        data=Markup(data),
        script=Markup(script),
        nonce=nonce,
    )


def _elsewhere(board: Scoreboard, boards: Sequence[Scoreboard]) -> dict[str, Any] | None:
    """The run of this machine that has a faster rung: its place in the selector, and what is said of it."""
    if (best := faster_elsewhere(board, boards)) is None:
        return None
    return {
        "run": _place(best.board, boards),
        "said": f"{FASTER}{plain(faster_in_words(best, board))}, in ",
    }


def _place(board: Scoreboard, boards: Sequence[Scoreboard]) -> int:
    """Place of a run, or of its own rungs alone, in the selector."""
    return next(n for n, each in enumerate(boards) if each.records is board.records)


def _tells_most(board: Scoreboard) -> tuple[bool, int, float]:
    """What decides which run the page shows first: the one with most rungs that stand on one another."""
    measured = [row.mean_tps for row in board.own.rows if row.tps]
    return board.climbs, len(measured), max(measured, default=0.0)


# --- The data of the charts: each figure once as a number and once as the text that tables show


def _run(board: Scoreboard, hardware: str, price_per_hour: float | None) -> dict[str, Any]:
    """A run of the selector: its answer, the rows of its climb, and what each change buys."""
    ours, results = peer_results(board)
    share = _share(board)
    peers = {
        result.peer.row.index: judged(result.ratio, result.verdict) for result in results if result.ratio
    }
    return {
        "title": plain(board.title),
        "ladder": plain(board.ladder),
        "machine": plain(board.environment.machine),
        "hardware": plain(hardware),
        "about": plain(title(board)),
        "task": board.task,
        "limit": limit_tps(board, board.fastest) if board.fastest else None,
        "swept": board.swept,
        "keeps": keeps(board) or _values(board),
        "answer": list(_answer(board, share)),
        "findings": [
            plain(line) for line in (*findings(board, price_per_hour, settings=True), *marks(board))
        ],
        "warnings": [plain(line) for line in warnings_by_weight(board)],
        "rows": [_row(board, row, share, peers.get(row.index)) for row in board.rows],
        "ours": plain(f"{ours.row.rung}, {ours.row.tokens_per_step or 0:,} tokens per step")
        if ours
        else None,
        "attribution": [_attributed(each) for each in attribution(board)],
        "gains": list(GAINS.values()),
        "noise": floor(board.delta) if board.delta is not None else None,
        "band": [1 / (1 + board.delta), 1 + board.delta] if board.delta is not None else None,
    }


def _values(board: Scoreboard) -> str:
    swept = swept_toggles(board)
    return f"Values of {', '.join(swept)}." if swept else ""


def _answer(board: Scoreboard, share: Share) -> Iterator[tuple[str, str]]:
    """The large figures, each with what it is; one that is absent is left out."""
    best = board.fastest
    if best is None:
        yield "no result", "no rung is without a failed check or a warning"
        return
    alike = fastest_of_first_step(board, best)
    steps = f", {best.tokens_per_step:,} tokens per step" if alike and best.tokens_per_step else ""
    yield f"{number(best.mean_tps)} tokens/s", f"fastest: {plain(best.rung)}{steps}"
    if over := board.over_first(best):
        low, high = over.low, over.high
        sure = f", {low:.2f}x to {high:.2f}x at 95 %" if low is not None and high is not None else ""
        same = ""
        if alike and alike.speedup:
            step = f"{plain(board.rows[0].rung)}'s {first_step_tokens(board):,} tokens per step"
            same = f"; with {step} {times(alike.speedup.value)}, {plain(alike.rung)}"
        yield times(over.value), f"over {plain(board.rows[0].rung)}{sure}{same}"
    of, of_row = share
    if most := limit_tps(board, best):
        yield whole_percent(best.mean_tps / most), f"of its limit, {number(most)} tokens/s"
    elif reached := of_row(best):
        yield reached, of


def _row(board: Scoreboard, row: Row, share: Share, ours_over_it: str | None) -> dict[str, Any]:
    """A row of the climb. ours_over_it: for another trainer, our fastest rung's speed over its."""
    records = board.records_of(row)
    words, (of, of_row), over_first = why_not_counted(row), share, board.over_first(row)
    not_counted = words or ("; ".join(row.caveats) or None)
    short = status_of(row) if words else "other maths" if row.other_maths else "a warning is about it"
    figures = {
        "tokens/s": tokens_per_second(row.tps) if row.tps else None,
        "over the rung before": judged(row.gain, row.verdict) if row.gain else None,
        "ours over it": ours_over_it,
        "over the first rung": ratio(over_first) if over_first else None,
        of: of_row(row) or None,
        "peak memory": f"{gib(row.peak_memory_bytes)} GiB" if row.peak_memory_bytes is not None else None,
        f"loss at step {board.loss_step}": loss(row.loss) if row.loss is not None else None,
        "instead of figures" if row.tps is None else "not counted": not_counted,
    }
    values = ", ".join(str(getattr(row.toggles, toggle)) for toggle in swept_toggles(board))
    return {
        "name": plain(row.rung),
        "label": values or plain(row.rung),
        "other_trainer": row.external is not None,
        "sound": words is None and not row.caveats,
        "words": plain(f"{number(row.tps.value)}, {short}" if row.tps and not_counted else words or ""),
        "tps": _bounds(row.tps),
        "gain": _bounds(row.gain),
        "said": f"{number(row.tps.value)}{_gain(row)}" if row.tps else "",
        "verdict": row.verdict,
        "figures": {name: plain(text) for name, text in figures.items() if text},
        "caveats": [plain(each) for each in row.caveats],
        "changed": [plain(each) for each in row.changed],
        "proofs": list(_proofs(board, row)),
        "work": _work(records),
        "blocks": _blocks(records),
        "command": plain(records[0].command),
        "error": plain(row.error) if row.error else None,
    }


def _share(board: Scoreboard) -> Share:
    """What the speeds of a run are shares of, and a rung's share in words, empty where it is not known."""
    name, share = share_of_limit(board)
    of = "of the chip's peak (MFU)" if name == MFU else name
    return of, lambda row: whole_percent(share(row))


def _gain(row: Row) -> str:
    if row.external:
        return ", another trainer"
    return f", {times(row.gain.value)} {verdict_word(row.verdict)}".rstrip() if row.gain else ""


def _bounds(estimate: Estimate | None) -> list[float | None] | None:
    return [estimate.value, estimate.low, estimate.high] if estimate else None


def _proofs(board: Scoreboard, row: Row) -> Iterator[tuple[str, str]]:
    """Evidence for each toggle that the rung changes, as its first process with a proof took it."""
    before = board.rung_before(row)
    changed = varying(before.toggles if before else Toggles(), row.toggles)
    taken = (m.proofs for m in measurements(board.records_of(row)) if m.proofs)
    for name, proof in next(taken, {}).items():
        if name in changed:
            yield f"{name}={getattr(row.toggles, name)}", plain(proof.evidence)


def _work(records: Sequence[Record]) -> list[tuple[str, float, str]]:
    """Kinds of work of a step with their milliseconds, the largest first."""
    each = [(WORK[kind][0], 1e3 * seconds) for kind, seconds in work_of(records) if seconds]
    return [(title, ms, f"{number(ms)} ms") for title, ms in each]


def _blocks(records: Sequence[Record]) -> list[list[str]]:
    """Round, tokens per second, and the seconds of each block of each process that was timed."""
    timed = [(r.repetition, r.measurement) for r in records if r.measurement and r.measurement.block_seconds]
    return [
        [str(repetition), number(m.tokens_per_second), " ".join(f"{each:.4g}" for each in m.block_seconds)]
        for repetition, m in timed
        if m.tokens_per_second is not None
    ]


def _attributed(rung: Attribution) -> dict[str, Any]:
    gains: list[Gain] = [getattr(rung, name) for name in GAINS]
    return {
        "name": plain(rung.rung),
        "agreement": rung.agreement,
        "gains": [{"ratio": _bounds(gain.ratio), "said": gain_text(gain)} for gain in gains],
    }


def _machines(report: Report) -> Iterator[dict[str, Any]]:
    """For each model and length of sequences the fastest rung of each machine, and published figures."""
    fastest = [rung for board in report.boards if (rung := fastest_rung(board.own))]
    for (model, length), rungs in group_by(fastest, lambda rung: rung.board.task).items():
        slowest_first = sorted(rungs, key=lambda rung: (not rung.row.caveats, rung.row.mean_tps))
        once = {rung.environment.machine: rung for rung in slowest_first}
        titles = told_apart([(hardware_title(rung), rung.environment.machine) for rung in once.values()])
        measured = [
            {
                "name": plain(title),
                "tps": _bounds(rung.row.tps),
                "said": plain(
                    f"{rung.tps_cell}, {rung.row.rung}" + f" ({rung.incomplete})" * bool(rung.incomplete)
                ),
                "run": _place(rung.board, report.boards),
            }
            for title, rung in zip(titles, once.values(), strict=True)
        ]
        figures = fastest_published(report.figures, (model, length))
        rows = [*measured, *map(_figure, figures)]
        rows.sort(key=lambda row: -row["tps"][0])
        name = model_title_of(rungs[0].board)
        yield {"title": plain(f"{name}, T = {length}"), "rows": rows}


def _figure(figure: Published) -> dict[str, Any]:
    assert figure.tps
    return {
        "name": plain(f"{figure.on} ({figure.source})"),
        "tps": [figure.tps, None, None],
        "said": f"{number(figure.tps)}, {plain(figure.label or figure.rung)}, published",
    }


def _turns(turns: Sequence[Turns]) -> Iterator[dict[str, Any]]:
    """For each file of bench turns the speed of ours over that of each other trainer."""
    titles = machines_of(turns)
    for source, of_file in group_by(turns, lambda each: each.source).items():
        first = of_file[0]
        where = f"{first.ladder} on {titles[first.environment.machine]}"
        rows = [
            {
                "name": plain(each.trainer),
                "ratio": _bounds(each.ratio),
                "said": f"{judged_briefly(each.ratio, each.verdict)}"
                f"{'' if verdict_word(each.verdict) else ', no verdict'}; "
                f"{number(each.ours_tokens_per_second.value)} against {number(each.tokens_per_second.value)}",
            }
            for each in of_file
        ]
        yield {
            "machine": plain(first.environment.machine),
            "task": first.task,
            "title": plain(", ".join(filter(None, (where, task_of(first))))),
            "about": plain(f"{source.as_posix()}, {first.time.date()}{'' if first.task else NO_TASK}"),
            "rows": rows,
        }


def _published(table: Table) -> dict[str, Any]:
    """A series as bars: one for each of its figures that states tokens per second."""
    stated = [figure for figure in table.rows if figure.tps]
    labels = [figure.label or figure.rung for figure in stated]
    alike = len(set(labels)) < len(labels)
    names = [
        f"{label} on {figure.on}" if alike else label for label, figure in zip(labels, stated, strict=True)
    ]
    several_machines = not alike and len({figure.on for figure in stated}) > 1
    several_models = len({figure.model for figure in stated}) > 1

    def said(figure: Published) -> str:
        assert figure.tps
        on = f" on {figure.on}" if several_machines else ""
        of = f", {figure.model or 'model not stated'}" if several_models else ""
        return plain(f"{number(figure.tps)}{on}{of}, published")

    rows = [
        {**_figure(figure), "name": plain(name), "said": said(figure)}
        for name, figure in zip(names, stated, strict=True)
    ]
    return {"title": plain(table.title), "rows": rows}


# --- Tables


def _tables(board: Scoreboard, tables: Sequence[Table]) -> dict[str, Any]:
    """All tables of one run, folded on the page."""
    what = f"{board.title}: {plural(len(board.rows), 'rung')}, {plural(board.rounds, 'round')}"
    environment = dumps(board.environment.model_dump(mode="json"), indent=2)
    return {"title": what, "tables": tables, "environment": environment}
