"""The random numbers of rollouts: each sequence's own, whoever draws it, and alike at every call."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from abrun.trainer.seeds import Draws

ROWS, TOKENS = 64, 40


def draws(**named: Any) -> Draws:
    settled: dict[str, Any] = {"seed": 3, "stream": "sampling", "step": 7, "rows": range(ROWS)}
    return Draws(**settled | named)


OTHERS = [
    draws(seed=4),
    draws(stream="validation"),
    draws(step=8),
    draws(rows=range(ROWS, 2 * ROWS)),
    draws(rows=range(5 * ROWS, 6 * ROWS)),
    draws(step=8, rows=range(ROWS, 2 * ROWS)),
]


def test_a_sequence_has_its_numbers_on_every_rank_and_at_every_call() -> None:
    whole = draws()
    for rows in (range(5), range(20, 33), range(63, 64), range(10, 10)):
        part = draws(rows=rows)
        assert torch.equal(part.uniforms(TOKENS), whole.uniforms(TOKENS)[rows.start : rows.stop])
        assert part.seeds() == whole.seeds()[rows.start : rows.stop]
    assert torch.equal(draws(rows=range(5)).uniforms(TOKENS), draws(rows=range(500)).uniforms(TOKENS)[:5])


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 39, 41, 1000])
def test_the_maximum_length_only_adds_numbers(num_tokens: int) -> None:
    common = min(num_tokens, TOKENS)
    uniforms = draws().uniforms(num_tokens)
    assert uniforms.shape == (ROWS, num_tokens)
    assert torch.equal(uniforms[:, :common], draws().uniforms(TOKENS)[:, :common])


def test_a_row_is_the_published_generator_of_its_seed() -> None:
    """Java's SplittableRandom; the first output for the seed 1234567 is in many of its test suites."""

    def next_bits(state: int) -> tuple[int, int]:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        bits = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return state, bits ^ bits >> 31

    assert next_bits(1234567)[1] == 6457827717110365317
    whole = draws()
    for state, row in zip(whole.seeds(), whole.uniforms(5).tolist(), strict=True):
        for uniform in row:
            state, bits = next_bits(state)
            assert uniform == (bits >> 11) / 2**53


def test_no_two_sequences_have_the_same_numbers() -> None:
    every = [draws(), *OTHERS]
    seeds = [seed for each in every for seed in each.seeds()]
    assert len(set(seeds)) == len(every) * ROWS and all(0 <= seed < 2**63 for seed in seeds)
    rows = torch.cat([each.uniforms(TOKENS) for each in every])
    assert len(rows.unique()) == rows.numel()


def test_numbers_are_uniform_and_independent() -> None:
    """Between the sequences of a step, between tokens, and between steps; bounds of 5 standard deviations."""
    streams = [each.uniforms(TOKENS).numpy() for each in (draws(), *OTHERS)]
    for one in streams:
        assert one.dtype == np.float64 and one.min() >= 0 and one.max() < 1
        assert kstest(one.ravel(), "uniform").pvalue > 1e-6
        for matrix, count in ((np.corrcoef(one), TOKENS), (np.corrcoef(one.T), ROWS)):
            assert np.abs(matrix[np.triu_indices_from(matrix, 1)]).max() < 6 / np.sqrt(count)
    for one, other in itertools.combinations(streams, 2):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)
