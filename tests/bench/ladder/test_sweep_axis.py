from __future__ import annotations

import pytest
import yaml

from bench.ladder.sweep_axis import parse, parse_all
from bench.ladder.validation import LadderError


def test_listed_values_have_the_types_that_yaml_gives_them() -> None:
    assert parse("toggles.micro_batch_size=1, 2,4").values == (1, 2, 4)
    assert parse("toggles.autocast=float32,bfloat16").values == ("float32", "bfloat16")
    assert parse("workload.lr=6.0e-4,3.0e-4").values == (6.0e-4, 3.0e-4)


def test_three_dots_ask_for_larger_batches() -> None:
    axis = parse("toggles.micro_batch_size=3,4,...")
    assert (axis.values, axis.doubling) == ((3, 4), True)
    assert not parse("toggles.micro_batch_size=3,4").doubling


def test_a_value_is_written_as_yaml_reads_it_again() -> None:
    axis = parse("workload.lr=1.0e-5,null")
    assert [yaml.safe_load(axis.written(value).removeprefix("lr=")) for value in axis.values] == [1e-5, None]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("micro_batch_size=1,2", r"write toggles\.KEY=A,B,\.\.\. or workload\.KEY=A,B"),
        ("protocol.blocks=5,6", r"write toggles\.KEY"),
        ("toggles.batch=1", "toggles has no 'batch'"),
        ("toggles.micro_batch=1", "did you mean 'micro_batch_size'"),
        ("toggles.micro_batch_size=", "give at least one value"),
        ("toggles.micro_batch_size=1,,2", "a value is missing before or after a comma"),
        (
            "toggles.micro_batch_size=8,...,16",
            r"\.\.\. must come last",
        ),
        ("toggles.micro_batch_size=...", "give at least one value"),
        ("toggles.micro_batch_size=0", "micro_batch_size 0 is less than 1"),
        ("toggles.micro_batch_size=2,2", "2 is listed twice"),
        ("toggles.micro_batch_size=4,2", "from the smallest up"),
        ("toggles.autocast=bf16", "did you mean 'bfloat16'"),
        ("toggles.autocast=on", "YAML reads on, off, yes and no as true and false"),
        ("toggles.world_size=1,...", r"only toggles\.micro_batch_size goes on doubling"),
        ("workload.seq_len={", "no YAML value"),
    ],
)
def test_an_axis_that_cannot_be_is_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(LadderError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_one_path_cannot_be_swept_twice() -> None:
    with pytest.raises(LadderError, match=r"toggles\.adamw is given twice"):
        parse_all(["toggles.adamw=fused", "toggles.adamw=foreach"])
