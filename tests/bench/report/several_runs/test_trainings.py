"""Long runs side by side, from what gpt2 train wrote down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import REAL
from typer.testing import CliRunner

from bench.cli.main import app
from bench.records.record import RecordError
from bench.report.plots.trainings import _styles
from bench.report.several_runs.published_scores import PUBLISHED
from bench.report.several_runs.trainings import load, reference_lines, runs_in, tables
from gpt2.pretrain.metrics import Event, MetricsFile


def step(number: int, **values: Any) -> Event:
    measured = {"tokens": 1024 * number, "loss": 11.0 - number, "grad_norm": 1.0, "lr": 1e-3, "seconds": 2.0}
    measured |= {
        "elapsed_seconds": 10.0 + 2 * number,
        "tps": 512.0,
        "mfu": None,
        "peak_memory_bytes": 3 << 30,
    }
    return Event(kind="step", step=number, values={**measured, "wait_seconds": 0.01, **values})


def val(number: int, loss: float | None, corpus: str = "tinyshakespeare") -> Event:
    values = {"loss": loss, "tokens": 1024, "corpus": corpus, "elapsed_seconds": number}
    return Event(kind="val", step=number, values=values)


def score(number: int, style: str, acc_norm: float) -> Event:
    values = {"style": style, "acc": 0.28, "acc_norm": acc_norm, "examples": 10042, "corpus": "fineweb-edu"}
    return Event(kind="hellaswag", step=number, values=values)


LEG = Event(kind="leg", step=0, values={"chip": "H100", "devices": 8, "resumed_from": None})


def written(folder: Path, *events: Event, **run: Any) -> Path:
    folder.mkdir()
    about = {"name": folder.name, "steps": 4, "workload": {"model": "gpt2", "data": "tinyshakespeare"}}
    about |= {"toggles": {"autocast": "float32"}, **run}
    (folder / "run.json").write_text(json.dumps({"id": "1", "run": about}))
    files = MetricsFile(folder)
    for event in events:
        files.write(event)
    files.close()
    return folder


def table(*folders: Path) -> str:
    return "\n".join(table.to_markdown("##") for table in tables(load(folders)))


def cells(text: str) -> list[str]:
    """The row of the run that is called mine."""
    (row,) = [line for line in text.splitlines() if line.startswith("| mine")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_run_is_a_row_with_what_it_learnt_and_in_what_time(tmp_path: Path) -> None:
    text = table(written(tmp_path / "mine", LEG, val(0, 11.0), *map(step, range(1, 5)), val(4, 7.5)))
    assert cells(text) == [
        *("mine", "gpt2", "tinyshakespeare", "8 x H100", "float32"),
        *("4 of 4", "4,096", "18 s", "512", "3.00", "0.5%"),
        *("8.5000", "7.5000 (tinyshakespeare)", "7.5000"),
    ]


def test_a_run_that_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", LEG, step(1))
    done = CliRunner().invoke(app, ["trainings", str(folder), f"{folder}/", "--markdown"])
    assert done.output.count("| run ") == 1


def test_what_was_not_measured_is_a_dash_or_no_column(tmp_path: Path) -> None:
    text = table(written(tmp_path / "mine", LEG))
    assert "MFU" not in text
    assert "| mine | gpt2 | tinyshakespeare | 8 x H100 | float32 | 0 of 4 |" in text


def test_what_others_say_of_such_a_training_stands_beneath_and_is_named_as_theirs(tmp_path: Path) -> None:
    text = table(written(tmp_path / "mine", LEG, *map(step, range(1, 5))))
    (row,) = [line for line in text.splitlines() if "published: " in line]
    assert row.startswith(
        "| published: jjschwartz-2024 | gpt2 | tinyshakespeare | M3 laptop CPU | float32 | 1,000 |"
    )
    assert "| 26 min |" in row
    assert "not measured here" in text
    other = written(tmp_path / "other", LEG, step(1), workload={"model": "mini", "data": "tinyshakespeare"})
    assert "published" not in table(other)


def test_hellaswag_of_two_styles_never_shares_a_table(tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, score(4, "completion", 0.29), score(4, "harness", 0.31))
    completion, harness = (table for table in tables(load([run])) if table.title.startswith("HellaSwag"))
    assert [row[5] for row in completion.cells if row[0] == "mine"] == ["0.2900"]
    assert [row[5] for row in harness.cells if row[0] == "mine"] == ["0.3100"]
    others = [row for row in (*completion.cells, *harness.cells) if row[0] != "mine"]
    assert all(row[6].startswith("published") for row in others)
    assert "0.2955" in {row[5] for row in completion.cells}
    assert "0.3114" in {row[5] for row in harness.cells}
    assert "0.3114" not in {row[5] for row in completion.cells}


def test_published_scores_are_of_the_models_that_were_trained(tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, score(4, "completion", 0.29))
    (scores,) = (table for table in tables(load([run])) if table.title.startswith("HellaSwag"))
    assert {row[1] for row in scores.cells} == {"gpt2"}


def test_the_commits_that_a_run_was_trained_by_are_told(tmp_path: Path) -> None:
    legs = [
        Event(kind="leg", step=n, values={**LEG.values, "commit": commit, "changed": changed})
        for n, commit, changed in ((0, "a" * 40, False), (2, "a" * 40, False), (3, "b" * 40, True))
    ]
    told = f"Code: mine by {'a' * 12} and {'b' * 12}, changed since."
    assert told in table(written(tmp_path / "mine", *legs, step(4)))
    assert "Code" not in table(written(tmp_path / "other", LEG, step(1)))


def test_whose_weights_a_run_began_with_is_told(tmp_path: Path) -> None:
    leg = Event(kind="leg", step=0, values={**LEG.values, "begun_from": "runs/first/checkpoints/step-4"})
    told = "mine began with the weights of runs/first/checkpoints/step-4."
    assert told in table(written(tmp_path / "mine", leg, step(1)))
    assert "began with" not in table(written(tmp_path / "other", LEG, step(1)))


def test_the_number_format_told_is_that_of_the_products(tmp_path: Path) -> None:
    toggles = {"autocast": "float32", "matmul_precision": "medium", "device": "cpu"}
    text = table(written(tmp_path / "mine", LEG, toggles={**toggles, "of a later version": 1}))
    assert "| 8 x H100 | bfloat16 |" in text


def test_a_plot_has_lines_for_all_that_is_published_of_its_models_and_for_xl(tmp_path: Path) -> None:
    runs = load([written(tmp_path / "mine", LEG, score(4, "completion", 0.29))])
    assert reference_lines(runs, "completion") == [("gpt2", 0.294463, 0.2955), ("gpt2-xl", 0.488946, 0.4893)]


def test_samples_are_shown_as_they_were_written(tmp_path: Path) -> None:
    said = Event(kind="sample", step=4, values={"prompt": "Romeo", "text": " | and\nJuliet"})
    text = table(written(tmp_path / "mine", LEG, said))
    assert "| mine | 4 | Romeo | \\| and Juliet |" in text


def test_plots_are_drawn_for_all_that_there_is_to_show(tmp_path: Path) -> None:
    first = written(tmp_path / "a", LEG, val(0, 11.0), *map(step, range(1, 5)), score(4, "completion", 0.29))
    second = written(tmp_path / "b", LEG, *map(step, range(1, 5)), val(4, 3.0, "fineweb"))
    asked = ["trainings", str(first), str(second), "--plots", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    drawn = {file.name for file in (tmp_path / "out" / "plots").glob("*.svg")}
    kinds = ("loss-by-step", "loss-by-time", "speed", "hellaswag-completion")
    assert drawn == {f"trainings-{kind}{dark}.svg" for kind in kinds for dark in ("", "-dark")}
    by_step = (tmp_path / "out" / "plots" / "trainings-loss-by-step.svg").read_text()
    assert "validation is on unlike corpora" in by_step
    lines = (tmp_path / "out" / "plots" / "trainings-hellaswag-completion.svg").read_text()
    assert "(published)" in lines
    assert (tmp_path / "out" / "trainings.md").read_text().startswith("# Long runs")


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    runs = load([written(tmp_path / "x" / "mine", LEG), written(tmp_path / "y" / "mine", LEG)])
    assert [run.name for run in runs] == [str(tmp_path / "x" / "mine"), str(tmp_path / "y" / "mine")]


def test_what_holds_no_run_among_others_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = written(tmp_path / "mine", LEG, step(1))
    done = CliRunner().invoke(app, ["trainings", str(tmp_path / "empty"), str(run), "--markdown"])
    assert done.exit_code == 0, done.output
    assert "| mine |" in done.output
    assert "empty holds no run of gpt2 train" in done.output
    alone = CliRunner().invoke(app, ["trainings", str(tmp_path / "empty")])
    assert alone.exit_code == 2


def test_a_run_s_corpus_is_the_one_that_it_was_trained_on(tmp_path: Path) -> None:
    leg = Event(kind="leg", step=0, values={**LEG.values, "corpus": "own"})
    text = table(written(tmp_path / "mine", leg, step(1)))
    assert "| mine | gpt2 | own |" in text
    assert "published" not in text


def test_more_runs_than_colours_are_told_apart_by_their_lines(tmp_path: Path) -> None:
    runs = load([written(tmp_path / f"run {n}", LEG, step(1)) for n in range(8)])
    assert len(set(_styles(runs))) == 8


@pytest.mark.parametrize("text", ["{", "[]", '{"run": {}}'])
def test_a_folder_that_holds_no_run_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no run of gpt2 train"):
        load([tmp_path])
    folder = written(tmp_path / "mine", LEG)
    (folder / "run.json").write_text(text)
    with pytest.raises(RecordError, match="is damaged") as raised:
        load([folder])
    assert "\n" not in str(raised.value)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "mine", LEG, *map(step, range(1, 4)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')
    (run,) = load([folder])
    assert len(run.of("step")) == 3


@pytest.mark.parametrize(
    "turned",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: b"\n" + text.replace(b"\n", b"\n\n \n"),
        lambda text: text.rstrip(b"\n"),
        lambda text: text + bytes(20),
    ],
    ids=["BOM", "CRLF", "blank lines", "no last newline", "NULs"],
)
def test_what_an_editor_or_a_crash_does_to_metrics_loses_no_event(turned, tmp_path: Path) -> None:
    folder = written(tmp_path / "mine", LEG, *map(step, range(1, 4)))
    path = folder / "metrics.jsonl"
    path.write_bytes(turned(path.read_bytes()))
    (run,) = load([folder])
    assert len(run.of("step")) == 3


def test_metrics_in_another_encoding_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "mine", LEG, step(1))
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_text().encode("utf-16-le"))
    with pytest.raises(RecordError, match=r"metrics\.jsonl(: line 1)? is damaged"):
        load([folder])


@pytest.mark.parametrize(
    ("losses", "lowest"), [([3.0, None], "3.0000"), ([None, 2.0], "2.0000"), ([None], "not finite")]
)
def test_a_validation_loss_that_is_not_finite_is_shown_as_that(
    losses: list, lowest: str, tmp_path: Path
) -> None:
    vals = [val(n, loss, "c") for n, loss in enumerate(losses, 1)]
    (run,) = load([written(tmp_path / "mine", LEG, step(1), *vals)])
    row = tables([run])[0].cells[0]
    assert row[-2] == ("not finite (c)" if losses[-1] is None else f"{losses[-1]:.4f} (c)")
    assert row[-1] == lowest


def test_a_validation_loss_of_an_earlier_step_than_the_last_names_its_step(tmp_path: Path) -> None:
    """As where the last line of the metrics, the last validation's, was not wholly written."""
    (run,) = load([written(tmp_path / "mine", LEG, step(1), val(1, 3.0, "c"), step(2))])
    assert tables([run])[0].cells[0][-2] == "3.0000 (c, step 1)"


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "step": 1}',
        '{"kind": "step", "step": 1, "tokens": 1, "loss": 1, "seconds": 1, "tps": null, "wait_seconds": 0}',
        '{"kind": "step", "step": 1, "tokens": 1, "loss": 1, "seconds": 1, "tps": "5", "wait_seconds": 0}',
        '{"kind": "leg", "step": 0, "devices": 8}',
        '{"kind": "leg", "step": 0, "devices": 8, "chip": "H100", "commit": 308040}',
        '{"kind": "note", "step": 0, "elapsed_seconds": "12.3"}',
        '{"kind": "val", "step": {}, "loss": 1, "corpus": "a"}',
        '{"kind": "val", "step": 0, "loss": "low", "corpus": "a"}',
        "[]",
        "7",
    ],
)
def test_a_line_that_lacks_what_it_should_say_is_named(line: str, tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, step(2))
    (run / "metrics.jsonl").write_text(f"{line}\n" + (run / "metrics.jsonl").read_text())
    with pytest.raises(RecordError, match=r"metrics\.jsonl(: line 1)? is damaged"):
        load([run])


@pytest.mark.parametrize("toggles", [{"world_size": -1}, {"device": ""}, "fast"])
def test_a_run_whose_toggles_were_edited_to_none_is_named(toggles: Any, tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, step(1), toggles=toggles)
    with pytest.raises(RecordError, match=r"run\.json is damaged"):
        load([run])


def test_a_step_whose_loss_was_taken_out_has_none(tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, step(1))
    lines = (run / "metrics.jsonl").read_text().replace('"loss": 10.0, ', "").replace('"loss":10.0,', "")
    (run / "metrics.jsonl").write_text(lines)
    (loss,) = load([run])[0].losses
    assert math.isnan(loss)


def test_a_step_without_loss_or_time_is_left_out_of_pictures(tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, *map(step, range(1, 5)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    del lines[2]["loss"], lines[3]["elapsed_seconds"]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = CliRunner().invoke(app, ["trainings", str(run), "--plots", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "plots" / "trainings-loss-by-time.svg").exists()


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    one = written(tmp_path / "runs" / "one", LEG, step(1))
    two = written(tmp_path / "runs" / "two", LEG, step(1))
    (tmp_path / "runs" / "notes").mkdir()
    assert runs_in(tmp_path / "runs") == [one, two]
    assert runs_in(one) == [one]
    assert runs_in(tmp_path / "runs" / "notes") == [tmp_path / "runs" / "notes"]


@pytest.mark.parametrize("lacking", ["name", "steps"])
def test_a_run_that_does_not_say_what_it_is_is_named(lacking: str, tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG, step(1))
    about = json.loads((run / "run.json").read_text())
    del about["run"][lacking]
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(RecordError, match=r"run\.json is damaged"):
        load([run])


def test_losses_of_an_older_version_compare_by_the_corpus_and_its_tokens(tmp_path: Path) -> None:
    new = val(4, 2.5)
    new.values["sha256"] = "ab"
    text = table(written(tmp_path / "mine", LEG, val(0, 5.0), *map(step, range(1, 5)), val(2, 2.0), new))
    assert cells(text)[-1] == "2.0000"


def test_the_lowest_loss_is_of_those_on_the_last_one_s_tokens(tmp_path: Path) -> None:
    steps = map(step, range(1, 5))
    run = written(tmp_path / "mine", LEG, val(0, 1.5, "easy"), *steps, val(2, 7.0), val(4, 7.5))
    assert cells(table(run))[-1] == "7.0000"


def test_a_run_that_is_named_twice_is_one(tmp_path: Path) -> None:
    run = written(tmp_path / "mine", LEG)
    (tmp_path / "link").symlink_to(run)
    assert [each.folder for each in load([run, tmp_path / "link", run])] == [run]


def test_published_scores_are_those_of_the_reference() -> None:
    path = REAL.parent / "reference" / "published.yaml"
    if not path.is_file():
        pytest.skip("the reference figures are not at hand")
    stated = set()
    for source in yaml.safe_load(path.read_text())["sources"]:
        for row in [*source.get("openai_weights", ()), *source.get("full_runs", ())]:
            how = row.get("dataset", "webtext"), row.get("style", "completion")
            name = (source["source"], row["model"], *how)
            if "hellaswag_acc" in row:
                stated.add((*name, row["hellaswag_acc"], row["hellaswag_acc_norm"]))
            elif "hellaswag" in row:
                stated.add((*name, None, row["hellaswag"]))
    told = [p for p in PUBLISHED if "plots" not in p.note]
    ours = {(p.source, p.model, p.corpus, p.style, p.acc, p.acc_norm) for p in told}
    assert len(stated) == 8
    assert ours == stated
