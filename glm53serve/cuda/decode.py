"""Decode steps that feed themselves: one recorded graph a batch bucket, a ring in mapped host memory, a device loop."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.layers import CudaLayers
from glm53serve.cuda.pipeline import RowArrays
from glm53serve.cuda.runtime import BUCKETS, MAX_ROWS, Argument, Graph, Loop
from glm53serve.engine.decode_loop import DecodeLoop
from glm53serve.engine.step_device import End, Record, RowPlan

STOPS = 128
CLOCKS = 8192
RING_STEPS = 1024
SCANS = 32
SAMPLE_SHARED = 2048 * 8
SPIN_POLLS = 200

CONTROL = np.dtype(
    [
        *[(name, np.int32, (MAX_ROWS,)) for name in ("slot", "position", "live", "first", "token", "generation", "left", "counter", "span_end")],
        ("spans", np.int32, (MAX_ROWS, 3)),
        ("stop_count", np.int32, (MAX_ROWS,)),
        ("stops", np.int32, (MAX_ROWS, STOPS)),
        ("temperature", np.float32, (MAX_ROWS,)),
        ("top_p", np.float32, (MAX_ROWS,)),
        ("seed", np.uint64, (MAX_ROWS,)),
        ("active", np.int32),
        ("pad", np.int32),
    ],
)
"""The layout of `struct Control` in step.cu. MAX_ROWS is also the define the kernels are compiled with, so the commit kernel's cap is the largest bucket."""

SHARED = np.dtype(
    [
        ("head", np.uint64), ("pad0", np.uint64, 7), ("loop_end", np.uint64), ("pad1", np.uint64, 7),
        ("stop", np.int32), ("pad2", np.int32, 15), ("cancel", np.int32, MAX_ROWS),
    ]
)  # fmt: skip
"""The layout of `struct Shared` in step.cu."""

assert BUCKETS[-1] == MAX_ROWS


class Decoder:
    """A `StepDevice` on CUDA. Everything is allocated and recorded here; serving only replays.

    `note` gets one line when recording fails: the graphs are given up and steps are launched kernel by kernel. `loops`: record device loops too.
    """

    buckets: tuple[int, ...] = BUCKETS

    def __init__(self, layers: CudaLayers, note: Callable[[str], None] = lambda _line: None, loops: bool = False) -> None:
        self.layers, self.device = layers, layers.device
        vocabulary = layers.config.vocab_size
        self._control = self.device.alloc(CONTROL.itemsize)
        self._staging = self.device.host(CONTROL.itemsize)
        self._staged = self._staging.bytes.view(CONTROL)
        self._shared = self.device.host(SHARED.itemsize)
        shared = self._shared.bytes.view(SHARED)
        self._head, self._loop_end, self._stop, self._cancel = shared["head"], shared["loop_end"], shared["stop"], shared["cancel"][0]
        self._head_view = memoryview(self._shared.bytes[:8]).cast("Q")  # type: ignore[arg-type]
        self._ring = self.device.host(RING_STEPS * MAX_ROWS * 16)
        self._records = memoryview(self._ring.bytes).cast("i")  # type: ignore[arg-type]
        self._clocks = self.device.alloc(8 * (2 * CLOCKS + 1))
        self.logits_room = self.device.alloc(4 * MAX_ROWS * vocabulary)
        self._kept = self.device.alloc(4 * len(layers.states.capacity) * vocabulary)
        self._peaks = self.device.alloc(4 * MAX_ROWS * SCANS)
        self._peak_ids = self.device.alloc(4 * MAX_ROWS * SCANS)
        self._chosen = self.device.alloc(4 * MAX_ROWS)
        self._graphs: dict[int, Graph] = {}
        self._loops: dict[int, Loop] = {}
        self.launched = 0
        self._record(note, loops)

    # -- recording

    def _record(self, note: Callable[[str], None], loops: bool) -> None:
        self._warm()
        try:
            for bucket in self.buckets:
                self._graphs[bucket] = self.device.record(lambda b=bucket: self._step(b))  # type: ignore[misc]
                if loops:
                    self._loops[bucket] = self.device.record_loop(lambda handle, b=bucket: self._loop_body(handle, b))  # type: ignore[misc]
        except (RuntimeError, NotImplementedError) as error:
            self._graphs.clear()
            self._loops.clear()
            note(f"recording a decode step failed ({error}): steps are launched kernel by kernel")
        self._run_padding()

    def _warm(self) -> None:
        """Run one step of each bucket with padding only, so that nothing is loaded for the first time later."""
        self._run_padding(plain=True)

    def _run_padding(self, plain: bool = False) -> None:
        staged = self._staged
        staged[:] = 0
        self.device.copy_host(self._control.at(), self._staging, CONTROL.itemsize)
        for bucket in self.buckets:
            if plain or bucket not in self._graphs:
                self._step(bucket)
            else:
                self._graphs[bucket].launch()
            self.launched += 1
        for loop in self._loops.values():
            self._loop_end[0] = self.launched + 1
            loop.launch()
            self.device.synchronize()
            self.launched += 1
        self.device.synchronize()

    @property
    def captured(self) -> bool:
        """Steps are replayed from graphs."""
        return bool(self._graphs)

    def _arrays(self) -> RowArrays:
        return RowArrays(*(self._control.at(_offset(name)) for name in ("slot", "position", "live", "first", "span_end", "spans")))

    def _step(self, bucket: int) -> None:
        """Enqueue one step: embedding of the device's own tokens ... logits, a token a row, commit."""
        launch, pipeline, vocabulary = self.device.launch, self.layers.pipeline, self.layers.config.vocab_size
        launch("step_begin", (1,), 32, [self._clocks])
        pipeline.embed(bucket, self._control.at(_offset("token")))
        pipeline.layers(bucket, self._arrays(), bucket)
        pipeline.logits(bucket, self.logits_room)
        launch("logit_peaks", (SCANS, bucket), 512, [self.logits_room, vocabulary, self._peaks, self._peak_ids])
        control = [self._control.at(_offset(name)) for name in ("temperature", "top_p", "seed", "counter")]
        launch("sample", (bucket,), 1024, [self.logits_room, vocabulary, self._peaks, self._peak_ids, *control, self._chosen], SAMPLE_SHARED)
        books: list[Argument] = [self._control, self._shared, self._ring, RING_STEPS, self._clocks, self._chosen]
        launch("commit", (1,), 256, [*books, bucket, self.logits_room, self._kept, vocabulary])

    def _loop_body(self, handle: int, bucket: int) -> None:
        self._step(bucket)
        self.device.launch("loop_condition", (1,), 32, [ctypes.c_uint64(handle), self._control, self._shared, self._clocks])

    # -- StepDevice

    def upload(self, bucket: int, rows: Sequence[tuple[RowPlan, int]]) -> None:
        """Set the inputs of the next steps. Called with no step outstanding."""
        if len(rows) > bucket or bucket not in self.buckets:
            raise ValueError(f"{len(rows)} rows for bucket {bucket}")
        staged = self._staged[0]
        self._staged[:] = 0
        self._cancel[:] = 0
        vocabulary = self.layers.config.vocab_size
        for r, (plan, generation) in enumerate(rows):
            if len(plan.stop_ids) > STOPS:
                raise ValueError(f"{len(plan.stop_ids)} stop ids, at most {STOPS}")
            if not 0 <= plan.token < vocabulary:
                raise ValueError(f"token {plan.token}: the vocabulary has 0..{vocabulary - 1}")
            if not 0 <= plan.position < self.layers.states.capacity[plan.slot]:
                raise ValueError(f"slot {plan.slot}: position {plan.position} of {self.layers.states.capacity[plan.slot]}")
            staged["slot"][r], staged["position"][r], staged["live"][r] = plan.slot, plan.position, 1
            staged["token"][r], staged["generation"][r], staged["span_end"][r] = plan.token, generation, plan.position + 1
            staged["left"][r], staged["counter"][r] = min(plan.limit, plan.room), plan.counter
            staged["spans"][r] = plan.slot, r, 1
            staged["stop_count"][r] = len(plan.stop_ids)
            staged["stops"][r, : len(plan.stop_ids)] = plan.stop_ids
            staged["temperature"][r], staged["top_p"][r], staged["seed"][r] = plan.temperature, plan.top_p, plan.seed & (1 << 64) - 1
        staged["first"] = np.arange(MAX_ROWS)
        for r in range(len(rows), MAX_ROWS):
            staged["spans"][r] = 0, r, 1
        staged["active"] = len(rows)
        self.device.copy_host(self._control.at(), self._staging, CONTROL.itemsize)

    def launch(self, bucket: int, steps: int, loop: bool) -> None:
        """Enqueue steps. With `loop` (and loops recorded) they go as one loop on the device: no host between them."""
        self.launched += steps
        if loop and self._loops:
            self._stop[0] = 0
            self._loop_end[0] = self.committed() + steps
            self._loops[bucket].launch()
            return
        for _ in range(steps):
            if self._graphs:
                self._graphs[bucket].launch()
            else:
                self._step(bucket)

    def committed(self) -> int:
        """Steps committed since start."""
        return self._head_view[0]

    def wait(self, step: int) -> None:
        """Poll the ring's head; now and then make sure the device is still there."""
        head, polls = self._head_view, 0
        while head[0] <= step:
            polls += 1
            if polls % SPIN_POLLS == 0:
                if self.device.idle():
                    if head[0] <= step:
                        return
                    break
                time.sleep(0)

    def record(self, step: int, row: int) -> Record:
        """The record of a row of a committed step."""
        at = ((step % RING_STEPS) * MAX_ROWS + row) * 4
        generation, position, token, end = self._records[at : at + 4]
        return Record(generation, position, token, End(end))

    def cancel(self, row: int, generation: int) -> None:
        """Write the row's cancel word: the commit that runs next parks it."""
        self._cancel[row] = generation

    def stop_loop(self) -> None:
        """End a running loop at its next step border; plain steps cannot be stopped."""
        self._stop[0] = 1

    def last_logits(self, slot: int) -> NDArray[np.float32]:
        """Logits [V] that the commit kept when the slot's row was parked."""
        out = np.empty(self.layers.config.vocab_size, np.float32)
        self.device.download(self._kept.at(4 * slot * len(out)), out)
        return out

    # -- for the host

    def logits(self, row: int) -> NDArray[np.float32]:
        """Logits [V] of a row of the last step; only while no later step is launched."""
        out = np.empty(self.layers.config.vocab_size, np.float32)
        self.device.download(self.logits_room.at(4 * row * len(out)), out)
        return out

    def clocks(self) -> NDArray[np.uint64]:
        """Begin and end of the last steps in ns, oldest first: uint64 [n, 2]."""
        everything = np.zeros(2 * CLOCKS + 1, np.uint64)
        self.device.download(self._clocks.at(), everything)
        count = int(everything[-1])
        table = everything[:-1].reshape(CLOCKS, 2)
        return table[:count] if count <= CLOCKS else np.roll(table, -(count % CLOCKS), axis=0)


def _offset(name: str) -> int:
    fields = CONTROL.fields
    assert fields is not None
    return fields[name][1]


def decode_loop(decoder: Decoder, depth: int | None = None, loop_bound: int = 0) -> DecodeLoop:
    """A `DecodeLoop` that starts counting at the decoder's steps so far (those that warmed it up)."""
    loop = DecodeLoop(decoder, depth, loop_bound)
    loop.launched = loop.harvested = decoder.committed()
    return loop

