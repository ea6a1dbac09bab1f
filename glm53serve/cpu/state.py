"""What the CPU layers keep for a slot: the part a chunk changes in place, and the DSA rows, which only grow (model spec 4.5, 5.6)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.config import FULL, KDA, ModelConfig

F32 = NDArray[np.float32]

_FIRST_ROWS = 256


class DsaRows:
    """Latents of every position and keys of every complete pool of one DSA layer, in buffers that double up to the slot's capacity.

    latents float32 [>= rows, kv_lora_rank]; pool_keys float32 [>= rows // kpool, index_head_dim], empty for a shared indexer layer.
    Rows past the positions computed so far are garbage.
    """

    def __init__(self, config: ModelConfig, capacity: int, indexed: bool, multiple: int = 1) -> None:
        self.capacity = capacity
        self.kpool = config.index_kpool
        self.latents: F32 = np.empty((0, padded(config.kv_lora_rank, multiple)), np.float32)
        self.pool_keys: F32 = np.empty((0, padded(config.index_head_dim, multiple)), np.float32)
        self.indexed = indexed

    def reserve(self, rows: int, keep: int) -> None:
        """Make room for `rows` positions, keeping the first `keep`. Raises ValueError above the capacity."""
        if rows > self.capacity:
            raise ValueError(f"{rows} positions: the slot was opened for {self.capacity}")
        if rows <= len(self.latents):
            return
        room = min(self.capacity, max(rows, 2 * len(self.latents), _FIRST_ROWS))
        keys = _grown(self.pool_keys, room // self.kpool, keep // self.kpool) if self.indexed else self.pool_keys
        # the latents' length says how much room there is, so they come last
        self.latents = _grown(self.latents, room, keep)
        self.pool_keys = keys

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.latents.nbytes + self.pool_keys.nbytes


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def _grown(old: F32, rows: int, keep: int) -> F32:
    new = np.empty((rows, old.shape[1]), np.float32)
    new[:keep] = old[:keep]
    return new


class SlotState:
    """The state of one slot for a run of layers.

    Everything a chunk changes in place is a view of one flat array, so that a snapshot is one copy:
      kda[l]     float32 [heads, d, d], the recurrence's state S
      windows[l] float32 [K-1, 3P], raw q|k|v rows before the convolution, oldest first
      raw[l]     float32 [2, kpool-1, index_head_dim], raw keys and gates of the incomplete pool, in token order
    dsa[l] are the rows that only grow. Every width (d, each head's share of P, r, index_head_dim) is rounded up to `multiple`, the rest
    stays zero.
    """

    def __init__(self, config: ModelConfig, layers: range, capacity: int, multiple: int = 1) -> None:
        heads, d = config.kda_heads, padded(config.kda_head_dim, multiple)
        kda_shape = (heads, d, d)
        window_shape = (config.conv_width - 1, 3 * heads * d)
        raw_shape = (2, config.index_kpool - 1, padded(config.index_head_dim, multiple))
        kda_layers = [i for i in layers if config.layer_kinds[i] == KDA]
        dsa_layers = [i for i in layers if config.layer_kinds[i] != KDA]
        full_layers = [i for i in dsa_layers if config.indexer_kinds[i] == FULL]
        total = len(kda_layers) * (math.prod(kda_shape) + math.prod(window_shape)) + len(full_layers) * math.prod(raw_shape)
        self.flat: F32 = np.zeros(total, np.float32)
        self.kda: dict[int, F32] = {}
        self.windows: dict[int, F32] = {}
        self.raw: dict[int, F32] = {}
        used = 0
        for views, shape, indices in ((self.kda, kda_shape, kda_layers), (self.windows, window_shape, kda_layers), (self.raw, raw_shape, full_layers)):
            size = math.prod(shape)
            for index in indices:
                views[index] = self.flat[used : used + size].reshape(shape)
                used += size
        self.dsa = {i: DsaRows(config, capacity, i in self.raw, multiple) for i in dsa_layers}

    def reset(self) -> None:
        """Empty the slot; DSA rows are bounded by positions and stay as they are."""
        self.flat.fill(0)
