"""Weights on their way to the device: formats, matrices in fragment order, and which memory each routed expert is read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.model import (
    DeviceLayer,
    DeviceMatrix,
    DeviceModel,
    DsaOnDevice,
    FfnOnDevice,
    IndexerOnDevice,
    KdaOnDevice,
    MoeOnDevice,
    Site,
    head_width,
    scale_floats,
    weight_bytes,
)
from glm53serve.cuda.packing import Packed, pack, pack_pair, shape_of
from glm53serve.cuda.runtime import FORMAT_CODES, Buffer, Device, HostBuffer, Pointer
from glm53serve.model import quant
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, F32Array, FfnWeights, HyperConnection, KdaWeights, LayerWeights, Matrix, MatrixFormat, MoeWeights


def requantised(matrix: Matrix, bits: int) -> Matrix:
    """A dense matrix in the bits asked for: 4 or 8 (from wider ones only), 32, or 0 / 16 = as stored."""
    if bits in (0, 16) or matrix.format in ("int4", "int8") or (bits == 8 and matrix.format == "fp8"):
        return matrix
    values = quant.dequantise(matrix)
    if bits == 32:
        return Matrix("f32", matrix.rows, matrix.cols, values)
    data, scale = quant.quantise_int8(values) if bits == 8 else quant.quantise_int4(values)
    return Matrix("int8" if bits == 8 else "int4", matrix.rows, matrix.cols, data, scale)


def narrowest(values: F32Array) -> Matrix:
    """A float32 matrix, kept as bf16 when that loses nothing."""
    values = np.ascontiguousarray(values, np.float32)
    bits = quant.f32_to_bf16(values)
    if np.array_equal(quant.bf16_to_f32(bits), values):
        return Matrix("bf16", values.shape[0], values.shape[1], bits)
    return Matrix("f32", values.shape[0], values.shape[1], values)


SLAB_BYTES = 256 << 20
"""Pinned host memory is asked for in pieces of at most this size: each is a call of the driver, whatever its size."""


@dataclass(slots=True)
class PinnedSlabs:
    """Places for small arrays in few pinned allocations. `wanted`: bytes still to come, so that the last slab is no larger than needed."""

    device: Device
    wanted: int
    _slab: HostBuffer | None = None
    _used: int = 0

    def put(self, array: NDArray[np.generic]) -> Pointer:
        """Copy an array to its place: its address, on a border of 256 bytes. Raises MemoryError."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        room = pinned_room(flat.nbytes)
        if self._slab is None or self._used + room > len(self._slab.bytes):
            self._slab, self._used = self.device.host(max(room, min(SLAB_BYTES, self.wanted))), 0
        self._slab.bytes[self._used : self._used + flat.nbytes] = flat
        place = self._slab.at(self._used)
        self._used += room
        self.wanted -= room
        return place


def pinned_room(nbytes: int) -> int:
    """What an array of that many bytes takes of a slab."""
    return max(256, -(-nbytes // 256) * 256)


@dataclass(slots=True)
class Uploader:
    """Moves weights to the device; `bits` as GLM53_BITS."""

    device: Device
    config: ModelConfig
    bits: int = 0

    def vector(self, values: NDArray[np.generic]) -> Buffer:
        """A small tensor as it is (float32, or raw bits)."""
        flat = np.ascontiguousarray(values)
        buffer = self.device.alloc(max(4, flat.nbytes))
        self.device.upload(buffer.at(), flat)
        return buffer

    def matrix(self, matrix: Matrix, dense: bool = False) -> DeviceMatrix:
        """A matrix; `dense` ones may be requantised."""
        return self._packed([pack(requantised(matrix, self.bits) if dense else matrix)])

    def stack(self, matrices: Sequence[Matrix]) -> DeviceMatrix:
        """Equal matrices back to back, one a head."""
        return self._packed([pack(m) for m in matrices])

    def pair(self, gate: Matrix, up: Matrix, dense: bool = False) -> DeviceMatrix:
        """Gate and up as one interleaved matrix."""
        if dense:
            gate, up = requantised(gate, self.bits), requantised(up, self.bits)
        return self._packed([pack_pair(gate, up)])

    def _packed(self, parts: list[Packed]) -> DeviceMatrix:
        first = parts[0]
        data = self.device.alloc(sum(p.data.nbytes for p in parts))
        scale = self.device.alloc(sum(p.scale.nbytes for p in parts)) if first.scale.size else None
        at = at_scale = 0
        for p in parts:
            self.device.upload(data.at(at), p.data)
            at += p.data.nbytes
            if scale:
                self.device.upload(scale.at(at_scale), p.scale)
                at_scale += p.scale.nbytes
        return DeviceMatrix(FORMAT_CODES[first.format], first.rows, first.cols, first.tiles, first.granules, data, scale, len(parts))

    def site(self, hc: HyperConnection, norm: F32Array) -> Site:
        """An mHC site with the norm behind it."""
        return Site(self.vector(hc.fn), self.vector(hc.base), self.vector(hc.scale), self.vector(norm))

    def ffn(self, w: FfnWeights) -> FfnOnDevice:
        """A dense feed-forward or shared expert."""
        return FfnOnDevice(self.pair(w.gate, w.up, dense=True), self.matrix(w.down, dense=True))

    def kda(self, w: KdaWeights) -> KdaOnDevice:
        """A KDA attention half."""
        taps = np.concatenate([w.q_conv, w.k_conv, w.v_conv])
        q, k, v = (self.matrix(m, dense=True) for m in (w.q_proj, w.k_proj, w.v_proj))
        return KdaOnDevice(
            projections=(q, k, v),
            beta=self.matrix(w.b_proj),
            f_a=self.matrix(w.f_a),
            f_b=self.matrix(w.f_b),
            g_a=self.matrix(w.g_a),
            g_b=self.matrix(w.g_b),
            out=self.matrix(w.o_proj, dense=True),
            taps=self.vector(taps),
            dt_bias=self.vector(w.dt_bias),
            a_log=self.vector(w.a_log.reshape(-1)),
            norm=self.vector(w.o_norm),
        )

    def dsa(self, w: DsaWeights) -> DsaOnDevice:
        """A DSA attention half, its key and value projections split by head."""
        c = self.config
        kv_b = w.kv_b
        bits = np.asarray(kv_b.data).reshape(kv_b.rows, kv_b.cols) if kv_b.format in ("bf16", "f32") else quant.dequantise(kv_b)
        fmt: MatrixFormat = kv_b.format if kv_b.format in ("bf16", "f32") else "f32"
        heads = bits.reshape(c.num_heads, c.qk_head_dim + c.v_head_dim, c.kv_lora_rank)

        def parts(blocks: Sequence[NDArray[np.generic]]) -> DeviceMatrix:
            return self.stack([Matrix(fmt, b.shape[0], b.shape[1], np.ascontiguousarray(b)) for b in blocks])

        indexer = None
        if w.indexer is not None:
            i = w.indexer
            indexer = IndexerOnDevice(
                query=self.matrix(i.wq_b),
                key=self.matrix(i.wk),
                gate=self.matrix(i.gate),
                weights=self.matrix(i.weights_proj),
                norm=self.vector(i.k_norm_weight),
                bias=self.vector(i.k_norm_bias),
                ape=self.vector(i.ape),
            )
        return DsaOnDevice(
            q_a=self.matrix(w.q_a, dense=True),
            q_b=self.matrix(self._head_rows(requantised(w.q_b, self.bits))),
            kv_a=self.matrix(w.kv_a, dense=True),
            absorb=parts([h[: c.qk_head_dim].T for h in heads]),
            value=parts([h[c.qk_head_dim :] for h in heads]),
            out=self.matrix(w.o_proj, dense=True),
            q_norm=self.vector(w.q_a_norm),
            kv_norm=self.vector(w.kv_a_norm),
            indexer=indexer,
        )

    def _head_rows(self, q_b: Matrix) -> Matrix:
        """q_b with every head's rows padded to a multiple of 8, so that a head's query starts at a 16-byte border."""
        c = self.config
        if c.qk_head_dim % 8 == 0:
            return q_b
        padded = np.zeros((c.num_heads, head_width(c), q_b.cols), np.float32)
        padded[:, : c.qk_head_dim] = quant.dequantise(q_b).reshape(c.num_heads, c.qk_head_dim, q_b.cols)
        return narrowest(padded.reshape(-1, q_b.cols))

    def moe(self, layer: int, w: MoeWeights, experts: ExpertSource) -> MoeOnDevice:
        """Router and shared expert of a mixture; its experts follow with `place_experts`."""
        c = self.config
        sample = experts.expert(layer, 0)
        if (sample.gate.format, sample.gate.rows, sample.gate.cols) != (sample.up.format, sample.up.rows, sample.up.cols):
            raise ValueError(f"layer {layer}: an expert's gate and up are stored in different formats")
        return MoeOnDevice(
            router=self.matrix(narrowest(w.router)),
            bias=self.vector(w.bias),
            shared=None if w.shared is None else self.ffn(w.shared),
            table=self.device.alloc(32 * c.n_routed_experts),
            gate_up=_shape(sample.gate, pair=True),
            down=_shape(sample.down),
            on_device=np.zeros(c.n_routed_experts, bool),
        )

    def choose_experts(self, mixtures: Sequence[MoeOnDevice], budget: int, heat: NDArray[np.generic] | None = None) -> int:
        """Mark in `on_device` the experts that go to device memory, the hottest first while `budget` bytes last. Returns the bytes of the others.

        heat [mixtures, experts]: uses of each; without it see `expert_order`.
        """
        left = 0
        for i, e in expert_order(len(mixtures), self.config.n_routed_experts, heat):
            moe = mixtures[i]
            moe.on_device[e] = moe.expert_bytes <= budget
            if moe.on_device[e]:
                budget -= moe.expert_bytes
            else:
                left += moe.expert_bytes
        return left

    def place_experts(self, layers: Sequence[DeviceLayer], experts: ExpertSource) -> None:
        """Bring every routed expert to where `on_device` says it is read from, device or pinned host memory.

        Raises ValueError for an expert in another format than its layer's first.
        """
        mixtures = [(layer.index, layer.ffn) for layer in layers if isinstance(layer.ffn, MoeOnDevice)]
        slabs = PinnedSlabs(self.device, sum(int(np.count_nonzero(~moe.on_device)) * _pinned_expert(moe) for _, moe in mixtures))
        for index, moe in mixtures:
            table = np.zeros((self.config.n_routed_experts, 4), np.uint64)
            for e in range(self.config.n_routed_experts):
                weights = experts.expert(index, e)
                parts = pack_pair(weights.gate, weights.up), pack(weights.down)
                shapes = zip(parts, (moe.gate_up, moe.down), strict=True)
                if any(FORMAT_CODES[p.format] != m.format or p.data.nbytes != weight_bytes(m) for p, m in shapes):
                    raise ValueError(f"layer {index}: expert {e} is stored in another format than expert 0")
                pieces = [a for p in parts for a in (p.data, p.scale)]
                table[e] = [self.vector(a).address if moe.on_device[e] else int(slabs.put(a)) for a in pieces]
            self.device.upload(moe.table.at(), table)

    def layer(self, w: LayerWeights, experts: ExpertSource) -> DeviceLayer:
        """One layer, without its routed experts."""
        return DeviceLayer(
            w.index,
            self.site(w.hc_attn, w.input_norm),
            self.site(w.hc_ffn, w.post_norm),
            self.kda(w.attention) if isinstance(w.attention, KdaWeights) else self.dsa(w.attention),
            self.ffn(w.ffn) if isinstance(w.ffn, FfnWeights) else self.moe(w.index, w.ffn, experts),
        )

    def ends(self, model: DeviceModel, embedding: Matrix, final_norm: F32Array, lm_head: Matrix) -> None:
        """Embedding table, final norm and head."""
        table = embedding if embedding.format in ("bf16", "f32") else Matrix("f32", embedding.rows, embedding.cols, quant.dequantise(embedding))
        model.embedding = self.vector(np.asarray(table.data))
        model.embedding_kind = int(table.format == "bf16")
        model.final_norm = self.vector(final_norm)
        model.head = self.matrix(lm_head, dense=True)


def formats_of(config: ModelConfig, layer: Callable[[int], LayerWeights], experts: ExpertSource, bits: int, ends: Sequence[Matrix] = ()) -> set[str]:
    """Formats of all matrices as they will lie on the device."""
    found: set[str] = set()
    kept = {4: "int4", 8: "int8", 32: "f32"}.get(bits)
    if kept:
        found.add(kept)
    for index in range(config.num_layers):
        w = layer(index)
        parts: list[object] = [w.attention]
        if isinstance(w.attention, DsaWeights):
            parts.append(w.attention.indexer)
            if w.attention.kv_b.format != "bf16" or config.qk_head_dim % 8:
                found.add("f32")
        if isinstance(w.ffn, FfnWeights):
            parts.append(w.ffn)
        else:
            parts += [w.ffn.shared, experts.expert(index, 0)]
            found.add(narrowest(w.ffn.router).format)
        for part in parts:
            if part is not None:
                names = [n for cls in type(part).__mro__ for n in getattr(cls, "__slots__", ())]
                found |= {v.format for n in names if isinstance(v := getattr(part, n), Matrix)}
    return found | {m.format for m in ends}


def _shape(matrix: Matrix, pair: bool = False) -> DeviceMatrix:
    tiles, granules, _ = shape_of(matrix.format, matrix.rows, matrix.cols)
    tiles = -(-matrix.rows // 8) if pair else tiles
    return DeviceMatrix(FORMAT_CODES[matrix.format], matrix.rows, matrix.cols, tiles, granules, Buffer(0, 0), None)


def _pinned_expert(moe: MoeOnDevice) -> int:
    """Bytes of one expert in pinned memory: weights and scales of both its matrices."""
    return sum(pinned_room(weight_bytes(m)) + pinned_room(4 * scale_floats(m)) for m in (moe.gate_up, moe.down))


def expert_order(mixtures: int, experts: int, heat: NDArray[np.generic] | None) -> list[tuple[int, int]]:
    """(mixture, expert) from the first to go to the device to the last: the hottest first.

    Without heat, and among equally hot ones, expert 0 of every mixture comes first, then expert 1, so that all layers leave equally many to the host.
    """
    pairs = [(i, e) for e in range(experts) for i in range(mixtures)]
    if heat is None:
        return pairs
    if heat.shape != (mixtures, experts):
        raise ValueError(f"heat is {heat.shape}, must be {(mixtures, experts)}")
    return sorted(pairs, key=lambda pair: -float(heat[pair]))
