"""Which copy of a model the next expert is read from: the one that will have read it first. Pure bookkeeping; whoever uses it holds a lock.

So equal disks share the reads, a slower one takes what the faster one would be later with, and one that is much slower, or fails, stands by.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from time import perf_counter

NEWEST = 0.25
"""Share of the newest read in a copy's mean."""
REST_READS = 50
"""A copy that is passed over is tried again when as many of its reads would have fitted since its last one: that costs a fiftieth of the time."""
REST_SECONDS = 1.0
"""... and not before this, so that one that fails at once is left alone for a while too."""


@dataclass(frozen=True, slots=True)
class Read:
    """A read under way: of which copy, since when, with how many on that copy at its beginning (itself included); `anew`: what was known of the
    copy before is too old to count."""

    copy: int
    began: float
    beside: int
    anew: bool


@dataclass(slots=True)
class _Copy:
    """`seconds` a read takes when it has the copy to itself (a mean, None before the first), when the `last` one ended, whether it `failed`."""

    seconds: float | None = None
    last: float = 0.0
    failed: bool = False
    under_way: list[Read] = field(default_factory=list)

    def known(self, now: float) -> bool:
        """Whether what the last reads took can be relied on; else the copy is worth a try."""
        return self.seconds is not None and (bool(self.under_way) or now - self.last < max(REST_READS * self.seconds, REST_SECONDS))

    def wait(self, now: float) -> tuple[bool, float, int]:
        """How long a read that begins now would take, for comparison: whether the copy fails, seconds, reads before it."""
        ahead, known = len(self.under_way), self.known(now)
        so_far = max((now - read.began for read in self.under_way), default=0.0) / max(ahead, 1)
        mean = self.seconds if known and self.seconds is not None else 0.0
        return known and self.failed, (ahead + 1) * max(mean, so_far), ahead


class Copies:
    """The reads of `count` copies, at most `most` under way on each. `clock`: seconds."""

    def __init__(self, count: int, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self._copies = [_Copy() for _ in range(count)]
        self._most = most
        self._clock = clock

    def begin(self, tried: Container[int] = ()) -> Read | None:
        """Begin a read on the copy that will have it first, of those not `tried`; None when that one has its fill: wait until a read ends."""
        now = self._clock()
        _, number = min((copy.wait(now), number) for number, copy in enumerate(self._copies) if number not in tried)
        copy = self._copies[number]
        if len(copy.under_way) >= self._most:
            return None
        read = Read(number, now, len(copy.under_way) + 1, not copy.known(now))
        copy.under_way.append(read)
        return read

    def end(self, read: Read, failed: bool = False) -> None:
        """A read has ended."""
        copy, now = self._copies[read.copy], self._clock()
        copy.under_way.remove(read)
        copy.last, copy.failed = now, failed
        took = (now - read.began) / read.beside
        copy.seconds = took if copy.seconds is None or read.anew else (1 - NEWEST) * copy.seconds + NEWEST * took
