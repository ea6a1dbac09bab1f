"""What a slot remembers, and what a prompt may reuse of it.

A slot's rows come in two kinds: DSA rows belong to positions and can be cut back, KDA state belongs to the whole past and cannot. So a
prompt goes on from the end of what is computed, or from a checkpoint (a copy of the KDA side at some position), or from nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Word = Literal["cold", "equal", "shorter", "diverged", "extend", "pin"]
Origin = Literal["pin", "boundary", "rewind"]

BOUNDARIES_A_SLOT = 8
_clock = itertools.count()


@dataclass(slots=True)
class Checkpoint:
    """A copy of one slot's KDA side at `length` tokens of its history, one copy a backend, with the logits row that followed."""

    length: int
    origin: Origin
    copies: list[Any]
    logits: NDArray[np.float32]
    nbytes: int
    used: int = field(default_factory=lambda: next(_clock))


@dataclass(slots=True)
class Slot:
    """One conversation: `history` are the tokens it was given or gave, the first `filled` of them are computed.

    `logits` is the row that followed position filled - 1 (None when it was not computed); `resumable` tells whether an equal prompt may be
    answered from it (not after scored turns).
    """

    index: int
    history: list[int] = field(default_factory=list)
    filled: int = 0
    logits: NDArray[np.float32] | None = None
    resumable: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def forget(self) -> None:
        """Empty the slot; its checkpoints die with its history."""
        self.history.clear()
        self.filled = 0
        self.logits = None
        self.resumable = False
        self.checkpoints.clear()

    def cut(self, length: int) -> None:
        """Positions from `length` on are about to be overwritten: drop them, and the checkpoints that need them."""
        del self.history[length:]
        self.checkpoints = [c for c in self.checkpoints if c.length <= length]

    def check_integrity(self) -> None:
        """The invariants that hold whenever no pass runs; AssertionError names the broken one."""
        assert 0 <= self.filled <= len(self.history) <= self.filled + 1, (self.index, self.filled, len(self.history))
        assert all(c.length <= len(self.history) for c in self.checkpoints), (self.index, [c.length for c in self.checkpoints])


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt reuses: `reused` computed tokens, from the slot as it is or from `checkpoint`, and the word that says why."""

    word: Word
    reused: int
    filled_before: int
    common: int
    checkpoint: Checkpoint | None = None


def plan_reuse(slot: Slot, prompt: Sequence[int]) -> Reuse:
    """Decide what `prompt` may reuse of `slot`; changes nothing."""
    common = _common_prefix(slot.history, prompt)
    filled = slot.filled
    covered = min(common, filled)
    if filled == 0:
        return Reuse("cold", 0, 0, 0)
    if len(prompt) == filled == common and slot.logits is not None and slot.resumable:
        return Reuse("equal", filled, filled, covered)
    if common >= filled and len(prompt) > filled:
        return Reuse("extend", filled, filled, covered)
    fitting = [c for c in slot.checkpoints if c.length <= common and c.length < len(prompt)]
    if fitting:
        deepest = max(fitting, key=lambda c: (c.length, c.origin != "rewind"))
        return Reuse("shorter" if deepest.origin == "rewind" else "pin", deepest.length, filled, covered, deepest)
    if common == len(prompt):
        return Reuse("equal" if common == filled else "shorter", 0, filled, covered)
    return Reuse("diverged", 0, filled, covered)


def _common_prefix(history: Sequence[int], prompt: Sequence[int]) -> int:
    for position, (have, want) in enumerate(zip(history, prompt, strict=False)):
        if have != want:
            return position
    return min(len(history), len(prompt))


class CheckpointPool:
    """Keeps checkpoints within their limits: `pins` a slot, one rewind a slot, boundaries within `budget` bytes over all slots."""

    def __init__(self, slots: list[Slot], pins: int, budget: int) -> None:
        self._slots = slots
        self._pins = pins
        self._budget = budget

    def wanted(self, origin: Origin) -> bool:
        """True when a checkpoint of this origin would be kept at all."""
        return {"pin": self._pins > 0, "boundary": self._budget > 0, "rewind": True}[origin]

    def add(self, slot: Slot, new: Checkpoint) -> None:
        """Keep a checkpoint of `slot`; older ones of the same length and origin, and whatever is over a limit, go."""
        slot.checkpoints = [c for c in slot.checkpoints if not (c.origin == new.origin and (c.length == new.length or new.origin == "rewind"))]
        slot.checkpoints.append(new)
        self._trim(slot, "pin", self._pins)
        self._trim(slot, "boundary", BOUNDARIES_A_SLOT)
        while self.boundary_bytes() > self._budget:
            owner, oldest = min(((s, c) for s in self._slots for c in s.checkpoints if c.origin == "boundary"), key=lambda pair: pair[1].used)
            owner.checkpoints.remove(oldest)

    def boundary_bytes(self) -> int:
        """Bytes of all boundary checkpoints."""
        return sum(c.nbytes for s in self._slots for c in s.checkpoints if c.origin == "boundary")

    def touch(self, checkpoint: Checkpoint) -> None:
        """Mark a checkpoint as used now."""
        checkpoint.used = next(_clock)

    @staticmethod
    def _trim(slot: Slot, origin: Origin, limit: int) -> None:
        kept = sorted((c for c in slot.checkpoints if c.origin == origin), key=lambda c: c.used)
        for extra in kept[: max(0, len(kept) - limit)]:
            slot.checkpoints.remove(extra)
