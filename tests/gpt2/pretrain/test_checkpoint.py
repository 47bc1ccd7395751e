from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainings import FAST, WORKLOAD, start

from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS
from gpt2.files.atomic import new_folder
from gpt2.model.model import build
from gpt2.pretrain import checkpoint_tensors
from gpt2.pretrain.checkpoint import (
    FACTS,
    CheckpointError,
    Saved,
    Shape,
    folders,
    misnamed,
    newest,
    prune,
    read,
    recover,
    seal,
    step_folder,
)
from gpt2.training.train import Training

pytestmark = pytest.mark.usefixtures("process_settings")
FUSED = Toggles(adamw="fused", micro_batch_size=2)


def saved_of(training: Training, **more: object) -> Saved:
    facts = {"updates": checkpoint_tensors.updates(training), "tokens": training.number * 128, **more}
    return Saved(shape=Shape.of(training.model.config), step=training.number, **facts)  # type: ignore[arg-type]


def trained(toggles: Toggles, steps: int = 3) -> Training:
    training = start(toggles)
    for _ in range(steps):
        next(training)
    return training


def keep_steps(folder: Path, *steps: int, facts: Sequence[dict[str, Any]] = ()) -> None:
    """Checkpoints of one training that say that they are of these steps, and what else there is to say."""
    training = trained(FUSED, steps=1)
    for step, more in zip(steps, facts or [{}] * len(steps), strict=True):
        saved = replace(saved_of(training), step=step, **more)
        checkpoint_tensors.save(step_folder(folder, step), training, saved)


def logical(training: Training) -> dict[str, torch.Tensor]:
    """Weights and averages without padding, by the names of the plain model."""
    found = {}
    for name, parameter in training.model.named_parameters():
        rows = training.model.config.vocab_size if name == "wte.weight" else parameter.size(0)
        averages = training.optimizer.state[parameter]
        for kind, tensor in {"weight": parameter, **averages}.items():
            if kind != "step":
                found[f"{name}/{kind}"] = tensor.detach()[:rows].clone()
    return found


PADDED = replace(FUSED, vocab_multiple=64)
COMPILED = replace(FUSED, compile="default")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(FUSED, PADDED, id="to padded"),
        pytest.param(PADDED, FUSED, id="from padded"),
        pytest.param(FUSED, COMPILED, id="to compiled", marks=pytest.mark.slow),
        pytest.param(COMPILED, PADDED, id="from compiled", marks=pytest.mark.slow),
        pytest.param(FUSED, FAST, id="to the top", marks=pytest.mark.slow),
        pytest.param(FAST, FUSED, id="from the top", marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_under_some_toggles_is_restored_bit_for_bit_under_others(
    before: Toggles, after: Toggles, tmp_path: Path
) -> None:
    first = trained(before)
    checkpoint_tensors.save(tmp_path / "c", first, saved_of(first))
    second = start(after)
    checkpoint_tensors.restore(tmp_path / "c", read(tmp_path / "c"), second)
    expected, found = logical(first), logical(second)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert (second.number, checkpoint_tensors.updates(second)) == (3, 3)
    assert torch.isfinite(next(second).loss)


def test_copies_of_the_weights_are_those_of_what_was_restored(tmp_path: Path) -> None:
    first = trained(FUSED)
    checkpoint_tensors.save(tmp_path / "c", first, saved_of(first))
    second = start(FAST)
    checkpoint_tensors.restore(tmp_path / "c", read(tmp_path / "c"), second)
    copies = second.optimizer.copies  # type: ignore[attr-defined]
    assert copies
    assert all(torch.equal(weight.bfloat16(), copy) for weight, copy in copies.items())


def test_tensors_have_the_plain_model_s_names_and_shapes(tmp_path: Path) -> None:
    training = trained(replace(COMPILED, vocab_multiple=64))
    checkpoint_tensors.save(tmp_path / "c", training, saved_of(training))
    (file,) = (tmp_path / "c").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    plain = build(PRESETS["tiny"], 0, torch.device("cpu"))
    kinds = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
    expected = {kind.format(name): tuple(p.shape) for kind in kinds for name, p in plain.named_parameters()}
    assert shapes == expected


def test_weights_of_a_checkpoint_give_the_logits_of_the_training_that_it_is_of(tmp_path: Path) -> None:
    training = trained(PADDED)
    checkpoint_tensors.save(tmp_path / "c", training, saved_of(training))
    config, weights = checkpoint_tensors.weights(tmp_path / "c")
    plain = build(config, 0, torch.device("cpu"))
    checkpoint_tensors.load_weights(plain, weights)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(plain.logits(tokens), training.model.logits(tokens)[..., :509])


def test_weights_alone_are_written_as_they_are_read(tmp_path: Path) -> None:
    plain = build(PRESETS["tiny"], 5, torch.device("cpu"))
    mine = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    checkpoint_tensors.save_weights(tmp_path / "w", PRESETS["tiny"], mine)
    config, weights = checkpoint_tensors.weights(tmp_path / "w")
    assert config == PRESETS["tiny"]
    assert all(torch.equal(mine[name], weights[name]) for name in mine)


def test_a_large_checkpoint_is_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_tensors, "FILE_BYTES", 100_000)
    training = trained(FUSED)
    checkpoint_tensors.save(tmp_path / "c", training, saved_of(training))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 3
    second = start(FUSED)
    checkpoint_tensors.restore(tmp_path / "c", read(tmp_path / "c"), second)
    expected, found = logical(training), logical(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_training_begins_from_a_checkpoint_s_weights_at_its_first_step(tmp_path: Path) -> None:
    first = trained(FUSED)
    checkpoint_tensors.save(tmp_path / "c", first, saved_of(first))
    second = start(PADDED)
    checkpoint_tensors.begin_from(tmp_path / "c", second)
    assert (second.number, checkpoint_tensors.updates(second)) == (0, 0)
    assert torch.equal(second.model.wte.weight[:509], first.model.wte.weight)
    assert not second.model.wte.weight[509:].any()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    training = trained(FUSED, steps=1)
    checkpoint_tensors.save(tmp_path / "step-00000001", training, saved_of(training))
    return tmp_path / "step-00000001"


def test_a_truncated_file_is_refused_with_its_sizes(kept: Path) -> None:
    (file,) = kept.glob("*.safetensors")
    whole = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(whole - 1000)
    with pytest.raises(CheckpointError, match=f"has {whole - 1000:,} bytes instead of {whole:,}"):
        read(kept)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "other", "version": 1}', "is not of a gpt2-bench checkpoint"),
        ('{"step": 3}', "is damaged"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": "gpt2-bench checkpoint", "version": 9}', "version 9; this program reads version 1"),
        ('{"format": "gpt2-bench checkpoint", "version": 1}', "is damaged"),
    ],
)
def test_foreign_or_damaged_facts_are_refused(kept: Path, text: str, said: str) -> None:
    (kept / FACTS).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        read(kept)


def test_fields_by_the_names_of_older_checkpoints_are_read(kept: Path) -> None:
    facts = json.loads((kept / FACTS).read_text())
    older = {name: value for name, value in facts.items() if not name.startswith("evaluat")}
    (kept / FACTS).write_text(json.dumps({**older, "looked": False, "looking_seconds": 7.5}))
    assert (read(kept).evaluated, read(kept).evaluating_seconds) == (False, 7.5)


def test_a_folder_of_something_else_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.json.*gpt2 import"):
        read(tmp_path)


@pytest.fixture
def damaged(kept: Path) -> Path:
    """A checkpoint whose file has its size and no content."""
    (file,) = kept.glob("*.safetensors")
    file.write_bytes(b"\xff" * file.stat().st_size)
    return kept


def test_tensors_that_are_none_are_refused_in_one_line(damaged: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        checkpoint_tensors.restore(damaged, read(damaged), start(FUSED))
    assert "\n" not in str(raised.value)


def test_another_model_is_refused_by_what_differs(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = replace(PRESETS["tiny"], n_embd=128)
    monkeypatch.setitem(PRESETS, "tiny", wider)
    with pytest.raises(CheckpointError, match="another model: n_embd 64, not 128"):
        checkpoint_tensors.restore(kept, read(kept), start(FUSED, WORKLOAD))


def test_reading_runs_no_code(kept: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('ran')",)

    for name in (".metadata", "__0_0.distcp", "model.bin"):  # where torch's own format keeps pickles
        (kept / name).write_bytes(pickle.dumps(Bomb()))
    checkpoint_tensors.restore(kept, read(kept), start(FUSED))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    keep_steps(
        tmp_path, 10, 20, 30, 40, 50, facts=[{"val_loss": loss} for loss in (3.0, 2.0, 2.5, 2.6, None)]
    )
    prune(tmp_path, keep=2)
    assert [read(each).step for each in folders(tmp_path)] == [20, 40, 50]


def test_of_a_run_s_folder_the_newest_checkpoint_is_meant(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    kept.rename(tmp_path / "run" / "checkpoints" / kept.name)
    assert newest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / kept.name
    assert newest(tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_an_old_checkpoint_that_is_refused_neither_ends_the_run_nor_is_removed(tmp_path: Path) -> None:
    keep_steps(tmp_path, 10, 20, 30, 40, facts=[{"val_loss": loss} for loss in (2.0, 3.0, 3.5, 4.0)])
    averaged = step_folder(tmp_path, 10) / "ema.safetensors"
    averaged.write_bytes(b"a user's")
    prune(tmp_path, keep=1)
    assert [each.name for each in folders(tmp_path)] == ["step-00000010", "step-00000020", "step-00000040"]
    assert averaged.read_bytes() == b"a user's"


def test_what_was_being_written_is_no_checkpoint(kept: Path) -> None:
    for name in ("step-00000003.part", "step-00000004", "step-00000099.part"):
        kept.with_name(name).mkdir()
    (kept.with_name("step-00000099.part") / FACTS).write_text('{"format": "gpt2-b')  # torn in its last file
    assert folders(kept.parent) == [kept]


def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(small_disk: Path) -> None:
    training = trained(FUSED, steps=1)
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        checkpoint_tensors.save(small_disk / "step-00000001", training, saved_of(training))
    assert "\n" not in str(raised.value)
    assert list(small_disk.iterdir()) == []


def test_steps_passed_over_are_no_updates(tmp_path: Path) -> None:
    training = start(FUSED)
    training.accept = lambda loss, norm: False
    next(training)
    assert (training.number, checkpoint_tensors.updates(training)) == (1, 0)
    training.accept = None
    next(training)
    assert (training.number, checkpoint_tensors.updates(training)) == (2, 1)


def test_copies_of_a_checkpoint_by_other_names_are_the_user_s_own(tmp_path: Path) -> None:
    keep_steps(tmp_path, 10, 20, 30)
    copies = [tmp_path / "step-best", tmp_path / "step-00000030-backup", tmp_path / "step-00000010 (copy)"]
    for copy in copies:
        shutil.copytree(tmp_path / "step-00000010", copy)
    prune(tmp_path, keep=1)
    assert [each.name for each in folders(tmp_path)] == ["step-00000030"]
    assert all(copy.is_dir() for copy in copies)


def test_a_copy_under_another_step_s_name_hides_no_checkpoint_and_takes_no_place(tmp_path: Path) -> None:
    keep_steps(tmp_path, 10, 20, facts=[{"run": {"name": "mine"}}] * 2)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000099")
    assert [each.name for each in folders(tmp_path)] == ["step-00000010", "step-00000020"]
    assert misnamed(tmp_path) == [(tmp_path / "step-00000099", 10)]
    prune(tmp_path, keep=1)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["step-00000020", "step-00000099"]


def test_a_checkpoint_whose_facts_are_damaged_is_not_passed_over_in_silence(kept: Path) -> None:
    (kept / FACTS).write_text('{"format": "gpt2-b')
    assert folders(kept.parent) == [kept]


def test_the_newest_is_that_of_the_most_steps_however_long_its_name(tmp_path: Path) -> None:
    keep_steps(tmp_path, 99_999_999, 100_000_000)
    assert [read(each).step for each in folders(tmp_path)] == [99_999_999, 100_000_000]


@pytest.mark.parametrize(
    "before",
    [None, {"validation": ["easy", 256]}, {"validation": ["own", 128]}],
    ids=["older", "other", "fewer"],
)
@pytest.mark.parametrize(
    "now", [{"validation": ["own", 256]}, {"validation": None}], ids=["validated", "not"]
)
def test_where_a_run_changed_its_validation_the_best_of_each_stays(
    before: dict | None, now: dict, tmp_path: Path
) -> None:
    facts = [
        {"val_loss": None if data == {"validation": None} else loss, "data": data or {}}
        for loss, data in ((1.5, before), (1.0, before), (2.5, now), (2.0, now), (2.1, now))
    ]
    keep_steps(tmp_path, 10, 20, 30, 40, 50, facts=facts)
    prune(tmp_path, keep=1)
    kept = [20, 50] if now["validation"] is None else [20, 40, 50]
    assert [read(each).step for each in folders(tmp_path)] == kept


def other_weights(kept: Path) -> bytes:
    """The file of a checkpoint of the same model, other weights in it."""
    other = trained(FUSED, steps=2)
    checkpoint_tensors.save(kept.parent / "other", other, saved_of(other))
    (file,) = (kept.parent / "other").glob("*.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "A.SAFETENSORS"])
def test_a_file_of_weights_that_the_checkpoint_does_not_list_is_refused_by_name(
    kept: Path, name: str
) -> None:
    (kept / name).write_bytes(other_weights(kept))
    with pytest.raises(CheckpointError, match=f"{name} is none of the files"):
        read(kept)


def test_hidden_weights_beside_those_of_a_checkpoint_do_not_take_their_place(kept: Path) -> None:
    _, before = checkpoint_tensors.weights(kept)
    (kept / ".copy.safetensors").write_bytes(other_weights(kept))
    _, after = checkpoint_tensors.weights(kept)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_macos_puts_beside_a_checkpoint_s_files_is_ignored(kept: Path) -> None:
    (file,) = kept.glob("*.safetensors")
    file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    (kept / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    checkpoint_tensors.restore(kept, read(kept), start(FUSED))


def test_hidden_files_that_appear_while_a_checkpoint_is_written_are_none_of_its_files(tmp_path: Path) -> None:
    part = new_folder(tmp_path / "c")
    for name in ("shard.safetensors", "._shard.safetensors"):
        (part / name).touch()
    saved = Saved(shape=Shape.of(PRESETS["tiny"]), step=0, updates=0, tokens=0)
    seal(part, tmp_path / "c", saved, replace=True)
    assert read(tmp_path / "c").files == {"shard.safetensors": 0}


def test_of_a_damaged_checkpoint_its_file_is_told_and_torch_logs_nothing(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(Error while deserializing header"):
        checkpoint_tensors.weights(damaged)
    assert caplog.records == []


def test_a_folder_called_like_what_is_being_written_stays(tmp_path: Path) -> None:
    (tmp_path / "c.part").mkdir()
    (tmp_path / "c.part" / "mine").touch()
    training = trained(FUSED, steps=1)
    checkpoint_tensors.save(tmp_path / "c", training, saved_of(training))
    assert (tmp_path / "c.part" / "mine").exists()


def test_a_folder_called_like_what_is_being_imported_stays(tmp_path: Path) -> None:
    (tmp_path / "w.part").mkdir()
    (tmp_path / "w.part" / "mine").touch()
    plain = build(PRESETS["tiny"], 5, torch.device("cpu"))
    checkpoint_tensors.save_weights(tmp_path / "w", PRESETS["tiny"], dict(plain.named_parameters()))
    assert (tmp_path / "w.part" / "mine").exists()


def test_imported_weights_take_the_place_of_no_checkpoint(kept: Path) -> None:
    plain = build(PRESETS["tiny"], 5, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint_tensors.save_weights(kept, PRESETS["tiny"], dict(plain.named_parameters()))
    assert read(kept).step == 1


def test_what_a_killed_run_was_writing_is_removed(kept: Path) -> None:
    torn = new_folder(step_folder(kept.parent, 99))
    prune(kept.parent, keep=1)
    assert not torn.exists()


def test_what_a_killed_run_was_writing_makes_room_for_the_run_that_goes_on(kept: Path) -> None:
    torn = new_folder(step_folder(kept.parent, 99))
    whole = kept.rename(new_folder(step_folder(kept.parent, 3)))
    recover(kept.parent)
    assert not torn.exists()
    assert not whole.exists()
    assert [each.name for each in folders(kept.parent)] == ["step-00000003"]


def test_folders_of_the_user_s_among_the_checkpoints_stay(kept: Path) -> None:
    for name in ("step-00000099.part", "step-notes.part"):
        (kept.parent / name).mkdir()
    prune(kept.parent, keep=1)
    assert len(list(kept.parent.glob("step-*.part"))) == 2


def test_a_checkpoint_whose_name_is_no_utf_8_is_refused_for_its_name(kept: Path) -> None:
    renamed = kept.rename(os.fsdecode(os.fsencode(kept.parent) + b"/r\xe9"))
    with pytest.raises(CheckpointError, match=r"r\\xe9 is no UTF-8"):
        read(renamed)
