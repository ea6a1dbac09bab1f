"""The two kinds of attention, as stages of dispatches (model spec 4 and 5)."""

from __future__ import annotations

import struct

from glm53serve.model.config import FULL
from glm53serve.model.weights import DsaWeights, KdaWeights
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.hyper import constant
from glm53serve.vulkan.linear import Op, Stage, Target, upload
from glm53serve.vulkan.pack import Narrow, by_heads, key_and_value, pack, padded
from glm53serve.vulkan.scratch import Scratch, Sizes, attention_splits
from glm53serve.vulkan.state import DsaState, KdaState


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
