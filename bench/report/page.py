"""Scoreboards as one HTML file that needs nothing else: tables that sort, raw samples, pictures, rungs compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bench.analysis.cross_run import Chain
from bench.analysis.row import Row
from bench.analysis.run_records import tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import gib, loss, number, percent, plain
from bench.records.published import Published
from bench.report import across, chained
from bench.report.overview import overview
from bench.report.plots.pictures import of_all, pictures
from bench.report.plots.style import THEMES
from bench.report.published import sheets as published_sheets
from bench.report.table import Sheet
from bench.report.tables import sheets
from gpt2.strict_json import dumps

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Picture:
    label: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    """Of the page: all runs side by side, one run, or the figures of others."""

    title: str
    tables: Sequence[Sheet]
    pictures: Sequence[Picture] = ()
    environment: str = ""
    samples: Sheet | None = None


def page(
    boards: Sequence[Scoreboard],
    figures: Sequence[Published] = (),
    price_per_hour: float | None = None,
    chain: Chain | None = None,
) -> str:
    """The file's text. What comes from results files is text in it, never markup or script."""
    first = (chained.sheet(chain) if chain else None, overview(boards))
    together = [*(sheet for sheet in first if sheet), *across.sheets(boards, figures)]
    drawn = []
    if len(boards) > 1:
        drawn = [_picture(what, "all runs", svg, f"all-{what}") for what, svg in of_all(boards).items()]
    sections = []
    if together or drawn:
        sections.append(Section(title="Side by side", tables=[_dense(sheet) for sheet in together], pictures=drawn))
    sections += [_section(board, place, figures, price_per_hour) for place, board in enumerate(boards)]
    sections += [Section(title=sheet.title, tables=[_dense(sheet)]) for sheet in published_sheets(figures)]
    rungs = [_rung(board, row, place) for place, board in enumerate(boards) for row in board.rows]
    data = dumps(rungs).replace("<", "\\u003c")  # no text may end the script
    # Only this page's own script may run, and a hash of what it shows is as good as a random number for that.
    nonce = sha256(data.encode()).hexdigest()[:24]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        (HERE / "page.html").read_text(encoding="utf-8")
    )
    script = (HERE / "page.js").read_text(encoding="utf-8")
    shown = {"boards": sections, "runs": len(boards), "rungs": rungs}
    return template.render(shown, data=Markup(data), script=Markup(script), nonce=nonce)


def _section(board: Scoreboard, place: int, figures: Sequence[Published], price_per_hour: float | None) -> Section:
    return Section(
        title=plain(f"{board.ladder} on {board.environment.machine}"),
        tables=[_dense(table) for table in sheets(board, price_per_hour, figures)],
        pictures=[_picture(what, board.ladder, svg, f"{place}-{what}") for what, svg in pictures(board).items()],
        environment=dumps(board.environment.model_dump(mode="json"), indent=2),
        samples=_samples(board),
    )


def _picture(what: str, of: str, svg: str, prefix: str) -> Picture:
    """An SVG document as a part of the page, in its colours and its font; `prefix` makes ids the picture's own."""
    drawing = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    drawing = re.sub("<[^>]*>", lambda tag: _tag(tag[0], prefix), drawing)  # tags alone: text stays as it is
    return Picture(label=plain(f"{what.replace('-', ' ')} of {of}"), svg=Markup(re.sub(r">\s+<", "><", drawing)))


def _tag(tag: str, prefix: str) -> str:
    """One tag of a picture: without what the page says once, and with two decimals of a point, which nobody sees."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r'font-family: [^;"]*(?:; )?', "", tag)
    tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
    for part, colour in THEMES["light"].items():
        tag = tag.replace(f": {colour.lower()}", f": var(--{part})")
    return re.sub(r'( id="|="#|url\(#)', rf"\g<1>{prefix}-", tag)


def _dense(sheet: Sheet) -> Sheet:
    """Without the columns that hold nothing."""
    shown = sheet.shown
    return Sheet(
        title=plain(sheet.title),
        head=[sheet.head[place] for place in shown],
        rows=[[row[place] for place in shown] for row in sheet.rows],
        words=frozenset(n for n, place in enumerate(shown) if place in sheet.words),
        first=sheet.first,
        notes=sheet.notes,
        beneath=sheet.beneath,
    )


def _samples(board: Scoreboard) -> Sheet:
    rows = []
    for record in board.records:
        found = record.measurement
        if found is None or not found.block_seconds or found.tokens_per_second is None:
            continue
        blocks = " ".join(f"{seconds:.4g}" for seconds in found.block_seconds)
        cells = [plain(record.rung), record.kind, str(record.repetition), number(found.tokens_per_second)]
        rows.append([*cells, str(found.block_steps), blocks])
    head = ["Rung", "Kind", "Round", "TPS", "Steps per block", "Seconds of each block"]
    return Sheet(title="Raw samples", head=head, rows=rows, words=frozenset({0, 1, 5}), notes=())


def _rung(board: Scoreboard, row: Row, run: int) -> dict[str, Any]:
    """What the page must know to compare it with another."""
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
        "name": plain(f"{board.ladder} on {machine.machine}: {row.rung}"),
        "run": run,
        "status": row.status,
        "task": {key: workload[key] for key in ("model", "seq_len")},
        "tps": {f"{repetition} {session}": tps for (repetition, session), tps in tps_by_round(records).items()},
        "facts": {name: value if value is None else plain(str(value)) for name, value in facts.items()},
    }
