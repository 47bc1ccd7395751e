"""Log-probabilities that a model assigns to the ends of texts, in batches.

sums = log_probabilities(model, texts, device=device, autocast=contextlib.nullcontext, batch_size=32)

Used by gpt2.evals.hellaswag.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.device import Device
from gpt2.files.cache import DataError
from gpt2.model.model import GPT2
from gpt2.training import distributed

STEP = 32
"""Lengths are padded to multiples of this, so that devices that compile a program per shape compile few."""
IGNORE_INDEX = -100
"""Target of padding positions, which cross_entropy ignores."""


Text = tuple[np.ndarray, int]
"""Token ids, and how many of them, at the end, are scored: fewer than all."""


@dataclass(frozen=True)
class Batch:
    """Texts of one forward pass; where they are fewer than its rows, the rest is padding."""

    texts: list[int]
    """Indices of the texts."""
    T: int
    """Tokens per row."""
    K: int
    """Scored tokens per row."""


def log_probabilities(
    model: GPT2,
    texts: Sequence[Text],
    *,
    device: Device,
    autocast: Callable[[], AbstractContextManager[Any]],
    batch_size: int,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Return the log-probability of each text's scored tokens given the tokens before them, in nats.

    Returns float64 (len(texts),). Runs eagerly, since compiled code would be recompiled for each shape. A
    text that is too long loses its first tokens. Memory: the logits of one batch, and a float32 copy at
    scored positions only. With several processes, all must call this together, each with its own texts.
    progress: called with texts done and in total. Raises DataError where the scored tokens alone are too
    long.
    """
    batches = _plan(texts, model.config.n_ctx, batch_size)
    # Where ranks shard the weights, all must take part in each forward pass.
    passes = max(distributed.gather(len(batches), processes))
    idle = min(STEP, model.config.n_ctx)
    batches += [Batch([], idle, idle)] * (passes - len(batches))
    sums, done = [], 0
    with torch.no_grad(), _eagerly():
        for batch in batches:
            tokens, places, targets = (device.put(each) for each in _filled(texts, batch, batch_size))
            with autocast():
                logits = model.logits(tokens)
            sums.append(_sums(logits, places, targets))  # left on the device, as reading would wait for it
            device.end_step()
            done += len(batch.texts)
            if progress:
                progress(done, len(texts))
    found = np.empty(len(texts))
    for batch, values in zip(batches, sums, strict=True):
        found[batch.texts] = values.cpu().numpy()[: len(batch.texts)]
    return found


def _eagerly() -> AbstractContextManager[Any]:
    """Run what is compiled eagerly; without importing torch's compiler, a second, where nothing can be."""
    compiler = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()


def _plan(texts: Sequence[Text], n_ctx: int, batch_size: int) -> list[Batch]:
    """Group texts of similar length into batches of one shape each, those that need most memory first."""
    widths: dict[int, list[int]] = defaultdict(list)
    for place, (tokens, scored) in enumerate(texts):
        if scored > n_ctx:
            raise DataError(f"{scored} tokens to be scored do not fit the model's context of {n_ctx}")
        widths[_filled_up(min(len(tokens) - 1, n_ctx), n_ctx)].append(place)
    batches = []
    for T, members in sorted(widths.items(), reverse=True):
        K = _filled_up(max(texts[place][1] for place in members), T)
        batches += [Batch(members[i : i + batch_size], T, K) for i in range(0, len(members), batch_size)]
    return batches


def _filled_up(length: int, most: int) -> int:
    return min(-(-length // STEP) * STEP, most)


def _filled(texts: Sequence[Text], batch: Batch, rows: int) -> Iterator[Tensor]:
    """Yield a batch's inputs (rows, T), and positions and targets of scored tokens (rows, K): int64, CPU.

    Rows are padded on the right, where causal attention ignores it.
    """
    tokens = torch.zeros(rows, batch.T, dtype=torch.int64)
    places = torch.zeros(rows, batch.K, dtype=torch.int64)
    targets = torch.full((rows, batch.K), IGNORE_INDEX)
    for row, place in enumerate(batch.texts):
        whole, scored = texts[place]
        ids = torch.from_numpy(whole[-(batch.T + 1) :].astype(np.int64))
        length = len(ids) - 1
        tokens[row, :length] = ids[:-1]
        places[row, :scored] = torch.arange(length - scored, length)
        targets[row, :scored] = ids[-scored:]
    yield from (tokens, places, targets)


def _sums(logits: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of each row's log-probabilities at `places`, float32 (B,).

    logits: (B, T, V); places, targets: (B, K).
    """
    rows = torch.arange(len(places), device=places.device).unsqueeze(1)
    scored = logits[rows, places].float()
    flat = scored.flatten(0, 1), targets.flatten()
    losses = F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="none")
    return -losses.view(places.shape).sum(1)
