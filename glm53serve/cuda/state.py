"""What a slot keeps on the device: KDA states, windows and incomplete pools in one block of floats; latents and pool keys in growing rows."""

from __future__ import annotations

import numpy as np

from glm53serve.cuda.runtime import Buffer, Device, Pointer
from glm53serve.model.config import DSA, FULL, KDA, ModelConfig


class SlotStates:
    """State of `slots` slots for the layers held. `block` [slots][stride] floats is what a pass changes in place; a slot's rows lie in an own buffer.

    For DSA layer number i of those held, `rows_table(i)` and `pools_table(i)` are device arrays of row addresses, one a slot.
    """

    def __init__(self, device: Device, config: ModelConfig, layers: range, slots: int, narrow: bool) -> None:
        self.device, self.config, self.slots, self.narrow = device, config, slots, narrow
        self.s_at: dict[int, int] = {}
        self.window_at: dict[int, int] = {}
        self.tail_at: dict[int, int] = {}
        self.dsa_layers = [i for i in layers if config.layer_kinds[i] == DSA]
        at = 0
        for index in layers:
            if config.layer_kinds[index] == KDA:
                self.s_at[index] = at
                at += config.kda_heads * config.kda_head_dim**2
                self.window_at[index] = at
                at += (config.conv_width - 1) * 3 * config.kda_width
            elif config.indexer_kinds[index] == FULL:
                self.tail_at[index] = at
                at += 2 * config.index_kpool * config.index_head_dim
            at = -(-at // 4) * 4
        self.stride = max(4, at)
        self.block = device.alloc(4 * self.stride * slots)
        self.saved = device.alloc(4 * self.stride)
        self.capacity = [0] * slots
        self._tables = np.zeros((max(1, len(self.dsa_layers)), 3, slots), np.uint64)
        self._device_tables = device.alloc(self._tables.nbytes)
        self._rows: dict[int, Buffer] = {}

    def open(self, slot: int, capacity: int) -> None:
        """Rows for `capacity` positions. Raises ValueError for a slot number out of range or opened with less room before."""
        c = self.config
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot}: this backend was made for {self.slots}")
        if self.capacity[slot] >= capacity:
            return
        if self.capacity[slot]:
            raise ValueError(f"slot {slot} was opened for {self.capacity[slot]} positions, now {capacity} are wanted")
        pools = capacity // c.index_kpool + 1
        sizes = [-(-size // 256) * 256 for size in (4 * capacity * c.kv_lora_rank, 4 * pools * c.index_head_dim, 2 * capacity * c.kv_lora_rank * self.narrow)]
        each = sum(sizes)
        if self.dsa_layers:
            self._rows[slot] = self.device.alloc(each * len(self.dsa_layers))
        for i in range(len(self.dsa_layers)):
            start = self._rows[slot].address + i * each
            self._tables[i, :, slot] = start, start + sizes[0], start + sizes[0] + sizes[1]
        self.device.upload(self._device_tables.at(), self._tables)
        self.capacity[slot] = capacity

    def rows_table(self, layer: int) -> Pointer:
        """Device array of the addresses of every slot's latents of a DSA layer, float32."""
        return self._table(layer, 0)

    def pools_table(self, layer: int) -> Pointer:
        """Device array of the addresses of every slot's pool keys of a DSA layer."""
        return self._table(layer, 1)

    def narrow_table(self, layer: int) -> Pointer | None:
        """The same latents in bf16, for prompts; None where prompts attend in full precision."""
        return self._table(layer, 2) if self.narrow else None

    def _table(self, layer: int, which: int) -> Pointer:
        return self._device_tables.at((self.dsa_layers.index(layer) * 3 + which) * 8 * self.slots)

    def of(self, slot: int) -> Pointer:
        """A slot's block."""
        return self.block.at(4 * self.stride * slot)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot's block."""
        return 4 * self.stride

    def reset(self, slot: int) -> None:
        """Zero a slot's block."""
        self.device.zero(self.of(slot), self.nbytes)

    def snapshot(self, slot: int) -> None:
        """Copy a slot's block into the one spare block."""
        self.device.copy(self.saved.at(), self.of(slot), self.nbytes)

    def restore(self, slot: int) -> None:
        """Copy the spare block back."""
        self.device.copy(self.of(slot), self.saved.at(), self.nbytes)
