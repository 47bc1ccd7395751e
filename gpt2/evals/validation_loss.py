"""Validation loss, computed by the same code that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpt2.data.batches import Corpus, DataError, inputs_and_targets
from gpt2.device import Device
from gpt2.evals.hellaswag import ScoreError
from gpt2.model.model import GPT2
from gpt2.training import distributed
from gpt2.training.train import Training

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context manager for a forward pass; see gpt2.training.stages.precision."""


class Validation:
    """Validation loss of a training on the first tokens of a corpus, in order.

    The number of tokens is rounded down to whole forward passes over all ranks, with training's batch size,
    but to at least one: `tokens` says to how many. So another batch size may judge by a few tokens fewer.
    Raises DataError where the corpus is too short for one pass.
    """

    def __init__(self, corpus: Corpus, training: Training, tokens: int) -> None:
        toggles, self.seq_len = training.toggles, training.workload.seq_len
        per_pass = toggles.sequences * toggles.processes
        at_hand = tokens if corpus.tokens is None else min(tokens, corpus.tokens - 1)
        self.passes = max(1, at_hand // (per_pass * self.seq_len))
        self.tokens = self.passes * per_pass * self.seq_len
        self.corpus, self.training = corpus, training
        if corpus.tokens is not None and corpus.tokens < self.tokens + 1:
            raise DataError(
                f"validation corpus {corpus.name!r} has {corpus.tokens} tokens, one pass over {per_pass} "
                f"sequences of {self.seq_len} needs {self.tokens + 1}; take a smaller micro_batch_size or "
                "another val_corpus"
            )

    def loss(self, heed: Callable[[], None] = lambda: None) -> float:
        """Return the mean cross-entropy in nats per token, the same on every rank; all call it together.

        heed: called before each forward pass; an exception that it raises ends the validation.
        """
        training = self.training
        losses = []
        for x, y in training.device.feed(self._mine()):
            heed()
            # Gradients stay enabled and DDP is used, so that this is the forward pass that trains. The loss
            # is detached at once: a graph kept alive would hold its activations during the next pass.
            with distributed.gradient_sync(training.wrapped, last=False), training.autocast():
                x, y = training.device.put(x), training.device.put(y)
                losses.append(training.wrapped(x, y).detach().clone())
            training.device.end_step()
        if training.toggles.shards_gradients:
            distributed.release(training.wrapped)
        mine = torch.stack(losses).mean().item()
        everyone = distributed.gather(mine, training.toggles.processes)
        return sum(everyone) / len(everyone)

    def _mine(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        B, W, rank = self.training.toggles.sequences, self.training.toggles.processes, distributed.rank()
        for number in range(self.passes):
            first = (number * W + rank) * B
            x, y = inputs_and_targets(self.corpus, range(first, first + B), self.seq_len)
            yield torch.from_numpy(x), torch.from_numpy(y)


@torch.no_grad()
def corpus_loss(
    model: GPT2,
    corpus: Corpus,
    *,
    tokens: int,
    seq_len: int,
    device: Device,
    autocast: Autocast,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """Return the mean cross-entropy over a corpus's first `tokens`, in nats per token, and their number.

    The corpus is cut into sequences of seq_len. batch_size: sequences per forward pass. progress: called with
    sequences done and sequences in total. Raises DataError where there is not one whole sequence, ScoreError
    where the loss is not finite.
    """
    T = seq_len
    at_hand = tokens if corpus.tokens is None else min(tokens, corpus.tokens - 1)
    if tokens < T:
        raise DataError(f"{tokens} validation tokens are too few: a sequence is of {T}; ask for more")
    if at_hand < T:
        raise DataError(f"corpus {corpus.name!r} has {at_hand} tokens to judge by, a sequence is of {T}")
    total, sequences = 0.0, at_hand // T
    for first in range(0, sequences, batch_size):
        count = min(batch_size, sequences - first)
        pair = inputs_and_targets(corpus, range(first, first + count), T)
        x, y = (device.put(torch.from_numpy(each.copy())) for each in pair)
        with autocast():
            total += model(x, y).item() * count
        if progress:
            progress(first + count, sequences)
    if not math.isfinite(total):
        raise ScoreError("the model's loss is not finite: it has diverged, and cannot be judged")
    return total / sequences, sequences * T
