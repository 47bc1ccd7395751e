"""JSON Schemas of ladders and of results, generated from what reads them: for editors, and for other
programs.

python -m bench.records.schema writes both to docs/schema/.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.ladder.ladder import LONGEST_NAME, Protocol
from bench.ladder.peers import PEERS, PeerRung
from bench.records.record import Record
from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS, Workload
from gpt2.hardware import peaks

FOLDER = Path("docs/schema")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def ladder() -> dict[str, Any]:
    """Of a ladder's YAML; bench.ladder.ladder.load() checks more than a schema can say."""
    toggles = _closed(Toggles)
    for toggle in fields(Toggles):
        toggles["properties"][toggle.name]["description"] = toggle.metadata["help"]
    workload = _closed(Workload)
    workload["properties"]["model"]["enum"] = list(PRESETS)
    external = _closed(PeerRung)
    external["properties"]["peer"]["enum"] = list(PEERS)
    name = {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}
    rung = {
        "type": "object",
        "properties": {
            "name": {**name, "pattern": "^[^,]+$"},
            "set": {**toggles, "description": "What it changes; it keeps everything set above it."},
            "external": {**external, "description": "Another trainer in place of ours; see docs/peers.md."},
            "expect": {
                "enum": ["inert", "out_of_memory"],
                "description": "An outcome that is the point of the rung.",
            },
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    return {
        "$schema": DIALECT,
        "title": "A ladder of gpt2-bench",
        "type": "object",
        "properties": {
            "name": name,
            "chip": {
                "enum": [chip.name for chip in peaks.CHIPS],
                "description": "What its batches were chosen for.",
            },
            "workload": {**workload, "description": "What is computed, the same on every rung."},
            "protocol": {**_closed(Protocol), "description": "How long, and how often, each rung is run."},
            "rungs": {"type": "array", "items": rung, "minItems": 1},
        },
        "required": ["name", "rungs"],
        "additionalProperties": False,
    }


def results() -> dict[str, Any]:
    """Of one line of a results file."""
    return {"$schema": DIALECT, **Record.model_json_schema(by_alias=True, mode="serialization")}


def _closed(kind: type) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    schema.pop("title", None)
    for each in schema["properties"].values():
        each.pop("title", None)
    return {**schema, "additionalProperties": False}


def text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in (("ladder", ladder()), ("results", results())):
        (FOLDER / f"{name}.json").write_text(text(schema), encoding="utf-8")
