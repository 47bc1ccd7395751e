from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from bench.ladder.ladder import LadderError, load
from bench.records.record import results_files
from gpt2.config.toggles import Toggles


def test_a_rung_keeps_every_toggle_below_it(write_ladder) -> None:
    rungs = "[{name: a, set: {autocast: bfloat16}}, {name: b, set: {attention: sdpa}}, {name: c}]"
    ladder = load(write_ladder(rungs))
    assert [rung.toggles for rung in ladder.rungs] == [
        Toggles(autocast="bfloat16"),
        Toggles(autocast="bfloat16", attention="sdpa"),
        Toggles(autocast="bfloat16", attention="sdpa"),
    ]


def test_the_top_of_a_ladder_is_its_last_rung_that_is_meant_to_run_or_else_the_last(write_ladder) -> None:
    huge = "{name: huge, set: {micro_batch_size: 4096}, expect: out_of_memory}"
    assert load(write_ladder(f"[{{name: a}}, {huge}]")).top.name == "a"
    assert load(write_ladder(f"[{huge}]")).top.name == "huge"


def test_accumulation_is_derived_from_the_tokens_per_step_of_the_workload(write_ladder) -> None:
    path = write_ladder(
        "[{name: a}, {name: b, set: {micro_batch_size: 4}}]",
        workload="model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 256",
    )
    assert [rung.toggles.grad_accum_steps for rung in load(path).rungs] == [8, 2]


def test_overrides_reach_every_section_and_every_rung_after_its_own_changes(write_ladder) -> None:
    path = write_ladder("[{name: a}, {name: b, set: {micro_batch_size: 4}}]")
    overrides = ["workload.seed=7", "protocol.repeats=9", "toggles.micro_batch_size=2"]
    ladder = load(path, overrides)
    assert (ladder.workload.seed, ladder.protocol.repeats) == (7, 9)
    assert [rung.toggles.micro_batch_size for rung in ladder.rungs] == [2, 2]


def test_the_hash_covers_workload_and_toggles_but_not_the_protocol(write_ladder) -> None:
    path = write_ladder("[{name: a}]")
    overrides = ("protocol.repeats=7", "workload.seed=7", "toggles.adamw=fused")
    hashes = {override: load(path, [override]).hash for override in overrides}
    plain = load(path).hash
    assert hashes.pop("protocol.repeats=7") == plain
    assert plain not in hashes.values()
    assert len(set(hashes.values())) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "ladders").glob("*.yaml")), ids=lambda path: path.name)
def test_a_committed_ladder_loads_and_begins_by_saying_what_it_shows(path: Path) -> None:
    load(path)
    assert path.read_text().startswith("# Shows ")


@pytest.mark.parametrize("path", sorted((ROOT / "ladders").glob("*.yaml")), ids=lambda path: path.name)
def test_a_committed_ladder_expects_nothing_of_float32_products_where_autocast_leaves_none(
    path: Path,
) -> None:
    for rung in load(path).rungs:
        if rung.toggles.autocast != "float32" and rung.toggles.matmul_precision != "highest":
            assert rung.expect == "inert", rung.name


BAD = {
    "unknown toggle": (
        "rungs: [{name: b, set: {autocas: x}}]",
        "rung 'b': unknown toggle 'autocas'; did you mean 'autocast'?",
    ),
    "unknown value": (
        "rungs: [{name: b, set: {adamw: fuzed}}]",
        "rung 'b': toggle 'adamw': 'fuzed' is not one of for_loop, foreach, fused, compiled; did you mean "
        "'fused'?",
    ),
    "unknown key": ("workloads: {}\nrungs: [{name: b}]", "unknown key 'workloads'; did you mean 'workload'?"),
    "unknown key in the workload": (
        "workload: {sead: 3}\nrungs: [{name: b}]",
        "workload: unknown key 'sead'; did you mean 'seed'?",
    ),
    "unknown key in the protocol": (
        "protocol: {repeat: 3}\nrungs: [{name: b}]",
        "protocol: unknown key 'repeat'; did you mean 'repeats'?",
    ),
    "unknown key in a rung": (
        "rungs: [{name: b, sets: {}}]",
        "rung 'b': unknown key 'sets'; did you mean 'set'?",
    ),
    "unknown model": (
        "workload: {model: gpt3}\nrungs: [{name: b}]",
        "workload: model 'gpt3' is not one of tiny, mini, gpt2,",
    ),
    "a boolean where a number is wanted": (
        "rungs: [{name: b, set: {vocab_multiple: yes}}]",
        "rung 'b': vocab_multiple: YAML reads on, off, yes and no as true and false",
    ),
    "a number beyond reason": (
        "rungs: [{name: b, set: {micro_batch_size: 100000000000000000000}}]",
        "rung 'b': micro_batch_size 100000000000000000000 is too large",
    ),
    "a percentage": (
        "protocol: {until: 5%}\nrungs: [{name: b}]",
        "key 'until': '5%' should be a number; write 0.05",
    ),
    "a word for a device": (
        "rungs: [{name: b, set: {device: gpu}}]",
        "'gpu' is not one of cpu, cuda, mps, xpu, xla; NVIDIA's and AMD's are cuda",
    ),
    "a boolean": (
        "rungs: [{name: b, set: {compile: on}}]",
        "toggle 'compile': True is not one of eager, default",
    ),
    "a numeric string": (
        "rungs: [{name: b, set: {micro_batch_size: '4'}}]",
        "rung 'b': toggle 'micro_batch_size': '4' should be a whole number; YAML reads it as text here, "
        "write 4",
    ),
    "a number in quotes": (
        "workload: {lr: '6e-4'}\nrungs: [{name: b}]",
        "workload: key 'lr': '6e-4' should be a number; YAML reads it as text here, write 0.0006",
    ),
    "a fraction's notation for a whole number": (
        "workload: {tokens_per_step: 1e3}\nrungs: [{name: b}]",
        "workload: key 'tokens_per_step': 1000.0 should be a whole number; write 1000",
    ),
    "a wrong type": ("workload: {lr: [1]}\nrungs: [{name: b}]", "workload: key 'lr': [1] should be a number"),
    "an empty ladder": ("rungs: []", "rungs is empty"),
    "no rungs": ("workload: {}", "key 'rungs' is missing"),
    "rungs that are no list": ("rungs: {b: 1}", "key 'rungs': {'b': 1} should be a list"),
    "a rung that is no mapping": ("rungs: [b]", "key 'rungs': 'b' should be a mapping"),
    "a rung without a name": ("rungs: [{set: {}}]", "rung 1: key 'name' is missing"),
    "a rung's name that no table holds": (
        f"rungs: [{{name: {'b' * 101}}}]",
        "some text of at most 100 characters",
    ),
    "a rung's name that a program would take for an option": (
        "rungs: [{name: --help}]",
        "rung '--help': a rung's name is some text of at most 100 characters, without a comma or a dash in",
    ),
    "a rung's name that YAML reads as a number": (
        "rungs: [{name: 1.0}]",
        "key 'name': 1.0 should be text; put it in quotes: '1.0'",
    ),
    "duplicate rung names": ("rungs: [{name: b}, {name: b}]", "rung 'b': name is used twice"),
    "tokens that do not divide": (
        "workload: {tokens_per_step: 1000}\nrungs: [{name: b}]",
        "rung 'b': workload.tokens_per_step 1000 is not a multiple of 1024",
    ),
    "accumulation that contradicts": (
        "workload: {tokens_per_step: 4096}\nrungs: [{name: b, set: {grad_accum_steps: 2}}]",
        "rung 'b': grad_accum_steps 2 contradicts workload.tokens_per_step 4096",
    ),
    "a sequence beyond the context": (
        "workload: {seq_len: 2000}\nrungs: [{name: b}]",
        "workload: seq_len 2000 is outside 1 to 1024, the context of gpt2",
    ),
    "a count below one": (
        "rungs: [{name: b, set: {world_size: 0}}]",
        "rung 'b': world_size 0 is less than 1",
    ),
    "too few blocks": ("protocol: {blocks: 2}\nrungs: [{name: b}]", "protocol: blocks 2 is less than 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_that_names_file_and_key(case: str, tmp_path: Path) -> None:
    content, complaint = BAD[case]
    path = tmp_path / "bad.yaml"
    path.write_text(f"name: bad\n{content}\n")
    with pytest.raises(LadderError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["", "[1, 2]", "just text", "1: 2"])
def test_a_file_that_is_no_ladder_at_all_is_told_what_one_has(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(LadderError, match="a ladder has the keys name, workload, protocol and rungs"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LadderError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("seed=1", "--set seed=1: write workload.KEY=VALUE"),
        ("workload.seed", "--set workload.seed: write"),
        ("workload.sead=1", "did you mean 'seed'"),
        ("toggles.adamw=fuze", "--set: toggle 'adamw': 'fuze' is not one of"),
        ("toggles.threads=[", "is no YAML value"),
    ],
)
def test_a_bad_override_is_refused(override: str, complaint: str, write_ladder) -> None:
    with pytest.raises(LadderError) as caught:
        load(write_ladder("[{name: a}]"), [override])
    assert complaint in str(caught.value)


def test_rungs_are_chosen_once_each_and_in_the_ladder_s_order(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b}, {name: c}]"))
    assert [rung.name for rung in ladder.chosen(["c", "a", "c"])] == ["a", "c"]
    assert [rung.name for rung in ladder.chosen([])] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["''", "x" * 101])
def test_a_name_that_no_file_could_have_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text(f"name: {name}\nrungs: [{{name: a}}]\n")
    with pytest.raises(LadderError, match="at most 100 characters"):
        load(tmp_path / "l.yaml")


def test_a_long_name_in_another_script_still_makes_a_file_s_name(write_ladder) -> None:
    named = replace(load(write_ladder("[{name: a}]")), name="梯" * 90)
    assert 0 < len(named.file_name.encode()) <= 160
    assert set(named.file_name) == {"梯"}


@pytest.mark.parametrize("name", [".", "..", ".mine", "...a.b"])
def test_no_name_of_a_ladder_hides_its_results_file(name: str, write_ladder, tmp_path: Path) -> None:
    made = replace(load(write_ladder("[{name: a}]")), name=name).file_name
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / f"{made}-20261127T000000Z.jsonl").write_text("")
    assert results_files(tmp_path / "results", f"{made}-") != []


def test_what_a_rung_changes_is_read_from_its_toggles_not_from_the_file(write_ladder) -> None:
    path = write_ladder("[{name: a}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}]")
    changed = [rung.changed for rung in load(path).rungs]
    assert changed == [["device=cpu"], ["attention=sdpa"], ["adamw=fused"]]
    overridden = load(path, ["toggles.attention=math"]).rungs
    assert [rung.changed for rung in overridden] == [["device=cpu", "attention=math"], [], ["adamw=fused"]]


def test_case_does_not_hide_the_nearest_name(write_ladder) -> None:
    with pytest.raises(LadderError, match="did you mean 'bfloat16'"):
        load(write_ladder("[{name: bfloat16}, {name: other}]")).rung("BFLOAT16")


def test_an_unknown_rung_is_refused_with_the_nearest_name(write_ladder) -> None:
    with pytest.raises(LadderError, match="no rung is called 'basline'; did you mean 'baseline'"):
        load(write_ladder("[{name: baseline}]")).rung("basline")


def test_a_ladder_that_is_not_there_names_one_that_is(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("name: smoke\nrungs: [{name: a}]\n")
    with pytest.raises(LadderError, match=r"No such file or directory; did you mean .*smoke\.yaml\?"):
        load(tmp_path / "smoke")
    with pytest.raises(LadderError, match=r"did you mean .*smoke\.yaml\?"):
        load(tmp_path / "smok.yaml")


def test_each_committed_ladder_is_in_the_documentation_with_its_command() -> None:
    text = (ROOT / "docs" / "ladders.md").read_text()
    for path in (ROOT / "ladders").glob("*.yaml"):
        assert f"| [`{path.stem}`](../ladders/{path.name}) |" in text
        assert f"bench run ladders/{path.name}` |" in text


def test_a_chip_is_one_that_is_known_and_no_part_of_the_hash(write_ladder) -> None:
    path = write_ladder("[{name: a}]")
    plain = load(path)
    path.write_text(path.read_text().replace("name: test\n", "name: test\nchip: h100-sxm\n"))
    written = load(path)
    assert (plain.chip, written.chip and written.chip.name) == (None, "H100 SXM")
    assert written.hash == plain.hash
    path.write_text(path.read_text().replace("h100-sxm", "H1000 SXM"))
    said = r"ladder\.yaml: chip: no chip is called 'H1000 SXM'; did you mean: H100 SXM"
    with pytest.raises(LadderError, match=said):
        load(path)


def test_a_chip_that_is_not_the_ladder_s_is_said_and_the_right_one_passed_over() -> None:
    ladder = load(ROOT / "ladders" / "h100.yaml")
    assert ladder.written_for_another("NVIDIA H100 80GB HBM3") is None
    said = ladder.written_for_another("NVIDIA H200")
    assert said is not None
    assert "is written for H100 SXM, and this is NVIDIA H200" in said
    assert load(ROOT / "ladders" / "cpu.yaml").written_for_another("any CPU") is None
