"""A model's weights in device memory: matrices in fragment order, small tensors in float32, routed experts behind a table of addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.packing import GRANULE_BYTES, TILE, Packed, pack, pack_pair, shape_of
from glm53serve.cuda.runtime import FORMAT_CODES, FORMAT_NAMES, MAX_ROWS, Buffer, Device, HostBuffer
from glm53serve.model import quant
from glm53serve.model.config import DSA, KDA, ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, F32Array, FfnWeights, HyperConnection, KdaWeights, LayerWeights, Matrix, MatrixFormat, MoeWeights

EXACT_BELOW = 1024
"""Models narrower than this run prompts on bf16 pairs as well: it costs nothing there, and they amplify rounding most."""


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """One matrix, or `heads` equal ones back to back, on the device; `rows` counts outputs (of a gate|up pair: its width)."""

    format: int
    rows: int
    cols: int
    tiles: int
    granules: int
    data: Buffer
    scale: Buffer | None
    heads: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales, padding included."""
        return self.data.nbytes + (self.scale.nbytes if self.scale else 0)


@dataclass(frozen=True, slots=True)
class Site:
    """mHC parameters of one half layer."""

    fn: Buffer
    base: Buffer
    scale: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class KdaOnDevice:
    """A KDA layer's attention half; the projections that read the layer input are separate matrices of one launch."""

    projections: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix]
    beta: DeviceMatrix
    f_a: DeviceMatrix
    f_b: DeviceMatrix
    g_a: DeviceMatrix
    g_b: DeviceMatrix
    out: DeviceMatrix
    taps: Buffer
    dt_bias: Buffer
    a_log: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class IndexerOnDevice:
    """The indexer of a full DSA layer."""

    query: DeviceMatrix
    key: DeviceMatrix
    gate: DeviceMatrix
    weights: DeviceMatrix
    norm: Buffer
    bias: Buffer
    ape: Buffer


@dataclass(frozen=True, slots=True)
class DsaOnDevice:
    """A DSA layer's attention half; `absorb` is Wk transposed and `value` Wv, one matrix a head."""

    q_a: DeviceMatrix
    q_b: DeviceMatrix
    kv_a: DeviceMatrix
    absorb: DeviceMatrix
    value: DeviceMatrix
    out: DeviceMatrix
    q_norm: Buffer
    kv_norm: Buffer
    indexer: IndexerOnDevice | None


@dataclass(frozen=True, slots=True)
class FfnOnDevice:
    """A dense feed-forward or shared expert."""

    gate_up: DeviceMatrix
    down: DeviceMatrix


@dataclass(frozen=True, slots=True)
class MoeOnDevice:
    """Router, shared expert and the experts' address table uint64 [E][4]: gate|up data, scale, down data, scale.

    `gate_up` and `down` give the shapes all experts share and have no data. `on_device[e]` is false for experts left in pinned host memory.
    """

    router: DeviceMatrix
    bias: Buffer
    shared: FfnOnDevice | None
    table: Buffer
    gate_up: DeviceMatrix
    down: DeviceMatrix
    on_device: NDArray[np.bool_]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales and padding included."""
        return sum(weight_bytes(m) + 4 * scale_floats(m) for m in (self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer."""

    index: int
    attention_site: Site
    ffn_site: Site
    attention: KdaOnDevice | DsaOnDevice
    ffn: FfnOnDevice | MoeOnDevice


@dataclass(slots=True)
class DeviceModel:
    """All layers held, and the two ends of the network when the device holds them. `embedding_kind` 0 float32, 1 bf16."""

    config: ModelConfig
    layers: list[DeviceLayer] = field(default_factory=list)
    embedding: Buffer | None = None
    embedding_kind: int = 0
    final_norm: Buffer | None = None
    head: DeviceMatrix | None = None


def check_supported(config: ModelConfig) -> None:
    """Raise ValueError naming the first size the kernels cannot take."""
    limits = (
        ("hc_mult", config.hc_mult, 1 <= config.hc_mult <= 4, "1 to 4"),
        ("linear_head_dim", config.kda_head_dim, config.kda_head_dim % 4 == 0 and config.kda_head_dim <= 256, "a multiple of 4, at most 256"),
        ("kv_lora_rank", config.kv_lora_rank, config.kv_lora_rank <= 512, "at most 512"),
        ("index_head_dim", config.index_head_dim, config.index_head_dim % 4 == 0 and config.index_head_dim <= 256, "a multiple of 4, at most 256"),
        ("num_experts_per_tok", config.num_experts_per_tok, config.num_experts_per_tok <= 32, "at most 32"),
        ("hidden_size", config.hidden_size, config.hidden_size <= 16384, "at most 16384"),
    )
    for name, value, fits, allowed in limits:
        if not fits:
            raise ValueError(f"{name}={value}: the CUDA backend takes {allowed}")


def is_exact(config: ModelConfig) -> bool:
    """Prompts run on bf16 pairs: narrow models, and those whose sizes the wide kernels do not take."""
    odd = head_width(config) % 32 or config.kv_lora_rank % 8
    return config.hidden_size < EXACT_BELOW or (DSA in config.layer_kinds and bool(odd))


def defines(config: ModelConfig, formats: set[str], exact: bool | None = None) -> dict[str, int]:
    """Compile-time sizes of the kernels for a model (the list at the top of kernels/common.cuh). `exact`: see `is_exact`, which is the default."""
    check_supported(config)
    has_kda, has_dsa = KDA in config.layer_kinds, DSA in config.layer_kinds
    return {
        "HC": config.hc_mult,
        "KDA_D": config.kda_head_dim if has_kda else 16,
        "CONV": config.conv_width if has_kda else 4,
        "LATENT": -(-config.kv_lora_rank // 64) * 64 if has_dsa else 64,
        "HEADS": config.num_heads if has_dsa else 16,
        "MAX_ROWS": MAX_ROWS,
        "FORMATS": sum(1 << FORMAT_CODES[f] for f in formats | {"bf16"}),
        "EXACT": int(is_exact(config) if exact is None else exact),
    }


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

    def place_experts(self, layers: Sequence[DeviceLayer], experts: ExpertSource, budget: int, heat: NDArray[np.generic] | None = None) -> None:
        """Put every routed expert where it is read from: the hottest in device memory while `budget` bytes last, the rest in pinned host memory.

        heat [mixtures, experts]: uses of each; without it the layers share the device evenly. Raises ValueError for an expert in another format than
        its layer's first.
        """
        mixtures = [(layer.index, layer.ffn) for layer in layers if isinstance(layer.ffn, MoeOnDevice)]
        order = expert_order(len(mixtures), self.config.n_routed_experts, heat)
        for i, e in order:
            moe = mixtures[i][1]
            size = moe.expert_bytes
            moe.on_device[e] = size <= budget
            budget -= size if moe.on_device[e] else 0
        for index, moe in mixtures:
            table = np.zeros((self.config.n_routed_experts, 4), np.uint64)
            for e in range(self.config.n_routed_experts):
                weights = experts.expert(index, e)
                parts = pack_pair(weights.gate, weights.up), pack(weights.down)
                shapes = zip(parts, (moe.gate_up, moe.down), strict=True)
                if any(FORMAT_CODES[p.format] != m.format or p.data.nbytes != weight_bytes(m) for p, m in shapes):
                    raise ValueError(f"layer {index}: expert {e} is stored in another format than expert 0")
                table[e] = [self._piece(a, bool(moe.on_device[e])).address for p in parts for a in (p.data, p.scale)]
            self.device.upload(moe.table.at(), table)

    def _piece(self, array: NDArray[np.generic], here: bool) -> Buffer | HostBuffer:
        if here:
            return self.vector(array)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host = self.device.host(max(4, flat.nbytes))
        host.bytes[: flat.nbytes] = flat
        return host

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


def head_width(config: ModelConfig) -> int:
    """Query values a head takes in memory: qk_head_dim up to a multiple of 8."""
    return -(-config.qk_head_dim // 8) * 8


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


def weight_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of data a product with this matrix reads when every tile is read once, scales not counted."""
    return matrix.heads * matrix.tiles * matrix.granules * GRANULE_BYTES


def scale_floats(matrix: DeviceMatrix) -> int:
    """Floats of scale beside them."""
    granules = matrix.tiles * matrix.granules
    each = {"int4": granules * 64, "fp8": granules * 2, "int8": matrix.tiles * TILE}
    return matrix.heads * each.get(FORMAT_NAMES[matrix.format], 0)


def _shape(matrix: Matrix, pair: bool = False) -> DeviceMatrix:
    tiles, granules, _ = shape_of(matrix.format, matrix.rows, matrix.cols)
    tiles = -(-matrix.rows // 8) if pair else tiles
    return DeviceMatrix(FORMAT_CODES[matrix.format], matrix.rows, matrix.cols, tiles, granules, Buffer(0, 0), None)


def expert_order(mixtures: int, experts: int, heat: NDArray[np.generic] | None) -> list[tuple[int, int]]:
    """(mixture, expert) from the first to go to the device to the last: hottest first, ties one expert of every layer at a time."""
    pairs = [(i, e) for e in range(experts) for i in range(mixtures)]
    if heat is None:
        return pairs
    if heat.shape != (mixtures, experts):
        raise ValueError(f"heat is {heat.shape}, must be {(mixtures, experts)}")
    return sorted(pairs, key=lambda pair: -float(heat[pair]))


def flops_per_row(matrix: DeviceMatrix, pair: bool = False) -> int:
    """Useful floating-point operations of a product with one row."""
    return 2 * matrix.heads * matrix.rows * matrix.cols * (2 if pair else 1)

