"""Ranks that train together learn what one alone would. They are real processes, each group started once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from trainings import FOUR, start
from trainings import WORKLOAD as STEADY

from bench.stats import loss_difference
from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from gpt2.config.workload import Workload
from gpt2.data.batches import Batches, open_corpus
from gpt2.training.memory_estimate import estimate
from gpt2.training.train import micro_batches

pytestmark = pytest.mark.usefixtures("process_settings")
STEPS = 4
WORKLOAD = replace(STEADY, lr_warmup_steps=3)
"""Its learning rate changes at each step, which whatever wraps the optimiser must pass on."""
CORPUS = open_corpus("synthetic", vocab_size=509)
TWO = Toggles(world_size=2, micro_batch_size=2)
FEW = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(Phase.generate,),
)
SHARDING = ("none", "zero1", "zero2", "fsdp2")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    """By which none of the model's sizes can be divided."""
    ranks = Ranks(3)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def alone() -> dict[str, list]:
    """One rank on the global batch of FOUR, with plain AdamW."""
    training = start(FOUR, WORKLOAD)
    steps = list(itertools.islice(training, STEPS))
    return {
        "losses": [step.loss.item() for step in steps],
        "grad_norms": [step.grad_norm.item() for step in steps],
        "weights": [p.detach().flatten().tolist() for p in training.model.parameters()],
    }


def mean_losses(answers: list[dict]) -> list[float]:
    return [float(np.mean(losses)) for losses in zip(*(answer["losses"] for answer in answers), strict=True)]


MODES = [
    *({"sharding": name} for name in SHARDING),
    *({"sharding": name, "micro_batch_size": 1, "grad_accum_steps": 2} for name in SHARDING),
    *({"sharding": name, "adamw": "fused", "recompute": "block"} for name in SHARDING),
    {"sharding": "fsdp2", "adamw": "foreach", "vocab_multiple": 64},
    {"sharding": "zero1", "autocast": "float16", "adamw": "fused"},
    {"sharding": "zero2", "autocast": "float16"},
    {"sharding": "fsdp2", "autocast": "bfloat16", "attention": "sdpa", "recompute": "gelu"},
]


@pytest.mark.parametrize("changes", MODES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_two_ranks_train_as_one_however_they_share_and_every_toggle_is_proved(
    changes: dict, pair: Ranks, alone: dict[str, list]
) -> None:
    toggles = replace(TWO, **changes)
    answers = pair.ask(toggles, WORKLOAD, steps=STEPS, proofs=True)
    first, second = answers
    tolerance = LOSS_TOLERANCE[toggles.precision_class()]
    assert loss_difference(mean_losses(answers), alone["losses"]) <= tolerance.losses
    assert loss_difference(first["grad_norms"][:1], alone["grad_norms"]) <= tolerance.first_grad_norm
    assert first["grad_norms"] == second["grad_norms"]  # one gradient, the same everywhere
    if not toggles.shards_gradients:  # no shard has a second rank that it could differ from
        assert first["ranks_agree"] is second["ranks_agree"] is True
    assert {n: f for a in answers for n, f in a["proofs"].items() if not f[0]} == {}


def test_a_rank_one_of_whose_weights_is_off_by_a_millionth_is_found_out_by_all(pair: Ranks) -> None:
    answers = pair.ask(TWO, WORKLOAD, steps=STEPS, faulty_rank=1)
    assert [answer["ranks_agree"] for answer in answers] == [False, False]


@pytest.mark.parametrize("sharding", SHARDING)
def test_after_some_steps_the_weights_are_those_of_one_rank_alone(
    sharding: str, pair: Ranks, alone: dict[str, list]
) -> None:
    (answer, _) = pair.ask(replace(TWO, sharding=sharding), WORKLOAD, steps=STEPS, weights=True)
    for found, expected in zip(answer["weights"], alone["weights"], strict=True):
        # AdamW divides by the gradient's size, so that rounding of one that is next to nothing shows.
        assert np.abs(np.subtract(found, expected)).max() < 1e-3 * WORKLOAD.lr * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("sharding", "recompute"), [("none", "gelu"), ("zero1", "none"), ("fsdp2", "block")])
def test_compiled_ranks_train_as_eager_ones_and_their_gradients_agree(
    sharding: str, recompute: str, accumulated: int, pair: Ranks, alone: dict[str, list]
) -> None:
    toggles = replace(
        TWO,
        sharding=sharding,
        compile="default",
        recompute=recompute,
        micro_batch_size=TWO.micro_batch_size // accumulated,
        grad_accum_steps=accumulated,
    )
    # Small buckets, because torch cuts a replica's code wherever one is full.
    answers = pair.ask(toggles, WORKLOAD, steps=STEPS, proofs=True, gradients=True, bucket_bytes=100_000)
    assert toggles.shards_gradients or all(answer["graphs"] > 1 for answer in answers)
    assert loss_difference(mean_losses(answers), alone["losses"]) <= LOSS_TOLERANCE["float32"].losses
    assert {n: f for a in answers for n, f in a["proofs"].items() if not f[0]} == {}
    for answer in answers:
        assert 0 < answer["gradient_difference"] < GRADIENT_TOLERANCE["float32"]
        assert answer["graph_breaks"] == 0


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_gradients_of_replicas_stay_in_the_buffer_that_is_exchanged(
    sharding: str, accumulated: int, pair: Ranks
) -> None:
    toggles = replace(TWO, sharding=sharding, grad_accum_steps=accumulated)
    answers = pair.ask(toggles, WORKLOAD, steps=2)
    assert [answer["gradient_buffers"] for answer in answers] == [1, 1]


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_accumulated_gradients_are_exchanged_as_often_as_those_of_one_micro_batch(
    sharding: str, pair: Ranks
) -> None:
    seen = []
    for accumulated in (1, 3):
        toggles = replace(TWO, sharding=sharding, grad_accum_steps=accumulated)
        seen += [
            answer["proofs"]["world_size"][1] for answer in pair.ask(toggles, WORKLOAD, steps=2, proofs=True)
        ]
    assert len(set(seen)) == 1


def test_looking_at_a_sharded_training_changes_nothing_in_it(pair: Ranks) -> None:
    toggles = replace(TWO, sharding="zero2")
    plain = mean_losses(pair.ask(toggles, WORKLOAD, steps=STEPS + 2))
    looked_at = pair.ask(toggles, WORKLOAD, steps=STEPS, proofs=True, gradients=True)
    after = [answer["after"] for answer in looked_at]
    assert np.mean(after) == pytest.approx(plain[STEPS + 1], rel=1e-6)  # that after the profiled one
    assert all(answer["gradient_difference"] == 0.0 for answer in looked_at)  # nothing was compiled


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "fsdp2"])
def test_gradients_of_shards_add_up_over_the_parts_that_eager_code_takes(sharding: str, pair: Ranks) -> None:
    toggles = replace(TWO, sharding=sharding, micro_batch_size=9)  # of which eager code takes eight, and one
    for answer in pair.ask(toggles, WORKLOAD, steps=1, gradients=True):
        assert answer["gradient_difference"] < GRADIENT_TOLERANCE["float32"] / 10


@pytest.mark.parametrize("sharding", SHARDING)
def test_the_estimate_of_the_optimiser_s_memory_is_what_the_fullest_rank_keeps(
    sharding: str, pair: Ranks
) -> None:
    toggles = replace(TWO, sharding=sharding)
    kept = max(answer["optimizer_bytes"] for answer in pair.ask(toggles, WORKLOAD, steps=1))
    assert estimate(WORKLOAD, toggles).optimizer == kept


def test_each_way_of_sharing_needs_less_memory_than_the_one_before() -> None:
    gpt2, two = Workload(), Toggles(world_size=8)
    needs = [estimate(gpt2, replace(two, sharding=name)).total for name in SHARDING]
    assert needs == sorted(set(needs), reverse=True)


@pytest.mark.slow
@settings(FEW, max_examples=3)  # each of them is two real trainings
@given(
    sharding=st.sampled_from(SHARDING),
    micro_batch=st.integers(1, 3),
    accumulated=st.integers(1, 3),
    seq_len=st.integers(1, 48),
)
def test_three_ranks_train_as_one_at_any_batch_and_accumulation(
    three: Ranks, sharding: str, micro_batch: int, accumulated: int, seq_len: int
) -> None:
    workload = replace(WORKLOAD, seq_len=seq_len)
    toggles = Toggles(
        world_size=3,
        sharding=sharding,  # type: ignore[arg-type]
        micro_batch_size=micro_batch,
        grad_accum_steps=accumulated,
    )
    together = replace(FOUR, micro_batch_size=3 * micro_batch * accumulated)
    expected = [step.loss.item() for step in itertools.islice(start(together, workload), 3)]
    answers = three.ask(toggles, workload, steps=3)
    assert loss_difference(mean_losses(answers), expected) <= LOSS_TOLERANCE["float32"].losses
    assert estimate(workload, toggles).optimizer == max(answer["optimizer_bytes"] for answer in answers)


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 8),
    micro_batch=st.integers(1, 4),
    accumulated=st.integers(1, 4),
    steps=st.integers(1, 3),
)
def test_the_ranks_micro_batches_are_disjoint_and_together_the_global_batch(
    ranks: int, micro_batch: int, accumulated: int, steps: int
) -> None:
    toggles = Toggles(world_size=ranks, micro_batch_size=micro_batch, grad_accum_steps=accumulated)
    sequences = ranks * micro_batch * accumulated
    batches = Batches(CORPUS, seq_len=8, tokens_per_step=8 * sequences, seed=0)
    shares = [micro_batches(batches, toggles, rank=rank) for rank in range(ranks)]
    for step in range(steps):
        read = [next(share) for _ in range(accumulated) for share in shares]
        x, y = (torch.cat([pair[which] for pair in read]).numpy() for which in (0, 1))
        expected = batches.sequences(step, 0, sequences)
        # In this order they are the global batch itself: every sequence once, and none of another step.
        assert np.array_equal(x, expected[0])
        assert np.array_equal(y, expected[1])
