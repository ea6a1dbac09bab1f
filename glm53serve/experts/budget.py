"""How many routed experts may stay in RAM."""

from __future__ import annotations

from glm53serve.experts.memory import RESERVE_BYTES, available_bytes
from glm53serve.experts.store import ExpertStore

GB = 10**9
AT_ONCE_BYTES = 10**9
"""A model whose experts all fit and are no more than this is read before READY; a larger one fills up in the background."""


def experts_in_ram(store: ExpertStore, expert_slots: int, expert_gb: float, later: int) -> int:
    """Experts that may be held: `expert_slots` a layer when positive, else `expert_gb` GB when not negative, else what fits in the memory available.

    later: bytes that will be needed besides (slots, snapshots, scratch); a twentieth of the memory is left alone as well.
    """
    total = len(store.places)
    if expert_slots > 0:
        return min(expert_slots * len(store.layers), total)
    if expert_gb >= 0:
        return min(int(expert_gb * GB) // store.expert_bytes, total)
    available = available_bytes()
    return max(0, min(int(available * 0.95) - later - 2 * RESERVE_BYTES, total * store.buffer_bytes)) // max(store.buffer_bytes, 1)


def open_store(store: ExpertStore, budget: int) -> None:
    """Start the store: all at once when everything fits and is small; by the faster way to read when it does not fit."""
    if budget >= len(store.places):
        store.open(budget)
        store.warm()
        if len(store.places) * store.expert_bytes <= AT_ONCE_BYTES:
            store.wait_warm()
        return
    rates = store.files.measure(list(store.places.values()))
    store.files.direct = rates.prefer_direct
    store.open(budget)
