"""What one layer needs for one batch from the expert store: waiting for reads, handing out what has come."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from types import TracebackType
from typing import Self

from glm53serve.engine.seam import Halt, Halted
from glm53serve.experts.residence import Entry, Key, Residence, State
from glm53serve.experts.supply import Ready

POLL_SECONDS = 0.002
"""How often a waiting layer asks whether it should stop."""


class StoreNeed:
    """See `Need`: a need of experts whose state is in `books`."""

    def __init__(self, books: Residence, layer: int, keys: list[Key], halt: Halt, in_order: bool) -> None:
        self.layer = layer
        self.wanted = len(keys)
        self.found = 0
        self.blocked = 0.0
        self._books = books
        self._keys = keys
        self._halt = halt
        self._in_order = in_order
        self._left: list[Entry] = []
        self._shown: list[Entry] = []

    def __enter__(self) -> Self:
        books = self._books
        with books.lock:
            books.guesses.clear()
            for position, key in enumerate(self._keys):
                entry, found = books.want(position, key)
                self.found += found
                self._left.append(entry)
            if self.found < self.wanted:
                books.work.notify_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        books = self._books
        with books.lock:
            for entry in (*self._left, *self._shown):
                books.leave(entry)
            self._left, self._shown = [], []
            books.work.notify_all()

    def __iter__(self) -> Iterator[list[Ready]]:
        books = self._books
        first = True
        while self._left:
            if not first and self._halt():
                raise Halted(self.layer)
            first = False
            with books.lock:
                for entry in self._shown:
                    books.pin(entry, False)
                if self._shown and books.queue:
                    books.work.notify_all()
                self._shown = self._take()
            yield [entry.ready for entry in self._shown if entry.ready is not None]

    def _take(self) -> list[Entry]:
        """Wait for the next experts that are in memory. Under the lock."""
        began: float | None = None
        try:
            while True:
                failed = next((e for e in self._left if e.error is not None), None)
                if failed is not None and failed.error is not None:
                    raise failed.error
                if self._in_order:
                    count = next((n for n, e in enumerate(self._left) if e.state is not State.READY), len(self._left))
                    taken, left = self._left[:count], self._left[count:]
                else:
                    taken = [e for e in self._left if e.state is State.READY]
                    left = [e for e in self._left if e.state is not State.READY]
                if taken:
                    for entry in taken:
                        entry.shown = True
                    self._left = left
                    return taken
                began = perf_counter() if began is None else began
                self._books.starving = True
                if self._books.queue:
                    self._books.work.notify_all()
                self._books.arrived.wait(POLL_SECONDS)
                if self._books.closed:
                    raise RuntimeError("the expert store is closed")
                if self._halt():
                    raise Halted(self.layer)
        finally:
            self._books.starving = False
            if began is not None:
                self.blocked += perf_counter() - began
