"""A pass through the layers on the device: the launches of every section of the model spec, in order.

The same launches serve a prompt chunk (many rows of one slot), decode steps through the seam and recorded decode steps; up to 16 rows
use the skinny products, more rows the tiled ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

from glm53serve.cuda.model import DeviceLayer, DeviceModel, DsaOnDevice, FfnOnDevice, KdaOnDevice, MoeOnDevice, Site, head_width, site_blocks
from glm53serve.cuda.products import MAP_PAIR, MAP_SORTED, MAP_TOKEN, ExpertGroups, product, run_products, skinny_columns
from glm53serve.cuda.runtime import MAX_ROWS, Argument, Buffer, Device, Job, Pointer, Returned, SiteGiven, kda_in_chunks
from glm53serve.cuda.scratch import Scratch, SplitRows
from glm53serve.cuda.state import SlotStates
from glm53serve.model.config import FULL

PROMPT_ROWS = 64
"""Rows of a block of `site_open_prompt`."""
LEAST_GATE = -5.0
"""Decays of at least exp of this a token let sixteen of them be divided by."""
Border = Callable[[int], None]
"""Called between segments of a pass with the layer number; may raise to stop the pass."""


def no_border(_layer: int) -> None:
    """The border of passes that never stop."""


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Device int arrays, one entry a row: slot, position, live, first row of its span, position after its span; spans [n][3] = slot, first row, rows."""

    slot: Pointer
    position: Pointer
    live: Pointer
    first: Pointer
    span_end: Pointer
    spans: Pointer


class Pipeline:
    """Launches passes of a `DeviceModel` over `Scratch` and `SlotStates`."""

    def __init__(self, device: Device, model: DeviceModel, scratch: Scratch, states: SlotStates, uses: Buffer, exact: bool) -> None:
        self.device, self.model, self.scratch, self.states, self.uses = device, model, scratch, states, uses
        self.config = model.config
        self.exact = exact
        self.token_tile = 64 if exact else 128
        self._low = True
        self.sparse_held = [layer.index for layer in model.layers if isinstance(layer.ffn, MoeOnDevice)]
        self.use_stride = max(1, len(self.sparse_held)) * self.config.n_routed_experts

    # -- whole passes

    def layers(self, rows: int, at: RowArrays, spans: int, border: Border = no_border) -> None:
        """All layers over the streams of `rows` rows, the last half's result mixed in. Expert counts must be zero (`zero_counts`)."""
        self._low = self.exact or rows <= MAX_ROWS
        pending: Returned | None = None
        for layer in self.model.layers:
            border(layer.index)
            self._site(rows, layer.attention_site, pending)
            if isinstance(layer.attention, KdaOnDevice):
                pending = self._kda(rows, layer.index, layer.attention, at, spans)
            else:
                pending = self._dsa(rows, layer.index, layer.attention, at, spans, border)
            border(layer.index)
            self._site(rows, layer.ffn_site, pending)
            pending = self._ffn(rows, layer, at)
        self._site(rows, None, pending)

    def zero_counts(self) -> None:
        """Zero the counters of rows an expert gets."""
        counts = self.scratch.plain["counts"]
        self.device.zero(counts.at(), counts.nbytes)

    def embed(self, rows: int, ids: Pointer) -> None:
        """Streams of token ids (device int32 [rows])."""
        assert self.model.embedding is not None
        arguments: list[Argument] = [self.scratch.plain["streams"], ids, self.model.embedding, self.model.embedding_kind, self.config.hidden_size]
        self.device.launch("embed", (rows, -(-self.config.hidden_size // 512)), 512, arguments)

    def logits(self, rows: int, logits: Buffer, which: Pointer | None = None) -> None:
        """Logits float32 [rows][V] of the streams of rows 0.. (or of the rows listed at `which`)."""
        assert self.model.head is not None and self.model.final_norm is not None
        c, x = self.config, self.scratch.split["x"]
        arguments: list[Argument] = [self.scratch.plain["streams"], which, c.hidden_size, self.model.final_norm, c.rms_norm_eps, x.high, x.low, x.ld]
        self.device.launch("final_norm", (rows,), 1024, arguments, 4 * c.hidden_size)
        self._products(rows, [product(self.model.head, x, logits, c.vocab_size)])

    # -- pieces

    def _lower(self, rows: SplitRows) -> Buffer | None:
        """The low parts, where the products of this pass read them (else only high parts are stored, in product order)."""
        return rows.low if self._low else None

    def _split(self, name: str) -> SplitRows:
        """Activations to write."""
        rows = self.scratch.split[name]
        return rows if self._low else replace(rows, low=None)

    def _products(self, rows: int, jobs: list[Job], experts: ExpertGroups | None = None) -> None:
        run_products(self.device, rows, jobs, self.token_tile, experts)

    def _site(self, rows: int, site: Site | None, pending: Returned | None) -> None:
        """Mix the last half's result in, project, collapse and norm the streams; without a site only the mix."""
        c, x, plain = self.config, self.scratch.split["x"], self.scratch.plain
        if not self._low and c.hidden_size % 4 == 0:
            self._site_of_prompt(rows, site, pending)
            return
        given = SiteGiven(plain["streams"].address, int(pending is not None), plain["coefficients"].address, pending or Returned())
        if site:
            given.fn, given.base, given.scale, given.norm = (b.address for b in (site.fn, site.base, site.scale, site.norm))
        given.norm_eps, given.hc_eps, given.iterations, given.ldx = c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters, x.ld
        given.x_high, given.x_low = x.high.address, low.address if (low := self._lower(x)) else 0
        blocks = site_blocks(c.hidden_size)
        self.device.launch("site", (blocks, rows), 256, [given], 0, blocks)

    def _site_of_prompt(self, rows: int, site: Site | None, pending: Returned | None) -> None:
        c, plain, x, h, chunks = self.config, self.scratch.plain, self.scratch.split["x"], self.config.hidden_size, self.scratch.chunks
        mixed: list[Argument] = [plain["streams"], rows, h, int(pending is not None), plain["coefficients"], pending or Returned()]
        self.device.launch("site_open_prompt", (chunks, -(-rows // PROMPT_ROWS)), 256, [*mixed, site.fn if site else None, plain["partial"]])
        if not site:
            return
        projected: list[Argument] = [rows, h, chunks, plain["partial"], site.base, site.scale]
        balance: list[Argument] = [c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters, plain["coefficients"], plain["pre"]]
        self.device.launch("site_balance_prompt", (-(-rows // 32),), 256, [*projected, *balance])
        self.device.launch("site_close_prompt", (rows,), 256, [plain["streams"], h, plain["pre"], site.norm, c.rms_norm_eps, x.high, x.ld], 4 * h)

    def _kda(self, rows: int, index: int, w: KdaOnDevice, at: RowArrays, spans: int) -> Returned:
        c, s, st = self.config, self.scratch, self.states
        p, d, heads = c.kda_width, c.kda_head_dim, c.kda_heads
        plain, x = s.plain, s.split["x"]
        jobs = [product(m, x, plain["raw"].at(4 * i * p), 3 * p) for i, m in enumerate(w.projections)]
        jobs += [
            product(w.f_a, x, split=self._split("f_a")),
            product(w.g_a, x, split=self._split("g_a")),
            product(w.beta, x, plain["beta_raw"], heads),
        ]
        self._products(rows, jobs)
        self._products(rows, [product(w.f_b, s.split["f_a"], plain["z"], p), product(w.g_b, s.split["g_a"], plain["gate"], p)])
        stride, window = ctypes.c_int64(st.stride), ctypes.c_int64(st.window_at[index])
        bound = c.gate_lower_bound
        state: list[Argument] = [at.spans, at.live, st.block, stride, ctypes.c_int64(st.s_at[index]), window, plain["o"]]
        prepared: list[Argument] = [plain[name] for name in ("q", "k", "v", "decay", "beta", "qk")]
        a = s.split["a"]
        if rows == spans and rows <= MAX_ROWS:
            self.device.launch(
                "kda_step", (heads, rows), 256 if d <= 128 else 512,
                [plain["raw"], 3 * p, plain["beta_raw"], heads, plain["z"], plain["gate"], at.slot, at.live, st.block, stride,
                 ctypes.c_int64(st.s_at[index]), window, w.taps, w.dt_bias, w.a_log, int(bound is not None), float(bound or 0.0),
                 w.norm, c.rms_norm_eps, a.high, self._lower(a), a.ld],
            )  # fmt: skip
        elif not self._low and kda_in_chunks(d) and bound is not None and bound >= LEAST_GATE:
            by_eight = -(-heads // 8)
            self.device.launch(
                "kda_prepare_prompt", (heads, -(-rows // 128)), 128,
                [plain["raw"], 3 * p, plain["beta_raw"], heads, plain["z"], rows, heads, at.slot, at.first, st.block, stride, window, w.taps, w.dt_bias,
                 w.a_log, float(bound), *prepared],
            )  # fmt: skip
            chunk_bytes = 4 * 2 * 16 * (d + 8) * 2 + 2 * 2 * 16 * 24 * 2 + 4 * (d + 16 * 17 + 16)
            self.device.launch("kda_chunks", (-(-d // 64), heads, spans), 384, [*prepared[:5], plain["raw"], 3 * p, *state], 3 * chunk_bytes)
            self.device.launch("kda_finish_prompt", (by_eight, rows), 256, [plain["o"], plain["gate"], w.norm, c.rms_norm_eps, heads, a.high, a.ld])
        else:
            threads = -(-d // 32) * 32
            self.device.launch(
                "kda_prepare", (heads, rows), threads,
                [plain["raw"], 3 * p, plain["beta_raw"], heads, plain["z"], at.slot, at.first, st.block, stride, window, w.taps, w.dt_bias, w.a_log,
                 int(bound is not None), float(bound or 0.0), *prepared],
            )  # fmt: skip
            self.device.launch("kda_scan", (-(-d // 32), heads, spans), 256, [*prepared, plain["raw"], 3 * p, *state])
            self.device.launch("kda_finish", (heads, rows), threads, [plain["o"], plain["gate"], w.norm, c.rms_norm_eps, a.high, self._lower(a), a.ld])
        self._products(rows, [product(w.out, a, plain["y"], c.hidden_size)])
        return Returned(y=plain["y"].address)

    def _dsa(self, rows: int, index: int, w: DsaOnDevice, at: RowArrays, spans: int, border: Border) -> Returned:
        c, s, st = self.config, self.scratch, self.states
        plain, x, qr = s.plain, s.split["x"], s.split["qr"]
        di, own = c.index_head_dim, w.indexer
        jobs = [product(w.q_a, x, plain["q_latent"], c.q_lora_rank), product(w.kv_a, x, plain["kv"], c.kv_lora_rank)]
        if own:
            jobs += [
                product(own.key, x, plain["key"], di),
                product(own.gate, x, plain["index_gate"], di),
                product(own.weights, x, plain["index_weights"], c.index_n_heads),
            ]
        self._products(rows, jobs)
        rows_table, pools_table = st.rows_table(index), st.pools_table(index)
        stride, tail = ctypes.c_int64(st.stride), ctypes.c_int64(st.tail_at.get(index, 0))
        alone = own is not None and rows == spans and rows <= MAX_ROWS  # every pool a row completes is of older rows and itself
        self.device.launch(
            "dsa_prepare", (rows, 3 if own else 2), 256,
            [plain["q_latent"], c.q_lora_rank, w.q_norm, qr.high, self._lower(qr), qr.ld, plain["kv"], c.kv_lora_rank, w.kv_norm, c.rms_norm_eps,
             plain["key"] if own else None, di, own.norm if own else None, own.bias if own else None, at.slot, at.position, at.live,
             rows_table, st.narrow_table(index), plain["index_gate"] if own else None, c.index_kpool, own.ape if own else None, st.block if alone else None,
             stride, tail, pools_table],
        )  # fmt: skip
        jobs = [product(w.q_b, qr, split=self._split("heads_q"))]
        if own:
            jobs.append(product(own.query, qr, plain["index_query"], c.index_n_heads * di))
            if not alone:
                self.device.launch(
                    "dsa_pool", (rows,), -(-min(di, 256) // 32) * 32,
                    [plain["key"], plain["index_gate"], di, c.index_kpool, own.ape, at.slot, at.position, at.first, at.live,
                     st.block, stride, tail, pools_table],
                )  # fmt: skip
        self._products(rows, jobs)
        if c.indexer_kinds[index] == FULL:
            self._select(rows, index, at, alone, border)
        for first in range(0, rows, s.group):
            if first:
                border(index)
            self._attend(min(s.group, rows - first), first, rows, w, at, rows_table if self._low else st.narrow_table(index))
        self._products(rows, [product(w.out, s.split["heads_o"], plain["y"], c.hidden_size)])
        return Returned(y=plain["y"].address)

    def _select(self, rows: int, index: int, at: RowArrays, tail_kept: bool, border: Border) -> None:
        c, s, st = self.config, self.scratch, self.states
        plain, di, few = s.plain, c.index_head_dim, rows <= MAX_ROWS
        keep = c.index_topk // c.index_kpool
        lds = ctypes.c_int64(s.max_pools)
        query: list[Argument] = [plain["index_query"], plain["index_weights"], c.index_n_heads, c.index_n_heads, di, c.index_kpool, keep]
        stored: list[Argument] = [
            at.slot, at.position, at.span_end, at.live, st.block, ctypes.c_int64(st.stride), ctypes.c_int64(st.tail_at[index]), st.pools_table(index),
            plain["scores"], lds,
        ]  # fmt: skip
        key, gate = plain["key"], plain["index_gate"]
        for first in range(0, rows, s.group):
            if first:
                border(index)
            here = min(s.group, rows - first)
            if few:
                self.device.launch("dsa_scores_few", (512 // rows, rows), 256, [*query, None if tail_kept else key, gate, *stored], 4 * 4 * 8 * di)
            else:
                self.device.launch("dsa_scores", (1, here), 256, [*query, first, key, gate, *stored], 4 * (32 * (di + 4) + 32 * di))
            out = plain["selected"], s.selection, plain["selected_count"]
            arguments: list[Argument] = [plain["scores"], lds, c.index_kpool, keep, first, at.position, at.live, *out]
            self.device.launch("dsa_select", (here,), 512 if few else 256, arguments)

    def _attend(self, here: int, first: int, rows: int, w: DsaOnDevice, at: RowArrays, rows_table: Pointer | None) -> None:
        c, s = self.config, self.scratch
        plain, absorbed, attended, heads_q = s.plain, s.split["absorbed"], s.split["attended"], s.split["heads_q"]
        width, ld = head_width(c), absorbed.ld
        self._products_for(here, rows, [product(w.absorb, heads_q, split=absorbed, ldy=c.num_heads * ld, x_stride=width, y_stride=ld, x_at=first)])
        latent = -(-c.kv_lora_rank // 64) * 64
        if rows <= MAX_ROWS:
            self._attend_few(rows, at, rows_table)
        elif self.exact:
            heads = (4 if c.num_heads > 32 else 2 if c.num_heads > 16 else 1) * 16
            shared = 2 * (2 * heads * (latent + 48) + 64 * (latent + 8)) + 4 * heads * 36
            self.device.launch(
                "attend_exact", (here, -(-c.num_heads // heads)), 256,
                [absorbed.high, absorbed.low, ld, c.qk_head_dim**-0.5, at.slot, rows_table, c.kv_lora_rank, plain["selected"], s.selection,
                 plain["selected_count"], first, attended.high, attended.low, ld],
                shared,
            )  # fmt: skip
        else:
            self.device.launch(
                "attend_prompt", (here, -(-c.num_heads // 64)), 256,
                [absorbed.high, ld, c.qk_head_dim**-0.5, at.slot, rows_table, c.kv_lora_rank, plain["selected"], s.selection, plain["selected_count"], first,
                 attended.high, ld],
                1024 + 3 * 128 * latent + 2 * 64 * 72,
            )  # fmt: skip
        job = product(w.value, attended, split=self._split("heads_o"), x_stride=ld, y_stride=c.v_head_dim, split_at=first, ldx=c.num_heads * ld)
        self._products_for(here, rows, [job])

    def _attend_few(self, rows: int, at: RowArrays, rows_table: Pointer | None) -> None:
        """Attention of up to MAX_ROWS rows: blocks of 16 heads and a part of the selection, then the parts together."""
        c, s = self.config, self.scratch
        plain, absorbed, attended = s.plain, s.split["absorbed"], s.split["attended"]
        latent = -(-c.kv_lora_rank // 64) * 64
        self.device.launch(
            "attend_few" if rows <= 2 else "attend_few_shared", (-(-c.num_heads // 16), rows, s.splits), 256,
            [absorbed.high, absorbed.low, absorbed.ld, c.qk_head_dim**-0.5, at.slot, rows_table, c.kv_lora_rank, plain["selected"], s.selection,
             plain["selected_count"], plain["splits"]],
            2 * 96 * (latent + 8) + 2 * 32 * 40 + 4 * (4 * 16 * 33 + 48),
        )  # fmt: skip
        join: list[Argument] = [plain["splits"], s.splits, plain["selected_count"], c.kv_lora_rank, attended.high, attended.low, attended.ld]
        self.device.launch("attend_join", (c.num_heads, rows, -(-latent // 256)), 256, join)

    def _products_for(self, here: int, rows: int, jobs: list[Job]) -> None:
        """Products of a row group; a last group of few rows goes the way of the pass it belongs to."""
        if here <= MAX_ROWS < rows:
            run_products(self.device, here, jobs, self.token_tile, tiled=True)
        else:
            self._products(here, jobs)

    def _ffn(self, rows: int, layer: DeviceLayer, at: RowArrays) -> Returned:
        c, s = self.config, self.scratch
        plain, x = s.plain, s.split["x"]
        if isinstance(layer.ffn, FfnOnDevice):
            h = s.split["dense_h"]
            self._products(rows, [product(layer.ffn.gate_up, x, split=self._split("dense_h"), swiglu=c.swiglu_limit)])
            self._products(rows, [product(layer.ffn.down, h, plain["y"], c.hidden_size)])
            return Returned(y=plain["y"].address)
        return self._moe(rows, layer.index, layer.ffn, at)

    def _moe(self, rows: int, index: int, w: MoeOnDevice, at: RowArrays) -> Returned:
        c, s = self.config, self.scratch
        plain, x, k, e = s.plain, s.split["x"], c.num_experts_per_tok, c.n_routed_experts
        held = self.sparse_held.index(index)
        jobs = [product(w.router, x, plain["router"], e)]
        if w.shared:
            jobs.append(product(w.shared.gate_up, x, split=self._split("shared_h"), swiglu=c.swiglu_limit))
        self._products(rows, jobs)
        router: list[Argument] = [plain["router"], e, w.bias, e, k, c.n_group, c.topk_group, int(c.norm_topk_prob), c.routed_scaling_factor, at.slot, at.live]
        uses: tuple[Argument, Argument] = self.uses.at(4 * held * e), ctypes.c_int64(self.use_stride)
        ids, weights, pairs, groups = (plain[name] for name in ("ids", "weights", "list", "groups"))
        room = 4 * (2 * e + c.n_group + 32)
        if rows <= MAX_ROWS:
            most = min(rows * k, e)
            self.device.launch("route_few", (1,), 512, [*router, rows, skinny_columns(rows), ids, weights, pairs, groups, *uses], rows * room)
        else:
            counts = plain["counts"].at(4 * held * e)
            most = min(rows * k, rows * k // self.token_tile + min(e, rows * k))
            self.device.launch("route", (rows,), 256, [*router, ids, weights, counts, *uses], room)
            self.device.launch("moe_list", (e,), 256, [ids, rows * k, counts, e, self.token_tile, pairs, groups])
        experts = ExpertGroups(plain["list"], plain["groups"], k, most)
        h = s.split["expert_h"]
        chosen, order = x, MAP_TOKEN
        if not self._low:  # the copy engine reads runs of rows: those of an expert side by side, where the results of pairs will lie later
            chosen, order = SplitRows(plain["pair_y"], None, x.ld), MAP_SORTED
            self.device.launch("moe_gather", (rows * k,), 256, [x.high, x.ld, plain["list"], k, chosen.high])
        job = product(w.gate_up, chosen, split=self._split("expert_h"), swiglu=c.swiglu_limit, table=w.table, which=0, x_map=order, y_map=MAP_SORTED)
        self._products(rows, [job], experts)
        jobs = [product(w.down, h, plain["pair_y"], c.hidden_size, table=w.table, which=1, x_map=MAP_SORTED, y_map=MAP_PAIR)]
        if w.shared:
            jobs.append(product(w.shared.down, s.split["shared_h"], plain["y"], c.hidden_size))
        self._products(rows, jobs, experts)
        return Returned(
            y=plain["y"].address if w.shared else 0, pairs=plain["pair_y"].address, ids=plain["ids"].address, weights=plain["weights"].address, top_k=k
        )
