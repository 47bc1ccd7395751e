"""What the commands beside `bench run` print: the answer first, one table, no cell wrapped, three notes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from rich.cells import cell_len
from shown import check_golden

from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_boards
from bench.analysis.several_runs.compare import compare, sides
from bench.analysis.several_runs.rungs import build_chain, load_baseline
from bench.cli import dry_run
from bench.cli.machine import doctor_brief
from bench.cli.turns import turns_brief
from bench.host.checks import Diagnosis
from bench.ladder.ladder import load
from bench.records.machine import Environment
from bench.report.assembly import assemble, short
from bench.report.brief import Brief
from bench.report.folder import pages
from bench.report.one_run.roofline import ladder_lines, roofline_brief
from bench.report.several_runs.comparison import comparison_brief
from bench.report.several_runs.tables import overview_brief
from bench.report.table import Column, Table
from bench.run.turns.interleave import CONTROL, Group, Pair
from gpt2.config.workload import Workload
from gpt2.hardware.peaks import named

ZEN5 = "results/amd-epyc-26-2-1-x2/cpu-20261125T050205Z.jsonl"
EPYC = "results/amd-epyc-x2/cpu-20261124T211607Z.jsonl"
XEON = "results/intel-xeon-x2/cpu-20261122T155152Z.jsonl"
ZEN3_CLIMB = "results/amd-epyc-25-1-1-x2/cpu-20261128T110927Z.jsonl"
ZEN4_CLIMB = "results/amd-epyc-25-17-1-x2/cpu-20261127T220339Z.jsonl"
XEON_BEFORE = "results/intel-xeon-x2/cpu-20261121T150006Z.jsonl"
TURNS = "results/amd-epyc-26-2-1-x2/turns-peers-cpu-20261125T061011Z.json"


def compared(*runs: str) -> Brief:
    ((first, *others),) = sides(runs or (ZEN5, EPYC))
    return comparison_brief([compare(first, other) for other in others])


def climbs_compared() -> Brief:
    return compared(ZEN3_CLIMB, ZEN4_CLIMB)


def runs() -> Brief:
    boards, _ = load_boards([Path("results/h200-x1"), Path(ZEN5), Path(EPYC), Path(XEON)])
    return overview_brief(boards)


def turns() -> Brief:
    ladder = load(Path("ladders/peers-cpu.yaml"))
    kept_turns, parts = json.loads(Path(TURNS).read_text()), []
    for group in kept_turns["groups"]:
        pairs = [Pair(rung=pair["rung"], over=pair["over"]) for pair in group["pairs"]]
        for pair, kept in zip(pairs, group["pairs"], strict=True):
            pair.starts = [list(zip(took["over"], took["rung"], strict=True)) for took in kept["starts"]]
        both = [name.removesuffix(CONTROL) for pair in pairs for name in (pair.over, pair.rung)]
        part = Group(rungs=[ladder.rung(name) for name in dict.fromkeys(both)], pairs=pairs)
        part.failed, part.stolen_cores = group["failed"], group["stolen_cores"]
        parts.append(part)
    return turns_brief(ladder, parts, 1, Environment(**kept_turns["environment"]))


def zen5() -> Scoreboard:
    (board,), _ = load_boards([Path(ZEN5)])
    return board


def roofline() -> Brief:
    ceiling = zen5().ceilings["cpu"].measured[0]
    return roofline_brief(ceiling, 2 * ceiling.best.flops_per_second, Workload())


def roofline_of_a_ladder() -> Brief:
    board, ladder = zen5(), load(Path("ladders/cpu.yaml"))
    ceiling = board.ceilings["cpu"].measured[0]
    lines = ladder_lines(ladder, "cpu", ceiling, board)
    return roofline_brief(ceiling, None, ladder.workload, lines, title="cpu", source=f"Measured: {ZEN5}.")


def plan() -> Brief:
    ladder = load(Path("ladders/h200.yaml"))
    return dry_run.plan(ladder, ladder.rungs, named("RTX 4090"))


def doctor() -> Brief:
    faults = "2.15 us per 4 KiB: 108 ms for each new 206 MB tensor, 19 ms in huge pages"
    remedy = "on a CPU, every step pays this: set toggles.allocator to jemalloc or tcmalloc, or to thp"
    return doctor_brief(
        [
            Diagnosis(name="CPU governor", value="performance", ok=True),
            Diagnosis(name="SMT", value="off"),
            Diagnosis(name="other work", value="others keep 1.00 cores busy", ok=False, advice="stop them"),
            Diagnosis(name="noise", value="24.8% spread of equal blocks", ok=False, advice="more rounds"),
            Diagnosis(name="page faults", value=faults, ok=False, advice=remedy),
            Diagnosis(name="jemalloc", value="missing", advice="apt-get install libjemalloc2"),
            Diagnosis(name="code", value="commit cbb3d750ea, changed since", ok=False, advice="commit first"),
        ]
    )


ANSWERS = {
    "compare": compared,
    "compare-climbs": climbs_compared,
    "runs": runs,
    "turns": turns,
    "roofline": roofline,
    "roofline-ladder": roofline_of_a_ladder,
    "plan": plan,
    "doctor": doctor,
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the paths of results are as they are shown


def text(brief: Brief, width: int) -> str:
    return "\n".join(map(str, brief.lines(width))) + "\n"


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_shown_as_it_was_looked_at_and_no_wider_than_the_terminal(name: str) -> None:
    brief = ANSWERS[name]()
    for width in (80, 100, 200):
        shown = text(brief, width)
        assert max(map(cell_len, shown.splitlines())) <= min(width, 100)
        check_golden(f"{name}-{width}", shown)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_runs_chained_from_a_baseline_begin_with_the_fastest_of_all(width: int) -> None:
    boards, _ = load_boards([Path(ZEN3_CLIMB), Path(ZEN4_CLIMB)])
    chain = build_chain(boards, load_baseline(f"{ZEN3_CLIMB}:baseline"))
    lines = [str(line) for line in short(assemble(boards, chain=chain), width)]
    fastest = "batch of 4 on amd-epyc-25-17-1-x2, 422 tokens/s."
    chained = lines.index("From one baseline: 2 runs chained")
    assert fastest in " ".join(lines[:3])
    assert any(line.startswith("  baseline ") or "  baseline  " in line for line in lines[chained:])


def test_a_table_without_a_row_has_no_line_but_a_head() -> None:
    lines, about = table(name=[], first=[]).to_lines(60)
    assert ([line.plain for line in lines], about) == ([""], [])


def test_names_that_would_look_alike_are_cut_in_the_middle_by_the_room_that_they_take() -> None:
    wide = "中文名字很長很長很長很長很長"
    names = ["nanoGPT compiled with jemalloc", "nanoGPT compiled with AdamW", f"{wide}甲", f"{wide}乙"]
    lines = [line.plain.strip() for line in table(name=names, first=["1"] * 4).to_lines(24)[0][1:]]
    assert [line.split("…")[1].split() for line in lines[:2]] == [["th", "jemalloc"], ["with", "AdamW"]]
    assert [line.count("…") for line in lines] == [1] * 4
    assert len(set(lines)) == 4


def test_the_narrow_form_stands_where_there_is_no_room_for_a_column() -> None:
    whole, narrow = (table(name=["a"], wanted=["3"], gain=[gain]) for gain in ("1.00x ±10% unclear", "1.00x"))
    whole = replace(whole, narrow=narrow, narrow_for="wanted")
    shown = [whole.to_lines(width)[0][1].plain.split() for width in (60, 24, 12)]
    assert shown == [["a", "3", "1.00x", "±10%", "unclear"], ["a", "3", "1.00x"], ["a"]]


def table(**columns: list[str]) -> Table:
    def column(place: int, title: str, cells: list[str]) -> Column[int]:
        return Column(title, lambda row: cells[row], words=title == "name", drop=place or None)

    made = [column(place, *each) for place, each in enumerate(columns.items())]
    return Table(title="t", columns=made, rows=range(len(columns["name"])))


def test_columns_that_do_not_fit_are_dropped_in_their_order_and_then_names_are_cut() -> None:
    wide = table(name=["a" * 40, "b"], first=["1" * 20, "2"], last=["3" * 20, "4"])
    assert wide.to_lines(60)[0][0].plain.split() == ["name", "last"]
    assert wide.to_lines(30)[0][1].plain == f"  {'a' * 27}…"


def test_a_number_and_what_follows_it_are_aligned_each_for_itself() -> None:
    lines, _ = table(name=["a", "b"], speed=["9 ±1 %", "100 ±20 %"]).to_lines(80)
    assert [line.plain for line in lines[1:]] == ["  a       9 ±1 %", "  b     100 ±20 %"]


def test_no_more_than_three_notes_are_printed_and_the_others_counted() -> None:
    said = ["n1", "n2", "n3"]
    shown = text(Brief(answer=["yes"], table=table(name=["a"]), warnings=["w1", "w2"], notes=said), 80)
    assert [word for word in ("w1", "w2", *said) if word in shown] == ["w1", "w2", "n1"]
    assert "2 more notes: --full" in shown


def test_files_that_are_named_have_a_page_each_though_they_are_of_one_ladder_and_machine() -> None:
    boards, _ = load_boards([Path(XEON), Path(XEON_BEFORE)])
    assert pages(boards) == ["intel-xeon-x2/cpu.md", "intel-xeon-x2/cpu-20261121T150007.md"]


def test_of_a_folder_one_run_of_a_ladder_is_shown_and_the_others_are_listed() -> None:
    others: list[Scoreboard] = []
    boards, _ = load_boards([Path("results/intel-xeon-x2")], passed_over=others)
    assert XEON in [str(board.source) for board in boards]
    assert XEON_BEFORE in [str(board.source) for board in others]
