"""How often each routed expert is used, with ageing: what the store keeps when not all fit.

Public reports and our own replays agree that plain recency is nearly worthless here: a token walks through all layers, so by the time a layer
comes round again its experts are the least recent. A count that fades keeps the experts a conversation really uses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_TOKENS = 96.0
FADE = 0.5 ** (1.0 / HALF_LIFE_TOKENS)


class Heat:
    """Fading use counts, float64 [layers, experts]: a use counts 1 now and half of it `HALF_LIFE_TOKENS` tokens later.

    Each layer ages by the rows that passed through it. All layers see the same rows, so counts of different layers compare.
    """

    def __init__(self, layers: int, experts: int, fade: float = FADE) -> None:
        self.values = np.zeros((layers, experts))
        self.fade = fade

    def use(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int) -> None:
        """A pass of `rows` rows used each of `experts` (distinct) `counts` times in this layer; as if the uses were spread evenly over the rows."""
        kept = self.fade**rows
        row = self.values[layer]
        row *= kept
        row[experts] += counts * ((1.0 - kept) / (rows * (1.0 - self.fade)))

    def start_from(self, history: NDArray[np.uint64], a_token: int) -> None:
        """Begin as if the history's proportions had held for long, with `a_token` uses a token and layer. history: uint64 [layers, experts]."""
        totals = history.sum(axis=1, dtype=np.float64, keepdims=True)
        self.values[:] = history / np.maximum(totals, 1.0) * (a_token / (1.0 - self.fade))

    def coldest(self, among: NDArray[np.bool_]) -> tuple[int, int] | None:
        """(layer, expert) with the least heat among those marked in a [layers, experts] mask; None when none is."""
        candidates = np.where(among, self.values, np.inf)
        at = int(np.argmin(candidates))
        layer, expert = divmod(at, among.shape[1])
        return (layer, expert) if among[layer, expert] else None
