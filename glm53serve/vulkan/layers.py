"""The chain behind the engine's seam: whole layers on a Vulkan device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.seam import Batch, DeviceLost, Halt, Halted, Meter, never
from glm53serve.model.config import DSA, SHARED, SPARSE, ModelConfig
from glm53serve.model.weights import ExpertSource, LayerWeights
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.graph import Rate
from glm53serve.vulkan.groups import Group, cut
from glm53serve.vulkan.halting import HaltGate
from glm53serve.vulkan.layer import ChainLayer, load_layer
from glm53serve.vulkan.queue import Queue
from glm53serve.vulkan.recordings import Recordings, bucket
from glm53serve.vulkan.scratch import Scratch, Sizes
from glm53serve.vulkan.state import NONE, DsaState, KdaState, PageCopies, Pages, SavedState, make_state

F32 = NDArray[np.float32]
T = TypeVar("T")
IN_FLIGHT = 2
COPY_FLOATS = 1 << 19
HEADER_WORDS, ROW_WORDS, SPAN_WORDS = 16, 4, 8


@dataclass(frozen=True, slots=True)
class _Flight:
    """A submission on its way; `group` is set when it is its row group's last."""

    number: int
    layer: int
    group: int | None
    graph: tuple[int, int]
    submitted: float


@dataclass(slots=True)
class _Pass:
    """One `forward`: its row groups, what is on its way, and how many groups were filled in, have landed and were collected."""

    groups: list[Group]
    streams: F32
    out: F32
    flights: deque[_Flight] = field(default_factory=deque)
    touched: set[int] = field(default_factory=set)
    filled: int = 0
    landed: int = 0
    collected: int = 0
    layer: int = 0


class VulkanLayers:
    """Layers 0..N-1 on a device, nothing of them on the host.

    layer_weights(l) and experts give the weights; dense matrices are kept at `bits` (0 as stored, else 4, 8, 16 or 32), routed experts as
    stored. `slots` slots of `capacity` positions; row groups of at most `rows` rows. The device is this object's from now on, unless `owns_device` is
    false: `close` closes it, also when construction fails. Raises OutOfDeviceMemory, DeviceLost, ValueError for a range the chain cannot hold.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        layers: range,
        layer_weights: Callable[[int], LayerWeights],
        experts: ExpertSource,
        slots: int,
        capacity: int,
        rows: int = 128,
        bits: int = 0,
        rate: Rate | None = None,
        progress: Callable[[int], None] | None = None,
        owns_device: bool = True,
    ) -> None:
        self.device, self.config, self.layers = device, config, layers
        self.meter = Meter()
        self._owns_device = owns_device
        try:
            self._build(layer_weights, experts, slots, capacity, rows, bits, rate, progress)
        except BaseException:
            if owns_device:
                device.close()
            raise

    def _build(
        self,
        layer_weights: Callable[[int], LayerWeights],
        experts: ExpertSource,
        slots: int,
        capacity: int,
        rows: int,
        bits: int,
        rate: Rate | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        device, config, layers = self.device, self.config, self.layers
        if len(layers) == 0 or (layers[0] and _shared(config, layers[0])) or (layers[-1] + 1 < config.num_layers and _shared(config, layers[-1] + 1)):
            raise ValueError(f"layers {layers[0] if layers else 0}..{layers[-1] if layers else -1} part a shared indexer layer from the one it reads")
        self.sizes = sizes = Sizes(config, max(1, rows), slots, capacity)
        sparse = {l: i for i, l in enumerate(l for l in layers if config.mlp_kinds[l] == SPARSE)}
        self._sparse = len(sparse)
        self._uses = device.local(4 * max(1, slots * len(sparse) * config.n_routed_experts))
        device.zero([self._uses])
        self._scratch = Scratch(device, sizes, layers)
        self._chain: list[ChainLayer] = []
        self.states: dict[int, KdaState | DsaState] = {}
        """The state buffers of each layer."""
        for index in layers:
            state = self.states[index] = make_state(device, sizes, index)
            self._chain.append(load_layer(device, sizes, layer_weights(index), sparse.get(index, 0), state, experts, self._uses, bits))
            if progress is not None:
                progress(index)
        self._pages = Pages(slots)
        self._copies = PageCopies(device, sizes, [s for s in self.states.values() if isinstance(s, KdaState)])
        self._queue = Queue(device)
        words = HEADER_WORDS + (ROW_WORDS + SPAN_WORDS) * sizes.rows
        self._gate = HaltGate(device, self._queue)
        self._parameters = device.local(4 * words)
        device.zero([self._parameters])
        self._common = device.bind([self._gate.word, self._parameters], device.common_layout)
        stride = config.hc_mult * sizes.hidden
        self._rings = [(device.host(4 * words), device.host(4 * sizes.rows * stride), device.host(4 * sizes.rows * stride, cached=True)) for _ in range(2)]
        self._stride = stride
        self.recordings = Recordings(device, self._chain, self._scratch, self._common, self._parameters, self._rings, rate)
        self.observed: dict[tuple[int, int], list[float]] = {}
        """Seconds of each segment of the last pass, by (bucket, spans)."""
        self._last_landing = 0.0

    # --- slots -------------------------------------------------------------------------------------------------------------------

    def open_slot(self, slot: int, capacity: int) -> None:
        """Empty a slot of at most the capacity the chain was built with. Raises ValueError when there is no room for it."""
        if not 0 <= slot < self.sizes.slots or capacity > self.sizes.capacity:
            raise ValueError(f"slot {slot} of {capacity} positions: the chain holds {self.sizes.slots} slots of {self.sizes.capacity}")
        self.reset_slot(slot)

    def reset_slot(self, slot: int) -> None:
        """Empty a slot."""
        self._pages.reset(slot)

    def snapshot(self, slot: int) -> None:
        """Protect the slot's KDA state; nothing is copied."""
        self._pages.snapshot(slot)

    def restore(self, slot: int) -> None:
        """Go back to the last snapshot; nothing is copied."""
        self._pages.restore(slot)

    def save(self, slot: int) -> SavedState:
        """A copy of the slot's KDA state and windows in host memory."""
        position = self._pages.position(slot)
        return SavedState(None if position.fresh else self._alive(lambda: self._copies.read(position.page)))

    def load(self, slot: int, copy: SavedState) -> None:
        """Put a saved copy back."""
        if copy.data is None:
            self._pages.reset(slot)
            return
        data = copy.data
        self._alive(lambda: self._copies.write(self._pages.target(slot), data))
        self._pages.commit(slot)

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Uses of each routed expert by this slot: uint32 [sparse layers held, experts]."""
        shape = (self._sparse, self.config.n_routed_experts)
        part = self._uses_of(slot)
        return self._alive(lambda: self.device.get(part, np.uint32)).reshape(shape) if part.nbytes else np.zeros(shape, np.uint32)

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses."""
        part = self._uses_of(slot)
        if part.nbytes:
            self._alive(lambda: self.device.put(part, np.zeros(part.nbytes, np.uint8)))

    def tiers(self) -> NDArray[np.uint8]:
        """Every routed expert is on the device: uint8 [sparse layers held, experts], all 2."""
        return np.full((self._sparse, self.config.n_routed_experts), 2, np.uint8)

    def close(self) -> None:
        """Release everything, the device too."""
        self._gate.disarm(None)
        if self._owns_device:
            self.device.close()
        else:
            self.device.idle()

    def _uses_of(self, slot: int) -> Buffer:
        size = 4 * self._sparse * self.config.n_routed_experts
        return self._uses.part(slot * size, size)

    def _alive(self, work: Callable[[], T]) -> T:
        """Work outside `forward` that meets a lost device as DeviceLost."""
        if self.device.lost:
            raise DeviceLost(f"{self.device.info.name} was lost")
        return work()

    # --- a pass ------------------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End a running `forward` whose own `halt()` says so; callable from any thread, at any time.

        The pass that runs is asked, under a lock, whether it is meant: a cancel that comes late finds another pass, whose halt says no,
        or none, and does nothing. Otherwise the halt word is written (kernels that start from now on leave at once) and the wait ends.
        """
        self._gate.interrupt()

    def forward(self, streams: F32, batch: Batch, halt: Halt = never) -> F32:
        """All layers over the rows: streams float32 [rows, hc_mult, H] -> the same shape (see `seam.Layers.forward`)."""
        started = self._last_landing = time.perf_counter()
        self.observed.clear()
        passing = _Pass(list(cut(batch, self.sizes.rows)), streams, np.empty_like(streams))
        wakes = self._gate.arm(halt)
        try:
            for flight in self._submissions(passing):
                passing.flights.append(flight)
                while len(passing.flights) >= IN_FLIGHT:
                    self._land(passing, wakes)
                self._catch_up(passing)
            while passing.flights:
                self._land(passing, wakes, last=len(passing.flights) == 1)
            self._catch_up(passing)
        finally:
            self._gate.disarm(passing.flights[-1].number if passing.flights else None)
        for slot in {span.slot for span in batch.spans}:
            self._pages.commit(slot)
        self._note(batch.rows, time.perf_counter() - started)
        self.recordings.adapt(self.observed)
        return passing.out

    def _submissions(self, passing: _Pass) -> Iterator[_Flight]:
        """Submit segment after segment, one each time the caller comes back for the next."""
        for number, group in enumerate(passing.groups):
            graph = self.recordings.graph_of(group, self.sizes.rows)
            while passing.filled <= number:
                self._fill(passing)
            entry, leave = self.recordings.copies(number % 2, graph.bucket, self._stride)
            last = len(graph.segments) - 1
            for i, segment in enumerate(graph.segments):
                buffers = ([entry] if i == 0 else []) + [segment.commands] + ([leave] if i == last else [])
                submitted = time.perf_counter()
                key = (graph.bucket, graph.spans)
                yield _Flight(self._queue.submit(buffers), segment.layer, number if i == last else None, key, submitted)

    def _land(self, passing: _Pass, wakes: int | None, last: bool = False) -> None:
        """Wait for the oldest submission and ask whether to go on. Raises Halted."""
        flight = passing.flights[0]
        if self._queue.wait(flight.number, wakes):
            passing.flights.popleft()
            now = time.perf_counter()
            self.observed.setdefault(flight.graph, []).append(now - max(flight.submitted, self._last_landing))
            self._last_landing = now
            if flight.group is not None:
                passing.landed += 1
        passing.layer = passing.flights[0].layer if passing.flights else flight.layer
        if self._gate.stops(asked_again=not last):
            raise Halted(passing.layer, on_device=True)

    def _catch_up(self, passing: _Pass) -> None:
        """The host's copies, while the device works on what was just submitted: rows of groups that landed, and the rows of the group after the
        next, whose place is free once the group before it has landed."""
        while passing.collected < passing.landed:
            self._collect(passing)
        while passing.filled < min(passing.landed + 2, len(passing.groups)):
            self._fill(passing)

    def _collect(self, passing: _Pass) -> None:
        """Take a landed group's rows."""
        group = passing.groups[passing.collected]
        rows = self._rings[passing.collected % 2][2].view()[: group.rows * self._stride].reshape(group.rows, self.config.hc_mult, -1)
        hidden = self.config.hidden_size
        for at in self._slices(group.rows, passing):
            passing.out[group.first + at.start : group.first + at.stop] = rows[at, :, :hidden]
        passing.collected += 1

    def _slices(self, rows: int, passing: _Pass) -> Iterator[slice]:
        """Rows in slices of about two megabytes; an interrupt does not wait for a whole group's copy. Raises Halted."""
        step = max(1, COPY_FLOATS // self._stride)
        for at in range(0, rows, step):
            if self._gate.interrupted and (passing.flights or passing.landed):
                raise Halted(passing.layer, on_device=True)
            yield slice(at, min(at + step, rows))

    def prepare(self) -> None:
        """Record the graphs of single rows, of a row for every slot and of full row groups now instead of at their first use."""
        most = self.sizes.rows
        together = bucket(min(self.sizes.slots, most), most)
        for key in ((1, 1), (together, together), (most, 1)):
            self.recordings.graph(*key)

    def _fill(self, passing: _Pass) -> None:
        """Write the next group's parameters and rows where the device will copy them from. A slot's first piece of a pass reads its page, later
        ones what the pass wrote before."""
        group = passing.groups[passing.filled]
        parameters, into, _ = self._rings[passing.filled % 2]
        words = parameters.view(np.uint32)
        spans_at = HEADER_WORDS + ROW_WORDS * self.sizes.rows
        words[0:3] = group.rows, len(group.pieces), spans_at
        row = 0
        for number, piece in enumerate(group.pieces):
            position, target = self._pages.position(piece.slot), self._pages.target(piece.slot)
            source = target if piece.slot in passing.touched else NONE if position.fresh else position.page
            words[spans_at + SPAN_WORDS * number : spans_at + SPAN_WORDS * number + 4] = row, piece.count, source, target
            table = words[HEADER_WORDS + ROW_WORDS * row : HEADER_WORDS + ROW_WORDS * (row + piece.count)].reshape(-1, ROW_WORDS)
            table[:, 0], table[:, 2] = piece.slot, number
            table[:, 3] = np.arange(piece.count)
            table[:, 1] = table[:, 3] + piece.start
            row += piece.count
            passing.touched.add(piece.slot)
        place = into.view()[: group.rows * self._stride].reshape(group.rows, self.config.hc_mult, -1)
        for at in self._slices(group.rows, passing):
            place[at, :, : self.config.hidden_size] = passing.streams[group.first + at.start : group.first + at.stop]
        passing.filled += 1

    def _note(self, rows: int, seconds: float) -> None:
        """Time is split by layer halves in the shares of their estimated work."""
        uses = rows * self._sparse * self.config.num_experts_per_tok
        self.meter.uses += uses
        self.meter.found += uses
        share = self._sparse / (self._sparse + len(self._chain))
        self.meter.experts += seconds * share
        self.meter.attention += seconds * (1 - share)


def _shared(config: ModelConfig, layer: int) -> bool:
    return config.layer_kinds[layer] == DSA and config.indexer_kinds[layer] == SHARED

