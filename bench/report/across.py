"""Tables over all runs shown, each only where it has something to say. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.scoreboard import Scoreboard
from bench.records.published import Published
from bench.report.formats import number_formats
from bench.report.hardware import hardware, mfu_context
from bench.report.scaling import scaling
from bench.report.sizes import sizes
from bench.report.table import Sheet


def sheets(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> list[Sheet]:
    """figures: of others, beneath ours and labelled."""
    boards = [board.own for board in boards]  # what differs by toggles is ours alone
    found = [sizes(boards), mfu_context(boards, figures), number_formats(boards), scaling(boards)]
    return [*hardware(boards, figures), *(sheet for sheet in found if sheet)]
