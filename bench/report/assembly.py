"""All tables of a report, put together once for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import Chain, fastest_rung
from bench.analysis.turns import Turns
from bench.format import plain
from bench.records.published import Published
from bench.report import published
from bench.report.brief import Brief
from bench.report.one_run.screen import screen, screen_markdown
from bench.report.one_run.tables import tables as tables_of_run
from bench.report.several_runs.atlas import atlas_table
from bench.report.several_runs.comparison import chain_table
from bench.report.several_runs.tables import not_listed, overview, overview_brief
from bench.report.several_runs.tables import tables as tables_over_runs
from bench.report.several_runs.trainers import turns_table
from bench.report.table import NOTES_TITLE, Table, notes_to_markdown, share_notes


@dataclass(frozen=True, kw_only=True)
class Report:
    """The tables of a report, by what they are about."""

    opening: Sequence[Table]
    """The chain, if asked for, and the overview of runs, if there are several."""
    boards: Sequence[Scoreboard]
    passed_over: Sequence[Scoreboard]
    """Runs in whose place another run of the same ladder is shown."""
    runs: Sequence[Sequence[Table]]
    """The tables of each board, the scoreboard first."""
    atlas: Table | None
    """What helps on which hardware, made of all runs."""
    several_runs: Sequence[Table]
    published: Sequence[Table]
    figures: Sequence[Published] = ()
    """The published figures themselves."""
    turns: Sequence[Turns] = ()
    """Other trainers that took turns with ours."""
    price_per_hour: float | None = None

    @property
    def everything(self) -> list[Scoreboard]:
        """The runs shown and those passed over."""
        return [*self.boards, *self.passed_over]

    @property
    def together(self) -> list[Table]:
        """The atlas, the other tables over several runs, and the trainers that took turns with ours."""
        return [table for table in (self.atlas, *self.several_runs, turns_table(self.turns)) if table]

    def in_order(self) -> tuple[list[tuple[int, Table]], list[str]]:
        """All tables in order with the level of each heading, and the notes that several tables share."""
        tables = [(3, table) for table in self.opening]
        for own in self.runs:
            tables += [(4 if place else 3, table) for place, table in enumerate(own)]
        tables += [(3, table) for table in (*self.together, *self.published)]
        if len(self.boards) < 2:  # a single one is complete in itself
            return tables, []
        without, notes = share_notes([table for _, table in tables])
        return [(level, table) for (level, _), table in zip(tables, without, strict=True)], notes


def assemble(
    boards: Sequence[Scoreboard],
    figures: Sequence[Published] = (),
    price_per_hour: float | None = None,
    chain: Chain | None = None,
    passed_over: Sequence[Scoreboard] = (),
    turns: Sequence[Turns] = (),
) -> Report:
    """Build all tables of a report.

    figures: published ones, shown in tables of their own and beside ours. passed_over: from load_boards().
    turns: from load_turns().
    """
    opening = (chain_table(chain) if chain else None, overview(boards))
    return Report(
        opening=[table for table in opening if table],
        boards=boards,
        passed_over=passed_over,
        runs=[tables_of_run(board, price_per_hour, figures) for board in boards],
        atlas=atlas_table([board.own for board in (*boards, *passed_over)], figures),
        several_runs=tables_over_runs(boards, figures),
        published=published.tables(figures),
        figures=figures,
        turns=turns,
        price_per_hour=price_per_hour,
    )


def short_markdown(report: Report) -> str:
    """The overview of several runs, then each run's screen; without runs all tables of published figures."""
    tables = report.opening if report.boards else report.published
    screens = [screen_markdown(board, price_per_hour=report.price_per_hour) for board in report.boards]
    return "\n".join([*(table.to_markdown("###") for table in tables), *screens])


def short(report: Report, width: int, *, notes: bool = False) -> list[RenderableType]:
    """The same for a terminal: one table for several runs, the screen for one."""
    if len(report.boards) == 1 and not report.opening:
        (board,) = report.boards
        others = list(not_listed(report.passed_over, filter(None, [fastest_rung(board)])))
        return screen(board, width, notes=notes, price_per_hour=report.price_per_hour, others=others)
    if not report.boards:
        return [part for table in report.published for part in table.to_terminal(width)]
    several = len(report.boards) > 1
    chains = report.opening[:-1] if several else report.opening
    briefs = [overview_brief(report.boards, report.passed_over)] if several else []
    briefs += [Brief(answer=[t.title], about=t.first, table=t, notes=t.notes) for t in chains]
    return [part for n, brief in enumerate(briefs) for part in ([Text()] * bool(n) + brief.lines(width))]


def to_markdown(report: Report) -> str:
    tables, notes = report.in_order()
    texts = [table.to_markdown("#" * level) for level, table in tables]
    return "\n".join([*texts, *notes_to_markdown(notes, "###")])


def to_terminal(report: Report, width: int) -> list[RenderableType]:
    """The report for rich, in `width` columns."""
    tables, notes = report.in_order()
    parts = [part for _, table in tables for part in table.to_terminal(width)]
    if notes:
        parts.append(Text(NOTES_TITLE, style="bold"))
    return [*parts, *(Text(plain(f"{n}. {note}"), style="dim") for n, note in enumerate(notes, start=1))]
