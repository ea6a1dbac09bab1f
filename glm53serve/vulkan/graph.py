"""Recorded segments: the chain cut into command buffers of bounded work, recorded once for each row-group size and replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm53serve.vulkan.commands import Commands
from glm53serve.vulkan.device import (
    HOST_READ,
    SHADER_READ,
    SHADER_WRITE,
    STAGE_COMPUTE,
    STAGE_HOST,
    STAGE_TRANSFER,
    TRANSFER_READ,
    TRANSFER_WRITE,
    Buffer,
    Device,
)
from glm53serve.vulkan.layer import ChainLayer
from glm53serve.vulkan.linear import Op, Stage
from glm53serve.vulkan.scratch import Scratch

SEGMENT_SECONDS = 0.010
"""Estimated work of a segment. Two are in flight, and a cancel must leave the device idle in less than 30 ms even where the halt word comes late."""
LONGEST_SECONDS, SHORTEST_SECONDS = 0.0125, 0.004
MOST_RECORDINGS = 4
DISPATCH_SECONDS = 4e-6


@dataclass(frozen=True, slots=True)
class Rate:
    """What the estimate of a dispatch's time divides by: operations and bytes a second, and operations of matrix units."""

    flops: float
    nbytes: float
    units: float = 2e13

    def seconds(self, op: Op) -> float:
        """Estimated time of a dispatch."""
        return DISPATCH_SECONDS + op.flops / (self.units if op.units else self.flops) + op.nbytes / self.nbytes

    def scaled(self, factor: float) -> Rate:
        """A device `factor` times as fast."""
        return Rate(self.flops * factor, self.nbytes * factor, self.units * factor)


RATES = {
    "discrete": Rate(4e12, 4e11),
    "integrated": Rate(3e11, 3e10),
    "virtual": Rate(3e11, 3e10),
    "other": Rate(3e11, 3e10),
    "cpu": Rate(1e9, 1e9),
}
"""First estimates by kind of device, low ones; what segments really take corrects them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A recorded command buffer: the layer its first dispatch belongs to, its number of dispatches and estimated seconds."""

    commands: Commands
    layer: int
    dispatches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Graph:
    """A chain recorded for row groups of up to `bucket` rows and `spans` spans, cut by `rate`."""

    bucket: int
    spans: int
    segments: list[Segment]
    rate: Rate
    recordings: int = 1

    @property
    def seconds(self) -> float:
        """Estimated time of a row group."""
        return sum(s.seconds for s in self.segments)

    def better_rate(self, observed: Sequence[float]) -> Rate | None:
        """The rate to cut by after seeing how long segments took, None when this recording is good enough.

        Too long is more than LONGEST_SECONDS, too short a mean under SHORTEST_SECONDS where there is more than one."""
        if self.recordings >= MOST_RECORDINGS or not observed:
            return None
        mean = sum(observed) / len(observed)
        factor = self.seconds / len(self.segments) / mean
        too_long = max(observed) > LONGEST_SECONDS and factor < 0.8
        too_short = mean < SHORTEST_SECONDS and len(self.segments) > 1 and factor > 1.25
        return self.rate.scaled(factor) if too_long or too_short else None

    def free(self) -> None:
        """Give the command buffers back; the device must be done with them."""
        for segment in self.segments:
            segment.commands.free()


def record_graph(
    device: Device, layers: Sequence[ChainLayer], scratch: Scratch, common: object, bucket: int, spans: int, rate: Rate, recordings: int = 1
) -> Graph:
    """Record all layers for a bucket. A segment ends where the next dispatch would take it over SEGMENT_SECONDS."""
    segments: list[Segment] = []
    recorder: _Recorder | None = None
    for layer in layers:
        for stage in layer.stages(device, scratch, bucket, spans):
            for part, seconds in _parts(stage, rate):
                if recorder is not None and recorder.seconds + seconds > SEGMENT_SECONDS:
                    segments.append(recorder.finish())
                    recorder = None
                if recorder is None:
                    recorder = _Recorder(device, common, layer.index)
                recorder.stage(part, seconds)
    if recorder is not None:
        segments.append(recorder.finish())
    return Graph(bucket, spans, segments, rate, recordings)


def _parts(stage: Stage, rate: Rate) -> Iterator[tuple[Stage, float]]:
    """A stage as it is when it fits a segment, else its dispatches one by one, the larger ones cut."""
    seconds = sum(rate.seconds(op) for op in stage)
    if seconds <= SEGMENT_SECONDS:
        yield stage, seconds
        return
    for op in stage:
        for part in op.cut(math.ceil(rate.seconds(op) / SEGMENT_SECONDS)):
            yield [part], rate.seconds(part)


class _Recorder:
    def __init__(self, device: Device, common: object, layer: int) -> None:
        self.device, self.layer = device, layer
        self.commands = Commands(device)
        self.commands.begin(common)
        self.dispatches, self.seconds = 0, 0.0

    def stage(self, stage: Stage, seconds: float) -> None:
        written: set[tuple[object, int]] = set()
        for op in stage:
            target = (op.buffers[3].handle, op.buffers[3].offset) if op.module.startswith("gem") else None
            if target is not None and target in written:
                self.commands.kernel_barrier()
                written.clear()
            if target is not None:
                written.add(target)
            pipeline = self.device.pipeline(op.module, op.constants)
            self.commands.dispatch(pipeline, self.device.bind(op.buffers), op.push, op.groups)
            self.dispatches += 1
        self.commands.kernel_barrier()
        self.seconds += seconds

    def finish(self) -> Segment:
        self.commands.end()
        return Segment(self.commands, self.layer, self.dispatches, self.seconds)


def record_entry(device: Device, copies: Sequence[tuple[Buffer, Buffer]]) -> Commands:
    """Host ranges into device ranges, after whatever the device still does with those."""
    commands = Commands(device)
    commands.begin()
    commands.barrier(STAGE_COMPUTE | STAGE_TRANSFER, STAGE_TRANSFER, SHADER_WRITE | TRANSFER_WRITE, TRANSFER_READ | TRANSFER_WRITE)
    for source, target in copies:
        commands.copy(source, target)
    commands.barrier(STAGE_TRANSFER, STAGE_COMPUTE, TRANSFER_WRITE, SHADER_READ | SHADER_WRITE)
    commands.end()
    return commands


def record_exit(device: Device, source: Buffer, target: Buffer) -> Commands:
    """A device range into a host range that the host reads when this is done."""
    commands = Commands(device)
    commands.begin()
    commands.barrier(STAGE_COMPUTE, STAGE_TRANSFER, SHADER_WRITE, TRANSFER_READ)
    commands.copy(source, target)
    commands.barrier(STAGE_TRANSFER, STAGE_HOST, TRANSFER_WRITE, HOST_READ)
    commands.end()
    return commands
