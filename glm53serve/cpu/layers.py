"""A run of layers on the CPU, behind the seam of `glm53serve.engine.seam`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.dsa import DsaLayer, Pools
from glm53serve.cpu.kda import KdaLayer
from glm53serve.cpu.moe import DenseFfn, MoeLayer
from glm53serve.cpu.rows import Group, row_groups
from glm53serve.cpu.state import SlotState
from glm53serve.engine.seam import Batch, Halt, Halted, Meter
from glm53serve.model import reference_math as m
from glm53serve.model.config import DSA, SHARED, SPARSE, ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, HyperConnection, LayerWeights, MoeWeights

F32 = NDArray[np.float32]


class _Layer:
    """One layer: its two mHC sites, its attention half and its feed-forward half."""

    def __init__(self, config: ModelConfig, w: LayerWeights, experts: ExpertSource, meter: Meter, bits: int) -> None:
        self.index = w.index
        self.hc_attn, self.hc_ffn = w.hc_attn, w.hc_ffn
        self.input_norm, self.post_norm = w.input_norm, w.post_norm
        self.attention: KdaLayer | DsaLayer
        if isinstance(w.attention, DsaWeights):
            self.attention = DsaLayer(config, w.index, w.attention, bits)
        else:
            self.attention = KdaLayer(config, w.index, w.attention, bits)
        self.ffn: DenseFfn | MoeLayer
        if isinstance(w.ffn, MoeWeights):
            self.ffn = MoeLayer(config, w.index, w.ffn, experts, meter, bits)
        else:
            self.ffn = DenseFfn(config, w.ffn, bits)


class CpuLayers:
    """Layers `layers` of a model, computed in row groups so that `halt` is asked often.

    layer_weights(l) gives the weights of layer l, asked once each in order; experts the routed ones as they are needed. Dense matrices
    are kept in `bits` (4, 8, 16 or 32); mHC, router, norms, biases, convolution taps and b_proj stay as stored. `slots` bounds the slots
    that may be open. Raises ValueError when the run begins with a shared indexer layer, whose selection another backend would hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        layer_weights: Callable[[int], LayerWeights],
        experts: ExpertSource,
        slots: int,
        bits: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if len(layers) and config.layer_kinds[layers[0]] == DSA and config.indexer_kinds[layers[0]] == SHARED:
            raise ValueError(f"layer {layers[0]} uses the selection of layer {layers[0] - 1}: both must be on one backend")
        self.config = config
        self.layers = layers
        self.meter = Meter()
        self.slots = slots
        self.experts = experts
        self._layers: list[_Layer] = []
        for index in layers:
            self._layers.append(_Layer(config, layer_weights(index), experts, self.meter, bits))
            if progress is not None:
                progress(index)
        self._sparse = {l: n for n, l in enumerate(i for i in layers if config.mlp_kinds[i] == SPARSE)}
        self._open: dict[int, SlotState] = {}
        self._uses: dict[int, NDArray[np.uint32]] = {}
        self._snapshot: F32 | None = None

    # --- slots -------------------------------------------------------------------------------------------------------------------

    def open_slot(self, slot: int, capacity: int) -> None:
        """Make room for `capacity` positions of a slot and empty it. DSA rows are allocated as they come."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot}: there are slots 0..{self.slots - 1}")
        self._open[slot] = SlotState(self.config, self.layers, capacity)
        self._uses[slot] = np.zeros((len(self._sparse), self.config.n_routed_experts), np.uint32)

    def reset_slot(self, slot: int) -> None:
        """Empty a slot."""
        self._open[slot].reset()

    def snapshot(self, slot: int) -> None:
        """Copy what a chunk changes in place into the one buffer, allocated at first use. Raises MemoryError when there is none to be had."""
        flat = self._open[slot].flat
        if self._snapshot is None:
            self._snapshot = np.empty_like(flat)
        np.copyto(self._snapshot, flat)

    def restore(self, slot: int) -> None:
        """Put the last snapshot back. Raises RuntimeError when there was none."""
        if self._snapshot is None:
            raise RuntimeError("restore without a snapshot")
        np.copyto(self._open[slot].flat, self._snapshot)

    def save(self, slot: int) -> F32:
        """An independent copy of what `snapshot` holds."""
        return self._open[slot].flat.copy()

    def load(self, slot: int, copy: F32) -> None:
        """Put a saved copy back."""
        np.copyto(self._open[slot].flat, copy)

    # --- telemetry ---------------------------------------------------------------------------------------------------------------

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Uses of each routed expert by this slot's rows since `clear_uses`: uint32 [sparse layers held, experts]."""
        return self._uses[slot]

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses."""
        self._uses[slot].fill(0)

    def tiers(self) -> NDArray[np.uint8]:
        """Where each routed expert is now: uint8 [sparse layers held, experts], 0 disk, 1 RAM. A source that cannot tell holds all in RAM."""
        resident = getattr(self.experts, "resident", None)
        tiers = np.ones((len(self._sparse), self.config.n_routed_experts), np.uint8)
        if resident is not None:
            for layer, row in self._sparse.items():
                tiers[row] = resident(layer)
        return tiers

    def close(self) -> None:
        """Release weights, slots and the snapshot buffer."""
        self._layers.clear()
        self._open.clear()
        self._uses.clear()
        self._snapshot = None

    # --- the way through ---------------------------------------------------------------------------------------------------------

    def forward(self, streams: F32, batch: Batch, halt: Halt) -> F32:
        """Run all layers over streams [rows, hc_mult, H], overwritten and returned (see the seam). Raises Halted."""
        groups = row_groups(batch)
        chosen: list[list[Pools]] = [[] for _ in groups]
        for number, layer in enumerate(self._layers):
            if number and halt():
                raise Halted(layer.index)
            start = time.perf_counter()
            for n, group in enumerate(groups):
                if n and halt():
                    raise Halted(layer.index)
                chosen[n] = self._attend(layer, streams, group, chosen[n])
            middle = time.perf_counter()
            self.meter.attention += middle - start
            if halt():
                raise Halted(layer.index)
            disk = self.meter.disk
            self._feed_forward(layer, streams, batch, groups, halt)
            self.meter.experts += time.perf_counter() - middle - (self.meter.disk - disk)
        return streams

    def _attend(self, layer: _Layer, streams: F32, group: Group, chosen: list[Pools]) -> list[Pools]:
        rows = streams[group.first : group.first + group.count]
        post, mix, x = self._collapse(rows, layer.hc_attn, layer.input_norm)
        if isinstance(layer.attention, DsaLayer):
            y, chosen = layer.attention(x, group.pieces, self._open, chosen)
        else:
            y = layer.attention(x, group.pieces, self._open)
        rows[:] = m.hc_expand(rows, post, mix, y)
        return chosen

    def _feed_forward(self, layer: _Layer, streams: F32, batch: Batch, groups: list[Group], halt: Halt) -> None:
        if isinstance(layer.ffn, DenseFfn):
            for n, group in enumerate(groups):
                if n and halt():
                    raise Halted(layer.index)
                rows = streams[group.first : group.first + group.count]
                post, mix, x = self._collapse(rows, layer.hc_ffn, layer.post_norm)
                rows[:] = m.hc_expand(rows, post, mix, layer.ffn(x))
            return
        collapsed = []
        for n, group in enumerate(groups):
            if n and halt():
                raise Halted(layer.index)
            post, mix, x = self._collapse(streams[group.first : group.first + group.count], layer.hc_ffn, layer.post_norm)
            collapsed.append((post, mix, x, *layer.ffn.route(x)))
        post, mix, x, chosen, weights = (np.concatenate(parts) for parts in zip(*collapsed, strict=True))
        self._count(layer.index, batch, chosen)
        y = layer.ffn(x, chosen, weights, halt)
        for group in groups:
            part = slice(group.first, group.first + group.count)
            streams[part] = m.hc_expand(streams[part], post[part], mix[part], y[part])

    def _count(self, index: int, batch: Batch, chosen: NDArray[np.int64]) -> None:
        first = 0
        for span in batch.spans:
            used = chosen[first : first + span.count]
            self._uses[span.slot][self._sparse[index]] += np.bincount(used.ravel(), minlength=self.config.n_routed_experts).astype(np.uint32)
            first += span.count

    def _collapse(self, streams: F32, site: HyperConnection, norm: F32) -> tuple[F32, F32, F32]:
        """mHC site and norm: streams [rows, n, H] -> post [rows, n], mix [rows, n, n], normalised input [rows, H]."""
        c = self.config
        post, mix, x = m.hc_collapse(streams, site.fn, site.base, site.scale, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)
        return post, mix, m.rms(x, norm, c.rms_norm_eps)
