"""How likely a model finds the ends of texts, many texts at once.

sums = log_probabilities(model, texts, device=device, autocast=contextlib.nullcontext, batch_size=32)

Called by gpt2.hellaswag. A text here is anything with `tokens` and `scored`, how many of the last ones count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2 import parallel
from gpt2.cache import DataError
from gpt2.device import Device
from gpt2.model import GPT2

STEP = 32
"""Lengths are filled up to multiples of this, so that whoever compiles a program for each shape compiles few."""
NOWHERE = -100
"""The target of places that fill up, which cross_entropy leaves out."""


class Text(Protocol):
    """Tokens, of which the last ones are scored."""

    @property
    def tokens(self) -> np.ndarray:
        """Integers, of shape (count,)."""
        ...

    @property
    def scored(self) -> int:
        """Less than there are tokens: what is scored has something before it."""
        ...


@dataclass(frozen=True)
class Batch:
    """Texts that take one forward pass together; where they are fewer than its rows, the rest is filled up."""

    texts: list[int]
    """Their places in the list."""
    T: int
    """Tokens of a row."""
    K: int
    """Scored tokens of a row."""


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
    """For each text the log-probability of its scored tokens given those before them, in nats: float64 (len(texts),).

    Compiled code is left aside: it would be compiled anew for each shape. What is too long for the model loses its
    first tokens. Memory: the logits of one batch, and in float32 those at scored places alone. With several processes
    all must call this together, each with its own texts. progress: called with texts done and to do.
    Raises DataError where the scored tokens alone are too long.
    """
    batches = _plan(texts, model.config.n_ctx, batch_size)
    # Where ranks share the weights out, all of them must join in each forward pass.
    passes = max(parallel.gather(len(batches), processes))
    idle = min(STEP, model.config.n_ctx)
    batches += [Batch([], idle, idle)] * (passes - len(batches))
    sums, done = [], 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            tokens, places, targets = (device.put(each) for each in _filled(texts, batch, batch_size))
            with autocast():
                logits = model.logits(tokens)
            sums.append(_sums(logits, places, targets))  # left on the device: reading it would wait for it
            device.end_step()
            done += len(batch.texts)
            if progress:
                progress(done, len(texts))
    found = np.empty(len(texts))
    for batch, values in zip(batches, sums, strict=True):
        found[batch.texts] = values.cpu().numpy()[: len(batch.texts)]
    return found


def _plan(texts: Sequence[Text], n_ctx: int, batch_size: int) -> list[Batch]:
    """Texts of about the same length together, one shape for each such length; the longest, which need most, first."""
    widths: dict[int, list[int]] = defaultdict(list)
    for place, each in enumerate(texts):
        if each.scored > n_ctx:
            raise DataError(f"{each.scored} tokens to be scored do not fit the model's context of {n_ctx}")
        widths[_filled_up(min(len(each.tokens) - 1, n_ctx), n_ctx)].append(place)
    batches = []
    for T, members in sorted(widths.items(), reverse=True):
        K = _filled_up(max(texts[place].scored for place in members), T)
        batches += [Batch(members[i : i + batch_size], T, K) for i in range(0, len(members), batch_size)]
    return batches


def _filled_up(length: int, most: int) -> int:
    return min(-(-length // STEP) * STEP, most)


def _filled(texts: Sequence[Text], batch: Batch, rows: int) -> Iterator[Tensor]:
    """Of a batch the inputs (rows, T), and of the scored tokens places and targets (rows, K); int64, on the CPU.

    Filled up on the right, where no earlier token looks.
    """
    tokens = torch.zeros(rows, batch.T, dtype=torch.int64)
    places = torch.zeros(rows, batch.K, dtype=torch.int64)
    targets = torch.full((rows, batch.K), NOWHERE)
    for row, place in enumerate(batch.texts):
        one = texts[place]
        ids = torch.from_numpy(one.tokens[-(batch.T + 1) :].astype(np.int64))
        length = len(ids) - 1
        tokens[row, :length] = ids[:-1]
        places[row, : one.scored] = torch.arange(length - one.scored, length)
        targets[row, : one.scored] = ids[-one.scored :]
    yield from (tokens, places, targets)


def _sums(logits: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """logits: (B, T, V); places, targets: (B, K). Returns the sum of each row's log-probabilities, float32 (B,)."""
    rows = torch.arange(len(places), device=places.device).unsqueeze(1)
    scored = logits[rows, places].float()
    losses = F.cross_entropy(scored.flatten(0, 1), targets.flatten(), ignore_index=NOWHERE, reduction="none")
    return -losses.view(places.shape).sum(1)
