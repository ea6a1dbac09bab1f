"""From a row of logits to a token: greedy or nucleus, with a counter-based generator, and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-4
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn chooses tokens. temperature <= 1e-4 is greedy; top_p <= 0 or >= 1 keeps every token."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature <= GREEDY_BELOW


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) that depends on (seed, counter) alone: two rounds of a 64-bit mixing function, upper 53 bits."""
    x = _mix(seed & _MASK)
    x = _mix((x + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return (x >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choose(logits: NDArray[np.float32], sampling: Sampling, counter: int) -> int:
    """The next token of one row of logits [V]; `counter` numbers the tokens of the turn. Ties go to the lowest id."""
    if sampling.greedy:
        return int(np.argmax(logits))
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    point = uniform(sampling.seed, counter)
    if sampling.top_p <= 0.0 or sampling.top_p >= 1.0:
        cumulative = np.cumsum(weights)
        return int(min(np.searchsorted(cumulative, point * cumulative[-1], side="right"), len(weights) - 1))
    ids = nucleus(weights, sampling.top_p * float(weights.sum()))
    cumulative = np.cumsum(weights[ids])
    return int(ids[min(np.searchsorted(cumulative, point * cumulative[-1], side="right"), len(ids) - 1)])


def nucleus(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Ids of the smallest set of largest weights whose sum reaches `mass`, largest first, ties by lower id.

    Only the candidates that can matter are sorted: the set is looked for among the 64 largest, then 8 times as many, and so on.
    """
    count = 64
    while True:
        ids = top_ids(weights, min(count, len(weights)))
        cumulative = np.cumsum(weights[ids])
        needed = int(np.searchsorted(cumulative, mass, side="left")) + 1
        if needed <= len(ids) or len(ids) == len(weights):
            return ids[:needed]
        count *= 8


def top_ids(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest values in falling order, ties by lower id, without sorting the whole row."""
    if count >= len(values):
        return np.argsort(-values, kind="stable").astype(np.int64)
    if count <= 0:
        return np.zeros(0, np.int64)
    edge = values[np.argpartition(values, len(values) - count)[len(values) - count]]
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    ids = np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])
    return ids.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Score:
    """Natural log-probability of a token and the best (id, log-probability) pairs of its row, from raw logits."""

    logprob: float
    best: tuple[tuple[int, float], ...]


def score(logits: NDArray[np.float32], token: int, k: int) -> Score:
    """Log-softmax of a raw row [V] at `token`, and its k best in falling order, ties by lower id."""
    row = logits.astype(np.float64)
    peak = float(row.max())
    norm = peak + float(np.log(np.exp(row - peak).sum()))
    best = top_ids(logits, min(k, len(logits)))
    return Score(float(row[token]) - norm, tuple((int(i), float(row[i]) - norm) for i in best))


NO_PREDICTOR = Score(0.0, ())
