"""The schemas that are committed are those of the code, and fit every ladder and every result that is."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from places import ROOT

from bench.records import schema

LADDER, RESULTS = schema.ladder(), schema.results()


@pytest.mark.parametrize(("name", "expected"), [("ladder", LADDER), ("results", RESULTS)])
def test_the_committed_schema_is_that_of_the_code(name: str, expected: dict) -> None:
    committed = (ROOT / "docs" / "schema" / f"{name}.json").read_text(encoding="utf-8")
    assert committed == schema.text(expected), "python -m bench.records.schema writes it anew"


@pytest.mark.parametrize("path", sorted((ROOT / "ladders").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ladder_fits_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), LADDER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "x", "rungs": [{"name": "a", "set": {"autocast": "bf16"}}]},
        {"name": "x", "rungs": [{"name": "a", "set": {"compiler": "default"}}]},
        {"name": "x", "rungs": []},
        {"name": "x", "rungs": [{"name": "a"}], "workload": {"model": "gpt5"}},
        {"rungs": [{"name": "a"}]},
    ],
)
def test_what_no_ladder_may_say_does_not_fit(wrong: dict) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, LADDER)


def test_a_committed_result_fits_the_schema() -> None:
    for path in sorted((ROOT / "results").glob("intel*/*.jsonl")):
        jsonschema.validate(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]), RESULTS)
