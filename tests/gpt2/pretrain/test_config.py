from __future__ import annotations

from pathlib import Path

import pytest

from gpt2.config.constraints import check
from gpt2.config.validation import ConfigError
from gpt2.pretrain.config import CONFIGS, load

NAMES = sorted(each.stem for each in CONFIGS.glob("*.yaml"))
FILE = "{steps: 3, workload: {model: tiny, seq_len: 32}, toggles: {device: cpu}}"


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_loads_and_asks_for_what_its_device_can_do(name: str) -> None:
    run = load(name)
    assert run.name == name
    check(run.toggles)
    assert run.workload.lr_decay_steps in (0, run.steps)


@pytest.mark.parametrize("name", [name for name in NAMES if "10b" in name])
def test_a_run_on_10b_tokens_takes_about_as_many(name: str) -> None:
    run = load(name)
    assert run.steps * run.tokens_per_step == pytest.approx(10e9, rel=0.015)


def test_the_a100_run_has_the_published_flags() -> None:
    run = load("gpt2-10b-a100x8")
    workload, toggles = run.workload, run.toggles
    assert (run.steps, run.tokens_per_step, workload.seq_len, toggles.micro_batch_size) == (
        18865,
        524288,
        1024,
        64,
    )
    schedule = workload.lr, workload.lr_warmup_steps, workload.lr_final_fraction, workload.weight_decay
    assert schedule == (6.0e-4, 700, 0.0, 0.1)
    assert (toggles.recompute, toggles.sharding, toggles.world_size) == ("gelu", "zero1", 8)
    assert (run.checkpoints.every, run.evaluation.val_every, run.evaluation.sample_every) == (
        5000,
        250,
        20000,
    )
    assert (workload.data, run.evaluation.hellaswag_every) == ("fineweb", 250)


@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_learning_rates_are_gpt_3_s_for_the_size(model: str) -> None:
    rates = {"gpt2": 6.0e-4, "gpt2-medium": 3.0e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2.0e-4}
    runs = [run for run in map(load, NAMES) if run.workload.model == model]
    assert runs
    assert all(run.workload.lr == rates[model] for run in runs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    return file


def test_a_run_is_named_by_its_file_unless_it_names_itself(path: Path) -> None:
    assert load(str(path)).name == "mine"
    assert load(str(path), ["name=other"]).name == "other"


def test_overrides_reach_every_part(path: Path) -> None:
    run = load(str(path), ["workload.lr=0.001", "toggles.micro_batch_size=2", "guard.spike=skip", "steps=9"])
    assert (run.workload.lr, run.toggles.micro_batch_size, run.guard.spike, run.steps) == (1e-3, 2, "skip", 9)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("workload.lr=fast", "key 'lr': 'fast' should be a number"),
        ("toggles.compile=on", "YAML reads on, off, yes and no as true and false"),
        ("evaluation.val_evry=3", "unknown key 'val_evry'; did you mean 'val_every'?"),
        ("evaluation.val_every=-1", "val_every -1 is negative"),
        ("checkpoints.keep=0", "keep 0 1 or more"),
        ("guard.spike=ignore", "'ignore' is not one of report, skip, stop"),
        ("guard.spike_deviations=-1", "spike_deviations -1.0 is negative"),
        ("workload.tokens_per_step=100", "tokens_per_step 100 is not a multiple of 32"),
        ("workload.lr_final_fraction=2", "lr_final_fraction 2.0 is outside 0 to 1"),
        ("workload.lr_warmup_steps=9", ""),
        ("name=a/b", "name 'a/b' is no name for a folder"),
        ("steps.x=1", "steps has no keys"),
        ("workload=3", "mine.yaml: workload"),
        ("nosuch=3", "unknown key 'nosuch'"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_in_one_line(override: str, said: str, path: Path) -> None:
    overrides = [override, "workload.lr_decay_steps=5"] if "warmup" in override else [override]
    with pytest.raises(ConfigError) as raised:
        load(str(path), overrides)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_accumulation_that_the_tokens_per_step_contradict_is_refused(path: Path) -> None:
    tokens = load(str(path)).tokens_per_step
    fixed = f"workload.tokens_per_step={2 * tokens}"
    assert load(str(path), [fixed, "toggles.grad_accum_steps=2"]).toggles.grad_accum_steps == 2
    with pytest.raises(ConfigError, match=r"grad_accum_steps 3 contradicts .* makes it 2; leave it out"):
        load(str(path), [fixed, "toggles.grad_accum_steps=3"])


def test_a_misspelt_key_is_named_and_not_the_one_that_it_leaves_missing(path: Path) -> None:
    path.write_text(path.read_text().replace("workload:", "workloads:", 1))
    with pytest.raises(ConfigError, match=r"unknown key 'workloads'; did you mean 'workload'\?"):
        load(str(path))


@pytest.mark.parametrize("text", ["[1, 2]", "steps: [", "\x00", "steps: 3"])
def test_a_file_that_is_no_run_is_refused(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load(str(path))


@pytest.mark.parametrize(
    ("name", "said"), [("gpt2-10b-h10x8", "did you mean"), ("no.yaml", "does not exist")]
)
def test_a_run_that_is_not_there_is_said_to_be_missing(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(name)
