"""What a layer asks for its routed experts, whether they are all in memory or some must be read first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.seam import Halt, Halted
from glm53serve.model.weights import ExpertSource, FfnWeights


@dataclass(slots=True, eq=False)
class Ready:
    """A routed expert in memory. `packed` belongs to whoever computes with it and lives exactly as long as the expert stays where it is."""

    layer: int
    expert: int
    weights: FfnWeights
    packed: Any = None


class Need(Protocol):
    """The experts one layer needs for one batch: a context manager, iterated once.

    Yields lists of experts that are in memory; a list is valid until the next one is asked for. Asks `halt` before every list but the
    first and while it waits, and raises Halted. `found` of `wanted` were in memory at the start; `blocked` are the seconds spent waiting.
    """

    wanted: int
    found: int
    blocked: float

    def __enter__(self) -> Self:
        """Begin to read what is missing."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give up what was not reached."""
        ...

    def __iter__(self) -> Iterator[list[Ready]]:
        """The experts, each once."""
        ...


class Supply(Protocol):
    """Where a layer's routed experts come from."""

    def need(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int, halt: Halt, in_order: bool) -> Need:
        """The distinct `experts` (ascending) that `rows` rows chose, each `counts` times.

        in_order: lists come in ascending order of the expert; else those in memory come first and the others as they arrive.
        """
        ...

    def foresee(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Experts that a need of this layer is likely to want soon, in the order in which to read them. Any read begun for them is only a
        guess: it changes no result, and makes room for what a need wants."""
        ...

    @property
    def stable(self) -> bool:
        """True once every expert is in memory and none will ever move: addresses may be kept."""
        ...

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """One expert's weights: those in memory while `stable`, else a copy."""
        ...

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of a layer are in memory now: bool [experts]."""
        ...

    def close(self) -> None:
        """Stop reading, release memory."""
        ...


class _NeedHeld:
    """A need of a source that hands out experts at once."""

    def __init__(self, layer: int, experts: Sequence[Ready], halt: Halt) -> None:
        self.layer = layer
        self.wanted = self.found = len(experts)
        self.blocked = 0.0
        self._experts = experts
        self._halt = halt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def __iter__(self) -> Iterator[list[Ready]]:
        if self._halt():
            raise Halted(self.layer)
        yield list(self._experts)


@dataclass(slots=True)
class HeldExperts:
    """A `Supply` over any `ExpertSource`, which is asked for each expert once and whose answers are kept."""

    source: ExpertSource
    experts: int
    stable: bool = False
    _kept: dict[tuple[int, int], Ready] = field(default_factory=dict)

    def need(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int, halt: Halt, in_order: bool) -> Need:
        """See `Supply`: one list of all."""
        return _NeedHeld(layer, [self._ready(layer, int(e)) for e in experts], halt)

    def foresee(self, layer: int, experts: NDArray[np.int64]) -> None:
        """See `Supply`: nothing to do."""

    def _ready(self, layer: int, expert: int) -> Ready:
        key = (layer, expert)
        if key not in self._kept:
            self._kept[key] = Ready(layer, expert, self.source.expert(layer, expert))
        return self._kept[key]

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """See `Supply`."""
        return self._ready(layer, expert).weights

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """All of them."""
        return np.ones(self.experts, np.bool_)

    def close(self) -> None:
        """Forget them."""
        self._kept.clear()


def supply_of(source: ExpertSource, experts: int) -> Supply:
    """The source itself when it is a `Supply` too (the expert store), else one that holds what it hands out. experts: number a layer."""
    if hasattr(source, "need"):
        return source  # type: ignore[return-value]
    return HeldExperts(source, experts)
