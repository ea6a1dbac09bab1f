"""Random models of real width, drawn on the GPU: nothing is written to disk or sent over the bus."""

from __future__ import annotations

from math import sqrt

import numpy as np

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
from glm53serve.cuda.packing import shape_of
from glm53serve.cuda.runtime import FORMAT_CODES, Buffer, Device, HostBuffer, Pointer
from glm53serve.model.config import DSA, FULL, SPARSE, ModelConfig
from glm53serve.model.weights import MatrixFormat

SOURCE = r"""
__device__ __forceinline__ u32 hashed(u64 i, u32 seed) {
    u64 x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (u32)(x >> 32);
}
__device__ __forceinline__ float uniform01(u32 h) { return (h >> 8) * (1.0f / 16777216.0f); }
// kind 0: random bits, 1: e4m3 bytes below 2, 2: pairs of bf16 in (low, high), 3: float32 in (low, high)
KERNEL fill_random(u32* to, u64 n, u32 seed, int kind, float low, float high) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const u32 h = hashed(i, seed);
        if (kind == 0) to[i] = h;
        else if (kind == 1) to[i] = h & 0xbfbfbfbfu;
        else if (kind == 2) to[i] = pack_bf16(low + (high - low) * uniform01(h), low + (high - low) * uniform01(hashed(i, seed + 77)));
        else to[i] = __float_as_uint(low + (high - low) * uniform01(h));
    }
}
__device__ __forceinline__ U4 stream16(const U4* from) {  // read once: past the first cache
    U4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
KERNEL copy_bytes(const U4* from, U4* to, u64 n) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        const U4 a = stream16(from + i), b = stream16(from + i + stride), c = stream16(from + i + 2 * stride), d = stream16(from + i + 3 * stride);
        to[i] = a; to[i + stride] = b; to[i + 2 * stride] = c; to[i + 3 * stride] = d;
    }
    for (; i < n; i += stride) to[i] = from[i];
}
KERNEL busy(u64 ns) { const u64 start = clock_ns(); while (clock_ns() - start < ns) {} }
"""


class RandomModel:
    """Draws layers of a config. A share of the experts of each layer, drawn at random, may lie in pinned host memory.

    The smaller `router_bias`, the more the experts of different tokens differ.
    """

    def __init__(self, device: Device, config: ModelConfig, dense: MatrixFormat, expert: MatrixFormat, seed: int = 1, router_bias: float = 0.05) -> None:
        self.device, self.config, self.dense, self.expert = device, config, dense, expert
        self.seed, self.router_bias = seed, router_bias

    def fill(self, to: Pointer | Buffer | HostBuffer, words: int, kind: int, low: float = 0.0, high: float = 0.0) -> None:
        """Random 32-bit words on the device."""
        import ctypes

        self.seed += 1
        self.device.launch("fill_random", (2112,), 256, [to, ctypes.c_uint64(words), self.seed, kind, low, high])

    def vector(self, size: int, low: float, high: float) -> Buffer:
        """Uniform float32."""
        buffer = self.device.alloc(4 * size)
        self.fill(buffer, size, 3, low, high)
        return buffer

    def matrix(self, rows: int, cols: int, fmt: MatrixFormat | None = None, heads: int = 1, pair: bool = False, gain: float = 1.0) -> DeviceMatrix:
        """A matrix whose outputs have about `gain` times the spread of its inputs."""
        fmt = fmt or self.dense
        tiles, granules, _ = shape_of(fmt, rows, cols)
        shape = DeviceMatrix(FORMAT_CODES[fmt], rows, cols, -(-rows // 8) if pair else tiles, granules, Buffer(0, 0), None, heads)
        data = self.device.alloc(weight_bytes(shape))
        scale = self.device.alloc(4 * scale_floats(shape)) if scale_floats(shape) else None
        self.draw(shape, fmt, data, scale, gain)
        return DeviceMatrix(shape.format, rows, cols, shape.tiles, granules, data, scale, heads)

    def draw(self, shape: DeviceMatrix, fmt: MatrixFormat, data: Buffer | HostBuffer, scale: Buffer | HostBuffer | None, gain: float = 1.0) -> None:
        """Fill a matrix's memory."""
        spread = gain / sqrt(shape.cols)
        words, edge = weight_bytes(shape) // 4, spread * sqrt(3.0)
        kind = {"int4": 0, "int8": 0, "fp8": 1, "bf16": 2, "f32": 3}[fmt]
        self.fill(data, words, kind, -edge, edge)
        if scale is not None:
            level = {"int4": 4.6, "int8": 74.0, "fp8": 0.6}[fmt]
            self.fill(scale, scale_floats(shape), 3, 0.9 * spread / level, 1.1 * spread / level)

    def site(self) -> Site:
        """mHC parameters."""
        n, h = self.config.hc_mult, self.config.hidden_size
        outs = (2 + n) * n
        edge = sqrt(3.0 / (n * h))
        return Site(self.vector(outs * n * h, -edge, edge), self.vector(outs, -1.0, 1.0), self.vector(3, 0.5, 1.0), self.vector(h, 0.75, 1.25))

    def ffn(self, width: int) -> FfnOnDevice:
        """A dense feed-forward."""
        return FfnOnDevice(self.matrix(width, self.config.hidden_size, pair=True), self.matrix(self.config.hidden_size, width))

    def kda(self) -> KdaOnDevice:
        """A KDA half."""
        c = self.config
        h, p, d = c.hidden_size, c.kda_width, c.kda_head_dim
        q, k, v = (self.matrix(p, h) for _ in range(3))
        return KdaOnDevice(
            (q, k, v), self.matrix(c.kda_heads, h, "bf16"), self.matrix(d, h, "bf16"), self.matrix(p, d, "bf16"), self.matrix(d, h, "bf16"),
            self.matrix(p, d, "bf16"),
            self.matrix(h, p), self.vector(3 * p * c.conv_width, -0.9, 0.9), self.vector(p, -6.0, -1.0), self.vector(c.kda_heads, 0.0, 0.7),
            self.vector(d, 0.75, 1.25),
        )  # fmt: skip

    def dsa(self, full: bool) -> DsaOnDevice:
        """A DSA half."""
        c = self.config
        h, di = c.hidden_size, c.index_head_dim
        indexer = None
        if full:
            indexer = IndexerOnDevice(
                self.matrix(c.index_n_heads * di, c.q_lora_rank, "bf16"), self.matrix(di, h, "bf16"), self.matrix(di, h, "bf16"),
                self.matrix(c.index_n_heads, h, "bf16"),
                self.vector(di, 0.75, 1.25), self.vector(di, -0.1, 0.1), self.vector(c.index_kpool * di, -1.0, 1.0),
            )  # fmt: skip
        return DsaOnDevice(
            self.matrix(c.q_lora_rank, h), self.matrix(c.num_heads * head_width(c), c.q_lora_rank), self.matrix(c.kv_lora_rank, h),
            self.matrix(c.kv_lora_rank, c.qk_head_dim, "bf16", heads=c.num_heads), self.matrix(c.v_head_dim, c.kv_lora_rank, "bf16", heads=c.num_heads),
            self.matrix(h, c.num_heads * c.v_head_dim), self.vector(c.q_lora_rank, 0.75, 1.25), self.vector(c.kv_lora_rank, 0.75, 1.25), indexer,
        )  # fmt: skip

    def moe(self, host_share: float, pinned: HostBuffer | None) -> MoeOnDevice:
        """A mixture; its experts lie in one allocation, those left on the host in `pinned` from its start."""
        c = self.config
        h, e = c.hidden_size, c.n_routed_experts

        def shape(rows: int, cols: int, pair: bool) -> DeviceMatrix:
            tiles, granules, _ = shape_of(self.expert, rows, cols)
            return DeviceMatrix(FORMAT_CODES[self.expert], rows, cols, -(-rows // 8) if pair else tiles, granules, Buffer(0, 0), None)

        gate_up, down = shape(c.moe_intermediate_size, h, True), shape(h, c.moe_intermediate_size, False)
        left = round(e * host_share)
        on_device = np.random.default_rng(self.seed).permutation(e) >= left
        sizes = [weight_bytes(gate_up), 4 * scale_floats(gate_up), weight_bytes(down), 4 * scale_floats(down)]
        each = sum(sizes)
        room = self.device.alloc(each * (e - left))
        table = np.zeros((e, 4), np.uint64)
        starts = np.concatenate([[0], np.cumsum(sizes)[:3]]).astype(np.uint64)
        places = np.where(on_device, np.cumsum(on_device) - 1, np.cumsum(~on_device) - 1)
        for i in range(e):
            base = (room.address if on_device[i] else pinned.address if pinned else 0) + each * int(places[i])
            table[i] = starts + np.uint64(base)
            for j, (m, at) in enumerate(((gate_up, 0), (down, 2))):
                del j
                data, scale = Buffer(int(table[i, at]), sizes[at]), Buffer(int(table[i, at + 1]), sizes[at + 1])
                self.draw(m, self.expert, data, scale if sizes[at + 1] else None)
        device_table = self.device.alloc(table.nbytes)
        self.device.upload(device_table.at(), table)
        shared = self.ffn(c.n_shared_experts * c.moe_intermediate_size) if c.n_shared_experts else None
        router, bias = self.matrix(e, h, "bf16", gain=2.0), self.vector(e, -self.router_bias, self.router_bias)
        return MoeOnDevice(router, bias, shared, device_table, gate_up, down, on_device)

    def build(self, host_share: float = 0.0) -> DeviceModel:
        """All layers and the ends."""
        c = self.config
        layers = []
        for i in range(c.num_layers):
            attention = self.dsa(c.indexer_kinds[i] == FULL) if c.layer_kinds[i] == DSA else self.kda()
            if c.mlp_kinds[i] == SPARSE:
                pinned = None
                if host_share:
                    left = round(c.n_routed_experts * host_share)
                    tiny = 2 * 1024 + sum(expert_sizes(c, self.expert)) * left
                    pinned = self.device.host(tiny)
                ffn: FfnOnDevice | MoeOnDevice = self.moe(host_share, pinned)
            else:
                ffn = self.ffn(c.intermediate_size)
            layers.append(DeviceLayer(i, self.site(), self.site(), attention, ffn))
        table = self.device.alloc(2 * c.vocab_size * c.hidden_size)
        self.fill(table, c.vocab_size * c.hidden_size // 2, 2, -1.7, 1.7)
        return DeviceModel(c, layers, table, 1, self.vector(c.hidden_size, 0.75, 1.25), self.matrix(c.vocab_size, c.hidden_size, gain=2.0))


def expert_sizes(config: ModelConfig, fmt: MatrixFormat) -> list[int]:
    """Bytes of one expert's four pieces."""
    out = []
    for rows, cols, pair in ((config.moe_intermediate_size, config.hidden_size, True), (config.hidden_size, config.moe_intermediate_size, False)):
        tiles, granules, _ = shape_of(fmt, rows, cols)
        m = DeviceMatrix(FORMAT_CODES[fmt], rows, cols, -(-rows // 8) if pair else tiles, granules, Buffer(0, 0), None)
        out += [weight_bytes(m), 4 * scale_floats(m)]
    return out


def matrices_of(model: DeviceModel) -> list[tuple[str, DeviceMatrix]]:
    """Every matrix a step reads once whatever it routes to, by kind."""
    out: list[tuple[str, DeviceMatrix]] = []
    for layer in model.layers:
        for part, kind in ((layer.attention, "attention"), (layer.ffn, "feed-forward")):
            if isinstance(part, MoeOnDevice):
                out.append(("router", part.router))
                part_list: list[object] = [part.shared] if part.shared else []
            else:
                part_list = [part]
            if isinstance(part, DsaOnDevice) and part.indexer:
                part_list.append(part.indexer)
            for p in part_list:
                for name in p.__slots__:  # type: ignore[attr-defined]
                    value = getattr(p, name)
                    out += [(kind, m) for m in (value if isinstance(value, tuple) else (value,)) if isinstance(m, DeviceMatrix)]
    if model.head:
        out.append(("head", model.head))
    return out


def stored_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of a matrix's weights and scales."""
    return weight_bytes(matrix) + 4 * scale_floats(matrix)
