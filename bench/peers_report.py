"""What is printed: agreement of logits, the table of speeds, and ratios against what is to be reached. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.peers_worker import Measured

# a row whose two best logits are closer than this share of its largest one has no argmax that float32 could settle
NEAR_TIE = 1e-3
OURS, LLAMA, TRANSFORMERS = "glm53serve", "llama.cpp", "transformers"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two engines' logits over the same ids compare: rows, rows with the same argmax, near ties among the others; a row's largest
    difference as a share of the largest logit, in the median row and in the worst (where rounding chose another expert, say)."""

    rows: int
    same: int
    near_ties: int
    typical: float
    worst: float

    @property
    def holds(self) -> bool:
        """The argmax differs nowhere but in near ties."""
        return self.same + self.near_ties == self.rows


def agreement(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> Agreement:
    """Compare logits [rows, vocabulary] with a reference of that shape."""
    two = np.sort(np.partition(reference, -2, axis=1)[:, -2:], axis=1)
    tie = two[:, 1] - two[:, 0] < NEAR_TIE * np.abs(reference).max(axis=1)
    same = logits.argmax(axis=1) == reference.argmax(axis=1)
    difference = np.abs(logits - reference).max(axis=1) / np.abs(reference).max()
    return Agreement(len(reference), int(same.sum()), int((tie & ~same).sum()), float(np.median(difference)), float(difference.max()))


def kept_argmaxes(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> tuple[float, float]:
    """Share of rows whose argmax is the reference's, and the error's root mean square as a share of the reference's spread."""
    same = float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean())
    return same, float(np.sqrt(np.mean((logits - reference) ** 2)) / reference.std())


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one engine in every round: prompts of the longest depth, and decoding at each depth."""

    prefill: tuple[float, ...]
    decode: Mapping[int, tuple[float, ...]]
    foreign: float


def rates(rounds: Sequence[Mapping[int, Measured]]) -> Rates:
    """Rates of an engine from its rounds, each with one measurement a depth."""
    depths = sorted(rounds[0])
    return Rates(
        tuple(one[depths[-1]].prefill_rate for one in rounds),
        {depth: tuple(one[depth].decode_rate for one in rounds) for depth in depths},
        median(m.foreign for one in rounds for m in one.values()),
    )


def speed_table(engines: Mapping[str, Rates], weights: Mapping[str, str]) -> list[str]:
    """A Markdown table: medians over the rounds with the smallest and the largest."""
    first = next(iter(engines.values()))
    depths = sorted(first.decode)
    lines = [
        f"| engine | weights | prefill of {depths[-1]}, tok/s | " + " | ".join(f"decode after {d}, tok/s" for d in depths) + " | other load, cores |",
        "|---|---|---|" + "---|" * (len(depths) + 1),
    ]
    for name, rate in engines.items():
        cells = [_spread(rate.prefill), *(_spread(rate.decode[depth]) for depth in depths)]
        lines.append(f"| {name} | {weights[name]} | " + " | ".join(cells) + f" | {rate.foreign:.2f} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of ours to a peer's rate that should be reached."""

    peer: str
    decode: float
    prefill: float


GOALS = (Goal(LLAMA, 0.9, 0.9), Goal(TRANSFORMERS, 8.0, 3.0))


def ratio_lines(engines: Mapping[str, Rates], goals: Sequence[Goal] = GOALS) -> list[str]:
    """One line a ratio: of medians, the range of the rounds' own ratios, and whether the goal is met. Goals of absent peers are left out."""
    lines = []
    ours = engines[OURS]
    for goal in goals:
        if goal.peer not in engines:
            continue
        peer = engines[goal.peer]
        kinds = [(f"prefill of {max(ours.decode)}", ours.prefill, peer.prefill, goal.prefill)]
        kinds += [(f"decode after {d}", ours.decode[d], peer.decode[d], goal.decode) for d in sorted(ours.decode)]
        for what, mine, theirs, least in kinds:
            ratio = median(mine) / median(theirs)
            each = [a / b for a, b in zip(mine, theirs, strict=True)]
            verdict = "met" if ratio >= least else "MISSED"
            lines.append(f"{what:18} {ratio:6.2f} x {goal.peer:12} (rounds {min(each):.2f} to {max(each):.2f}; goal {least:g}: {verdict})")
    return lines
