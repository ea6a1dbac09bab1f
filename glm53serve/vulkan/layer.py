"""One layer as stages of dispatches: which kernels, over which buffers, in which order (model spec 3 to 6)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import quant
from glm53serve.model.config import FULL, ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, FfnWeights, HyperConnection, KdaWeights, LayerWeights, Matrix, MoeWeights
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.linear import VECTOR_ROWS, ExpertMatrices, Linear, Op, Stage, Target, upload, upload_experts
from glm53serve.vulkan.pack import by_heads, gate_up, key_and_value, pack, pack_values, padded
from glm53serve.vulkan.scratch import Scratch, Sizes, attention_splits
from glm53serve.vulkan.state import DsaState, KdaState

F32 = NDArray[np.float32]
Narrow = Callable[[Matrix], Matrix]


def constant(device: Device, *parts: NDArray[np.float32]) -> Buffer:
    """Small float32 arrays, one after another, on the device."""
    values = np.concatenate([np.asarray(p, np.float32).ravel() for p in parts])
    buffer = device.local(values.nbytes)
    device.put(buffer, values)
    return buffer


def bits_of(value: float) -> int:
    """A float32's bits, for a specialisation constant."""
    return int(np.float32(value).view(np.uint32))


class HcSite:
    """An mHC site and the norm behind it (model spec 3)."""

    def __init__(self, device: Device, sizes: Sizes, site: HyperConnection, norm: F32) -> None:
        c = sizes.config
        n, hidden = c.hc_mult, c.hidden_size
        self.sizes = sizes
        self.outputs = (2 + n) * n
        fn = np.zeros((self.outputs, n, sizes.hidden), np.float32)
        fn[:, :, :hidden] = site.fn.reshape(self.outputs, n, hidden)
        self.fn = constant(device, fn)
        head = np.zeros(128, np.float32)
        head[: self.outputs + 3] = np.concatenate([site.base, site.scale])
        weight = np.zeros(sizes.hidden, np.float32)
        weight[:hidden] = norm
        self.constants = constant(device, head, weight)

    def before(self, s: Scratch, bucket: int) -> list[Stage]:
        """x of the sub-layer in `xn`, post and M in `mix`."""
        c, z = self.sizes.config, self.sizes
        width = c.hc_mult * z.hidden
        together = 1 if bucket <= VECTOR_ROWS else 4
        dots = Op(
            "hc_dots",
            {1: 256 if together == 1 else 64, 2: together},
            [s["x"], self.fn, s["dots"]],
            struct.pack("2I", self.outputs, width),
            (-(-(self.outputs + 1) // together), bucket, 1),
            2.0 * bucket * self.outputs * width,
            self.fn.nbytes,
        )
        pre = Op(
            "hc_pre",
            {2: c.hc_mult},
            [s["dots"], self.constants, s["x"], s["xn"], s["mix"]],
            struct.pack("3I2f", c.hidden_size, z.hidden, c.hc_sinkhorn_iters, c.rms_norm_eps, c.hc_eps),
            (bucket, 1, 1),
            4.0 * bucket * width,
        )
        return [[dots], [pre]]

    def after(self, device: Device, s: Scratch, bucket: int, has_y: bool = True, topk: int = 0) -> list[Stage]:
        """X' from the sub-layer's output in `y` and, with topk > 0, the experts' in `ey`."""
        c, z = self.sizes.config, self.sizes
        buffers = [s["x"], s["mix"], s["y"], s.get("ey", device.dummy), s.get("weights", device.dummy)]
        push = struct.pack("3I", z.hidden, has_y, topk)
        flops = 2.0 * bucket * z.hidden * (c.hc_mult * (c.hc_mult + 1) + topk)
        return [[Op("hc_post", {2: c.hc_mult}, buffers, push, (-(-z.hidden // 128), bucket, 1), flops)]]


class KdaLayer:
    """A KDA layer's attention half (model spec 4)."""

    def __init__(self, device: Device, sizes: Sizes, w: KdaWeights, state: KdaState, narrow: Narrow) -> None:
        c = sizes.config
        self.sizes, self.state = sizes, state
        names = ("q_proj", "k_proj", "v_proj", "f_a", "g_a", "b_proj")
        self.inputs = upload(device, [(name, pack(getattr(w, name) if name == "b_proj" else narrow(getattr(w, name)))) for name in names])
        self.f_b = upload(device, [("f_b", pack(narrow(w.f_b)))])
        self.g_b = upload(device, [("g_b", pack(narrow(w.g_b)))])
        self.o_proj = upload(device, [("o", pack(narrow(w.o_proj)))])
        self.taps = constant(device, w.q_conv.reshape(c.kda_width, -1), w.k_conv.reshape(c.kda_width, -1), w.v_conv.reshape(c.kda_width, -1))
        self.gate = constant(device, w.dt_bias, w.a_log)
        self.norm = constant(device, w.o_norm)

    def stages(self, s: Scratch, bucket: int, spans: int) -> list[Stage]:
        """From `xn` to `y`."""
        c, z, at = self.sizes.config, self.sizes, self.inputs.offsets
        p, h, d, stride = c.kda_width, c.kda_heads, c.kda_head_dim, self.inputs.rows
        bounded = c.gate_lower_bound is not None
        prep = Op(
            "kda_prep",
            {1: 128 if d > 64 else 64},
            [s["a"], s["fb"], self.taps, self.gate, self.state.window, s["qkv"], s["decay"], s["beta"]],
            struct.pack(
                "10If", p, h, d, c.conv_width, stride, at["k_proj"], at["v_proj"], at["b_proj"], z.kda, bounded, c.gate_lower_bound or 0.0
            ),
            (h, bucket, 1),
            40.0 * bucket * p,
        )
        recurrence = Op(
            "kda",
            {2: d},
            [s["qkv"], s["decay"], s["beta"], self.state.s, s["o"], s["a"], self.state.window],
            struct.pack("6I", p, h, c.conv_width, stride, at["k_proj"], at["v_proj"]),
            (-(-d // 32), h, spans),
            7.0 * bucket * h * d * d,
            8.0 * spans * h * d * d,
        )
        out = Op(
            "kda_out",
            {},
            [s["o"], s["gb"], self.norm, s["gated"]],
            struct.pack("3If", p, d, z.kda, c.rms_norm_eps),
            (h, bucket, 1),
            10.0 * bucket * p,
        )
        a = s["a"]
        low_rank = self.f_b.ops(bucket, Target(a, stride, at["f_a"]), Target(s["fb"], z.kda))
        low_rank += self.g_b.ops(bucket, Target(a, stride, at["g_a"]), Target(s["gb"], z.kda))
        return [
            self.inputs.ops(bucket, Target(s["xn"], z.hidden), Target(a, stride)),
            low_rank,
            [prep],
            [recurrence],
            [out],
            self.o_proj.ops(bucket, Target(s["gated"], z.kda), Target(s["y"], z.hidden)),
        ]


class DsaLayer:
    """A DSA layer's attention half (model spec 5), absorbed. A shared layer reads `chosen` as the layer before left it."""

    def __init__(self, device: Device, sizes: Sizes, index: int, w: DsaWeights, state: DsaState, narrow: Narrow) -> None:
        c = sizes.config
        self.sizes, self.state = sizes, state
        self.indexer = c.indexer_kinds[index] == FULL
        parts = [("q_a", pack(narrow(w.q_a))), ("kv_a", pack(narrow(w.kv_a)))]
        queries = [("q", by_heads(pack(narrow(w.q_b)), c.num_heads, sizes.head))]
        norms = [w.q_a_norm, w.kv_a_norm]
        self.ape = device.dummy
        if self.indexer:
            assert w.indexer is not None
            i = w.indexer
            parts += [("wk", pack(i.wk)), ("gate", pack(i.gate)), ("weights", pack(i.weights_proj))]
            queries.append(("qi", by_heads(pack(i.wq_b), c.index_n_heads, sizes.index_dim)))
            norms += [i.k_norm_weight, i.k_norm_bias]
            self.ape = constant(device, i.ape)
        keys, values = key_and_value(w.kv_b, c.num_heads, c.qk_head_dim, c.v_head_dim)
        self.inputs, self.queries = upload(device, parts), upload(device, queries)
        self.absorb = upload(device, [("k", keys)], c.num_heads)
        self.expand = upload(device, [("v", values)], c.num_heads)
        self.o_proj = upload(device, [("o", pack(narrow(w.o_proj)))])
        self.norms = constant(device, *norms)

    def stages(self, s: Scratch, bucket: int, _spans: int) -> list[Stage]:
        """From `xn` to `y`."""
        c, z, at = self.sizes.config, self.sizes, self.inputs.offsets
        a, width, rank = s["a"], self.inputs.rows, z.rank
        norm = Op(
            "dsa_norm",
            {},
            [a, self.norms, s["qr"], self.state.latents, self.state.keys],
            struct.pack(
                "12If",
                width,
                at["kv_a"],
                at.get("wk", 0),
                at.get("gate", 0),
                c.q_lora_rank,
                padded(c.q_lora_rank),
                c.kv_lora_rank,
                rank,
                c.index_head_dim,
                z.index_dim,
                z.capacity,
                self.indexer,
                c.rms_norm_eps,
            ),
            (bucket, 1, 1),
            10.0 * bucket * width,
        )
        queries = self.queries.ops(bucket, Target(s["qr"], padded(c.q_lora_rank)), Target(s["b"], self.queries.rows))
        absorb = self.absorb.ops(bucket, Target(s["b"], self.queries.rows, 0, z.head), Target(s["absorbed"], c.num_heads * rank, 0, rank))
        stages = [self.inputs.ops(bucket, Target(s["xn"], z.hidden), Target(a, width)), [norm], queries, absorb]
        if self.indexer:
            stages[2] = queries + [self._pool(bucket)]
            stages[3] = absorb + [self._score(s, bucket, width)]
            stages.append([self._select(s, bucket)])
        return [
            *stages,
            *self._attention(s, bucket),
            self.expand.ops(bucket, Target(s["mixed"], c.num_heads * rank, 0, rank), Target(s["values"], z.values, 0, c.v_head_dim)),
            self.o_proj.ops(bucket, Target(s["values"], z.values), Target(s["y"], z.hidden)),
        ]

    def _pool(self, bucket: int) -> Op:
        c, z = self.sizes.config, self.sizes
        push = struct.pack("5I", c.index_head_dim, z.index_dim, z.capacity, c.index_kpool, z.pools)
        return Op("dsa_pool", {}, [self.state.keys, self.ape, self.state.pools], push, (bucket, 1, 1), 20.0 * bucket * c.index_head_dim)

    def _score(self, s: Scratch, bucket: int, width: int) -> Op:
        c, z, at = self.sizes.config, self.sizes, self.inputs.offsets
        push = struct.pack(
            "8I2f",
            c.index_n_heads,
            self.queries.rows,
            self.queries.offsets["qi"],
            width,
            at["weights"],
            z.pools,
            c.index_kpool,
            c.index_topk,
            c.index_head_dim**0.5,
            c.index_n_heads**0.5,
        )
        flops = 2.0 * bucket * z.pools * c.index_n_heads * z.index_dim
        groups = (-(-z.pools // 64), bucket, 1)
        return Op("dsa_score", {2: z.index_dim}, [s["b"], s["a"], self.state.pools, s["scores"]], push, groups, flops)

    def _select(self, s: Scratch, bucket: int) -> Op:
        c, z = self.sizes.config, self.sizes
        push = struct.pack("4I", z.pools, c.index_kpool, c.index_topk, z.keep)
        return Op("dsa_topk", {}, [s["scores"], s["chosen"]], push, (bucket, 1, 1), 40.0 * bucket * z.pools)

    def _attention(self, s: Scratch, bucket: int) -> list[Stage]:
        c, z = self.sizes.config, self.sizes
        heads, per_thread = c.num_heads, 1 if c.num_heads <= 16 or bucket <= 4 else 2 if c.num_heads <= 32 else 4
        head_tiles = -(-heads // (16 * per_thread))
        push = struct.pack("7If", heads, z.rank, z.tokens, z.capacity, c.index_kpool, c.index_topk, z.keep, c.qk_head_dim**0.5)
        flops = 2.0 * bucket * heads * z.tokens * z.rank
        scores = Op(
            "attn_scores",
            {2: per_thread},
            [s["absorbed"], s["attention"], s["chosen"], self.state.latents],
            push,
            (z.tokens // 64, head_tiles, bucket),
            flops,
        )
        softmax_push = struct.pack("4I", heads, z.tokens, c.index_kpool, c.index_topk)
        softmax = Op("attn_softmax", {}, [s["attention"]], softmax_push, (heads, bucket, 1), 10.0 * bucket * heads * z.tokens)
        splits = attention_splits(bucket, z.tokens)
        mix = Op(
            "attn_mix",
            {2: per_thread},
            [s["attention"], s["parts"] if splits > 1 else s["mixed"], s["chosen"], self.state.latents],
            push + struct.pack("2I", splits, bucket),
            (z.rank // 64 * splits, head_tiles, bucket),
            flops,
        )
        stages = [[scores], [softmax], [mix]]
        if splits > 1:
            width = heads * z.rank
            stages.append([Op("attn_sum", {}, [s["parts"], s["mixed"]], struct.pack("2I", width, splits), (-(-width // 128), bucket, 1))])
        return stages


class DenseFfn:
    """A dense feed-forward or a shared expert (model spec 6)."""

    def __init__(self, device: Device, sizes: Sizes, w: FfnWeights, narrow: Narrow) -> None:
        self.sizes = sizes
        self.gate_up = upload(device, [("gate_up", gate_up(FfnWeights(narrow(w.gate), narrow(w.up), w.down)))])
        self.down = upload(device, [("down", pack(narrow(w.down)))])

    def stages(self, s: Scratch, bucket: int) -> list[Stage]:
        """From `xn` to `y`."""
        z, width = self.sizes, self.down.cols
        return [
            self.gate_up.ops(bucket, Target(s["xn"], z.hidden), Target(s["act"], width), z.config.swiglu_limit),
            self.down.ops(bucket, Target(s["act"], width), Target(s["y"], z.hidden)),
        ]


class MoeFfn:
    """Router, routed experts and the shared expert (model spec 6), all on the device."""

    def __init__(self, device: Device, sizes: Sizes, index: int, place: int, w: MoeWeights, experts: ExpertSource, uses: Buffer, narrow: Narrow) -> None:
        c = sizes.config
        self.sizes, self.place, self.uses = sizes, place, uses
        self.router = upload(device, [("router", pack_values(np.asarray(w.router, np.float32)))], exact=True)
        self.bias = constant(device, w.bias)
        self.shared = DenseFfn(device, sizes, w.shared, narrow) if w.shared is not None else None
        fetched = (experts.expert(index, e) for e in range(c.n_routed_experts))
        self.gate_up, self.down = upload_experts(device, c.n_routed_experts, ((gate_up(f), pack(f.down)) for f in fetched))

    def stages(self, device: Device, s: Scratch, bucket: int) -> list[Stage]:
        """From `xn` to `y` (shared), `ey` and `weights` (routed)."""
        c, z, k = self.sizes.config, self.sizes, self.sizes.config.num_experts_per_tok
        per_thread = _expert_tile(bucket * k / c.n_routed_experts)
        tile = 16 * per_thread
        most = -(-bucket * k // tile) + min(c.n_routed_experts, bucket * k)
        tiles = (s["tiles"], s["order"], per_thread, most)
        xn, limit = Target(s["xn"], z.hidden), c.swiglu_limit
        first = self.router.ops(bucket, xn, Target(s["logits"], z.experts))
        second: Stage = [self._route(s, bucket)]
        if self.shared is not None:
            gate_up_stage, down_stage = self.shared.stages(s, bucket)
            first, second = first + gate_up_stage, second + down_stage
        stages = [first, second]
        if bucket > VECTOR_ROWS:
            sort = Op("moe_sort", {2: c.n_routed_experts, 3: tile}, [s["ids"], s["tiles"], s["order"]], struct.pack("I", k), (1, 1, 1))
            stages.append([sort])
        act = Target(s["eact"], z.expert_width)
        stages.append(self.gate_up.ops(bucket, k, xn, act, k, s["ids"], tiles, limit))
        stages.append(self.down.ops(bucket, k, act, Target(s["ey"], z.hidden), 1, s["ids"], tiles, None))
        return stages

    def _route(self, s: Scratch, bucket: int) -> Op:
        c, z = self.sizes.config, self.sizes
        sparse = self.uses.nbytes // 4 // z.slots // c.n_routed_experts
        push = struct.pack(
            "6If",
            z.experts,
            c.num_experts_per_tok,
            c.topk_group,
            c.norm_topk_prob,
            sparse * c.n_routed_experts,
            self.place * c.n_routed_experts,
            c.routed_scaling_factor,
        )
        buffers = [s["logits"], self.bias, s["ids"], s["weights"], self.uses]
        return Op("route", {2: c.n_routed_experts, 3: c.n_group}, buffers, push, (bucket, 1, 1), 4.0 * bucket * c.n_routed_experts**2)


def _expert_tile(rows_an_expert: float) -> int:
    return 1 if rows_an_expert <= 16 else 2 if rows_an_expert <= 32 else 4


@dataclass(slots=True)
class ChainLayer:
    """One whole layer on the device."""

    index: int
    config: ModelConfig
    hc_attn: HcSite
    hc_ffn: HcSite
    attention: KdaLayer | DsaLayer
    ffn: DenseFfn | MoeFfn

    def stages(self, device: Device, s: Scratch, bucket: int, spans: int) -> list[Stage]:
        """From streams to streams in `x` for up to `bucket` rows of up to `spans` spans."""
        stages = self.hc_attn.before(s, bucket) + self.attention.stages(s, bucket, spans) + self.hc_attn.after(device, s, bucket)
        stages += self.hc_ffn.before(s, bucket)
        if isinstance(self.ffn, DenseFfn):
            return stages + self.ffn.stages(s, bucket) + self.hc_ffn.after(device, s, bucket)
        stages += self.ffn.stages(device, s, bucket)
        return stages + self.hc_ffn.after(device, s, bucket, self.ffn.shared is not None, self.config.num_experts_per_tok)


def narrowed(bits: int) -> Narrow:
    """Dense matrices at `bits` a weight (see `quant.requantise`), 0 as stored."""
    return (lambda matrix: quant.requantise(matrix, bits)) if bits else (lambda matrix: matrix)


def load_layer(
    device: Device, sizes: Sizes, w: LayerWeights, place: int, state: KdaState | DsaState, experts: ExpertSource, uses: Buffer, bits: int
) -> ChainLayer:
    """Put a layer's weights on the device. `place` is its number among the sparse layers held. Raises OutOfDeviceMemory."""
    narrow = narrowed(bits)
    attention: KdaLayer | DsaLayer
    if isinstance(w.attention, KdaWeights):
        assert isinstance(state, KdaState)
        attention = KdaLayer(device, sizes, w.attention, state, narrow)
    else:
        assert isinstance(state, DsaState)
        attention = DsaLayer(device, sizes, w.index, w.attention, state, narrow)
    ffn: DenseFfn | MoeFfn
    if isinstance(w.ffn, MoeWeights):
        ffn = MoeFfn(device, sizes, w.index, place, w.ffn, experts, uses, narrow)
    else:
        ffn = DenseFfn(device, sizes, w.ffn, narrow)
    sites = HcSite(device, sizes, w.hc_attn, w.input_norm), HcSite(device, sizes, w.hc_ffn, w.post_norm)
    return ChainLayer(w.index, sizes.config, *sites, attention, ffn)


__all__ = ["ChainLayer", "Linear", "ExpertMatrices", "load_layer"]
