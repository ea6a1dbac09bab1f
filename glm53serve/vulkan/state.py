"""What a slot keeps on the device: positional DSA rows, and KDA state in pages so that undoing a chunk is a change of numbers.

A chunk reads its slot's page and writes a page that no snapshot needs; a halt leaves the page it read untouched. Latents, raw index keys
and pool keys are addressed by position and bounded by the positions computed so far, so they need no copy at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.config import FULL, KDA
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.scratch import SLACK, Sizes

NONE = 0xFFFFFFFF
"""Source page of an empty slot: the kernels read zeros."""


@dataclass(frozen=True, slots=True)
class KdaState:
    """A KDA layer's pages: s [pages, h, d, d] and window [pages, K-1, 3P], float32."""

    s: Buffer
    window: Buffer


@dataclass(frozen=True, slots=True)
class DsaState:
    """A DSA layer's rows: latents [slots, capacity, rp], keys [slots, capacity, key and gate], pools [slots, pools, dim], float32.
    A shared layer's keys and pools are dummies."""

    latents: Buffer
    keys: Buffer
    pools: Buffer


def layer_floats(sizes: Sizes, index: int) -> list[int]:
    """Floats of the state buffers of a layer, all slots together."""
    c = sizes.config
    if c.layer_kinds[index] == KDA:
        pages = sizes.slots + 1
        return [pages * c.kda_heads * c.kda_head_dim**2, max(1, pages * (c.conv_width - 1) * 3 * c.kda_width)]
    positions = sizes.slots * sizes.capacity
    if c.indexer_kinds[index] != FULL:
        return [positions * sizes.rank]
    return [positions * sizes.rank, positions * 2 * sizes.index_dim, sizes.slots * sizes.pools * sizes.index_dim]


def make_state(device: Device, sizes: Sizes, index: int) -> KdaState | DsaState:
    """The state of a layer, zeroed. Raises OutOfDeviceMemory."""
    buffers = [device.local(4 * (count + SLACK)) for count in layer_floats(sizes, index)]
    device.zero(buffers)
    if sizes.config.layer_kinds[index] == KDA:
        return KdaState(*buffers)
    return DsaState(*buffers, *[device.dummy] * (3 - len(buffers)))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a slot's KDA state is: a page, or nowhere (`fresh`: zeros)."""

    page: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint of one slot's KDA state and windows in host memory; `data` is None for an empty slot."""

    data: NDArray[np.uint8] | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.data is None else int(self.data.nbytes)


class Pages:
    """Which page each slot owns; slots + 1 pages, so one is always free beside the one that the last snapshot protects."""

    def __init__(self, slots: int) -> None:
        self._slots = [Position(i, True) for i in range(slots)]
        self._spare = slots
        self._snapshot: tuple[int, Position] | None = None

    def position(self, slot: int) -> Position:
        """Where a slot's state is."""
        return self._slots[slot]

    def target(self, slot: int) -> int:
        """The page that a pass over this slot writes: its own, unless the snapshot needs that one."""
        position = self._slots[slot]
        return self._spare if not position.fresh and self._protects(slot) else position.page

    def commit(self, slot: int) -> None:
        """A pass wrote `target`: it is the slot's state now."""
        target = self.target(slot)
        if target == self._spare:
            self._spare = self._slots[slot].page
        self._slots[slot] = Position(target, False)

    def reset(self, slot: int) -> None:
        """Empty a slot. A snapshot of it stays valid."""
        page = self.target(slot)
        if page == self._spare:
            self._spare = self._slots[slot].page
        self._slots[slot] = Position(page, True)

    def snapshot(self, slot: int) -> None:
        """Protect the slot's state as it is; an earlier snapshot, of any slot, is given up."""
        self._snapshot = (slot, self._slots[slot])

    def restore(self, slot: int) -> None:
        """Go back to the snapshot. Raises ValueError when the last snapshot was of another slot."""
        if self._snapshot is None or self._snapshot[0] != slot:
            raise ValueError(f"there is no snapshot of slot {slot}")
        held = self._snapshot[1]
        if self._slots[slot].page != held.page:
            self._spare = self._slots[slot].page
        self._slots[slot] = held

    def _protects(self, slot: int) -> bool:
        return self._snapshot is not None and self._snapshot[0] == slot and self._snapshot[1] == self._slots[slot]


class PageCopies:
    """Reading and writing one page of all KDA layers."""

    def __init__(self, device: Device, sizes: Sizes, states: list[KdaState]) -> None:
        self.device = device
        c = sizes.config
        self._buffers: list[tuple[Buffer, int]] = []
        for state in states:
            self._buffers.append((state.s, 4 * c.kda_heads * c.kda_head_dim**2))
            if c.conv_width > 1:
                self._buffers.append((state.window, 4 * (c.conv_width - 1) * 3 * c.kda_width))

    def read(self, page: int) -> NDArray[np.uint8]:
        """The page's bytes, layer after layer."""
        parts = [self.device.get(buffer.part(page * size, size), np.uint8) for buffer, size in self._buffers]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Put back what `read` gave."""
        at = 0
        for buffer, size in self._buffers:
            self.device.put(buffer.part(page * size, size), data[at : at + size])
            at += size
