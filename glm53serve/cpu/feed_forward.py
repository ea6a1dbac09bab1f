"""The feed-forward halves of compiled layers: weights packed, operations listed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.compiled import Builder, Site, f32_matrix, kinds_of
from glm53serve.cpu.kernels import experts, matmul, router
from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.memory import RunMemory, p64
from glm53serve.cpu.packing import GROUP, pack_dense
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import FfnWeights, MoeWeights

F32 = NDArray[np.float32]


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
        self.add_route(b, p)
        if self.shared is not None:
            self.shared.add(b, p, b.chunk.x, b.group.first, b.chunk.y2, b.group.first)

    def add_route(self, b: Builder, p: Program) -> None:
        """mHC and router of a row group."""
        c, g, chunk = self.config, b.group, b.chunk
        b.collapse(p, self.site, chunk.x, g.first)
        logits = g.buffer("router", p64(c.n_routed_experts))
        p.matmul(self.router, chunk.x, g.count, logits, x_at=g.first)
        work = g.buffer("router work", 2 * c.n_routed_experts + c.n_group)
        arguments = Arguments(
            router.ROUTE_FIELDS,
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
        p.by_row(router.route.address, arguments)

    def add_plan(self, b: Builder, p: Program) -> None:
        """Assignments of the whole chunk sorted by expert, and sums cleared."""
        c, g, chunk = self.config, b.group, b.chunk
        arguments = Arguments(
            router.PLAN_FIELDS,
            count=g.total.at,
            k=c.num_experts_per_tok,
            experts=c.n_routed_experts,
            chosen=address(chunk.chosen),
            weights=address(chunk.weights),
            starts=address(chunk.starts),
            order_rows=address(chunk.order_rows),
            order_weights=address(chunk.order_weights),
        )
        p.add(router.plan.address, arguments)
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
