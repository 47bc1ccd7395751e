"""Find the results file that an interrupted run left and this run can go on with. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.errors import BenchError
from bench.ladder.ladder import Ladder
from bench.records.machine import Difference, Environment, differences
from bench.records.record import (
    RUNGS,
    Record,
    RecordError,
    not_of_one_run,
    read,
    results_files,
    torn,
)
from gpt2.files.strict_json import BLANK, NUL

BEGUN = re.compile(r"-(\d{8}T\d{6}Z)(-\d+)?\.jsonl$")
"""The end of a results file's name: when its run began."""


def unfinished(
    out: Path,
    ladder: Ladder,
    machine: Environment,
    *,
    chosen: Sequence[str] = (),
    data_sha256: str | None = None,
    peak_tflops: float | None = None,
    ablate: bool = False,
    lacks: Callable[[Sequence[Record]], bool],
) -> Path:
    """Return the newest results file that this run can go on with, incomplete ones first.

    chosen, data_sha256, peak_tflops, ablate: of this run. lacks: whether tasks are left after some records.
    Raises BenchError if there is none, with the first difference of the newest file, one of this machine
    before those of others.
    """
    unreadable: list[tuple[Path, RecordError]] = []
    runs = runs_of(out, ladder, unreadable)
    if unreadable and not runs:
        raise BenchError(f"{unreadable[-1][1]}; mend it, or leave out --resume")
    if not runs:
        files = f"{ladder.file_name}-*.jsonl"
        raise BenchError(
            f"{out}: no results of ladder {ladder.name!r} to go on with ({files}); leave out --resume"
        )
    runs.sort(
        key=lambda run: (run[1][0].environment.machine == machine.machine, run[1][-1].time), reverse=True
    )
    reasons: list[str] = []
    complete: list[Path] = []
    for path, records in runs:
        if mixed := not_of_one_run(records):
            reasons.append(f"{path}: cannot go on with it: it {mixed}")
            continue
        differences = [
            *_machine(records, machine, ladder.chosen(chosen)[-1].toggles.device),
            *_ladder(records, ladder),
            *_options(records, chosen, data_sha256, peak_tflops, ablate),
        ]
        if differences:
            what, there, now = differences[0]
            reasons.append(
                f"{path}: cannot go on with it: {what} was {there} and is {now}; repeat that run's options, "
                "or leave out --resume to start anew"
            )
        elif lacks(records):
            for other, error in unreadable:  # a newer one may be the run that is meant
                if _begun(other) > _begun(path):
                    raise BenchError(f"{error}; mend it, or move it away, to go on with {path}")
            return path
        else:
            complete.append(path)
    if complete:
        return complete[0]
    raise BenchError(reasons[0])


def runs_of(
    out: Path, ladder: Ladder, unreadable: list[tuple[Path, RecordError]]
) -> list[tuple[Path, list[Record]]]:
    """Return the results files of a ladder, by its name in their records: in their own it may be cut off.

    unreadable: takes the files that are called as this ladder's are, with the errors.
    """
    runs: list[tuple[Path, list[Record]]] = []
    for path in results_files(out, f"{ladder.file_name}-"):
        try:
            records = read(path)[0]
        except RecordError as error:
            if _begun(path) and BEGUN.sub("", path.name) == ladder.file_name:
                unreadable.append((path, error))
            continue
        if records and records[0].ladder == ladder.name:
            runs.append((path, records))
    return runs


def _begun(path: Path) -> str:
    """When the run of a results file began, by its name; empty where that does not tell."""
    found = BEGUN.search(path.name)
    return found[1] if found else ""


def _machine(records: Sequence[Record], machine: Environment, device: str) -> Iterator[Difference]:
    """Yield differences from `machine`, as a process on `device` sees it."""
    same = [record.environment for record in records if record.toggles.all.get("device") == device]
    was = (same or [record.environment for record in records])[0]
    yield from differences(was, machine, same_device=bool(same))


def _ladder(records: Sequence[Record], ladder: Ladder) -> Iterator[Difference]:
    first = records[0]
    if first.ladder_hash != ladder.hash:
        workload = asdict(ladder.workload)
        for key, value in workload.items():
            if first.workload.get(key, value) != value:
                yield f"workload.{key}", first.workload[key], value
        rungs = {rung.index: rung for rung in ladder.rungs}
        for record in records:
            rung = rungs.get(record.rung_index)
            if record.kind not in RUNGS or rung is None:
                continue
            if record.rung != rung.name:
                yield f"rung {record.rung_index + 1}", record.rung, rung.name
            if any(each.kind == "scout" for each in records):  # its toggles depend on what was carried
                continue
            for key, value in asdict(rung.toggles).items():
                if record.toggles.all.get(key, value) != value:
                    yield f"{key} of rung {rung.name!r}", record.toggles.all[key], value
        yield "the ladder's workload or toggles (hash)", first.ladder_hash[:12], ladder.hash[:12]
    for key, value in ladder.protocol.of_windows().items():
        if first.protocol.get(key, value) != value:
            yield f"protocol.{key}", first.protocol[key], value


def _options(
    records: Sequence[Record],
    chosen: Sequence[str],
    data_sha256: str | None,
    peak_tflops: float | None,
    ablate: bool,
) -> Iterator[Difference]:
    if records[0].ablate != ablate:  # later records would have no reference in their session
        was, now = ("given" if given else "not given" for given in (records[0].ablate, ablate))
        yield "--ablate", was, now
    if (records[0].chosen or []) != list(chosen):
        everything = "all rungs"
        yield "--rungs", ",".join(records[0].chosen or []) or everything, ",".join(chosen) or everything
    data = {record.data_sha256 for record in records if record.data_sha256}
    if data and data_sha256 and data != {data_sha256}:
        yield "the text (sha256)", " and ".join(sorted(sha[:12] for sha in data)), data_sha256[:12]
    for record in records:
        if record.measurement is None:
            continue
        given = record.measurement.peak_flops_kind == "given"
        there = (record.measurement.peak_flops_bf16 or 0) / 1e12 if given else None
        if not (there == peak_tflops or (there and peak_tflops and math.isclose(there, peak_tflops))):
            yield "--peak-tflops", there or "not given", peak_tflops or "not given"
        return


def repair(path: Path) -> None:
    """Remove a last line that is cut off, and end one that is complete, so that records can be appended."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    last = content[end:].rstrip(NUL)  # left by a crash of the machine
    last = b"" if not last.strip() or torn(last.strip(BLANK)) else last + b"\n"
    if last != content[end:]:
        with path.open("r+b") as file:
            file.seek(end)
            file.write(last)
            file.truncate()
