"""Moving one slot's state between the device and host arrays: KDA states and windows, latents, pool keys, raw keys of the incomplete pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.config import FULL, KDA
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.scratch import Sizes
from glm53serve.vulkan.state import DsaState, KdaState, SavedState

F32 = NDArray[np.float32]


@dataclass(slots=True)
class HostState:
    """A slot's state at a position, by layer, float32: s [h, d, d] and windows [K-1, 3, h, d] of KDA layers; of full DSA layers raw [2, n % kpool, di],
    keys then gates."""

    s: dict[int, F32] = field(default_factory=dict)
    windows: dict[int, F32] = field(default_factory=dict)
    raw: dict[int, F32] = field(default_factory=dict)


class SlotRows:
    """One slot's rows and state on the device, as host arrays. `states` are the buffers of each layer held."""

    def __init__(self, device: Device, sizes: Sizes, states: dict[int, KdaState | DsaState], slot: int) -> None:
        self.device, self.sizes, self.slot = device, sizes, slot
        self.config = sizes.config
        self._dsa = {i: s for i, s in states.items() if isinstance(s, DsaState)}
        self._kda = [i for i, s in states.items() if isinstance(s, KdaState)]

    def unpack(self, saved: SavedState, position: int) -> HostState:
        """What a saved page and the raw keys on the device say of the slot at `position`."""
        c = self.config
        h, d, keep = c.kda_heads, c.kda_head_dim, c.conv_width - 1
        found, at = HostState(), 0
        floats = None if saved.data is None else saved.data.view(np.float32)
        for layer in self._kda:
            for target, shape in ((found.s, (h, d, d)), (found.windows, (keep, 3, h, d))):
                count = int(np.prod(shape))
                target[layer] = np.zeros(shape, np.float32) if floats is None else floats[at : at + count].reshape(shape)
                at += count
        first = position // c.index_kpool * c.index_kpool
        for layer in self._dsa:
            if c.indexer_kinds[layer] == FULL:
                found.raw[layer] = self._raw(layer, first, position).swapaxes(0, 1)
        return found

    def pack(self, state: HostState, position: int) -> SavedState:
        """The other way: the raw keys go to the device, the page's bytes are returned for `VulkanLayers.load`."""
        c = self.config
        parts = [np.ascontiguousarray(part[layer]).ravel() for layer in self._kda for part in (state.s, state.windows)]
        first = position // c.index_kpool * c.index_kpool
        for layer, raw in state.raw.items():
            if position > first:
                wide = np.zeros((position - first, 2, self.sizes.index_dim), np.float32)
                wide[:, :, : c.index_head_dim] = raw.swapaxes(0, 1)
                self.device.put(self._part(self._dsa[layer].keys, first, position, 2 * self.sizes.index_dim), wide)
        return SavedState(np.concatenate(parts).view(np.uint8) if parts else np.empty(0, np.uint8))

    def latents(self, layer: int, first: int, last: int) -> F32:
        """Latents of positions first..last-1: [n, r]."""
        part = self._part(self._dsa[layer].latents, first, last, self.sizes.rank)
        return self.device.get(part).reshape(last - first, -1)[:, : self.config.kv_lora_rank]

    def put_latents(self, layer: int, first: int, rows: F32) -> None:
        """Set latents from position `first` on."""
        wide = np.zeros((len(rows), self.sizes.rank), np.float32)
        wide[:, : rows.shape[1]] = rows
        self.device.put(self._part(self._dsa[layer].latents, first, first + len(rows), self.sizes.rank), wide)

    def pool_keys(self, layer: int, first: int, last: int) -> F32:
        """Keys of pools first..last-1: [n, di]."""
        return self.device.get(self._pool_part(layer, first, last)).reshape(last - first, -1)[:, : self.config.index_head_dim]

    def put_pool_keys(self, layer: int, first: int, rows: F32) -> None:
        """Set pool keys from pool `first` on."""
        wide = np.zeros((len(rows), self.sizes.index_dim), np.float32)
        wide[:, : rows.shape[1]] = rows
        self.device.put(self._pool_part(layer, first, first + len(rows)), wide)

    @property
    def dsa_layers(self) -> list[tuple[int, bool]]:
        """DSA layers held and whether they have an indexer."""
        return [(i, self.config.indexer_kinds[i] == FULL) for i in self._dsa if self.config.layer_kinds[i] != KDA]

    def _raw(self, layer: int, first: int, last: int) -> F32:
        width = self.sizes.index_dim
        if last == first:
            return np.zeros((0, 2, self.config.index_head_dim), np.float32)
        rows = self.device.get(self._part(self._dsa[layer].keys, first, last, 2 * width))
        return rows.reshape(-1, 2, width)[:, :, : self.config.index_head_dim]

    def _part(self, buffer: Buffer, first: int, last: int, width: int) -> Buffer:
        start = self.slot * self.sizes.capacity + first
        return buffer.part(4 * width * start, 4 * width * (last - first))

    def _pool_part(self, layer: int, first: int, last: int) -> Buffer:
        width = self.sizes.index_dim
        return self._dsa[layer].pools.part(4 * width * (self.slot * self.sizes.pools + first), 4 * width * (last - first))
