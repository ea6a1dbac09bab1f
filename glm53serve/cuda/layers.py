"""`Layers` and `Head` on the device, for prompts and for decode steps that go through the seam."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.model import DeviceModel, MoeOnDevice, head_width
from glm53serve.cuda.pipeline import Pipeline, RowArrays
from glm53serve.cuda.runtime import MAX_ROWS, Buffer, Device, Fence, Pointer
from glm53serve.cuda.scratch import Scratch
from glm53serve.cuda.state import SlotStates
from glm53serve.engine.seam import Batch, Halt, Halted, Meter, Span, never

F32Array = NDArray[np.float32]
SEGMENTS_AHEAD = 1
"""Segments (half layers, row groups) enqueued behind the one that runs: what a cancel has to wait for."""


class RowTables:
    """The arrays of a `RowArrays` in one device buffer, filled from spans."""

    def __init__(self, device: Device, rows: int) -> None:
        self.device, self.rows = device, rows
        self._host = np.zeros((9, rows), np.int32)
        self._buffer = device.alloc(self._host.nbytes)
        starts = [self._buffer.at(4 * rows * i) for i in range(7)]
        self.arrays = RowArrays(*starts[:6])
        self.ids = starts[6]

    def _layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        flat = self._host.reshape(-1)
        return flat[: 5 * self.rows].reshape(5, self.rows), flat

    def fill(self, spans: Sequence[Span], ids: NDArray[np.int64] | None = None) -> RowArrays:
        """Upload the rows of the spans, and their token ids where given."""
        per_row, flat = self._layout()
        table = np.zeros((len(spans), 3), np.int32)
        row = 0
        for i, span in enumerate(spans):
            part = slice(row, row + span.count)
            per_row[0, part] = span.slot
            per_row[1, part] = np.arange(span.start, span.start + span.count)
            per_row[2, part] = 1
            per_row[3, part] = row
            per_row[4, part] = span.start + span.count
            table[i] = span.slot, row, span.count
            row += span.count
        flat[5 * self.rows : 5 * self.rows + table.size] = table.reshape(-1)
        ids_at = 8 * self.rows
        if ids is not None:
            flat[ids_at : ids_at + row] = ids
        self.device.upload(self._buffer.at(), self._host)
        self.ids = self._buffer.at(4 * ids_at)
        return self.arrays

    def list_rows(self, which: NDArray[np.int64]) -> Pointer:
        """Upload row numbers, where the ids of the last pass were: a device int32 array."""
        self.ids = self._buffer.at(4 * 8 * self.rows)
        self.device.upload(self.ids, which.astype(np.int32))
        return self.ids


class CudaLayers:
    """A run of layers on one device. `rows` = most rows of a pass; longer batches go through in pieces."""

    def __init__(self, device: Device, model: DeviceModel, slots: int, capacity: int, rows: int, exact: bool) -> None:
        c = model.config
        self.device, self.model, self.config = device, model, c
        self.layers = range(model.layers[0].index, model.layers[-1].index + 1)
        self.meter = Meter()
        self.rows = max(rows, MAX_ROWS)
        self.states = SlotStates(device, c, self.layers, slots, narrow=not exact)
        self.scratch = Scratch(device, c, self.rows, capacity // c.index_kpool + 1, head_width(c))
        self._mixtures = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeOnDevice)]
        self.uses = device.alloc(max(4, 4 * slots * len(self._mixtures) * c.n_routed_experts))
        self.pipeline = Pipeline(device, model, self.scratch, self.states, self.uses, exact)
        self.tables = RowTables(device, self.rows)
        self.slots, self.capacity = slots, capacity
        self._fences: deque[tuple[Fence, int, bool]] = deque()
        self._segment_began = 0.0

    # -- slots

    def open_slot(self, slot: int, capacity: int) -> None:
        """Make room for `capacity` positions of a slot and empty it."""
        if capacity > self.capacity:
            raise ValueError(f"slot {slot}: {capacity} positions, this backend was made for {self.capacity}")
        self.states.open(slot, capacity)
        self.reset_slot(slot)

    def reset_slot(self, slot: int) -> None:
        """Empty a slot."""
        self.states.reset(slot)

    def snapshot(self, slot: int) -> None:
        """Copy the slot's in-place state into the spare block, on the device."""
        self.states.snapshot(slot)

    def restore(self, slot: int) -> None:
        """Put the last snapshot back, on the device."""
        self.states.restore(slot)
        self.device.synchronize()

    def save(self, slot: int) -> NDArray[np.float32]:
        """The slot's in-place state in host memory."""
        copy = np.empty(self.states.stride, np.float32)
        self.device.download(self.states.of(slot), copy)
        return copy

    def load(self, slot: int, copy: NDArray[np.float32]) -> None:
        """Put a saved state back."""
        self.device.upload(self.states.of(slot), copy)

    # -- passes

    def warm_up(self) -> None:
        """Run a short and a long pass in slot 0 and empty it: every kernel is loaded before the first turn."""
        for count in (1, min(self.rows, self.states.capacity[0], MAX_ROWS + 1)):
            self.forward_ids(np.zeros(count, np.int64), Batch((Span(0, 0, count),)), never)
        self.reset_slot(0)
        for slot in range(self.slots):
            self.clear_uses(slot)
        self.meter = Meter()

    def forward(self, streams: F32Array, batch: Batch, halt: Halt) -> F32Array:
        """Run all layers over streams [rows, hc_mult, H] (see `Layers.forward`)."""
        out = np.empty(streams.shape, np.float32)
        row = 0
        started = False
        for spans in pieces(batch, self.rows):
            count = sum(span.count for span in spans)
            self.device.upload(self.scratch.plain["streams"].at(), np.ascontiguousarray(streams[row : row + count], np.float32))
            self._run(spans, None, halt, started)
            self.device.download(self.scratch.plain["streams"].at(), out[row : row + count])
            row += count
            started = True
        return out

    def forward_ids(self, ids: NDArray[np.int64], batch: Batch, halt: Halt) -> int:
        """The same from token ids, the streams staying on the device. Returns how many rows lie there (those of the last piece)."""
        return [count for _, count in self.passes(ids, batch, halt)][-1]

    def passes(self, ids: NDArray[np.int64], batch: Batch, halt: Halt) -> Iterator[tuple[int, int]]:
        """Run a batch from token ids piece by piece: (first row, rows) of each, its streams lying on the device until the next one is asked for."""
        row = 0
        for spans in pieces(batch, self.rows):
            count = sum(span.count for span in spans)
            self._run(spans, ids[row : row + count], halt, row > 0)
            yield row, count
            row += count

    def _run(self, spans: Sequence[Span], ids: NDArray[np.int64] | None, halt: Halt, started: bool) -> None:
        rows = sum(span.count for span in spans)
        for span in spans:
            if span.start + span.count > self.states.capacity[span.slot]:
                raise ValueError(f"slot {span.slot}: position {span.start + span.count - 1} of {self.states.capacity[span.slot]}")
        arrays = self.tables.fill(spans, ids)
        if ids is not None:
            self.pipeline.embed(rows, self.tables.ids)
        self.pipeline.zero_counts()
        self._fences.clear()
        self._segment_began = perf_counter()
        asked = started
        last = -1
        attention = False

        def border(layer: int) -> None:
            nonlocal asked, last, attention
            attention = not attention if layer == last else True
            self._throttle(layer, attention)
            if (asked or layer != self.layers.start or layer == last) and halt():
                self.device.synchronize()
                self._fences.clear()
                raise Halted(layer, on_device=True)
            asked, last = True, layer

        self.pipeline.layers(rows, arrays, len(spans), border)
        self._throttle(self.layers.stop, True, drain=True)

    def _throttle(self, layer: int, attention_next: bool, drain: bool = False) -> None:
        """Keep at most SEGMENTS_AHEAD segments enqueued behind the running one; note how long the finished ones took."""
        self._fences.append((self.device.fence(), layer, not attention_next))
        while len(self._fences) > (0 if drain else SEGMENTS_AHEAD):
            fence, _, was_attention = self._fences.popleft()
            fence.wait()
            now = perf_counter()
            if was_attention:
                self.meter.attention += now - self._segment_began
            else:
                self.meter.experts += now - self._segment_began
            self._segment_began = now

    # -- experts

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Uses of each routed expert by this slot's rows since `clear_uses`."""
        counts = np.zeros((len(self._mixtures), self.config.n_routed_experts), np.uint32)
        if counts.size:
            self.device.download(self._uses_of(slot), counts)
        return counts

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses; what was counted is added to the meter (every expert is in memory)."""
        found = int(self.expert_uses(slot).sum())
        self.meter.found += found
        self.meter.uses += found
        if self._mixtures:
            self.device.zero(self._uses_of(slot), 4 * len(self._mixtures) * self.config.n_routed_experts)

    def _uses_of(self, slot: int) -> Pointer:
        return self.uses.at(4 * slot * len(self._mixtures) * self.config.n_routed_experts)

    def tiers(self) -> NDArray[np.uint8]:
        """2 for experts in device memory, 1 for those in pinned host memory."""
        return np.array([np.where(m.on_device, 2, 1) for m in self._mixtures], np.uint8).reshape(len(self._mixtures), self.config.n_routed_experts)

    def close(self) -> None:
        """Release the device's memory."""
        self.device.close()


def pieces(batch: Batch, most: int) -> list[list[Span]]:
    """The spans of a batch in runs of at most `most` rows; a long span is cut."""
    out: list[list[Span]] = [[]]
    room = most
    for span in batch.spans:
        start, left = span.start, span.count
        while left:
            if room == 0:
                out.append([])
                room = most
            here = min(left, room)
            out[-1].append(Span(span.slot, start, here))
            start, left, room = start + here, left - here, room - here
    return out


@dataclass(slots=True)
class CudaHead:
    """The two ends of the network on the device, and with the layers between them the whole `Network`. `logits_room` holds MAX_ROWS rows of logits."""

    layers: CudaLayers
    logits_room: Buffer

    def embed(self, ids: NDArray[np.int64]) -> F32Array:
        """Streams of token ids: [rows, hc_mult, H]."""
        c, device = self.layers.config, self.layers.device
        out = np.empty((len(ids), c.hc_mult, c.hidden_size), np.float32)
        self._check(ids)
        for row in range(0, len(ids), self.layers.rows):
            part = out[row : row + self.layers.rows]
            self.layers.tables.fill([Span(0, 0, len(part))], ids[row : row + len(part)])
            self.layers.pipeline.embed(len(part), self.layers.tables.ids)
            device.download(self.layers.scratch.plain["streams"].at(), part)
        return out

    def logits(self, streams: F32Array) -> F32Array:
        """Logits [rows, V] of streams [rows, hc_mult, H]."""
        out = np.empty((len(streams), self.layers.config.vocab_size), np.float32)
        for row in range(0, len(streams), MAX_ROWS):
            part = np.ascontiguousarray(streams[row : row + MAX_ROWS], np.float32)
            self.layers.device.upload(self.layers.scratch.plain["streams"].at(), part)
            out[row : row + len(part)] = self.device_logits(len(part))
        return out

    def forward_ids(self, ids: NDArray[np.int64], batch: Batch, halt: Halt, rows: NDArray[np.int64]) -> F32Array:
        """From token ids to the logits of the rows listed, the streams staying on the device (see `Network.forward_ids`)."""
        self._check(ids)
        out = np.empty((len(rows), self.layers.config.vocab_size), np.float32)
        done = 0
        for first, count in self.layers.passes(ids, batch, halt):
            began = perf_counter()
            here = rows[(rows >= first) & (rows < first + count)] - first
            for at in range(0, len(here), MAX_ROWS):
                some = here[at : at + MAX_ROWS]
                out[done : done + len(some)] = self._logits_of(some)
                done += len(some)
            self.layers.meter.head += perf_counter() - began
        return out

    def device_logits(self, rows: int, first: int = 0) -> F32Array:
        """Logits of `rows` (<= 16) rows of the streams that lie on the device, from row `first` on."""
        return self._logits_of(np.arange(first, first + rows))

    def _logits_of(self, which: NDArray[np.int64]) -> F32Array:
        layers, rows = self.layers, len(which)
        layers.pipeline.logits(rows, self.logits_room, layers.tables.list_rows(which))
        out = np.empty((rows, layers.config.vocab_size), np.float32)
        layers.device.download(self.logits_room.at(), out)
        return out

    def _check(self, ids: NDArray[np.int64]) -> None:
        vocabulary = self.layers.config.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(f"token ids {ids.min()}..{ids.max()}: the vocabulary has 0..{vocabulary - 1}")


def make_head(layers: CudaLayers) -> CudaHead:
    """A head over the ends that the layers' model holds."""
    return CudaHead(layers, layers.device.alloc(4 * MAX_ROWS * layers.config.vocab_size))
