"""All that a chain has recorded, by row-group size, made at first use and made again when segments turn out too long or too short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glm53serve.vulkan.commands import Commands
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.graph import RATES, Graph, Rate, record_entry, record_exit, record_graph
from glm53serve.vulkan.groups import Group
from glm53serve.vulkan.layer import ChainLayer
from glm53serve.vulkan.scratch import Scratch

Ring = tuple[Buffer, Buffer, Buffer]
"""Host ranges of one row group: parameters, rows in, rows out."""


class Recordings:
    """Graphs for (bucket, spans) and the copies before and after them. A given `rate` is kept, else what segments took corrects it."""

    def __init__(
        self, device: Device, layers: Sequence[ChainLayer], scratch: Scratch, common: object, parameters: Buffer, rings: Sequence[Ring], rate: Rate | None
    ) -> None:
        self.device, self.layers, self.scratch = device, layers, scratch
        self.rings, self.parameters, self.common = rings, parameters, common
        self.rate, self._adapts = rate or RATES[device.info.kind], rate is None
        self.graphs: dict[tuple[int, int], Graph] = {}
        self._entries: dict[tuple[int, int], tuple[Commands, Commands]] = {}

    def graph_of(self, group: Group, most: int) -> Graph:
        """The graph a group runs on; `most` is the largest row group."""
        size = bucket(group.rows, most)
        return self.graph(size, 1 if len(group.pieces) == 1 else size)

    def graph(self, size: int, spans: int) -> Graph:
        """The graph for up to `size` rows of up to `spans` spans."""
        if (size, spans) not in self.graphs:
            with self.device.lock:
                self.graphs[size, spans] = record_graph(self.device, self.layers, self.scratch, self.common, size, spans, self.rate)
        return self.graphs[size, spans]

    def adapt(self, observed: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Record again what the last pass showed to be cut too coarsely or too finely; the device must be idle."""
        if not self._adapts:
            return
        for key, seconds in observed.items():
            graph = self.graphs[key]
            rate = graph.better_rate(seconds)
            if rate is not None:
                with self.device.lock:
                    graph.free()
                    self.graphs[key] = record_graph(self.device, self.layers, self.scratch, self.common, *key, rate, graph.recordings + 1)

    def copies(self, ring: int, size: int, stride: int) -> tuple[Commands, Commands]:
        """The copies of a ring's parameters and rows to the device, and of its rows back."""
        if (ring, size) not in self._entries:
            parameters, into, out = self.rings[ring]
            nbytes = 4 * size * stride
            x = self.scratch["x"].part(0, nbytes)
            entry = record_entry(self.device, [(parameters, self.parameters), (into.part(0, nbytes), x)])
            self._entries[ring, size] = entry, record_exit(self.device, x, out.part(0, nbytes))
        return self._entries[ring, size]


def bucket(rows: int, most: int) -> int:
    """The row-group size that `rows` rows run on: a power of two, or the largest there is."""
    size = 1
    while size < rows:
        size *= 2
    return min(size, most)
