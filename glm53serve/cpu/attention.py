"""The attention halves of compiled layers: weights packed, operations listed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.compiled import Builder, Site, f32_matrix, kinds_of
from glm53serve.cpu.kernels import dsa, kda
from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.memory import p64
from glm53serve.cpu.packing import pack_dense, pad_vector
from glm53serve.cpu.program import Form, Program
from glm53serve.cpu.state import SlotState
from glm53serve.model.config import ModelConfig
from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.weights import DsaWeights, KdaWeights

F32 = NDArray[np.float32]


class KdaPrograms:
    """A KDA layer's weights, packed, and its operations."""

    def __init__(self, config: ModelConfig, index: int, w: KdaWeights, site: Site, bits: int) -> None:
        c, d = config, config.kda_head_dim
        self.config, self.index, self.site = config, index, site
        self.project = pack_dense([(w.q_proj, d), (w.k_proj, d), (w.v_proj, d), (w.f_a, d), (w.g_a, d)], bits)
        self.beta = [pk.pack(w.b_proj, False)] if w.b_proj.format in ("f32", "bf16") else pack_dense([(w.b_proj, w.b_proj.rows)], 32)
        self.gates = pack_dense([(w.f_b, d), (w.g_b, d)], bits)
        self.out = [pk.pack(pk.pad_head_columns(requantise(w.o_proj, bits), d), bits < 32)]
        taps = np.concatenate([pad_vector(np.ascontiguousarray(t.T).ravel(), d).reshape(c.conv_width, -1) for t in (w.q_conv, w.k_conv, w.v_conv)], axis=1)
        self.taps = np.ascontiguousarray(taps, np.float32)
        self.dt_bias = pad_vector(w.dt_bias, d)
        self.speed = np.exp(w.a_log.ravel()).astype(np.float32)
        self.o_norm = pad_vector(w.o_norm)

    def add(self, b: Builder, p: Program, state: SlotState) -> None:
        """The attention half of the layer; `state` gives the layout of every slot's flat array."""
        c, g = self.config, b.group
        d = p64(c.kda_head_dim)
        wide = c.kda_heads * d
        x = g.form("attention", b.hidden, kinds_of(self.project + self.beta))
        b.collapse(p, self.site, x, b.zero)
        projected = g.buffer("kda", 3 * wide + 2 * d)
        p.matmul(self.project, x, g.count, projected)
        beta = g.buffer("beta", p64(c.kda_heads))
        p.matmul(self.beta, x, g.count, beta)
        low = g.form("kda low", 2 * d, kinds_of(self.gates), projected, 3 * wide)
        b.shape(p, low, g.count)
        gates = g.buffer("kda gates", 2 * wide)
        if len(self.gates) == 1:
            p.matmul(self.gates, low, g.count, gates, heads=2, x_head=d, y_head=wide)
        else:
            for n, part in enumerate(self.gates):
                p.matmul([part], low, g.count, gates, offset=n * wide, x_head=n * d)
        mixed = g.form("kda out", wide, kinds_of(self.out))
        flat = address(state.flat)
        arguments = Arguments(
            kda.KDA_FIELDS,
            pieces=address(g.table),
            piece_count=g.pieces.at,
            heads=c.kda_heads,
            width=c.kda_head_dim,
            padded=d,
            conv=c.conv_width,
            raw=address(projected),
            raw_stride=projected.strides[0],
            part=4 * wide,
            taps=address(self.taps),
            tap_stride=self.taps.strides[0],
            decay=address(gates),
            decay_stride=gates.strides[0],
            dt_bias=address(self.dt_bias),
            speed=address(self.speed),
            bounded=int(c.gate_lower_bound is not None),
            bound=float(c.gate_lower_bound or 0.0),
            beta=address(beta),
            beta_stride=beta.strides[0],
            gate=address(gates) + 4 * wide,
            gate_stride=gates.strides[0],
            norm=address(self.o_norm),
            eps=float(c.rms_norm_eps),
            form=mixed.at,
            state=address(state.kda[self.index]) - flat,
            window=address(state.windows[self.index]) - flat,
        )
        p.add(kda.kda.address, arguments, min(c.kda_heads, 8 * b.threads), c.kda_heads)
        y = g.buffer("y", b.hidden)
        p.matmul(self.out, mixed, g.count, y)
        b.expand(p, y, b.zero)


class DsaPrograms:
    """A DSA layer's weights, packed, and its operations.

    kv_b is kept at 16 bits when the dense matrices have fewer: half of it is used transposed, where groups of columns would lie across.
    """

    def __init__(self, config: ModelConfig, index: int, w: DsaWeights, site: Site, bits: int) -> None:
        c, i = config, w.indexer
        self.config, self.index, self.site = config, index, site
        di = c.index_head_dim
        self.project = pack_dense([(w.q_a, w.q_a.rows), (w.kv_a, w.kv_a.rows)] + ([(i.wk, di), (i.gate, di)] if i else []), bits)
        self.from_query = pack_dense([(w.q_b, c.qk_head_dim)] + ([(i.wq_b, di)] if i else []), bits)
        self.weigh = pack_dense([(i.weights_proj, i.weights_proj.rows)], max(bits, 16)) if i else []
        kv_b = dequantise(w.kv_b).reshape(c.num_heads, c.qk_head_dim + c.v_head_dim, c.kv_lora_rank)
        keys = np.zeros((c.num_heads, p64(c.kv_lora_rank), c.qk_head_dim), np.float32)
        keys[:, : c.kv_lora_rank] = kv_b[:, : c.qk_head_dim].transpose(0, 2, 1)
        values = np.zeros((c.num_heads, p64(c.v_head_dim), c.kv_lora_rank), np.float32)
        values[:, : c.v_head_dim] = kv_b[:, c.qk_head_dim :]
        wide = max(bits, 16)
        self.absorb = pk.pack(requantise(f32_matrix(keys.reshape(-1, c.qk_head_dim)), wide), False)
        self.values = pk.pack(requantise(f32_matrix(values.reshape(-1, c.kv_lora_rank)), wide), False)
        self.out = [pk.pack(pk.pad_head_columns(requantise(w.o_proj, bits), c.v_head_dim), bits < 32)]
        self.q_norm, self.kv_norm = pad_vector(w.q_a_norm), pad_vector(w.kv_a_norm)
        self.indexed = i is not None
        if i is not None:
            self.key_weight, self.key_bias = pad_vector(i.k_norm_weight), pad_vector(i.k_norm_bias)
            self.ape = pad_vector(np.ascontiguousarray(i.ape).ravel(), di)

    def add(self, b: Builder, p: Program, state: SlotState) -> None:
        """The attention half of the layer; `state` gives the layout of every slot's flat array."""
        c, g, chunk = self.config, b.group, b.chunk
        q_width, r, di = p64(c.q_lora_rank), p64(c.kv_lora_rank), p64(c.index_head_dim)
        dn, dv = p64(c.qk_head_dim), p64(c.v_head_dim)
        latents = b.slots.latents_at(self.index)
        x = g.form("attention", b.hidden, kinds_of(self.project + self.weigh))
        b.collapse(p, self.site, x, b.zero)
        projected = g.buffer("dsa", q_width + r + 2 * di)
        p.matmul(self.project, x, g.count, projected)
        qr = g.form("query latent", q_width, kinds_of(self.from_query))
        arguments = Arguments(
            dsa.ROWS_FIELDS,
            count=g.count.at,
            rows=address(g.rows),
            latents=latents,
            projected=address(projected),
            stride=projected.strides[0],
            query=0,
            query_width=c.q_lora_rank,
            query_norm=address(self.q_norm),
            latent=4 * q_width,
            latent_size=4 * r,
            latent_width=c.kv_lora_rank,
            latent_norm=address(self.kv_norm),
            key=4 * (q_width + r),
            key_size=4 * di if self.indexed else 0,
            key_width=c.index_head_dim,
            key_weight=address(self.key_weight) if self.indexed else 0,
            key_bias=address(self.key_bias) if self.indexed else 0,
            eps=float(c.rms_norm_eps),
            form=qr.at,
        )
        p.by_row(dsa.dsa_rows.address, arguments)
        queries = g.buffer("dsa queries", c.num_heads * dn + c.index_n_heads * di)
        p.matmul(self.from_query, qr, g.count, queries)
        if self.indexed:
            self._choose(b, p, state, x, projected, queries)
        absorbed = g.buffer("absorbed", c.num_heads * r)
        by_head = g.form("queries", c.num_heads * dn, set(), queries)
        p.matmul([self.absorb], by_head, g.count, absorbed, heads=c.num_heads, x_head=dn, y_head=r)
        mixed = g.form("mixed latents", c.num_heads * r, set())
        arguments = Arguments(
            dsa.ATTEND_FIELDS,
            count=g.count.at,
            at=g.first.at,
            rows=address(g.rows),
            latents=latents,
            query=address(absorbed),
            query_stride=absorbed.strides[0],
            heads=c.num_heads,
            size=4 * r,
            scale=float(c.qk_head_dim**-0.5),
            kpool=c.index_kpool,
            budget=chunk.pools.shape[1],
            chosen=address(chunk.pools),
            counts=address(chunk.pool_counts),
            form=mixed.at,
        )
        p.add(dsa.attend.address, arguments, 32 * b.threads, -(-c.num_heads // dsa.HEAD_UNIT))
        o = g.buffer("dsa out", c.num_heads * dv)
        p.matmul([self.values], mixed, g.count, o, heads=c.num_heads, x_head=r, y_head=dv)
        out = g.form("dsa out", c.num_heads * dv, kinds_of(self.out), o)
        b.shape(p, out, g.count)
        y = g.buffer("y", b.hidden)
        p.matmul(self.out, out, g.count, y)
        b.expand(p, y, b.zero)

    def _choose(self, b: Builder, p: Program, state: SlotState, x: Form, projected: F32, queries: F32) -> None:
        c, g, chunk = self.config, b.group, b.chunk
        di, keys = p64(c.index_head_dim), b.slots.latents_at(self.index) + 8
        pool_arguments = Arguments(
            dsa.POOL_FIELDS,
            pieces=address(g.table),
            piece_count=g.pieces.at,
            rows=address(g.rows),
            keys=keys,
            x=address(projected) + 4 * (p64(c.q_lora_rank) + p64(c.kv_lora_rank)),
            stride=projected.strides[0],
            gate=4 * di,
            kpool=c.index_kpool,
            size=4 * di,
            ape=address(self.ape),
            raw=address(state.raw[self.index]) - address(state.flat),
        )
        p.add(dsa.pools.address, pool_arguments)
        weights = g.buffer("index weights", p64(c.index_n_heads))
        p.matmul(self.weigh, x, g.count, weights)
        fields = {
            "count": g.count.at,
            "rows": address(g.rows),
            "keys": keys,
            "query": address(queries) + 4 * c.num_heads * p64(c.qk_head_dim),
            "query_stride": queries.strides[0],
            "weights": address(weights),
            "weight_stride": weights.strides[0],
            "heads": c.index_n_heads,
            "size": 4 * di,
            "kpool": c.index_kpool,
            "budget": chunk.pools.shape[1],
            "scores": b.slots.scores.at,
            "room": b.slots.score_room.at,
        }
        p.add(dsa.score.address, Arguments(dsa.SCORE_FIELDS, **fields), 4 * b.threads, 4 * b.threads)
        arguments = Arguments(dsa.SELECT_FIELDS, **fields, at=g.first.at, chosen=address(chunk.pools), counts=address(chunk.pool_counts))
        p.by_row(dsa.select.address, arguments)
