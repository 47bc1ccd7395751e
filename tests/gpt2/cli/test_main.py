"""The commands of gpt2 as a user gives them, on a small model of GPT-2's vocabulary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import standin_hub
import streams
import torch
from longruns import command, notes, settings
from typer.testing import CliRunner

from gpt2.cli import models
from gpt2.cli.main import app
from gpt2.pretrain.checkpoint import folders
from gpt2.pretrain.checkpoint import read as read_checkpoint
from gpt2.pretrain.config import PROMPTS
from gpt2.pretrain.metrics import read

SMALL = settings("toggles.threads=1", "workload.seq_len=64", "workload.tokens_per_step=512")
FEW = settings("steps=4", "workload.lr_decay_steps=0", "evaluation.val_tokens=512")
OFTEN = settings("evaluation.val_every=2", "evaluation.sample_every=4", "evaluation.sample_tokens=8")


OF_A_RUN = ("prepare", "train")
"""Commands that start processes, set signals, or end by more than an exit code."""


def done(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """What a command prints: one of a run's in a process of its own, others in this one, which has torch."""
    if arguments[0] in OF_A_RUN:
        process = command(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, err
        return out, err
    ended = CliRunner().invoke(app, [str(word) for word in arguments])
    assert ended.exit_code == code, ended.output
    return ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what one test makes stays for the next."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def trained(home: Path, shakespeare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps on tiny Shakespeare; made once."""
    monkeypatch.setenv("GPT2_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("GPT2_DATA_DIR", str(shakespeare.parent))
    if not (home / "run").exists():
        done("prepare", "tinyshakespeare")
        done("train", "mini-shakespeare", "--out", home / "run", *SMALL, *FEW, *OFTEN)
    return home / "run"


def test_a_corpus_is_prepared_and_trained_on_with_validation_and_samples(trained: Path) -> None:
    found = [(event.kind, event.step) for event in read(trained)]
    assert [each for each in found if each[0] == "val"] == [("val", 0), ("val", 2), ("val", 4)]
    assert [each for each in found if each[0] == "sample"] == [("sample", 0)] * 2 + [("sample", 4)] * 2
    samples = [event.values for event in read(trained) if event.kind == "sample"]
    assert {sample["prompt"] for sample in samples} == {"Hello, I'm a language model,", "Romeo and Juliet"}
    assert all(sample["text"] for sample in samples)
    corpora = {event.values["corpus"] for event in read(trained) if event.kind in ("leg", "val")}
    assert corpora == {"tinyshakespeare"}


def test_the_known_text_is_not_said_to_be_another(trained: Path) -> None:
    assert not [note for note in notes(list(read(trained))) if "is not the known" in note]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--stream", "--data"])
def test_another_text_of_a_known_name_is_said_to_be_another(
    way: str, tmp_path: Path, shakespeare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text(shakespeare.read_text()[-60_000:])
    out = tmp_path / "shards"
    _, said = done("prepare", "tinyshakespeare", "--out", out)
    assert "what is given as tinyshakespeare is not the known tinyshakespeare" in said
    how = ["--stream"] if way == "--stream" else ["--data", out]
    few = [*SMALL, *FEW, *settings("evaluation.val_every=0", "evaluation.sample_every=0")]
    done("train", "mini-shakespeare", "--out", tmp_path / "run", *how, *few)
    said_so = notes(list(read(tmp_path / "run")))
    assert any("is not the known tinyshakespeare" in note for note in said_so)


def test_the_wait_for_the_loader_is_under_a_hundredth_of_a_step(trained: Path) -> None:
    steps = [event.values for event in read(trained) if event.kind == "step"]
    assert median(step["wait_seconds"] / step["seconds"] for step in steps) < 0.01


def test_preparing_again_does_nothing(trained: Path, home: Path) -> None:
    shards = sorted((home / "cache" / "corpora" / "tinyshakespeare").glob("*.bin"))
    before = [shard.stat().st_mtime_ns for shard in shards]
    done("prepare", "tinyshakespeare")
    assert [shard.stat().st_mtime_ns for shard in shards] == before
    assert len(shards) == 2


def hellaswag(folder: Path) -> Path:
    """A file of six examples, whose right endings lie in turn."""
    endings = ["eats it.", "turns a page.", "is a fish.", "flies away."]
    example = {"activity_label": "Reading", "ctx_a": "A man reads a book.", "ctx_b": "he", "endings": endings}
    lines = [json.dumps({**example, "ctx": "A man reads a book. he", "label": n % 4}) for n in range(6)]
    file = folder / "hellaswag_val.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_hellaswag_and_samples_on_the_way_are_those_of_the_checkpoint(
    ranks: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = hellaswag(tmp_path)
    shutil.copytree(Path(os.environ["GPT2_CACHE_DIR"]), tmp_path / "cache")
    monkeypatch.setenv("GPT2_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(file, tmp_path / "cache" / "corpora")
    more = settings("evaluation.hellaswag_every=4", "evaluation.sample_every=4", "evaluation.sample_tokens=8")
    more += settings(f"toggles.world_size={ranks}", f"toggles.sharding={'fsdp2' if ranks > 1 else 'none'}")
    more += settings("toggles.micro_batch_size=2")
    done("train", "mini-shakespeare", *SMALL, *FEW, *more, "--out", tmp_path / "run")
    (score,) = [e.values for e in read(tmp_path / "run") if (e.kind, e.step) == ("hellaswag", 4)]
    told, _ = done("eval", tmp_path / "run", "--hellaswag-file", file, "--style", "completion")
    assert told.startswith(
        f"HellaSwag (completion) acc {score['acc']:.4f}, acc_norm {score['acc_norm']:.4f} "
    )
    assert (score["examples"], score["corpus"]) == (6, "tinyshakespeare")
    samples = [e.values["text"] for e in read(tmp_path / "run") if (e.kind, e.step) == ("sample", 4)]
    asked = ["--max-tokens", "8", "--temperature", "1", "--top-k", "50", "--seed", "1337"]
    assert done("sample", tmp_path / "run", *asked)[0] == "".join(
        f"{prompt}{text}\n\n" for prompt, text in zip(PROMPTS, samples, strict=True)
    )


def test_a_model_is_judged_on_a_corpus_and_on_hellaswag(trained: Path, tmp_path: Path) -> None:
    file = hellaswag(tmp_path)
    out, _ = done(
        "eval", trained, "--val-corpus", "tinyshakespeare", "--val-tokens", "512", "--hellaswag-file", file
    )
    loss, completion, harness = out.splitlines()
    in_training = [event.values["loss"] for event in read(trained) if event.kind == "val"][-1]
    assert float(loss.split()[2]) == pytest.approx(in_training, abs=2e-4)
    learnt = "; trained on 2,048 tokens of tinyshakespeare"
    assert loss.endswith(
        f"on 512 tokens of tinyshakespeare in sequences of 64 (tinyshakespeare_val_000000.bin){learnt}"
    )
    assert completion.startswith("HellaSwag (completion) acc ")
    assert harness.startswith("HellaSwag (harness) acc ")
    assert completion.endswith(f"of 6 examples{learnt}")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_on_generated_tokens_is_judged_on_others(seed: int, tmp_path: Path) -> None:
    few = [*SMALL, *FEW, *settings(f"workload.seed={seed}", "workload.model=tiny")]
    few += settings("workload.data=synthetic", "evaluation.sample_every=0")
    done("train", "mini-shakespeare", "--out", tmp_path / "run", *few)
    _, said = done("eval", tmp_path / "run", "--val-corpus", "synthetic", "--val-tokens", "512")
    assert "the very tokens" not in said


@pytest.mark.slow
def test_validation_tokens_that_make_no_sequence_are_too_few_whatever_the_corpus_has(trained: Path) -> None:
    _, err = done("eval", trained, "--val-corpus", "synthetic", "--val-tokens", "1", code=2)
    assert "1 validation tokens are too few: a sequence is of" in err


@pytest.mark.slow
def test_a_corpus_given_by_its_folder_goes_by_its_own_name(trained: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {n} of a corpus of our own, for nobody else"}) for n in range(400)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    out, _ = done("prepare", tmp_path / "own.jsonl", "--out", tmp_path / "shards")
    assert out.startswith("400 documents: ")
    given = ["--data", tmp_path / "shards", *SMALL, *FEW, "--set", "evaluation.val_every=4"]
    done("train", "mini-shakespeare", *given, "--out", tmp_path / "run")
    assert {e.values["corpus"] for e in read(tmp_path / "run") if e.kind in ("leg", "val")} == {"own"}
    assert read_checkpoint(folders(tmp_path / "run" / "checkpoints")[-1]).data["name"] == "own"
    (shard,) = (tmp_path / "shards").glob("own_train_*.bin")
    shard.unlink()
    _, err = done("train", "mini-shakespeare", *given, "--out", tmp_path / "again", code=2)
    assert f"{shard} is missing" in err
    assert not (tmp_path / "again").exists()


def test_a_model_goes_on_with_a_prompt_and_the_same_seed_writes_the_same(trained: Path) -> None:
    asked = ["sample", trained, "--prompt", "To be, or", "--max-tokens", "12", "--seed", "3"]
    first, _ = done(*asked)
    assert first.startswith("To be, or")
    assert done(*asked)[0] == first
    assert done(*asked[:-1], "4")[0] != first


def test_a_model_goes_to_transformers_and_back_unchanged(trained: Path, tmp_path: Path) -> None:
    from gpt2.pretrain import checkpoint_tensors

    done("export", trained, tmp_path / "hf")
    done("import", tmp_path / "hf", tmp_path / "back")
    (config, mine) = checkpoint_tensors.weights(folders(trained / "checkpoints")[-1])
    (again, theirs) = checkpoint_tensors.weights(tmp_path / "back")
    assert config == again
    assert all((mine[name] == theirs[name]).all() for name in mine)


@pytest.mark.slow
def test_a_run_begins_from_imported_weights(trained: Path, tmp_path: Path) -> None:
    done("export", trained, tmp_path / "ckpt.pt", "--format", "nanogpt")
    done("import", tmp_path / "ckpt.pt", tmp_path / "weights")
    start = ["--init-from", tmp_path / "weights", "--out", tmp_path / "run"]
    done("train", "mini-shakespeare", *start, *SMALL, *FEW, "--set", "evaluation.val_every=4")
    last = [event.values["loss"] for event in read(trained) if event.kind == "val"][-1]
    first = next(event.values["loss"] for event in read(tmp_path / "run") if event.kind == "val")
    assert first == pytest.approx(last, abs=1e-6)


@pytest.mark.slow
def test_imported_weights_among_a_runs_checkpoints_are_not_resumed_from(
    trained: Path, tmp_path: Path
) -> None:
    done("export", trained, tmp_path / "ckpt.pt", "--format", "nanogpt")
    done("import", tmp_path / "ckpt.pt", tmp_path / "run" / "checkpoints" / "step-00000009")
    _, err = done("train", "mini-shakespeare", *SMALL, *FEW, "--out", tmp_path / "run", "--resume", code=2)
    assert "holds weights alone" in err
    assert "--init-from" in err


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.values["loss"]) for event in read(folder) if event.kind in ("step", "val")]


@pytest.mark.slow
def test_a_run_streams_its_corpus_and_goes_on_where_it_was(
    trained: Path, shakespeare: Path, tmp_path: Path
) -> None:
    stream = ["--stream", "--data", shakespeare, *SMALL, *FEW, "--set", "evaluation.val_every=2"]
    done("train", "mini-shakespeare", *stream, "--out", tmp_path / "whole")
    halved = [*stream, "--out", tmp_path / "parts"]
    done("train", "mini-shakespeare", *halved, "--set", "steps=2")
    done("train", "mini-shakespeare", *halved, "--resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_stream_from_the_hub_goes_on_though_somebody_pushed_to_its_repository(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "someone" / "texts"
    repository.mkdir(parents=True)
    (repository / "README.md").write_text("---\nlicense: other\n---\n")
    streams.parquet(repository / "train-00000-of-00001.parquet", streams.documents(400))
    hub = standin_hub.Hub(tmp_path / "hub")
    own = {"USE_TORCH": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    stream = ["--stream", "--data", "someone/texts", *SMALL, *FEW, "--set", "evaluation.val_every=2"]
    done("train", "mini-shakespeare", *stream, "--out", tmp_path / "whole")
    done("train", "mini-shakespeare", *stream, "--out", tmp_path / "parts", "--set", "steps=2")
    hub.commits.append("f" * 40)
    done("train", "mini-shakespeare", *stream, "--out", tmp_path / "parts", "--resume")
    hub.stop()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_tensorboard_and_wandb_are_written_to_where_asked(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    more = ["--tensorboard", "--wandb", "--set", "evaluation.val_every=2"]
    done("train", "mini-shakespeare", "--out", tmp_path / "run", *SMALL, *FEW, *more)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    mine = [event.values["loss"] for event in read(tmp_path / "run") if event.kind == "step"]
    assert [each.value for each in events.Scalars("step/loss")] == pytest.approx(mine)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("command", [["sample"], ["eval", "--hellaswag"]])
def test_of_a_model_that_reads_no_text_none_is_asked_for(command: list[str], tmp_path: Path) -> None:
    from gpt2.config.workload import PRESETS
    from gpt2.model.model import build
    from gpt2.pretrain import checkpoint_tensors

    model = build(PRESETS["tiny"], 0, torch.device("cpu"))
    checkpoint_tensors.save_weights(
        tmp_path / "tiny", PRESETS["tiny"], {n: p.detach() for n, p in model.named_parameters()}
    )
    _, err = done(command[0], tmp_path / "tiny", *command[1:], code=2)
    assert len(err.strip().splitlines()) == 1
    assert "has a vocabulary of 509, not GPT-2's 50257" in err
    assert "gpt2 eval --val-corpus FOLDER" in err


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers whose vocabulary was padded, and whose last row is the likeliest by far."""
    from gpt2.config.workload import GPT2Config
    from gpt2.interop.convert import ConvertWarning, write_huggingface
    from gpt2.model.model import build

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_ctx=16, vocab_size=50304)
    weights = {name: each.detach() for name, each in build(config, 0, torch.device("cpu")).named_parameters()}
    weights["ln_f.bias"][:] = weights["wte.weight"][50303] = 1.0
    folder = tmp_path_factory.mktemp("padded") / "hf"
    with pytest.warns(ConvertWarning):
        write_huggingface(folder, config, weights)
    return folder


def test_a_model_of_a_padded_vocabulary_writes_text(padded: Path, vocabulary: None) -> None:
    out, err = done("sample", padded, "--prompt", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert out.startswith("Hello")
    assert len(out) > len("Hello\n\n")
    assert not err


def test_an_empty_prompt_begins_from_the_end_of_text_and_says_so(padded: Path, vocabulary: None) -> None:
    asked = ["--max-tokens", "8", "--temperature", "0"]
    out, err = done("sample", padded, "--prompt", "", *asked)
    assert err == "gpt2: the prompt is empty; the text begins from <|endoftext|>\n"
    spelled, _ = done("sample", padded, "--prompt", "<|endoftext|>", *asked)
    assert spelled == f"<|endoftext|>{out}"


def test_a_model_with_a_tokenizer_of_its_own_takes_no_text(padded: Path, tmp_path: Path) -> None:
    shutil.copytree(padded, tmp_path / "own")
    (tmp_path / "own" / "vocab.json").write_text(json.dumps({f"t{n}": n for n in range(50304)}))
    _, err = done("sample", tmp_path / "own", code=2)
    assert len(err.strip().splitlines()) == 1
    assert "has a vocabulary that is not GPT-2's: see" in err
    _, err = done("import", tmp_path / "own", tmp_path / "checkpoint")
    assert "vocab.json is not GPT-2's vocabulary" in err
    _, err = done("sample", tmp_path / "checkpoint", code=2)
    assert "was imported with a vocabulary that is not GPT-2's: text cannot be encoded for it" in err
    _, err = done("export", tmp_path / "checkpoint", tmp_path / "exported")
    assert "gets no tokenizer" in err
    assert not (tmp_path / "exported" / "vocab.json").exists()


def test_exported_weights_are_as_readable_by_others_as_the_files_beside_them(
    padded: Path, tmp_path: Path
) -> None:
    done("export", padded, tmp_path / "exported")
    (tmp_path / "any").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "exported").iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}


@pytest.mark.parametrize("command", [["sample"], ["eval", "--val-corpus", "synthetic"]])
def test_a_model_that_does_not_fit_is_one_line(
    command: list[str], padded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr("gpt2.evals.generate.generate", too_large)
    monkeypatch.setattr("gpt2.evals.validation_loss.corpus_loss", too_large)
    _, err = done(command[0], padded, *command[1:], code=6)
    assert err.startswith("gpt2: out of memory; take a smaller ")
    assert len(err.splitlines()) == 1


def test_a_mistyped_path_is_not_made_a_folder(tmp_path: Path) -> None:
    _, err = done("prepare", tmp_path / "nowhere.txt", code=2)
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_gives_no_finite_loss_is_not_judged(padded: Path, tmp_path: Path) -> None:
    from gpt2.interop.convert import read as read_weights
    from gpt2.pretrain import checkpoint_tensors

    config, weights = read_weights(padded)
    weights["ln_f.weight"][0] = float("nan")
    checkpoint_tensors.save_weights(tmp_path / "diverged", config, weights)
    _, err = done("eval", tmp_path / "diverged", "--val-corpus", "synthetic", "--val-tokens", "64", code=2)
    assert "the model's loss is not finite" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "nowhere", "--hellaswag"], "nowhere"),
        (["eval", "nowhere"], "nothing to judge by"),
        (["sample", "pyproject.toml"], "pyproject.toml"),
        (["import", "nowhere", "there"], "nowhere"),
        (["export", "nowhere", "there"], "nowhere"),
        (["import", "nowhere", "r\udce9"], "is no UTF-8"),
        (["export", "nowhere", "r\udce9"], "is no UTF-8"),
        (["prepare", "tinyshakespear"], "did you mean 'tinyshakespeare'"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    _, err = done(*arguments, code=2)
    assert len(err.strip().splitlines()) == 1, err
    assert said in err


@pytest.mark.parametrize("words", [["eval", "--val-corpus", "synthetic"], ["sample"], ["export"]])
def test_a_run_that_has_no_checkpoint_yet_is_told_from_a_folder_without_weights(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    there = [tmp_path / "there"] if words == ["export"] else []
    _, err = done(words[0], tmp_path / "run", *there, *words[1:], code=2)
    assert err.strip().endswith("when it ends")
    assert "holds no whole checkpoint yet" in err


def test_a_rank_that_failed_ends_without_waiting_for_its_groups_threads(tmp_path: Path) -> None:
    """They are joined nowhere after an error, and one that still runs can abort the interpreter's exit."""
    program = (
        "import atexit, sys, torch\n"
        "from gpt2.cli import main as command\n"
        f"store = torch.distributed.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "atexit.register(print, 'the interpreter took itself down')\n"
        "def fails(**_):\n    print('said before'); raise SystemExit(2)\n"
        "command.app = fails\n"
        "command.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "said before\n"), ended.stderr


@pytest.mark.parametrize(("seconds", "said"), [(11.0, "2 of 4 sequences\n"), (9.0, "")])
def test_without_a_terminal_progress_is_told_every_ten_seconds(
    seconds: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(models.time, "monotonic", lambda: now[0])
    tell = models._progress("sequences")
    now[0] += seconds
    tell(2, 4)
    tell(4, 4)
    assert capsys.readouterr().err == said
