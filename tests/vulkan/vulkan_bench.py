"""Running single kernels: buffers from arrays, one row group's parameters, one submission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.vulkan.commands import Commands
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.linear import Op, Stage

SLACK_FLOATS = 256


class Bench:
    """Buffers and a parameter block on a device for a group of rows: (slot, position) of each; one span a slot in order."""

    def __init__(self, device: Device, rows: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int, int]] = ()) -> None:
        self.device = device
        spans = spans or [(0, len(rows), 0, 1)]
        table = 16 + 4 * len(rows)
        words = np.zeros(table + 8 * len(spans), np.uint32)
        words[:3] = len(rows), len(spans), table
        for number, (first, count, source, target) in enumerate(spans):
            words[table + 8 * number : table + 8 * number + 4] = first, count, source, target
            for i in range(count):
                words[16 + 4 * (first + i) : 20 + 4 * (first + i)] = *rows[first + i], number, i
        self.parameters = self.buffer(words)
        self.halt = device.host(64)
        self.common = device.bind([self.halt, self.parameters], device.common_layout)

    def buffer(self, values: NDArray[Any]) -> Buffer:
        """An array on the device, with readable slack behind it."""
        made = self.device.local(values.nbytes + 4 * SLACK_FLOATS)
        self.device.zero([made])
        self.device.put(made, values)
        return made

    def empty(self, *shape: int, fill: float = 7.0) -> Buffer:
        """Floats that show whether they were written."""
        return self.buffer(np.full(shape, fill, np.float32))

    def read(self, buffer: Buffer, shape: tuple[int, ...], dtype: type = np.float32) -> NDArray[Any]:
        """What is in a buffer."""
        count = int(np.prod(shape))
        return self.device.get(buffer, dtype)[:count].reshape(shape)

    def run(self, *stages: Stage | Op) -> None:
        """Run stages, a barrier after each."""
        commands = Commands(self.device)
        commands.begin(self.common)
        for stage in stages:
            for op in stage if isinstance(stage, list) else [stage]:
                commands.dispatch(self.device.pipeline(op.module, op.constants), self.device.bind(op.buffers), op.push, op.groups)
                commands.kernel_barrier()
        commands.run()
