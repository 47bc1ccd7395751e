"""Scoreboards as one self-contained HTML file: sortable tables, raw samples, pictures, rungs compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bench.analysis.row import Row
from bench.analysis.run_records import tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import gib, loss, number, percent, plain
from bench.records.measurement import Measurement
from bench.records.record import Record
from bench.report.assembly import Report
from bench.report.plots.pictures import of_all, pictures
from bench.report.plots.style import THEMES
from bench.report.table import Column, Table
from gpt2.files.strict_json import dumps

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Picture:
    label: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page: all runs side by side, one run, or published figures."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()
    environment: str = ""
    samples: Table | None = None


def page(report: Report) -> str:
    """The file's text. What comes from results files is text in it, never markup or script."""
    boards = report.boards
    drawn = []
    if len(boards) > 1:
        drawn = [_picture(what, "all runs", svg, f"all-{what}") for what, svg in of_all(boards).items()]
    sections = []
    if (together := [*report.opening, *report.cross_run]) or drawn:
        sections.append(Section(title="Side by side", tables=together, pictures=drawn))
    sections += [
        _section(board, place, tables)
        for place, (board, tables) in enumerate(zip(boards, report.runs, strict=True))
    ]
    sections += [Section(title=table.title, tables=[table]) for table in report.published]
    rungs = [_rung(board, row, place) for place, board in enumerate(boards) for row in board.rows]
    data = dumps(rungs).replace("<", "\\u003c")  # no text may end the script
    # Only this page's own script may run, and a hash of what it shows is as good as a random number for that.
    nonce = sha256(data.encode()).hexdigest()[:24]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["plain"] = plain
    template = environment.from_string((HERE / "page.html").read_text(encoding="utf-8"))
    script = (HERE / "page.js").read_text(encoding="utf-8")
    shown = {"boards": sections, "runs": len(boards), "rungs": rungs}
    return template.render(shown, data=Markup(data), script=Markup(script), nonce=nonce)


def _section(board: Scoreboard, place: int, tables: Sequence[Table]) -> Section:
    return Section(
        title=board.title,
        tables=tables,
        pictures=[
            _picture(what, board.ladder, svg, f"{place}-{what}") for what, svg in pictures(board).items()
        ],
        environment=dumps(board.environment.model_dump(mode="json"), indent=2),
        samples=_samples(board),
    )


def _picture(what: str, of: str, svg: str, prefix: str) -> Picture:
    """An SVG document as a part of the page, in its colours and font; `prefix` makes its ids unique."""
    drawing = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    drawing = re.sub("<[^>]*>", lambda tag: _tag(tag[0], prefix), drawing)  # tags alone: text stays as it is
    return Picture(
        label=plain(f"{what.replace('-', ' ')} of {of}"), svg=Markup(re.sub(r">\s+<", "><", drawing))
    )


def _tag(tag: str, prefix: str) -> str:
    """One tag of a picture, without what the page says once, and with two decimals of a point."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r'font-family: [^;"]*(?:; )?', "", tag)
    tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
    for part, colour in THEMES["light"].items():
        tag = tag.replace(f": {colour.lower()}", f": var(--{part})")
    return re.sub(r'( id="|="#|url\(#)', rf"\g<1>{prefix}-", tag)


def _samples(board: Scoreboard) -> Table:
    columns: list[Column[tuple[Record, Measurement]]] = [
        Column("Rung", lambda sample: sample[0].rung, words=True),
        Column("Kind", lambda sample: sample[0].kind, words=True),
        Column("Round", lambda sample: sample[0].repetition),
        Column("TPS", lambda sample: sample[1].tokens_per_second, number),
        Column("Steps per block", lambda sample: sample[1].block_steps),
        Column(
            "Seconds of each block",
            lambda sample: " ".join(f"{seconds:.4g}" for seconds in sample[1].block_seconds),
            words=True,
        ),
    ]
    timed = [(r, r.measurement) for r in board.records if r.measurement]
    rows = [(r, m) for r, m in timed if m.block_seconds and m.tokens_per_second is not None]
    return Table(title="Raw samples", columns=columns, rows=rows)


def _rung(board: Scoreboard, row: Row, run: int) -> dict[str, Any]:
    """Facts by which the page compares a rung with another."""
    records = board.records_of(row)
    machine, workload = board.environment, records[0].workload
    facts = {
        "maths": row.maths,
        "torch": machine.torch,
        "chip": machine.chip,
        "devices of the machine": str(machine.device_count),
        "CPU": machine.cpu,
        "Python": machine.python,
        **machine.versions,
        **{f"toggles.{name}": str(value) for name, value in asdict(row.toggles).items()},
        **({"external": ", ".join(row.changed), "command": row.external.command} if row.external else {}),
        "tokens per second": number(row.tps.value) if row.tps else None,
        "MFU (bf16)": percent(row.mfu),
        "peak memory": f"{gib(row.peak_memory_bytes)} GiB" if row.peak_memory_bytes is not None else None,
        "peak memory is": row.peak_memory_method,
        "loss at step": f"{board.loss_step}: {loss(row.loss)}" if row.loss is not None else None,
        "code (hash)": machine.code_hash[:12],
        "from": board.source.as_posix() if board.source else None,
    }
    return {
        "name": plain(f"{board.title}: {row.rung}"),
        "run": run,
        "status": row.status,
        "task": {key: workload[key] for key in ("model", "seq_len")},
        "tps": {
            f"{repetition} {session}": tps for (repetition, session), tps in tps_by_round(records).items()
        },
        "facts": {name: value if value is None else plain(str(value)) for name, value in facts.items()},
    }
