"""The engine: spans of tokens go in, logits come out; slots stay whole whatever happens on the way. No I/O, no protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.decode_loop import DecodeLoop
from glm53serve.engine.faults import Faults
from glm53serve.engine.seam import Batch, DeviceLost, Halt, Halted, Head, Layers, Meter, Network, Span, never
from glm53serve.engine.slots import Checkpoint, CheckpointPool, Origin, Reuse, Slot, plan_reuse
from glm53serve.model.config import ModelConfig

F32Array = NDArray[np.float32]
Note = Callable[[str], None]
LOGIT_ROWS = 64


@dataclass(slots=True)
class Cost:
    """Seconds a pass spent, by kind (the fields of PROF)."""

    disk: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    head: float = 0.0

    def add(self, other: Cost, share: float = 1.0) -> None:
        """Add a share of another pass's cost."""
        self.disk += other.disk * share
        self.experts += other.experts * share
        self.attention += other.attention * share
        self.head += other.head * share


@dataclass(slots=True)
class ChunkResult:
    """A finished prompt chunk: the logits row after its last token, all rows when asked for, and what it cost."""

    logits: F32Array
    rows: F32Array | None
    cost: Cost


@dataclass(slots=True)
class Engine:
    """A model over an ordered list of backends that together cover all layers.

    `slot_count` conversations of `capacity` positions each. `note` receives the few lines a person debugging wants to see. `replace` makes
    backends for all layers and a head that need no device, for when one is lost. `network` and `ahead` are there when one backend holds everything:
    it computes passes from token ids to logits, and it decodes by itself.
    """

    config: ModelConfig
    backends: list[Layers]
    head: Head
    slot_count: int
    capacity: int
    chunk: int
    pins: int = 0
    checkpoint_bytes: int = 0
    faults: Faults = field(default_factory=Faults)
    note: Note = lambda _line: None
    replace: Callable[[], tuple[list[Layers], Head]] | None = None
    ahead: DecodeLoop | None = None
    network: Network | None = None
    slots: list[Slot] = field(init=False)
    pool: CheckpointPool = field(init=False)
    _snapshot_failed: bool = field(init=False, default=False)
    _head_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.slots = [Slot(i) for i in range(self.slot_count)]
        self.pool = CheckpointPool(self.slots, self.pins, self.checkpoint_bytes)
        self._open()

    def _open(self) -> None:
        held = [layer for backend in self.backends for layer in backend.layers]
        if held != list(range(self.config.num_layers)):
            raise ValueError(f"the backends hold layers {held}, the model has 0..{self.config.num_layers - 1}")
        if self.network is not None and len(self.backends) != 1:
            raise ValueError(f"one backend must hold everything to go from ids to logits, there are {len(self.backends)}")
        for backend in self.backends:
            for slot in self.slots:
                backend.open_slot(slot.index, self.capacity)

    # -- whole passes

    def run_layers(self, streams: F32Array, batch: Batch, halt: Halt) -> F32Array:
        """All layers over the rows of a batch; asks `halt` at each border between two backends too."""
        for number, backend in enumerate(self.backends):
            if number and halt():
                raise Halted(backend.layers.start)
            streams = backend.forward(streams, batch, halt)
        return streams

    def forward_span(self, ids: Sequence[int], batch: Batch, halt: Halt) -> F32Array:
        """Streams [rows, hc_mult, H] of the rows' tokens after the last layer."""
        return self.run_layers(self.head.embed(np.asarray(ids, dtype=np.int64)), batch, self._watched(halt))

    def forward_rows(self, ids: Sequence[int], batch: Batch, halt: Halt, rows: NDArray[np.int64]) -> F32Array:
        """Logits [len(rows), V] of the rows listed (ascending) of a batch; where one backend holds everything, nothing else comes to the host."""
        if self.network is not None:
            return self.network.forward_ids(np.asarray(ids, dtype=np.int64), batch, self._watched(halt), rows)
        streams = self.forward_span(ids, batch, halt)
        began = perf_counter()
        parts = [self.head.logits(streams[rows[i : i + LOGIT_ROWS]]) for i in range(0, len(rows), LOGIT_ROWS)]
        self._head_seconds += perf_counter() - began
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _watched(self, halt: Halt) -> Halt:
        """The halt question, with the fault of the layers in it when one is set."""
        if not self.faults.watches("layer"):
            return halt

        def ask() -> bool:
            self.faults.hit("layer")
            return halt()

        return ask

    # -- prompts

    def begin(self, slot: Slot, prompt: Sequence[int], reuse: Reuse) -> None:
        """Bring the slot to the state a plan starts from; its history becomes the reused tokens."""
        if reuse.word == "equal" and reuse.reused:
            return
        if reuse.checkpoint is not None:
            try:
                for backend, copy in zip(self.backends, reuse.checkpoint.copies, strict=True):
                    backend.load(slot.index, copy)
            except BaseException:
                self.empty(slot)
                raise
            self.pool.touch(reuse.checkpoint)
            slot.filled = reuse.reused
            slot.logits = reuse.checkpoint.logits
            slot.cut(slot.filled)
        elif reuse.reused == 0:
            self.empty(slot)
        else:
            slot.cut(slot.filled)

    def plan(self, slot: Slot, prompt: Sequence[int]) -> Reuse:
        """What the prompt may reuse of the slot."""
        return plan_reuse(slot, prompt)

    def forward_prefill(self, slot: Slot, ids: Sequence[int], halt: Halt = never, guard: bool = False, all_rows: bool = False) -> ChunkResult:
        """Compute one chunk of a prompt, all or nothing.

        With `guard` the slot is copied first and `halt` is armed. When the chunk is halted or fails in any way the copy goes back, `filled`
        stays and the exception goes on (Halted, or whatever happened). Without a guard a failure empties the slot.
        """
        armed = halt
        if guard and not self._snapshot(slot):
            guard, armed = False, never
        try:
            started = self._meters()
            wanted = np.arange(0 if all_rows else len(ids) - 1, len(ids))
            rows = self.forward_rows(ids, Batch((Span(slot.index, slot.filled, len(ids)),)), armed if guard else never, wanted)
            cost = self._cost_since(started)
        except BaseException:
            if guard:
                for backend in self.backends:
                    backend.restore(slot.index)
            else:
                self.empty(slot)
            raise
        slot.cut(slot.filled)
        slot.history.extend(ids)
        slot.filled += len(ids)
        slot.logits = rows[-1]
        slot.resumable = True
        return ChunkResult(rows[-1], rows if all_rows else None, cost)

    def _snapshot(self, slot: Slot) -> bool:
        try:
            self.faults.hit("alloc")
            for backend in self.backends:
                backend.snapshot(slot.index)
        except MemoryError:
            if not self._snapshot_failed:
                self.note("no memory for a snapshot: prompt chunks are checked at their ends only")
            self._snapshot_failed = True
            return False
        return True

    # -- decode

    def forward_step(self, rows: Sequence[tuple[Slot, int]]) -> tuple[F32Array, Cost]:
        """One token for each of several slots: logits [rows, V]. After a failure every slot of the step is empty."""
        batch = Batch(tuple(Span(slot.index, slot.filled, 1) for slot, _ in rows))
        try:
            started = self._meters()
            logits = self.forward_rows([token for _, token in rows], batch, never, np.arange(len(rows)))
            cost = self._cost_since(started)
        except BaseException:
            for slot, _ in rows:
                self.empty(slot)
            raise
        for (slot, token), row in zip(rows, logits, strict=True):
            slot.cut(slot.filled)
            slot.history.append(token)
            slot.filled += 1
            slot.logits = row
            slot.resumable = True
        return logits, cost

    # -- slots

    def empty(self, slot: Slot) -> None:
        """Empty a slot, here and on every backend."""
        slot.forget()
        for backend in self.backends:
            backend.reset_slot(slot.index)

    def checkpoint(self, slot: Slot, origin: Origin) -> None:
        """Keep a copy of the slot at `filled`, if its kind is kept and memory allows."""
        if not self.pool.wanted(origin) or slot.logits is None or slot.filled == 0:
            return
        try:
            self.faults.hit("alloc")
            copies = [backend.save(slot.index) for backend in self.backends]
        except MemoryError:
            self.note(f"no memory for a checkpoint of slot {slot.index} at {slot.filled}")
            return
        size = sum(int(copy.nbytes) for copy in copies) + int(slot.logits.nbytes)
        self.pool.add(slot, Checkpoint(slot.filled, origin, copies, slot.logits.copy(), size))

    def expert_uses(self, slot: Slot) -> NDArray[np.uint32]:
        """Uses of routed experts by this slot since `clear_uses`: [sparse layers, experts]."""
        return np.concatenate([backend.expert_uses(slot.index) for backend in self.backends])

    def clear_uses(self, slot: Slot) -> None:
        """Start counting a slot's expert uses anew."""
        for backend in self.backends:
            backend.clear_uses(slot.index)

    def tiers(self) -> NDArray[np.uint8]:
        """Where each routed expert is: [sparse layers, experts], 0 disk, 1 RAM, 2 device."""
        return np.concatenate([backend.tiers() for backend in self.backends])

    def hit_rate(self) -> float:
        """Percent of expert uses since start that were found in memory; 0 before any use."""
        uses = sum(backend.meter.uses for backend in self.backends)
        return 100.0 * sum(backend.meter.found for backend in self.backends) / uses if uses else 0.0

    def interrupt(self) -> None:
        """A halt that was asked for should take effect now: wake backends that wait for a device. Safe from any thread."""
        for backend in self.backends:
            wake = getattr(backend, "interrupt", None)
            if wake is not None:
                wake()

    def fail_over(self) -> None:
        """A device is lost: go on without it, with every slot empty. Raises DeviceLost when there is nothing to go on with."""
        if self.replace is None:
            raise DeviceLost("no other backend can take the layers")
        self.backends, self.head = self.replace()
        self.ahead = self.network = None
        for slot in self.slots:
            slot.forget()
        self._open()

    def check_integrity(self) -> None:
        """Assert the invariants of every slot; call when idle."""
        for slot in self.slots:
            slot.check_integrity()

    def close(self) -> None:
        """Release every backend."""
        for backend in self.backends:
            backend.close()

    # -- time

    def _meters(self) -> Meter:
        total = Meter(head=self._head_seconds)
        for backend in self.backends:
            total.head += backend.meter.head
            total.disk += backend.meter.disk
            total.experts += backend.meter.experts
            total.attention += backend.meter.attention
        return total

    def _cost_since(self, before: Meter) -> Cost:
        now = self._meters()
        return Cost(now.disk - before.disk, now.experts - before.experts, now.attention - before.attention, now.head - before.head)
