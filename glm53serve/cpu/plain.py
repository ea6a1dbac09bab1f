"""The layers in NumPy, used where Numba does not run; slow, and the numbers that the compiled kernels are compared with."""

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
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, HyperConnection, LayerWeights, MoeWeights

F32 = NDArray[np.float32]
Count = Callable[[int, Batch, NDArray[np.int64]], None]


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


class PlainStack:
    """Layers in order, each in row groups so that `halt` is asked often."""

    multiple = 1
    """What the widths of a slot's state are rounded up to."""

    def __init__(self, config: ModelConfig, experts: ExpertSource, meter: Meter, bits: int, count: Count) -> None:
        self.config = config
        self.experts = experts
        self.meter = meter
        self.bits = bits
        self.count = count
        self._layers: list[_Layer] = []

    def append(self, w: LayerWeights) -> None:
        """The next layer."""
        self._layers.append(_Layer(self.config, w, self.experts, self.meter, self.bits))

    def open(self, slot: int, state: SlotState) -> None:
        """A slot was opened."""

    def close(self) -> None:
        """Release the weights."""
        self._layers.clear()

    def forward(self, streams: F32, batch: Batch, slots: dict[int, SlotState], halt: Halt) -> F32:
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
                chosen[n] = self._attend(layer, streams, group, slots, chosen[n])
            middle = time.perf_counter()
            self.meter.attention += middle - start
            if halt():
                raise Halted(layer.index)
            disk = self.meter.disk
            self._feed_forward(layer, streams, batch, groups, halt)
            self.meter.experts += time.perf_counter() - middle - (self.meter.disk - disk)
        return streams

    def _attend(self, layer: _Layer, streams: F32, group: Group, slots: dict[int, SlotState], chosen: list[Pools]) -> list[Pools]:
        rows = streams[group.first : group.first + group.count]
        post, mix, x = self._collapse(rows, layer.hc_attn, layer.input_norm)
        if isinstance(layer.attention, DsaLayer):
            y, chosen = layer.attention(x, group.pieces, slots, chosen)
        else:
            y = layer.attention(x, group.pieces, slots)
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
        self.count(layer.index, batch, chosen)
        y = layer.ffn(x, chosen, weights, halt)
        for group in groups:
            part = slice(group.first, group.first + group.count)
            streams[part] = m.hc_expand(streams[part], post[part], mix[part], y[part])

    def _collapse(self, streams: F32, site: HyperConnection, norm: F32) -> tuple[F32, F32, F32]:
        """mHC site and norm: streams [rows, n, H] -> post [rows, n], mix [rows, n, n], normalised input [rows, H]."""
        c = self.config
        post, mix, x = m.hc_collapse(streams, site.fn, site.base, site.scale, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)
        return post, mix, m.rms(x, norm, c.rms_norm_eps)
