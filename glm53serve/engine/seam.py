"""The seam between the engine and a backend: spans of rows go in as residual streams and come out as residual streams.

State (DSA rows, pool keys, KDA state, convolution windows) lives with whoever runs the layers, one set for each open slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Halt = Callable[[], bool]


def never() -> bool:
    """The halt question of decode steps and one-shot runs: never stop."""
    return False


class Halted(Exception):
    """A forward pass stopped inside the chunk because `halt()` said so; nothing it computed may be used."""

    def __init__(self, layer: int, on_device: bool = False) -> None:
        super().__init__(f"halted at layer {layer}")
        self.layer = layer
        self.on_device = on_device


class DeviceLost(Exception):
    """The device behind a `Layers` is gone; its slots' state is lost."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive rows of one slot; the first has position `start` (0-based). start == positions computed so far in that slot."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass, span after span. A prompt chunk is one span; a decode step is one single-row span a slot (slots are distinct)."""

    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return sum(span.count for span in self.spans)


@dataclass(slots=True)
class Meter:
    """Seconds a backend spent since start, and routed-expert uses found in memory; the engine takes differences."""

    disk: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    found: int = 0
    uses: int = 0


class Layers(Protocol):
    """A run of consecutive layers on one backend."""

    layers: range
    meter: Meter

    def open_slot(self, slot: int, capacity: int) -> None:
        """Make room for `capacity` positions of a slot and empty it."""
        ...

    def reset_slot(self, slot: int) -> None:
        """Empty a slot: KDA state and convolution windows zero; DSA rows are bounded by positions and need no clearing."""
        ...

    def forward(self, streams: NDArray[np.float32], batch: Batch, halt: Halt) -> NDArray[np.float32]:
        """Run all layers over the rows.

        streams: float32 [rows, hc_mult, H]; may be overwritten. Returns the same shape. Asks `halt()` before each layer but the first and
        inside layers wherever time is spent; raises Halted when it answers true (never before the first layer has begun).
        After any exception the touched slots are undefined until `restore` or `reset_slot`.
        """
        ...

    def snapshot(self, slot: int) -> None:
        """Copy everything of the slot that a chunk changes in place (KDA state, windows, raw rows of the incomplete pool) into the process's one buffer."""
        ...

    def restore(self, slot: int) -> None:
        """Put the last snapshot back: the slot is exactly what it was then (rows past that position are garbage by definition)."""
        ...

    def save(self, slot: int) -> Any:
        """An independent copy of what `snapshot` holds, for checkpoints. Has an int attribute `nbytes`."""
        ...

    def load(self, slot: int, copy: Any) -> None:
        """Put a `save`d copy back. DSA rows below that position must still be the ones written then (the engine sees to it)."""
        ...

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Uses of each routed expert by this slot's rows since `clear_uses`: uint32 [sparse layers held, experts]."""
        ...

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses."""
        ...

    def tiers(self) -> NDArray[np.uint8]:
        """Where each routed expert is now: uint8 [sparse layers held, experts], 0 disk, 1 RAM, 2 device."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Head(Protocol):
    """The two ends of the network: embedding rows and logits."""

    def embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Streams of token ids: float32 [rows, hc_mult, H], every stream the embedding row (model spec 0)."""
        ...

    def logits(self, streams: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of rows: streams [rows, hc_mult, H] -> mean over streams, final RMS norm, head -> float32 [rows, V]."""
        ...


class Network(Protocol):
    """One backend that holds everything: embedding, all layers and head. Token ids go in, logits come out, the streams stay where they are computed."""

    def forward_ids(self, ids: NDArray[np.int64], batch: Batch, halt: Halt, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the tokens of a batch through the network: logits float32 [len(rows), V] of the rows listed, in their (ascending) order.

        ids: int64 [batch.rows]. Halts, failures and the state of the slots are those of `Layers.forward`, the logits' bits those of `Head`; the
        head's time goes to the backend's meter. Raises ValueError for an id outside the vocabulary.
        """
        ...
