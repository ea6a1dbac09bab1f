"""Routed experts in pinned host memory beside the same ones in device memory: one product kernel at a time, and whole passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.backend import MakeDevice, Weights
from glm53serve.cuda.cupy_runtime import CupyDevice
from glm53serve.cuda.layers import CudaHead, CudaLayers, make_head
from glm53serve.cuda.model import DeviceModel, MoeOnDevice, defines
from glm53serve.cuda.products import MAP_PAIR, MAP_SORTED, MAP_TOKEN, ExpertGroups, product, run_products, skinny_columns
from glm53serve.cuda.runtime import KERNEL_DIR, MAX_ROWS, Buffer, Job
from glm53serve.cuda.upload import Uploader, formats_of
from glm53serve.engine.seam import DeviceLost
from glm53serve.model.quant import bf16_to_f32, f32_to_bf16

ROWS = 128
"""Most rows of a pass, and positions of the one slot."""
TOKEN_TILE = 64
SHARED_BYTES = 227 << 10
SPOIL = """
// Blocks of 1,024 threads fill all shared memory of a multiprocessor with NaNs.
KERNEL spoil_shared_memory(int words) {
    DYNAMIC_SHARED(volatile u32, all);
    for (int i = threadIdx.x; i < words; i += 1024) all[i] = 0xffffffffu;
}
"""


class SpoilingDevice(CupyDevice):
    """The first GPU. `spoil` leaves NaNs in shared memory for the next kernel, as the emulated device does by itself: what it reads too early shows."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes, extra_sources={"spoil": (KERNEL_DIR / "common.cuh").read_text() + SPOIL})

    def spoil(self) -> None:
        """Many blocks for each multiprocessor: the first ones may end before the last have begun."""
        self.launch("spoil_shared_memory", (1024,), 1024, [SHARED_BYTES // 4], SHARED_BYTES)


def kernel_of(rows: int) -> str:
    """The kernel that multiplies so many rows of an exact model."""
    return f"gemv_{skinny_columns(rows)}" if rows <= MAX_ROWS else "gemm_exact"


def network(weights: Weights, make_device: MakeDevice, on_host: bool) -> CudaHead:
    """An exact network with one slot, all its routed experts in host memory or all on the device."""
    c = weights.config
    device = make_device(defines(c, formats_of(c, weights.layer, weights, 0, (weights.lm_head(),)), True))
    uploader, model = Uploader(device, c), DeviceModel(c)
    for i in range(c.num_layers):
        model.layers.append(uploader.layer(weights.layer(i), weights))
    uploader.ends(model, weights.embedding(), weights.final_norm(), weights.lm_head())
    uploader.choose_experts([layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeOnDevice)], 0 if on_host else 1 << 60)
    uploader.place_experts(model.layers, weights)
    layers = CudaLayers(device, model, 1, ROWS, ROWS, exact=True)
    layers.open_slot(0, ROWS)
    assert (layers.tiers() == (1 if on_host else 2)).all()
    return make_head(layers)


def routings(rows: int, top_k: int, experts: int) -> list[NDArray[np.int32]]:
    """Choices [rows, top_k] of experts, ascending in a row: some that together reach every expert, and one in which all rows want the same."""
    pairs = rows * top_k
    spread = [(first + np.arange(pairs)).reshape(rows, top_k) % experts for first in range(0, experts, pairs)]
    chosen = [np.sort(ids, axis=1).astype(np.int32) for ids in (*spread, np.tile(np.arange(top_k), (rows, 1)))]
    assert len(np.unique(np.concatenate([ids.reshape(-1) for ids in chosen]))) == experts
    return chosen


def by_expert(ids: NDArray[np.int32], tile: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pairs sorted by expert, and the groups of at most `tile` of them behind their number: what route_few and moe_list write."""
    flat = ids.reshape(-1)
    places = np.argsort(flat, kind="stable").astype(np.int32)
    groups = [(0, 0, 0, 0)]
    for expert in np.unique(flat):
        start, count = int(np.searchsorted(flat[places], expert)), int((flat == expert).sum())
        groups += [(int(expert), start + at, min(tile, count - at), 0) for at in range(0, count, tile)]
    table = np.array(groups, np.int32)
    table[0, 0] = len(groups) - 1
    return places, table


@dataclass(frozen=True)
class Products:
    """The products of one mixture of a network, launched by themselves over rows `x` [rows, hidden]."""

    head: CudaHead
    layer: int

    def run(self, x: NDArray[np.float32], ids: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """Results by product. Raises AssertionError with the kernel, rows and layer where the device fails."""
        layers, rows, pairs = self.head.layers, len(x), ids.size
        c, plain, split, device = layers.config, layers.scratch.plain, layers.scratch.split, layers.device
        moe = layers.model.layers[self.layer].ffn
        assert isinstance(moe, MoeOnDevice) and moe.shared
        places, groups = by_expert(ids, skinny_columns(rows) if rows <= MAX_ROWS else TOKEN_TILE)
        experts = ExpertGroups(plain["list"], plain["groups"], ids.shape[1], len(groups) - 1)
        device.upload(experts.places.at(), places)
        device.upload(experts.groups.at(), groups)
        self._put("x", x)
        for name, count in (("expert_h", pairs), ("shared_h", rows)):
            self._put(name, np.full((count, c.moe_intermediate_size), np.nan, np.float32))
        for name, count in (("pair_y", pairs), ("y", rows)):
            device.upload(plain[name].at(), np.full((count, c.hidden_size), np.nan, np.float32))
        h, shared_h, limit = split["expert_h"], split["shared_h"], c.swiglu_limit
        self._launch("shared gate|up", rows, [product(moe.shared.gate_up, split["x"], split=shared_h, swiglu=limit)], None)
        job = product(moe.gate_up, split["x"], split=h, swiglu=limit, table=moe.table, which=0, x_map=MAP_TOKEN, y_map=MAP_SORTED)
        self._launch("gate|up", rows, [job], experts)
        jobs = [
            product(moe.down, h, plain["pair_y"], c.hidden_size, table=moe.table, which=1, x_map=MAP_SORTED, y_map=MAP_PAIR),
            product(moe.shared.down, shared_h, plain["y"], c.hidden_size),
        ]
        self._launch("down", rows, jobs, experts)
        return {
            "gate|up": self._get(h.high, pairs, h.ld, np.uint16)[:, : c.moe_intermediate_size],
            "down": self._get(plain["pair_y"], pairs, c.hidden_size, np.float32),
            "shared down": self._get(plain["y"], rows, c.hidden_size, np.float32),
        }

    def _put(self, name: str, values: NDArray[np.float32]) -> None:
        """Activations of a name: bf16 pairs, zeros beyond their width."""
        to, device = self.head.layers.scratch.split[name], self.head.layers.device
        high = f32_to_bf16(values)
        low = f32_to_bf16(values - bf16_to_f32(high))
        for part, buffer in ((high, to.high), (low, to.low)):
            assert buffer is not None
            device.upload(buffer.at(), np.pad(part, ((0, 0), (0, to.ld - values.shape[1]))))

    def _launch(self, what: str, rows: int, jobs: list[Job], experts: ExpertGroups | None) -> None:
        device = self.head.layers.device
        if isinstance(device, SpoilingDevice):
            device.spoil()
        try:
            run_products(device, rows, jobs, TOKEN_TILE, experts)
            device.synchronize()
        except DeviceLost as lost:
            raise AssertionError(f"{kernel_of(rows)}, {rows} rows, layer {self.layer}, {what}: {lost}") from lost

    def _get(self, buffer: Buffer, rows: int, width: int, kind: type) -> NDArray[Any]:
        out = np.empty((rows, width), kind)
        self.head.layers.device.download(buffer.at(), out)
        return out


def different(some: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> Sequence[str]:
    """Products whose results differ in a bit, or are no numbers, and how many values."""
    return [
        f"{name}: {wrong} of {values.size} values"
        for name, values in some.items()
        if (wrong := int(((values != other[name]) | (np.isnan(values) if values.dtype == np.float32 else values >> 7 & 0xFF == 0xFF)).sum()))
    ]
