"""The layers as programs of compiled kernels: memory for one row group and one chunk, weights packed, operations listed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.kernels import dsa, experts, kda, matmul, rows
from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.packing import GROUP, Packed, pack_dense, pad_vector
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.cpu.rows import GROUP_ROWS, Group
from glm53serve.cpu.state import SlotState, padded
from glm53serve.model.config import DSA, ModelConfig
from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.weights import DsaWeights, FfnWeights, HyperConnection, KdaWeights, Matrix, MoeWeights

F32 = NDArray[np.float32]
RUN_ROWS = 256
"""Assignments of rows to experts computed in one run."""


def p64(size: int) -> int:
    """The next multiple of 64."""
    return padded(size, GROUP)


def f32_matrix(values: F32) -> Matrix:
    """float32 [rows, cols] as a Matrix."""
    return Matrix("f32", values.shape[0], values.shape[1], np.ascontiguousarray(values, np.float32))


class Slots:
    """Tables by which kernels find a slot's memory: its flat array, then latents and pool keys of each DSA layer held; and scratch for the
    scores of all pools of a few rows."""

    def __init__(self, config: ModelConfig, layers: range) -> None:
        self.dsa_layers = [i for i in layers if config.layer_kinds[i] == DSA]
        self.kpool = config.index_kpool
        self.tables: dict[int, NDArray[np.int64]] = {}
        self.room: dict[int, int] = {}
        self.scores, self.score_room = Cell(), Cell()
        self._scores: F32 = np.empty((dsa.FEW_ROWS, 0), np.float32)

    def latents_at(self, layer: int) -> int:
        """Byte offset of a layer's latents in a table; its pool keys are 8 bytes on."""
        return 8 + 16 * self.dsa_layers.index(layer)

    def open(self, slot: int, state: SlotState) -> None:
        """A new or emptied slot."""
        self.tables[slot] = np.zeros(1 + 2 * len(self.dsa_layers), np.int64)
        self.tables[slot][0] = address(state.flat)
        self.room[slot] = 0

    def reserve(self, slot: int, state: SlotState, end: int, keep: int) -> None:
        """Make room for positions below `end` in every DSA layer."""
        if end <= self.room[slot]:
            return
        table = self.tables[slot]
        for n, layer in enumerate(self.dsa_layers):
            store = state.dsa[layer]
            store.reserve(end, keep)
            table[1 + 2 * n], table[2 + 2 * n] = address(store.latents), address(store.pool_keys)
            self.room[slot] = len(store.latents)
        if not self.dsa_layers:
            self.room[slot] = end
        pools = self.room[slot] // self.kpool + 4
        if pools > self._scores.shape[1]:
            self._scores = np.empty((dsa.FEW_ROWS, pools), np.float32)
            self.scores.set(address(self._scores))
            self.score_room.set(pools)


class GroupMemory:
    """What describes the row group being computed, and scratch by width that lives no longer than one operation's successor."""

    def __init__(self) -> None:
        self.count, self.first, self.pieces, self.total, self.zero = (Cell() for _ in range(5))
        self.rows = np.zeros((GROUP_ROWS, len(dsa.ROW_FIELDS)), np.int64)
        self.table = np.zeros((GROUP_ROWS, len(kda.PIECE_FIELDS)), np.int64)
        self._buffers: dict[tuple[str, int], F32] = {}
        self._forms: dict[tuple[Any, ...], Form] = {}

    def buffer(self, name: str, width: int) -> F32:
        """Scratch float32 [GROUP_ROWS, width], shared by all layers under that name; columns beyond what is written stay zero."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = zeros(GROUP_ROWS, width)
        return self._buffers[name, width]

    def form(self, name: str, width: int, kinds: set[int], natural: F32 | None = None, offset: int = 0) -> Form:
        """The same for activations in forms."""
        key = (name, width, offset, *sorted(kinds & {pk.INT4, pk.INT4_Q16}))
        if key not in self._forms:
            self._forms[key] = Form(GROUP_ROWS, width, kinds, natural, offset)
        return self._forms[key]

    def describe(self, group: Group, slots: Slots) -> None:
        """Set the group that programs work on."""
        self.count.set(group.count)
        self.first.set(group.first)
        self.pieces.set(len(group.pieces))
        for n, piece in enumerate(group.pieces):
            slot = address(slots.tables[piece.slot])
            self.table[n] = (piece.first, piece.count, slot)
            part = self.rows[piece.first : piece.first + piece.count]
            part[:, 0] = np.arange(piece.start, piece.start + piece.count)
            part[:, 1] = slot


class ChunkMemory:
    """What lives as long as a chunk's pass through a layer, for up to `rows` rows."""

    def __init__(self, config: ModelConfig, row_count: int, kinds: set[int]) -> None:
        c, hidden = config, p64(config.hidden_size)
        n = c.hc_mult
        self.row_count = row_count
        self.streams = zeros(row_count, n, hidden)
        self.mixes = zeros(row_count, p64(n + n * n))
        self.x = Form(row_count, hidden, kinds)
        self.y, self.y2 = zeros(row_count, hidden), zeros(row_count, hidden)
        k = c.num_experts_per_tok
        self.chosen = zeros(row_count, k, dtype=np.int64)
        self.weights = zeros(row_count, k)
        self.starts = zeros(c.n_routed_experts + 1, dtype=np.int64)
        self.order_rows = zeros(row_count * k, dtype=np.int64)
        self.order_weights = zeros(row_count * k)
        budget = c.index_topk // c.index_kpool
        self.pools = zeros(row_count, budget, dtype=np.int32)
        self.pool_counts = zeros(row_count, dtype=np.int64)


@dataclass(slots=True)
class Site:
    """An mHC site and the norm after it."""

    fn: Packed
    base: F32
    scale: F32
    norm: F32

    @classmethod
    def of(cls, config: ModelConfig, w: HyperConnection, norm: F32) -> Site:
        """Pad the stored site."""
        n, h = config.hc_mult, config.hidden_size
        fn = pk.pack(pk.pad_head_columns(f32_matrix(w.fn.reshape(-1, n * h)), h), False)
        return cls(fn, np.ascontiguousarray(w.base), np.ascontiguousarray(w.scale), pad_vector(norm))


class Builder:
    """Adds the operations of sub-layers to programs."""

    def __init__(self, config: ModelConfig, group: GroupMemory, chunk: ChunkMemory, slots: Slots, threads: int) -> None:
        self.config = config
        self.group = group
        self.chunk = chunk
        self.slots = slots
        self.threads = threads
        self.zero = group.zero
        self.hidden = p64(config.hidden_size)
        self._streams = Form(0, config.hc_mult * self.hidden, set(), chunk.streams.reshape(len(chunk.streams), -1))

    def program(self) -> Program:
        """An empty program."""
        return Program(self.threads)

    def collapse(self, p: Program, site: Site, form: Form, out_at: Cell) -> None:
        """mHC before a sub-layer: its normalised input goes to form."""
        c, g, chunk = self.config, self.group, self.chunk
        y = g.buffer("hc", p64(site.fn.rows))
        p.matmul([site.fn], self._streams, g.count, y, x_at=g.first)
        arguments = Arguments(
            rows.COLLAPSE_FIELDS,
            count=g.count.at,
            at=g.first.at,
            out_at=out_at.at,
            streams=address(chunk.streams),
            stream_row=chunk.streams.strides[0],
            stream=chunk.streams.strides[1],
            n=c.hc_mult,
            width=c.hidden_size,
            y=address(y),
            y_stride=y.strides[0],
            base=address(site.base),
            scale=address(site.scale),
            norm_eps=float(c.rms_norm_eps),
            hc_eps=float(c.hc_eps),
            iterations=c.hc_sinkhorn_iters,
            norm=address(site.norm),
            form=form.at,
            mixes=address(chunk.mixes),
            mix_stride=chunk.mixes.strides[0],
        )
        p.by_row(rows.collapse.address, arguments)

    def expand(self, p: Program, y: F32, y_at: Cell, y2: F32 | None = None) -> None:
        """mHC after a sub-layer."""
        chunk = self.chunk
        arguments = Arguments(
            rows.EXPAND_FIELDS,
            count=self.group.count.at,
            at=self.group.first.at,
            y_at=y_at.at,
            streams=address(chunk.streams),
            stream_row=chunk.streams.strides[0],
            stream=chunk.streams.strides[1],
            n=self.config.hc_mult,
            y=address(y),
            y_stride=y.strides[0],
            y2=0 if y2 is None else address(y2),
            y2_stride=0 if y2 is None else y2.strides[0],
            mixes=address(chunk.mixes),
            mix_stride=chunk.mixes.strides[0],
        )
        p.by_row(rows.expand.address, arguments)

    def shape(self, p: Program, form: Form, count: Cell) -> None:
        """Forms of a matrix that a product wrote, where any are wanted."""
        if form.permuted is not None or form.bytes is not None:
            p.by_row(rows.shape.address, Arguments(rows.SHAPE_FIELDS, count=count.at, form=form.at))

    def swiglu(self, p: Program, both: F32, width: int, form: Form, count: Cell, at: Cell, per_row: int = 1) -> None:
        """Gate in the first `width` columns of both, up in the next."""
        arguments = Arguments(
            rows.SWIGLU_FIELDS,
            count=count.at,
            at=at.at,
            gate=address(both),
            up=address(both) + 4 * width,
            stride=both.strides[0],
            limit=float(self.config.swiglu_limit),
            form=form.at,
        )
        p.by_row(rows.swiglu.address, arguments, per_row * max(1, width // 512))


def kinds_of(parts: list[Packed]) -> set[int]:
    """Kinds of product among packed matrices."""
    return {part.kind for part in parts}


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


class FfnPrograms:
    """A dense feed-forward, or a shared expert."""

    def __init__(self, config: ModelConfig, w: FfnWeights, bits: int) -> None:
        self.width = p64(w.gate.rows)
        self.gate_up = pack_dense([(w.gate, w.gate.rows), (w.up, w.up.rows)], bits)
        self.down = pack_dense([(w.down, w.down.rows)], bits)

    def add(self, b: Builder, p: Program, x: Form, x_at: Cell, y: F32, y_at: Cell) -> None:
        """Rows of x to rows of y."""
        g = b.group
        both = g.buffer("gate up", 2 * self.width)
        p.matmul(self.gate_up, x, g.count, both, x_at=x_at)
        middle = g.form("middle", self.width, kinds_of(self.down))
        b.swiglu(p, both, self.width, middle, g.count, b.zero)
        p.matmul(self.down, middle, g.count, y, y_at=y_at)


class MoePrograms:
    """A layer's router, shared expert and the table of its routed experts."""

    def __init__(self, config: ModelConfig, w: MoeWeights, site: Site, bits: int) -> None:
        self.config, self.site = config, site
        self.router = [pk.pack(f32_matrix(w.router), False)]
        self.bias = np.ascontiguousarray(w.bias)
        self.shared = FfnPrograms(config, w.shared, bits) if w.shared is not None else None
        self.table = zeros(config.n_routed_experts, len(experts.RECORD_FIELDS), dtype=np.int64)

    def add_choice(self, b: Builder, p: Program) -> None:
        """mHC, router and shared expert of a row group."""
        c, g, chunk = self.config, b.group, b.chunk
        b.collapse(p, self.site, chunk.x, g.first)
        logits = g.buffer("router", p64(c.n_routed_experts))
        p.matmul(self.router, chunk.x, g.count, logits, x_at=g.first)
        work = g.buffer("router work", 2 * c.n_routed_experts + c.n_group)
        arguments = Arguments(
            rows.ROUTE_FIELDS,
            count=g.count.at,
            out_at=g.first.at,
            logits=address(logits),
            logit_stride=logits.strides[0],
            bias=address(self.bias),
            experts=c.n_routed_experts,
            k=c.num_experts_per_tok,
            groups=c.n_group,
            kept=c.topk_group,
            normalise=int(c.norm_topk_prob),
            scaling=float(c.routed_scaling_factor),
            chosen=address(chunk.chosen),
            weights=address(chunk.weights),
            work=address(work),
        )
        p.by_row(rows.route.address, arguments)
        if self.shared is not None:
            self.shared.add(b, p, chunk.x, g.first, chunk.y2, g.first)

    def add_plan(self, b: Builder, p: Program) -> None:
        """Assignments of the whole chunk sorted by expert, and sums cleared."""
        c, g, chunk = self.config, b.group, b.chunk
        arguments = Arguments(
            rows.PLAN_FIELDS,
            count=g.total.at,
            k=c.num_experts_per_tok,
            experts=c.n_routed_experts,
            chosen=address(chunk.chosen),
            weights=address(chunk.weights),
            starts=address(chunk.starts),
            order_rows=address(chunk.order_rows),
            order_weights=address(chunk.order_weights),
        )
        p.add(rows.plan.address, arguments)
        p.by_row(experts.clear.address, Arguments(experts.CLEAR_FIELDS, count=g.total.at, y=address(chunk.y), y_stride=chunk.y.strides[0], size=4 * b.hidden))

    def add_run(self, b: Builder, p: Program, m: RunMemory, per_row: int) -> None:
        """The products of one run of experts; per_row: assignments a row that the program counts."""
        c, chunk = self.config, b.chunk
        inner = p64(c.moe_intermediate_size)
        arguments = Arguments(experts.GATHER_FIELDS, run=address(m.run), order_rows=address(chunk.order_rows), source=chunk.x.at, target=m.x.at)
        p.by_row(experts.gather.address, arguments, per_row)
        self._half(b, p, m, m.x, c.moe_intermediate_size, 1, m.both, 4 * inner, per_row)
        b.swiglu(p, m.both, inner, m.middle, m.assignments, m.row, per_row)
        self._half(b, p, m, m.middle, c.hidden_size, 0, m.out, 0, per_row)

    def add_sum(self, b: Builder, p: Program, m: RunMemory, per_row: int) -> None:
        """The run's results added to their rows."""
        chunk = b.chunk
        combined = Arguments(
            experts.COMBINE_FIELDS,
            run=address(m.run),
            order_rows=address(chunk.order_rows),
            order_weights=address(chunk.order_weights),
            out=address(m.out),
            out_stride=m.out.strides[0],
            y=address(chunk.y),
            y_stride=chunk.y.strides[0],
            groups=b.hidden // GROUP,
        )
        p.add(experts.combine.address, combined, min(4 * b.threads, b.hidden // GROUP), max(1, per_row // 8))

    def _half(self, b: Builder, p: Program, m: RunMemory, form: Form, n: int, pairs: int, y: F32, second: int, per_row: int) -> None:
        arguments = Arguments(
            experts.EXPERTS_FIELDS,
            product=matmul.product.address,
            run=address(m.run),
            starts=address(b.chunk.starts),
            table=address(self.table),
            form=form.at,
            groups=form.groups,
            n=n,
            pairs=pairs,
            y=address(y),
            y_stride=y.strides[0],
            second=second,
        )
        p.add(experts.experts.address, arguments, 8 * b.threads, 8 * b.threads)


class RunMemory:
    """Buffers of one run of experts and the record that says which assignments it has."""

    def __init__(self, config: ModelConfig, kinds: set[int]) -> None:
        hidden, inner = p64(config.hidden_size), p64(config.moe_intermediate_size)
        self.run = np.zeros(len(experts.RUN_FIELDS), np.int64)
        self.assignments = Cell(self.run[:1])
        self.row = Cell(self.run[4:5])
        self.x = Form(RUN_ROWS, hidden, kinds)
        self.both = zeros(RUN_ROWS, 2 * inner)
        self.middle = Form(RUN_ROWS, inner, kinds)
        self.out = zeros(RUN_ROWS, hidden)

    def set(self, first: int, count: int, first_expert: int, last_expert: int, row: int = 0) -> None:
        """Which assignments, whose, and where their rows begin in the buffers."""
        self.run[:] = (count, first, first_expert, last_expert, row)
