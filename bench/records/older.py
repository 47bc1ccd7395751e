"""Translate records of earlier versions into today's form: facts that were part of texts become fields.

Nothing else reads a fact out of a text. The files stay as they are; a record is translated on reading.
"""

from __future__ import annotations

import json
import re
from typing import Any

STANDSTILL = re.compile(
    r"stood still: in the window the process did, for about (?P<seconds>[\d.]+) s in (?P<blocks>\d+) of "
    r"(?P<of_blocks>\d+) blocks(?: of rank (?P<rank>\d+))?: (?P<asleep>the machine slept)?.*"
)
OTHER_WORK = re.compile(r"other work: others keep (?P<cores>[\d.]+) cores busy; .*")
NOT_BEGUN = "not begun: "


def translated(line: str) -> str:
    """A line of a results file as today's version would have written it; other lines stay as they are."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the reader will say what is wrong
        return line
    if not isinstance(record, dict) or "other_work_cores" in record:  # every newer record has that field
        return line
    try:
        _translate(record)
    except (KeyError, TypeError, AttributeError, ValueError):  # the reader will say what is wrong
        return line
    return json.dumps(record)


def _translate(record: dict[str, Any]) -> None:
    warnings: list[str] = record["warnings"]
    if not isinstance(warnings, list):
        raise TypeError
    measured: dict[str, Any] | None = record["measurement"]
    record["interrupted_late"] = "after the window: interrupted" in warnings
    if record["status"] == "interrupted" and (record["error"] or "").startswith(NOT_BEGUN):
        record["not_begun"] = record["error"].removeprefix(NOT_BEGUN)
    kept = []
    for warning in warnings:
        if match := OTHER_WORK.fullmatch(warning):
            record["other_work_cores"] = float(match["cores"])
        elif measured and (match := STANDSTILL.fullmatch(warning)):
            keys = ("seconds", "blocks", "of_blocks", "rank")
            numbers = {key: match[key] and json.loads(match[key]) for key in keys}
            measured["stood_still"] = {**numbers, "asleep": match["asleep"] is not None}
        else:
            kept.append(warning)
    record["warnings"] = kept
    if record["kind"] == "control" and record["rung_index"] < 0:
        record["kind"], record["rung_index"] = "ceiling", -1 - record["rung_index"]
    if measured:
        measured["peak_flops_kind"] = _peak_kind(measured)


def _peak_kind(measured: dict[str, Any]) -> str | None:
    source: str = measured["peak_flops_source"]
    if source.startswith("derived"):
        return "derived"
    if source == "given with --peak-tflops":
        return "given"
    known = measured.get("peak_flops_bf16") is not None or measured.get("peak_flops_dtype") is not None
    return "datasheet" if known else None
