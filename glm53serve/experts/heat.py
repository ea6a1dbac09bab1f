"""How soon and how likely each routed expert is used again: what the store keeps when not all fit.

Plain recency is nearly worthless: a token walks through all layers, so by the time a layer comes round again its experts are the least
recent. What counts is the chance that a layer's next pass uses an expert, and fading use counts tell it well: a mean of a short, a middle
and a long memory beats each of them, and in replays of real routing the best fixed set too.

An expert whose layer comes next earns its place at once, one whose layer has just passed must hold it for a whole round. So its worth is its
chance divided by the passes until its layer's turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HALF_LIVES: tuple[float, ...] = (1.0, 8.0, 96.0)
"""In tokens."""
SHARES: tuple[float, ...] = (0.35, 0.35, 0.3)


class Heat:
    """The chance that the next token uses an expert, `chance`, and the chance a pass held, `worth`: float64 [layers, experts].

    Each layer's memories fade by the rows that pass through it.
    """

    def __init__(self, layers: int, experts: int, half_lives: Sequence[float] = HALF_LIVES, shares: Sequence[float] = SHARES) -> None:
        self.chance = np.zeros((layers, experts))
        self.worth = np.zeros((layers, experts))
        self._memories = np.zeros((len(half_lives), layers, experts))
        self._fades = 0.5 ** (1.0 / np.array(half_lives))
        self._shares = np.array(shares)
        self._layers = np.arange(layers)

    def use(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int) -> None:
        """A pass of `rows` rows used each of `experts` (distinct) `counts` times in this layer; as if the uses were spread evenly over the rows."""
        kept = self._fades**rows
        memories = self._memories[:, layer]
        memories *= kept[:, None]
        memories[:, experts] += (1.0 - kept)[:, None] * (counts / rows)
        self.chance[layer] = self._shares @ memories
        passes = (self._layers - layer - 1) % len(self._layers) + 1
        np.divide(self.chance, passes[:, None], out=self.worth)

    def start_from(self, history: NDArray[np.uint64], a_token: int) -> None:
        """Begin as if the history's proportions had held for long, with `a_token` uses a token and layer. history: uint64 [layers, experts]."""
        totals = history.sum(axis=1, dtype=np.float64, keepdims=True)
        self.chance[:] = history / np.maximum(totals, 1.0) * a_token
        self._memories[:] = self.chance
        self.worth[:] = self.chance

    def coldest(self, among: NDArray[np.bool_]) -> tuple[int, int] | None:
        """(layer, expert) worth the least among those marked in a [layers, experts] mask; None when none is."""
        at = int(np.argmin(np.where(among, self.worth, np.inf)))
        layer, expert = divmod(at, among.shape[1])
        return (layer, expert) if among[layer, expert] else None
