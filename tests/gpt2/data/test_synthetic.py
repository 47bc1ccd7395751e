import numpy as np
import pytest

from gpt2.data import synthetic
from gpt2.data.synthetic import BLOCK, Synthetic


def transition_matrix(chain: Synthetic) -> np.ndarray:
    """Probability of each next token (column) after each token (row), written out."""
    V = chain.vocab_size
    matrix = np.tile(synthetic.RESTART * chain.unigram, (V, 1))
    for token in range(V):
        for shift, weight in zip(chain.shifts, chain.follower, strict=True):
            matrix[token, (token + shift) % V] += (1 - synthetic.RESTART) * weight
    return matrix


def stationary(chain: Synthetic) -> np.ndarray:
    """Long-run frequency of each token, shape (vocab_size,).

    It solves mu = RESTART * unigram + (1 - RESTART) * sum_k follower_k * shift(mu, s_k), exactly, by Fourier
    transform.
    """
    steps = np.zeros(chain.vocab_size)
    steps[chain.shifts] = chain.follower
    restart = synthetic.RESTART
    spectrum = restart * np.fft.fft(chain.unigram) / (1 - (1 - restart) * np.fft.fft(steps))
    return np.fft.ifft(spectrum).real


def entropy_rate(chain: Synthetic) -> float:
    """Entropy of the next token given the one before, in nats."""
    restart = synthetic.RESTART * chain.unigram
    places = np.arange(chain.vocab_size)[:, None] + chain.shifts
    reached = restart[places % chain.vocab_size]  # (V, SUCCESSORS)
    likely = reached + (1 - synthetic.RESTART) * chain.follower
    per_token = surprise(restart).sum() + (surprise(likely) - surprise(reached)).sum(axis=1)
    return float(stationary(chain) @ per_token)


def surprise(probability: np.ndarray) -> np.ndarray:
    return -probability * np.log(probability)


def test_entropy_rate_is_that_of_the_written_out_chain() -> None:
    chain = Synthetic(509, seed=0)
    matrix = transition_matrix(chain)
    frequencies = np.linalg.matrix_power(matrix, 200)[0]
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_allclose(stationary(chain), frequencies, atol=1e-12)
    expected = -(frequencies[:, None] * matrix * np.log(matrix)).sum()
    assert entropy_rate(chain) == pytest.approx(expected, rel=1e-9)


def test_tokens_follow_each_other_with_the_chain_s_probabilities() -> None:
    chain = Synthetic(60, seed=5)
    tokens = chain.read(0, 2_000_000)
    pairs = np.zeros((60, 60))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    observed = pairs / pairs.sum(axis=1, keepdims=True)
    assert np.abs(observed - transition_matrix(chain)).max() < 0.02


@pytest.mark.parametrize(("vocab_size", "rate"), [(50257, 3.81), (509, 3.08)])
def test_documented_entropies_are_right(vocab_size: int, rate: float) -> None:
    assert entropy_rate(Synthetic(vocab_size, 0)) == pytest.approx(rate, abs=0.005)


def test_any_part_reads_the_same_as_the_whole() -> None:
    chain = Synthetic(509, seed=1)
    whole = chain.read(0, 3 * BLOCK)
    for start, count in [(0, 1), (BLOCK - 1, 2), (BLOCK - 100, BLOCK + 200), (17, 129)]:
        assert np.array_equal(chain.read(start, count), whole[start : start + count])


def test_another_seed_draws_other_tokens_by_the_same_rules() -> None:
    one, other = Synthetic(509, seed=1), Synthetic(509, seed=2)
    assert not np.array_equal(one.read(0, 100), other.read(0, 100))
    assert np.array_equal(one.shifts, other.shifts)
    assert one.sha256 != other.sha256
