"""The files that `bench report --out` writes: an index, a page for each run, comparisons and others' figures.

for name, text in files(report).items(): (out / name).write_text(text)
rewrite(Path("README.md"), text)  # between its two markers
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import RungView, faster_elsewhere
from bench.analysis.several_runs.steps import steps
from bench.errors import BenchError
from bench.format import DASH, markdown, number, plain, plural, times
from bench.report.assembly import Report
from bench.report.one_run.caption import rung_and_speed
from bench.report.one_run.screen import limit_of, screen_markdown
from bench.report.one_run.tables import loss_curves
from bench.report.several_runs.atlas import TITLE, pictured
from bench.report.table import Table, notes_to_markdown, share_notes
from bench.report.titles import machine_titles, task_title
from gpt2.files.atomic import atomic_text

FASTER = "Most tokens per second on this machine: "
"""What begins a line on another run, on the page of a run."""
INDEX, COMPARISONS, PUBLISHED = "scoreboard.md", "comparisons.md", "published.md"


Drawn = Callable[[str], bool]
"""Whether a picture is there, by its path in the folder without its ending."""


def files(report: Report, *, drawn: Drawn = lambda picture: True) -> dict[str, str]:
    """The text of each file, by its path within the folder."""
    names, boards = pages(report.boards), report.boards
    written = {INDEX: _index(report, names, drawn)}
    page_of = dict(zip(map(id, boards), names, strict=True))
    for board, name, stem, tables in zip(boards, names, stems(boards), report.runs, strict=True):
        screen = screen_markdown(board, "#", price_per_hour=report.price_per_hour)
        if best := faster_elsewhere(board, boards):
            link = f"[{markdown(best.board.ladder)}]({Path(page_of[id(best.board)]).name})"
            screen += f"\n{FASTER}{markdown(faster_in_words(best, board))}, in {link}.\n"
        written[name] = "\n".join([screen, *_details(board, tables, f"plots/{stem}", drawn)])
    if together := [*report.together, *report.opening]:
        written[COMPARISONS] = _page("Runs side by side", together)
    if report.published:
        written[PUBLISHED] = _page("Published by others", report.published)
    return written


def pages(boards: Sequence[Scoreboard]) -> list[str]:
    """The file of each run's page."""
    return [f"{name}.md" for name in _told_apart(boards, "/")]


def stems(boards: Sequence[Scoreboard]) -> list[str]:
    """The beginning of the names of each run's pictures."""
    return _told_apart(boards, "-")


def _told_apart(boards: Sequence[Scoreboard], between: str) -> list[str]:
    """Names of machine and ladder; of a second run of these, also when it began."""
    found: list[str] = []
    for board in boards:
        name = f"{board.environment.machine}{between}{board.file_name}"
        found.append(f"{name}-{re.sub(r'[^0-9T]', '', board.begun[:19])}" if name in found else name)
    return found


def _index(report: Report, files: Sequence[str], drawn: Drawn) -> str:
    page_of = dict(zip(map(id, report.boards), files, strict=True))
    lines = ["# Results", ""]
    if drawn("plots/summary") and steps(report.everything, report.figures):
        alt = "Tokens per second from the slowest hardware to the fastest rung"
        lines += [*_picture("plots/summary", alt), ""]
    lines += [*_fastest_runs(report.boards, page_of), ""]
    if report.opening or report.together:
        lines.append(f"Machines and sizes side by side: [{COMPARISONS}]({COMPARISONS}).")
    if report.published:
        lines.append(f"Figures that others have published: [{PUBLISHED}]({PUBLISHED}).")
    lines.append("")
    if drawn("plots/atlas") and pictured(report.everything, report.figures):
        lines += [f"## {TITLE}", "", *_picture("plots/atlas", "The gain of each change on each machine"), ""]
        lines += [f"All changes, those measured once too: [{COMPARISONS}]({COMPARISONS}).", ""]
    lines += _by_machine(report.boards, page_of, drawn)
    if older := report.passed_over:
        lines += ["## Other runs of these ladders", ""]
        lines += ["Shorter, older or interrupted; bench report FILE shows each.", ""]
        lines += [f"- {board.source.as_posix()}: {_said(board)}" for board in older if board.source]
    return "\n".join(lines).rstrip() + "\n"


def _fastest_runs(boards: Sequence[Scoreboard], page_of: Mapping[int, str]) -> Iterator[str]:
    """A table of the fastest run of each machine and model. page_of: the page of a run, by its id()."""
    yield "The fastest run of each machine and model; ?: its lead over the other rungs may be noise."
    yield ""
    yield "| machine | model | rung | tokens/s | over first | MFU or share of limit |"
    yield "|---|---|---|--:|--:|--:|"
    ranked = sorted(boards, key=lambda board: (task_title(board), -_most(board)))
    seen: set[tuple[str, str]] = set()
    for board, hardware in zip(ranked, machine_titles(ranked), strict=True):
        key = (task_title(board), board.environment.machine)
        fastest = board.fastest
        if fastest is None or key in seen:
            continue
        seen.add(key)
        over = board.over_first(fastest)
        cells = [
            markdown(hardware),
            markdown(task_title(board)),
            f"[{markdown(fastest.rung)}]({page_of[id(board)]}){'' if board.clear_lead else ' ?'}",
            f"{number(fastest.mean_tps)}{', interrupted' if board.interrupted else ''}",
            f"{times(over.value)} over {markdown(board.rows[0].rung)}" if over else DASH,
            limit_of(board, fastest) or DASH,
        ]
        yield f"| {' | '.join(cells)} |"


def _by_machine(boards: Sequence[Scoreboard], page_of: Mapping[int, str], drawn: Drawn) -> Iterator[str]:
    """Links to all runs of each machine, and the picture of the one with most rungs."""
    stem_of = dict(zip(map(id, boards), stems(boards), strict=True))
    for machine, runs in sorted(group_by(boards, lambda board: board.environment.machine).items()):
        yield from (f"## {markdown(machine)}", "")
        climbs: list[Scoreboard] = []
        for board in runs:
            yield f"- [{markdown(board.ladder)}]({page_of[id(board)]}): {_said(board)}"
            climbs += [board] if board.climbs else []
        yield ""
        main = max(climbs, key=lambda board: len(board.rows), default=None)
        if main is not None and drawn(climb := f"plots/{stem_of[id(main)]}-climb"):
            yield from (*_picture(climb, f"The climb of {main.ladder} on {machine}"), "")


def _said(board: Scoreboard) -> str:
    """Rungs, rounds and the fastest rung, in a few words."""
    what = f"{plural(len(board.rows), 'rung')}, {plural(board.rounds, 'round')}"
    what += ", interrupted" if board.interrupted else ""
    fastest = board.fastest
    return f"{what}; {markdown(fastest.rung)} {number(fastest.mean_tps)} tokens/s" if fastest else what


def faster_in_words(best: RungView, board: Scoreboard) -> str:
    """The fastest rung of this machine's runs, for the page of another one of them."""
    own, of_it = board.fastest and board.fastest.tokens_per_step, best.row.tokens_per_step
    step = f" with {of_it:,} tokens per step" if of_it and of_it != own else ""
    return f"{rung_and_speed(best.row)}{step}{f' ({best.incomplete})' if best.incomplete else ''}"


def _details(board: Scoreboard, tables: Sequence[Table], stem: str, drawn: Drawn) -> list[str]:
    """What is folded on a run's page: its tables and pictures. stem: beginning of the pictures' paths."""
    parts = [(table.title, table.to_markdown("###").split("\n", 2)[2]) for table in tables]
    pictures = {
        f"{stem}-rungs": ("Speed, speed-up, share of the limit and memory", any(r.tps for r in board.rows)),
        f"{stem}-loss-by-step": ("Loss by step", bool(loss_curves(board))),
    }
    for path, (shows, has_any) in pictures.items():
        if has_any and drawn(path):
            picture = _picture(f"../{path}", f"{shows} of the rungs of {board.ladder}")
            parts.append((f"{shows}, drawn", "\n".join([*picture, ""])))
    return [
        f"<details><summary>{escape(plain(title))}</summary>\n\n{body}\n</details>\n" for title, body in parts
    ]


def _page(heading: str, tables: Sequence[Table]) -> str:
    without, notes = share_notes(tables)
    texts = [table.to_markdown("##") for table in without]
    return "\n".join([f"# {heading}\n", *texts, *notes_to_markdown(notes, "##")])


def _picture(stem: str, alt: str) -> Iterable[str]:
    yield "<picture>"
    yield f'<source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">'
    yield f'<img alt="{escape(plain(alt))}" src="{stem}.svg">'
    yield "</picture>"


def _most(board: Scoreboard) -> float:
    return board.fastest.mean_tps if board.fastest else 0.0


# --- bench report --update

MARKERS = ("<!-- scoreboard: bench report --update rewrites what follows -->", "<!-- end of scoreboard -->")


def rewrite(path: Path, text: str) -> None:
    """Put `text` between the two markers of a file, whole or not at all; every byte outside them stays.

    The markers stand on lines of their own, once each. The file keeps its mode, and a link stays a link.
    Raises BenchError where the markers are missing or wrong, OSError where the file cannot be written.
    """
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    begin, end = _marked(path, lines)
    ending = lines[begin][len(lines[begin].rstrip(b"\r\n")) :]
    block = f"\n{text}\n".encode().replace(b"\n", ending)
    written = b"".join([*lines[: begin + 1], block, *lines[end:]])
    if written == content:
        return
    atomic_text(path, written)


def _marked(path: Path, lines: Sequence[bytes]) -> tuple[int, int]:
    """Indices of the two marker lines. Raises BenchError."""
    stripped = [line.removeprefix(codecs.BOM_UTF8).strip() for line in lines]
    places = [[n for n, line in enumerate(stripped) if line == marker.encode()] for marker in MARKERS]
    for marker, indices in zip(MARKERS, places, strict=True):
        if len(indices) > 1:
            stands = f"{len(indices)} times (lines {' and '.join(str(index + 1) for index in indices)})"
            raise BenchError(f"{path}: the line {marker} stands there {stands}; leave one")
    if not all(places):
        raise BenchError(f"{path}: has no lines {MARKERS[0]} and {MARKERS[1]} to write between")
    (begin,), (end,) = places
    if end < begin:
        raise BenchError(f"{path}:{end + 1}: the line {MARKERS[1]} stands before {MARKERS[0]}; put it after")
    return begin, end
