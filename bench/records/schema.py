"""JSON Schemas of ladders and of results, for editors and other programs.

python -m bench.records.schema writes both to docs/schema/, and the table of toggles to docs/toggles.md.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

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
    """Schema of a ladder's YAML; bench.ladder.ladder.load() checks more than a schema can say."""
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
            "retry": {
                "type": "boolean",
                "description": "With carry: if_faster, try it once more at the end if it was not carried.",
            },
            "best_of": {
                "type": "string",
                "description": "A ladder whose best toggles on this machine it starts from.",
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
    """Schema of one line of a results file."""
    return {"$schema": DIALECT, **Record.model_json_schema(by_alias=True, mode="serialization")}


def _closed(kind: type) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    schema.pop("title", None)
    for value in schema["properties"].values():
        value.pop("title", None)
    return {**schema, "additionalProperties": False}


def toggles_page() -> str:
    """Markdown of docs/toggles.md: each toggle with its values, where they can be had, and what it does."""
    hints = get_type_hints(Toggles)
    rows = []
    for toggle in fields(Toggles):
        values = [f"`{value}`" for value in get_args(hints[toggle.name]) if isinstance(value, str | int)]
        counts = values or [f"`{toggle.default}`"]
        if int in (hints[toggle.name], *get_args(hints[toggle.name])):
            counts += ["2, 3, ..."] if toggle.default == 1 else ["1, 2, ..."]
        told = toggle.metadata["help"]
        for value, why in toggle.metadata["maths"].items():
            told += f" `{value}` changes the maths: {why}."
        rows.append(f"| `{toggle.name}` | {', '.join(counts)} | {told} |")
    head = ["| toggle | values, the baseline first | what it does |", "|---|---|---|"]
    return "\n".join([TOGGLES_INTRODUCTION, *head, *rows, ""])


TOGGLES_INTRODUCTION = """# Toggles

What a rung of a [ladder](ladder-format.md) may switch. `python -m bench.records.schema` writes this page
from `gpt2/config/toggles.py`. Initial weights and the batch of each step depend on the seed alone, and a rung
whose losses leave the baseline's by more than its number format explains is marked `loss differs`. A value
that changes the maths makes a rung another training: it is marked `changed`, and never called the fastest.
"""


def text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in (("ladder", ladder()), ("results", results())):
        (FOLDER / f"{name}.json").write_text(text(schema), encoding="utf-8")
    Path("docs/toggles.md").write_text(toggles_page(), encoding="utf-8")
