"""Choosing tokens: against a plain full sort, and against the probabilities themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm53serve.engine.sampling import Sampling, choose, nucleus, score, top_ids, uniform

logit_rows = hnp.arrays(np.float32, st.integers(1, 700), elements=st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, 2.5, 9.0]))


@given(row=logit_rows)
def test_greedy_takes_the_lowest_of_equal_best(row: np.ndarray) -> None:
    best = [i for i, v in enumerate(row) if v == row.max()]
    assert choose(row, Sampling(), 0) == best[0]
    assert choose(row, Sampling(temperature=1e-4, top_p=0.3, seed=9), 5) == best[0]


@given(row=logit_rows, count=st.integers(1, 700))
def test_top_ids_is_the_head_of_a_stable_sort(row: np.ndarray, count: int) -> None:
    assert top_ids(row, count).tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


@given(row=logit_rows, top_p=st.floats(0.01, 0.99))
def test_nucleus_is_the_smallest_prefix_that_reaches_its_mass(row: np.ndarray, top_p: float) -> None:
    weights = np.exp(row.astype(np.float64))
    mass = top_p * float(weights.sum())
    ids = nucleus(weights, mass).tolist()
    order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
    assert ids == order[: len(ids)]
    assert weights[ids].sum() >= mass * (1 - 1e-12) or len(ids) == len(row)
    assert len(ids) == 1 or weights[ids[:-1]].sum() < mass * (1 + 1e-12)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**64 - 1), row=logit_rows, top_p=st.sampled_from([0.0, 0.4, 0.9, 1.0]))
def test_the_same_seed_gives_the_same_token(seed: int, row: np.ndarray, top_p: float) -> None:
    how = Sampling(0.8, top_p, seed)
    assert [choose(row, how, i) for i in range(5)] == [choose(row, how, i) for i in range(5)]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_frequencies_follow_the_probabilities(top_p: float) -> None:
    row = np.array([1.0, 0.0, 2.0, -1.0, 1.5], np.float32)
    weights = np.exp(row.astype(np.float64) / 0.7)
    kept = nucleus(weights, top_p * float(weights.sum())) if top_p < 1 else np.arange(5)
    expected = np.zeros(5)
    expected[kept] = weights[kept] / weights[kept].sum()
    drawn = np.bincount([choose(row, Sampling(0.7, top_p, 3), i) for i in range(20000)], minlength=5) / 20000
    assert np.abs(drawn - expected).max() < 0.012
    assert (drawn[expected == 0] == 0).all()


def test_uniform_is_uniform_and_counter_based() -> None:
    values = np.array([uniform(7, i) for i in range(20000)])
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01 and abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert uniform(7, 3) == values[3] and uniform(8, 3) != values[3]


@given(row=logit_rows, k=st.integers(0, 32))
def test_scores_are_the_log_softmax(row: np.ndarray, k: int) -> None:
    plain = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    token = len(row) // 2
    result = score(row, token, k)
    assert abs(result.logprob - plain[token]) < 1e-9
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert [i for i, _ in result.best] == order
    assert all(abs(value - plain[i]) < 1e-9 for i, value in result.best)
