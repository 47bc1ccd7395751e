"""Run one leg of a training in this process: device, ranks, signals, and the sinks of its events.

Called by `gpt2 train`, in each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gpt2.device import Device, find
from gpt2.errors import GPT2Error, limit_met
from gpt2.evals.hellaswag import ScoreError
from gpt2.files.atomic import atomic_write
from gpt2.files.listing import name_problem
from gpt2.files.lock import Locked, own
from gpt2.files.strict_json import dumps
from gpt2.pretrain.anomaly import TrainingStopped
from gpt2.pretrain.checkpoint import CheckpointError, folders, misnamed, newest, step_folder
from gpt2.pretrain.config import TrainingRun
from gpt2.pretrain.display import Display
from gpt2.pretrain.launcher import FAILED, INTERRUPTED, REFUSED, end_with_launcher
from gpt2.pretrain.metrics import MetricsError, MetricsFile, Sink, TensorBoard, WeightsAndBiases
from gpt2.pretrain.session import Session, SessionOptions
from gpt2.signals import Asked, ending, listening
from gpt2.terminal import denied
from gpt2.training import distributed
from gpt2.training.distributed import process_group

ABOUT = "run.json"
"""File in the run's folder that holds its configuration and id."""


def run_rank(
    run: TrainingRun, options: SessionOptions, *, tensorboard: bool = False, wandb: bool = False
) -> int:
    """Train until the run ends or is interrupted, and return the exit code (see gpt2.cli.main.train)."""
    device: Device | None = None
    try:
        end_with_launcher()
        device = find(run.toggles)
        with process_group(run.toggles, device) as rank:
            return _run_rank(run, options, device, rank, tensorboard=tensorboard, wandb=wandb)
    except (TrainingStopped, ScoreError) as error:  # raised on all ranks alike
        return FAILED if distributed.rank() else _say(f"{error}; {_kept(options)}", FAILED)
    except GPT2Error as error:
        return _say(str(error), REFUSED)
    except PermissionError as error:
        return _say(denied(error), REFUSED)
    except OSError as error:
        if limit := limit_met(error):
            return _say(f"{limit}; {_kept(options)}", FAILED)
        if error.filename is None:
            traceback.print_exc()
            return FAILED
        return _say(f"{error.filename}: {error.strerror}; {_kept(options)}", FAILED)
    except KeyboardInterrupt:  # before the leg's own signal handlers are in place
        return _say("interrupted before the first step", 130)
    except Exception as error:
        if run.toggles.processes > 1 and _lost_a_rank(error):
            return _say(f"another rank is gone ({' '.join(str(error).split())[:200]})", FAILED)
        if device is not None and device.is_out_of_memory(error):
            smaller = f"take a smaller toggles.micro_batch_size than {run.toggles.micro_batch_size}"
            return _say(f"out of memory; {smaller}", FAILED)
        if limit := limit_met(error):
            return _say(f"{limit}; {_kept(options)}", FAILED)
        traceback.print_exc()
        return FAILED


def _kept(options: SessionOptions) -> str:
    """Return what there is to go on from, in words."""
    found = folders(options.checkpoints)
    return f"{found[-1]} is the newest checkpoint" if found else "no checkpoint was kept yet"


def _lost_a_rank(error: Exception) -> bool:
    """Return whether a collective failed for want of another rank; gloo has no exception type for it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def _run_rank(run: TrainingRun, options: SessionOptions, device: Device, rank: int, **wanted: bool) -> int:
    with ExitStack() as stack:
        if rank == 0:
            _take_folder(options, stack)
        _see_one_folder(run, options)
        session = Session(run, options, device)
        interrupted = stack.enter_context(_heed_signals(session))
        sinks: list[Sink] = []
        if rank == 0:
            sinks = _sinks(run, session, **wanted)
            sinks.append(stack.enter_context(Display(run.steps)))
            for sink in sinks:
                stack.push(partial(_close, sink))
        failed, moved = False, False
        for event in session:
            if rank == 0 and not moved and _is_gone(options.folder / ABOUT):
                moved = True
                gone = f"{options.folder} was moved or removed"
                _say(f"{gone}: new checkpoints go there, metrics to where it is now")
                with contextlib.suppress(OSError, Locked):  # the lock has moved with the folder
                    stack.enter_context(own(options.folder))
            for sink in list(sinks):
                try:
                    sink.write(event)
                except Exception as error:  # the sinks' libraries raise many types
                    sinks.remove(sink)
                    failed |= _report_failure(error, sink, session)
    if rank == 0:
        early = f"{session.ended_early}; the same command with --resume goes on"
        _say(early if session.ended_early else _done(session))
    if failed:
        return FAILED
    return INTERRUPTED if interrupted() and session.ended_early else 0


def _is_gone(path: Path) -> bool:
    """Return whether the file does not exist; False where the file system does not answer."""
    with contextlib.suppress(OSError):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
    return False


def _done(session: Session) -> str:
    steps, wanted, kept = session.training.number, session.run.steps, newest(session.options.folder)
    if steps > wanted:
        beyond = f"the run is at step {steps:,}, beyond the {wanted:,} that are asked for"
        return f"nothing to do: {beyond}: {kept}"
    return f"all {wanted:,} steps are done: {kept}"


def _report_failure(error: Exception, sink: Sink, session: Session) -> bool:
    """Report that a sink failed; returns True if the leg must end, which only the metrics files require."""
    if isinstance(sink, MetricsFile):
        _say(str(error))
        session.end("the metrics could not be written")
        return True
    what = f"{type(sink).__name__} takes no more events ({' '.join(str(error).split())})"
    _say(f"{what}; the run goes on without")
    return False


def _close(sink: Sink, kind: type[BaseException] | None, *_: Any) -> None:
    """Close a sink and report an error: the disk may be full, or the network gone."""
    try:
        sink.close(failed=kind is not None)
    except Exception as error:
        _say(f"{type(sink).__name__} was not closed ({' '.join(str(error).split())})")


def _take_folder(options: SessionOptions, stack: ExitStack) -> None:
    """Create and lock the run's folder until the stack is closed. Raises MetricsError or CheckpointError."""
    folder = options.folder
    if problem := name_problem(folder):
        raise MetricsError(problem)
    try:
        stack.enter_context(own(folder))
        if options.checkpoints.exists() and not os.access(options.checkpoints, os.W_OK):
            denied_to = f"cannot write into {options.checkpoints}"
            raise MetricsError(f"{denied_to}; ask for access, or choose another --out")
    except Locked:
        other = f"another gpt2 train is writing to {folder}"
        raise MetricsError(f"{other}; end it, or choose another --out") from None
    except OSError as error:
        why = "it is a file; name a folder" if folder.is_file() else error.strerror
        raise MetricsError(f"cannot write into {folder} ({why})") from None
    for each, step in misnamed(options.checkpoints):
        right = step_folder(options.checkpoints, step)
        name = "move it elsewhere" if right.exists() else f"rename it {right.name}, or move it elsewhere"
        raise CheckpointError(f"{each} is the checkpoint of step {step:,}; {name}")
    metrics = folder / "metrics.jsonl"
    if not options.resume and (folders(options.checkpoints) or (metrics.exists() and metrics.stat().st_size)):
        ways = "--resume goes on with it, --out chooses another folder"
        raise MetricsError(f"{folder} has a run already: {ways}")
    if options.resume and not folders(options.checkpoints):
        _say(f"there is no checkpoint in {options.checkpoints} to go on from: the run begins at step 0")


def _see_one_folder(run: TrainingRun, options: SessionOptions) -> None:
    """Raise CheckpointError unless all ranks see the folder, to which each writes its part."""
    if run.toggles.processes == 1:
        return
    sign = options.folder / f".ranks-{distributed.gather(uuid.uuid4().hex, run.toggles.processes)[0]}"
    if distributed.rank() == 0:
        sign.touch()
    distributed.gather(None, run.toggles.processes)
    seen = distributed.gather(sign.exists(), run.toggles.processes)
    if distributed.rank() == 0:
        sign.unlink()
    if not all(seen):
        blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        unseen = f"{options.folder} of rank 0 is not seen by rank {blind}"
        raise CheckpointError(f"{unseen}; let --out lie on a shared disk")


def _sinks(run: TrainingRun, session: Session, *, tensorboard: bool, wandb: bool) -> list[Sink]:
    options = session.options
    step, about = session.training.number, options.folder / ABOUT
    run_id = (_id(about) if step else None) or uuid.uuid4().hex
    if step <= run.steps or not about.exists():  # else nothing is done of what is asked for
        with atomic_write(about, MetricsError) as file:
            file.write(dumps({"id": run_id, "run": asdict(run)}, indent=1).encode())
    files = MetricsFile(options.folder, step, evaluated=not session.evaluate_first)
    if files.set_aside:
        why = "have no checkpoint to go on from, or are damaged"
        _say(f"the metrics that were there {why}: now {files.set_aside}")
    sinks: list[Sink] = [files]
    if tensorboard:
        sinks.append(TensorBoard(options.folder, step))
    if wandb:
        sinks.append(WeightsAndBiases(options.folder, run.name, asdict(run), run_id))
    return sinks


def _id(about: Path) -> str | None:
    """Return the id of the run's earlier legs, by which metrics sites know it; None where not recorded."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads(about.read_text(encoding="utf-8-sig")).get("id")
        return found if isinstance(found, str) else None
    return None


@contextlib.contextmanager
def _heed_signals(session: Session) -> Iterator[Callable[[], bool]]:
    """End the leg in order at the first signal; yields whether there was one. Within, a later Ctrl-C exits.

    Signals are heeded after the block too, where little is left to do.
    """
    asked = Asked()
    heeded: list[int] = []

    def heed(number: int, frame: FrameType | None) -> None:
        if not heeded:
            heeded.append(number)
            session.end("interrupted")
            _say("ending after this step; what is trained is kept; a later Ctrl-C (kill -INT) ends at once")

    def hear(number: int) -> None:
        asked.hear(number)
        if asked.at_once:
            os._exit(INTERRUPTED)

    for number in ending():
        signal.signal(number, heed)
    with listening(hear):
        yield lambda: bool(heeded)


def _say(text: str, code: int = 0) -> int:
    """Print a line, and return the exit code that goes with it."""
    with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or a signal broke into a print
        print(f"gpt2: {text}", file=sys.stderr, flush=True)
    return code
