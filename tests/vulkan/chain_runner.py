"""Driving a chain over a tiny model, and what the reference makes of the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from glm53serve.engine.seam import Batch, Halt, Span, never
from glm53serve.model.config import ModelConfig
from glm53serve.model.reference import ReferenceModel
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.graph import Rate
from glm53serve.vulkan.layers import VulkanLayers

F32 = NDArray[np.float32]
EVERY_STAGE = Rate(1.0, 1.0)
"""A device so slow that every stage becomes a segment of its own."""


def chain(device: Device, model: Any, layers: int | None = None, **options: Any) -> VulkanLayers:
    """The first layers of a model on a shared device, two slots of 300 positions open."""
    config: ModelConfig = model.config
    kept = {"slots": 2, "capacity": 300, "rows": 16, **options}
    made = VulkanLayers(device, config, range(layers or config.num_layers), model.layer, model, owns_device=False, **kept)
    for slot in range(kept["slots"]):
        made.open_slot(slot, kept["capacity"])
    return made


@dataclass
class Runner:
    """A chain between the reference's embedding and its remaining layers and logits, all in float64 but the chain."""

    reference: ReferenceModel
    layers: VulkanLayers

    def streams(self, ids: ArrayLike, start: int = 0, slot: int = 0, halt: Halt = never) -> F32:
        """The chain's streams of a span."""
        rows = self.reference.embed(ids).astype(np.float32)
        return self.layers.forward(rows, Batch((Span(slot, start, len(rows)),)), halt)

    def pieces(self, ids: ArrayLike, sizes: Sequence[int], slot: int = 0) -> F32:
        """The streams of a sequence fed in pieces."""
        out, at = [], 0
        for size in sizes:
            out.append(self.streams(np.asarray(ids)[at : at + size], at, slot))
            at += size
        return np.concatenate(out)

    def logits(self, streams: F32) -> NDArray[np.float64]:
        """Logits of whole sequences' streams: what the chain does not hold is the reference's."""
        wide = streams.astype(np.float64)
        for index in range(self.layers.layers.stop, self.reference.config.num_layers):
            wide, _, _ = self.reference.layer_forward(index, wide, self.reference.new_layer_state(index), 0)
        return self.reference.logits(wide)


def relative(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(got - want).max() / np.abs(want).max())


class Countdown:
    """A halt that says yes from its n-th question on."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        self.left -= 1
        return self.left <= 0
