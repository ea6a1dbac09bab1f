"""Layers run by compiled kernels: one native call for each half of a layer and row group."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.attention import DsaPrograms, KdaPrograms
from glm53serve.cpu.compiled import Builder, Site, kinds_of
from glm53serve.cpu.feed_forward import FfnPrograms, MoePrograms
from glm53serve.cpu.kernels.fields import address
from glm53serve.cpu.kernels.team import shared_team
from glm53serve.cpu.memory import RUN_ROWS, ChunkMemory, GroupMemory, RunMemory, Slots
from glm53serve.cpu.packing import GROUP, INT4, INT4_Q16, Packed
from glm53serve.cpu.plain import Count
from glm53serve.cpu.program import Cell, Program
from glm53serve.cpu.rows import Group, row_groups
from glm53serve.cpu.state import SlotState
from glm53serve.engine.seam import Batch, Halt, Halted, Meter, never
from glm53serve.experts.supply import supply_of
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import DsaWeights, ExpertSource, FfnWeights, LayerWeights, MoeWeights

F32 = NDArray[np.float32]


class _Layer:
    """One layer's weights and, once built, its programs."""

    def __init__(self, config: ModelConfig, w: LayerWeights, bits: int) -> None:
        self.index = w.index
        site = Site.of(config, w.hc_attn, w.input_norm)
        self.site = Site.of(config, w.hc_ffn, w.post_norm)
        self.attention: KdaPrograms | DsaPrograms
        if isinstance(w.attention, DsaWeights):
            self.attention = DsaPrograms(config, w.index, w.attention, site, bits)
        else:
            self.attention = KdaPrograms(config, w.index, w.attention, site, bits)
        self.dense = None if isinstance(w.ffn, MoeWeights) else FfnPrograms(config, w.ffn, bits)
        self.moe = MoePrograms(config, w.ffn, self.site, bits) if isinstance(w.ffn, MoeWeights) else None
        self.resident: list[_Held] | None = None


@dataclass(slots=True)
class _Programs:
    """A layer's operations. Of a dense layer only attend and ffn; of a sparse one ffn is the whole second half for few rows, and foresee the
    router's answer to the streams as they are before the attention."""

    attend: Program
    ffn: Program
    foresee: Program | None = None
    choose: Program | None = None
    plan: Program | None = None
    run: Program | None = None
    add: Program | None = None
    finish: Program | None = None


@dataclass(slots=True)
class _Held:
    """A routed expert as the kernels take it, and its line of the layer's table."""

    parts: tuple[Packed, ...]
    record: NDArray[np.int64]


class CompiledStack:
    """Layers in order. `count` is told what the router chose."""

    multiple = GROUP
    """What the widths of a slot's state are rounded up to."""

    def __init__(self, config: ModelConfig, layers: range, experts: ExpertSource, meter: Meter, bits: int, threads: int, count: Count) -> None:
        self.config = config
        self.supply = supply_of(experts, config.n_routed_experts)
        self.meter = meter
        self.bits = bits
        self.count = count
        self.team = shared_team(threads)
        self.slots = Slots(config, layers)
        self._layers: list[_Layer] = []
        self._programs: list[_Programs] = []
        self._stop = Cell()
        self._armed: Cell | None = None
        self._group = GroupMemory()
        self._int4 = INT4_Q16 if bits < 32 else INT4
        self._run = RunMemory(config, {self._int4})
        self._chunk = ChunkMemory(config, 0, {self._int4})

    def append(self, w: LayerWeights) -> None:
        """The next layer."""
        self._layers.append(_Layer(self.config, w, self.bits))

    def open(self, slot: int, state: SlotState) -> None:
        """A slot was opened."""
        self.slots.open(slot, state)

    def interrupt(self) -> None:
        """Stop the pass that runs, if it may be stopped, at its next chunks. From any thread; `halt` must say so from now on."""
        self._stop.set(1)

    def close(self) -> None:
        """Release the weights."""
        self._layers.clear()
        self._programs.clear()

    # --- building ----------------------------------------------------------------------------------------------------------------

    def _build(self, row_count: int, layout: SlotState) -> None:
        """Memory for chunks of up to `row_count` rows and the programs that use it; `layout` stands for every slot's state."""
        c = self.config
        kinds = {self._int4}
        for layer in self._layers:
            if layer.moe is not None and layer.moe.shared is not None:
                kinds |= kinds_of(layer.moe.shared.gate_up)
        chunk = ChunkMemory(c, row_count, kinds)
        b = Builder(c, self._group, chunk, self.slots, self.team.threads)
        # both or neither: memory may run out before the last program
        self._programs = [self._layer_programs(b, layer, layout) for layer in self._layers]
        self._chunk = chunk

    def _layer_programs(self, b: Builder, layer: _Layer, layout: SlotState) -> _Programs:
        attend, ffn = b.program(), b.program()
        layer.attention.add(b, attend, layout)
        if layer.dense is not None:
            x = self._group.form("ffn", b.hidden, kinds_of(layer.dense.gate_up))
            b.collapse(ffn, layer.site, x, b.zero)
            y = self._group.buffer("y", b.hidden)
            layer.dense.add(b, ffn, x, b.zero, y, b.zero)
            b.expand(ffn, y, b.zero)
            return _Programs(attend, ffn)
        assert layer.moe is not None
        foresee, choose, plan, run, add, finish, few = (b.program() for _ in range(7))
        layer.moe.add_route(b, foresee)
        layer.moe.add_choice(b, choose)
        layer.moe.add_plan(b, plan)
        layer.moe.add_run(b, run, self._run, 1)
        layer.moe.add_sum(b, add, self._run, 1)
        layer.moe.add_run(b, few, self._run, self.config.num_experts_per_tok)
        layer.moe.add_sum(b, few, self._run, self.config.num_experts_per_tok)
        b.expand(finish, b.chunk.y, b.group.first, b.chunk.y2 if layer.moe.shared is not None else None)
        for part in (choose, plan, few, finish):
            ffn.extend(part)
        return _Programs(attend, ffn, foresee, choose, plan, run, add, finish)

    # --- the way through ---------------------------------------------------------------------------------------------------------

    def forward(self, streams: F32, batch: Batch, slots: dict[int, SlotState], halt: Halt) -> F32:
        """Run all layers over streams [rows, hc_mult, H], overwritten and returned (see the seam). Raises Halted."""
        count, hidden = batch.rows, self.config.hidden_size
        self._stop.set(0)
        self._armed = None if halt is never else self._stop
        for span in batch.spans:
            self.slots.reserve(span.slot, slots[span.slot], span.start + span.count, span.start)
        if count > self._chunk.row_count:
            self._build(max(count, min(2 * self._chunk.row_count, 4096), 16), slots[batch.spans[0].slot])
        self._chunk.streams[:count, :, :hidden] = streams
        groups = row_groups(batch)
        self._group.total.set(count)
        self._group.describe(groups[0], self.slots)
        for number, (layer, programs) in enumerate(zip(self._layers, self._programs, strict=True)):
            if number and halt():
                raise Halted(layer.index)
            start = time.perf_counter()
            self._foresee(layer, programs, groups)
            self._each_group(programs.attend, groups, layer.index, halt)
            middle = time.perf_counter()
            self.meter.attention += middle - start
            if halt():
                raise Halted(layer.index)
            disk = self.meter.disk
            if layer.moe is None:
                self._each_group(programs.ffn, groups, layer.index, halt)
            else:
                self._sparse(layer, programs, groups, batch, halt)
            self.meter.experts += time.perf_counter() - middle - (self.meter.disk - disk)
        streams[:] = self._chunk.streams[:count, :, :hidden]
        return streams

    def _foresee(self, layer: _Layer, programs: _Programs, groups: list[Group]) -> None:
        """Have the experts read that the layer will probably want and that are not in memory, while its attention computes. Attention moves
        the streams little, so the router's choice is mostly what it will be; the first row group speaks for the chunk."""
        if programs.foresee is None or layer.resident is not None or self.supply.resident(layer.index).all():
            return
        group = groups[0]
        if len(groups) > 1:
            self._group.describe(group, self.slots)
        self._go(programs.foresee, group.count, layer.index)
        rows = slice(group.first, group.first + group.count)
        likely = np.bincount(self._chunk.chosen[rows].ravel(), self._chunk.weights[rows].ravel(), self.config.n_routed_experts)
        wanted = np.flatnonzero(likely)
        # few rows take experts as they come, many in ascending order
        self.supply.foresee(layer.index, wanted if group.count * self.config.num_experts_per_tok > RUN_ROWS else wanted[np.argsort(-likely[wanted])])

    def _each_group(self, program: Program, groups: list[Group], layer: int, halt: Halt) -> None:
        for n, group in enumerate(groups):
            if n and halt():
                raise Halted(layer)
            if len(groups) > 1:
                self._group.describe(group, self.slots)
            self._go(program, group.count, layer)

    def _go(self, program: Program, rows: int, layer: int) -> None:
        """Run operations of a layer; a cancel that comes meanwhile ends them."""
        if program.run(self.team, rows, self._armed):
            raise Halted(layer)

    def _sparse(self, layer: _Layer, programs: _Programs, groups: list[Group], batch: Batch, halt: Halt) -> None:
        """The second half of a layer with routed experts."""
        assert layer.moe is not None and programs.choose is not None and programs.plan is not None and programs.finish is not None
        chunk, rows, k, experts = self._chunk, batch.rows, self.config.num_experts_per_tok, self.config.n_routed_experts
        if layer.resident is None and self.supply.stable:
            layer.resident = [self._enter(layer, e, None, self.supply.expert(layer.index, e)) for e in range(experts)]
        if layer.resident is not None and rows * k <= RUN_ROWS and len(groups) == 1:
            self._run.set(0, rows * k, 0, experts)
            self._go(programs.ffn, rows, layer.index)
            used = len(np.unique(chunk.chosen[:rows])) if rows > 1 else k
            self.meter.uses += used
            self.meter.found += used
        else:
            self._each_group(programs.choose, groups, layer.index, halt)
            self._go(programs.plan, rows, layer.index)
            self._run_experts(layer, programs, rows, halt)
            self._each_group(programs.finish, groups, layer.index, halt)
        self.count(layer.index, batch, chunk.chosen[:rows])

    def _run_experts(self, layer: _Layer, programs: _Programs, rows: int, halt: Halt) -> None:
        """Every expert that the chunk needs, each taken once. Few assignments keep all results to the end, so experts may come in any order;
        many are added up at once, in ascending order. A row's sum has that order either way."""
        assert programs.run is not None and programs.add is not None
        starts = self._chunk.starts
        counts = np.diff(starts)
        wanted = np.flatnonzero(counts)
        few = rows * self.config.num_experts_per_tok <= RUN_ROWS
        bounds = starts.tolist()
        with self.supply.need(layer.index, wanted, counts[wanted], rows, halt, not few) as need:
            self.meter.uses += need.wanted
            self.meter.found += need.found
            first = True
            for ready in need:
                if layer.resident is None:
                    for one in ready:
                        one.packed = self._enter(layer, one.expert, one.packed, one.weights)
                if few and len(ready) == len(wanted):
                    self._run.set(0, bounds[-1], 0, self.config.n_routed_experts)
                    self._go(programs.run, bounds[-1], layer.index)
                    continue
                for one in ready:
                    if not first and halt():
                        raise Halted(layer.index)
                    first = False
                    self._run_expert(layer.index, programs, one.expert, bounds[one.expert], bounds[one.expert + 1], few, halt)
            self.meter.disk += need.blocked
        if few:
            self._run.set(0, bounds[-1], 0, self.config.n_routed_experts)
            self._go(programs.add, bounds[-1], layer.index)

    def _run_expert(self, layer: int, programs: _Programs, expert: int, start: int, end: int, few: bool, halt: Halt) -> None:
        assert programs.run is not None and programs.add is not None
        for first in range(start, end, RUN_ROWS):
            if first > start and halt():
                raise Halted(layer)
            count = min(RUN_ROWS, end - first)
            self._run.set(first, count, expert, expert + 1, first if few else 0)
            self._go(programs.run, count, layer)
            if not few:
                self._go(programs.add, count, layer)

    def _enter(self, layer: _Layer, expert: int, held: _Held | None, w: FfnWeights) -> _Held:
        """Put an expert's addresses into the layer's table; they hold as long as the weights stay where they are."""
        assert layer.moe is not None
        if held is None:
            parts = pk.pack_expert(w, self.bits)
            record = [parts[0].kind]
            for part in parts:
                record += [address(part.data), 0 if part.scale is None else address(part.scale)]
            held = _Held(parts, np.array(record, np.int64))
        layer.moe.table[expert] = held.record
        return held
