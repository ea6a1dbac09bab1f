"""Which copy of a model the next expert is read from: the one that will have read it first. Pure bookkeeping; whoever uses it holds a lock.

So equal disks share the reads, a slower one takes what the faster one would be later with, and one that is much slower, or fails, stands by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

LATEST = 5
"""What a read takes is the middle of so many: a disk that stalls now and then is not a slow one."""
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
    """What the latest reads `took`, in seconds, each as if it had had the copy to itself; when the `last` one ended, and whether it `failed`."""

    took: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    last: float = 0.0
    failed: bool = False
    under_way: list[Read] = field(default_factory=list)

    def known(self, now: float) -> bool:
        """Whether what the latest reads took can be relied on; else the copy is worth a try."""
        return bool(self.took) and (bool(self.under_way) or now - self.last < max(REST_READS * median(self.took), REST_SECONDS))

    def wait(self, now: float) -> tuple[bool, float, int]:
        """How long a read that begins now would take, for comparison: whether the copy fails, seconds, reads before it."""
        ahead, known = len(self.under_way), self.known(now)
        so_far = max((now - read.began for read in self.under_way), default=0.0) / max(ahead, 1)
        return known and self.failed, (ahead + 1) * max(median(self.took) if known else 0.0, so_far), ahead


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
        if read.anew:
            copy.took.clear()
        copy.took.append((now - read.began) / read.beside)
