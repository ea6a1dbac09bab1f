"""COLI_VK_CHAIN=2: prompts on the device, decode on the CPU, over the same layers. State moves when a slot changes sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.layers import CpuLayers
from glm53serve.cpu.state import SlotState
from glm53serve.engine.seam import Batch, Halt, Layers, Meter, never
from glm53serve.vulkan.layers import VulkanLayers
from glm53serve.vulkan.rows import HostState, SlotRows

F32 = NDArray[np.float32]
Side = Literal["device", "host"]


@dataclass(slots=True)
class _Slot:
    """Who holds a slot's recurrent state, and up to where each side's DSA rows are those of the history."""

    owner: Side
    rows: dict[Side, int]


@dataclass(frozen=True, slots=True)
class SidedCopy:
    """A checkpoint of one side."""

    owner: Side
    copy: Any

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.copy.nbytes)


class PromptLayers:
    """Batches with a span of more than one row run on the device, single-row steps on the CPU (see `seam.Layers`).

    Both backends hold the same layers. `close` closes both."""

    def __init__(self, device: VulkanLayers, host: CpuLayers) -> None:
        if device.layers != host.layers:
            raise ValueError(f"the device holds layers {device.layers}, the CPU {host.layers}")
        self.device, self.host = device, host
        self.layers = device.layers
        self.meter = Meter()
        self._sides: dict[Side, Layers] = {"device": device, "host": host}
        self._slots: dict[int, _Slot] = {}
        self._snapshot: Side = "device"

    def open_slot(self, slot: int, capacity: int) -> None:
        """Empty a slot on both sides."""
        for side in self._sides.values():
            side.open_slot(slot, capacity)
        self._slots[slot] = _Slot("device", {"device": 0, "host": 0})

    def reset_slot(self, slot: int) -> None:
        """Empty a slot on both sides."""
        for side in self._sides.values():
            side.reset_slot(slot)
        self._slots[slot] = _Slot("device", {"device": 0, "host": 0})

    def snapshot(self, slot: int) -> None:
        """Protect the state where it is."""
        self._snapshot = self._slots[slot].owner
        self._sides[self._snapshot].snapshot(slot)

    def restore(self, slot: int) -> None:
        """Go back to where and what it was."""
        self._sides[self._snapshot].restore(slot)
        self._slots[slot].owner = self._snapshot

    def save(self, slot: int) -> SidedCopy:
        """An independent copy of the side that holds the state."""
        owner = self._slots[slot].owner
        return SidedCopy(owner, self._sides[owner].save(slot))

    def load(self, slot: int, copy: SidedCopy) -> None:
        """Put a saved copy back on its side."""
        self._sides[copy.owner].load(slot, copy.copy)
        self._slots[slot].owner = copy.owner

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Both sides together."""
        return self.device.expert_uses(slot) + self.host.expert_uses(slot)

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses on both sides."""
        for side in self._sides.values():
            side.clear_uses(slot)

    def tiers(self) -> NDArray[np.uint8]:
        """The device holds every routed expert."""
        return self.device.tiers()

    def interrupt(self) -> None:
        """See `VulkanLayers.interrupt`."""
        self.device.interrupt()

    def close(self) -> None:
        """Release both sides."""
        for side in self._sides.values():
            side.close()

    def forward(self, streams: F32, batch: Batch, halt: Halt = never) -> F32:
        """All layers over the rows, on the side they are for."""
        side: Side = "device" if any(span.count > 1 for span in batch.spans) else "host"
        for span in batch.spans:
            self._bring(span.slot, side, span.start)
        try:
            out = self._sides[side].forward(streams, batch, halt)
        finally:
            self._add_up()
        for span in batch.spans:
            self._slots[span.slot].rows[side] = span.start + span.count
        return out

    def _add_up(self) -> None:
        """The meter is both sides' together."""
        for name in ("disk", "experts", "attention", "head", "found", "uses"):
            setattr(self.meter, name, getattr(self.device.meter, name) + getattr(self.host.meter, name))

    def _bring(self, slot: int, side: Side, position: int) -> None:
        """Make a side hold the slot's state and rows up to `position`; rows past it are no one's any more."""
        state = self._slots[slot]
        for each in state.rows:
            state.rows[each] = min(state.rows[each], position)
        rows = SlotRows(self.device.device, self.device.sizes, self.device.states, slot)
        host = self.host.state(slot)
        if state.rows[side] < position:
            copy = _rows_to_host if side == "host" else _rows_to_device
            copy(rows, host, state.rows[side], position)
            state.rows[side] = position
        if state.owner != side:
            if side == "host":
                _state_to_host(rows.unpack(self.device.save(slot), position), host)
            elif position == 0:
                self.device.reset_slot(slot)
            else:
                self.device.load(slot, rows.pack(_state_of(host, self.device, position), position))
            state.owner = side


def _rows_to_host(rows: SlotRows, host: SlotState, first: int, last: int) -> None:
    for layer, indexed in rows.dsa_layers:
        store = host.dsa[layer]
        store.reserve(last, first)
        found = rows.latents(layer, first, last)
        store.latents[first:last] = 0
        store.latents[first:last, : found.shape[1]] = found
        pools = first // store.kpool, last // store.kpool
        if indexed and pools[1] > pools[0]:
            keys = rows.pool_keys(layer, *pools)
            store.pool_keys[pools[0] : pools[1]] = 0
            store.pool_keys[pools[0] : pools[1], : keys.shape[1]] = keys


def _rows_to_device(rows: SlotRows, host: SlotState, first: int, last: int) -> None:
    c = rows.config
    for layer, indexed in rows.dsa_layers:
        store = host.dsa[layer]
        rows.put_latents(layer, first, store.latents[first:last, : c.kv_lora_rank])
        pools = first // store.kpool, last // store.kpool
        if indexed and pools[1] > pools[0]:
            rows.put_pool_keys(layer, pools[0], store.pool_keys[pools[0] : pools[1], : c.index_head_dim])


def _state_to_host(found: HostState, host: SlotState) -> None:
    host.flat.fill(0)
    for layer, s in found.s.items():
        d = s.shape[1]
        host.kda[layer][:, :d, :d] = s
        keep, _, heads, _ = found.windows[layer].shape
        host.windows[layer].reshape(keep, 3, heads, -1)[..., :d] = found.windows[layer]
    for layer, raw in found.raw.items():
        host.raw[layer][:, : raw.shape[1], : raw.shape[2]] = raw


def _state_of(host: SlotState, device: VulkanLayers, position: int) -> HostState:
    c = device.config
    d, keep, tail = c.kda_head_dim, c.conv_width - 1, position % c.index_kpool
    found = HostState()
    for layer, s in host.kda.items():
        found.s[layer] = s[:, :d, :d]
        found.windows[layer] = host.windows[layer].reshape(keep, 3, c.kda_heads, -1)[..., :d]
    for layer, raw in host.raw.items():
        found.raw[layer] = raw[:, :tail, : c.index_head_dim]
    return found
