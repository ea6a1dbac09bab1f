"""The one writer: whole blocks in, bytes out in order, from a thread of its own, so that nobody else ever waits for the peer to read."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

ROOM_LIMIT = 1 << 20
"""Unsent bytes from which on turns wait."""

REPLY_LIMIT = 64 << 20
"""Unsent bytes (with waiting prompts) from which on nothing more is read."""

STUCK_SECONDS = 0.25

_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Outbox:
    """Writes to a file descriptor (pipe, file, socket, terminal; blocking or not) that it does not own.

    `send` never blocks; the first one starts the thread. When the peer is gone (closed pipe, any write error) `on_closed` is called once
    from the writer thread, everything unsent is dropped and so is all that follows; `error` says why. `on_drain` is called from the writer
    thread after bytes have gone. `fault` is called before each write and may raise OSError (fault injection).
    """

    def __init__(
        self,
        fd: int,
        on_closed: Callable[[], None] | None = None,
        on_drain: Callable[[], None] | None = None,
        fault: Callable[[], None] | None = None,
    ) -> None:
        self.closed = threading.Event()
        self.error: OSError | None = None
        self._fd = fd
        self._on_closed = on_closed
        self._on_drain = on_drain
        self._fault = fault
        self._blocks: deque[bytes] = deque()
        self._unsent = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._asleep = False
        self._dropped = False
        try:
            os.fstat(fd)  # before the bell takes the number of a descriptor that was closed
        except OSError as error:
            self.error = error
        self._bell_out, self._bell_in = os.pipe()
        os.set_blocking(self._bell_in, False)
        os.set_blocking(self._bell_out, False)
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._started = False

    # -- everybody's side

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent to this outbox and not yet taken by the descriptor."""
        return self._unsent

    def send(self, block: bytes) -> bool:
        """Queue a block that stays in one piece, behind all earlier ones. False when the peer is gone or the outbox closed: dropped."""
        if not block:
            return not self.closed.is_set()
        with self._changed:
            if self.closed.is_set() or self._stopping:
                return False
            self._blocks.append(block)
            self._unsent += len(block)
            if not self._started:
                self._started = True
                self._thread.start()
            elif self._asleep:
                self._asleep = False
                self._ring()
        return True

    def room(self, limit: int = ROOM_LIMIT) -> bool:
        """True while less than `limit` bytes are unsent; always true once the peer is gone."""
        return self._unsent < limit

    def wait_room(self, timeout: float | None = None, limit: int = ROOM_LIMIT) -> bool:
        """Wait until there is room or the peer is gone, at most `timeout` seconds (None: for ever). Returns `room(limit)`."""
        if self._unsent < limit:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._unsent < limit, timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is written (or the peer is gone), at most `timeout` seconds. True when nothing is unsent."""
        return self.wait_room(timeout, 1)

    def close(self, timeout: float = 0.0) -> bool:
        """Give what is unsent `timeout` seconds to leave, drop the rest and end the thread. True when nothing was dropped. The descriptor stays open.

        A write that blocks although the descriptor said it would not (a stopped terminal) is left behind after `STUCK_SECONDS`.
        """
        self.flush(timeout)
        with self._changed:
            self._stopping = True
            self._ring()
            begun, self._started = self._started, True
        if not begun:
            self._shut()
        elif self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STUCK_SECONDS)
            if self._thread.is_alive():
                # stuck in a write, or only not scheduled yet: nothing is added any more, so what is unsent tells
                return self._unsent == 0
        return not self._dropped

    # -- the writer thread

    def _ring(self) -> None:
        """Wake the thread. Under the lock, which also guards the bell's descriptors."""
        if not self.closed.is_set():
            with contextlib.suppress(BlockingIOError):  # a full bell wakes it as well
                os.write(self._bell_in, b"!")

    def _run(self) -> None:
        try:
            if self.error is None:
                self._work()
        except OSError as error:
            if not self._stopping:
                self.error = error
        finally:
            self._shut()

    def _work(self) -> None:
        idle, busy = select.poll(), select.poll()
        for poll in (idle, busy):
            poll.register(self._bell_out, select.POLLIN)
        idle.register(self._fd, 0)  # errors are always reported: a peer that leaves is noticed although nothing is written
        busy.register(self._fd, select.POLLOUT)
        while not self._stopping:
            block = self._next()
            if block:
                self._write(block, busy)
            else:
                self._rest(idle)

    def _next(self) -> bytes:
        """What to write next: as many whole blocks as make a decent write. Empty when there is none; then the next `send` rings."""
        with self._changed:
            self._asleep = not self._blocks
            if self._asleep:
                return b""
            blocks = [self._blocks.popleft()]
            size = len(blocks[0])
            while self._blocks and size + len(self._blocks[0]) <= select.PIPE_BUF:
                blocks.append(self._blocks.popleft())
                size += len(blocks[-1])
        return b"".join(blocks)

    def _write(self, block: bytes, poll: select.poll) -> None:
        """Write all of `block`, in pieces that a descriptor reported ready takes without blocking; give up when the outbox is closed."""
        rest = memoryview(block)
        while rest and not self._stopping:
            ready = dict(poll.poll())
            if self._bell_out in ready:
                self._silence()
            if self._fd not in ready:
                continue
            if self._fault is not None:
                self._fault()
            try:
                count = os.write(self._fd, rest[: select.PIPE_BUF])
            except BlockingIOError:
                continue
            rest = rest[count:]
            with self._changed:
                self._unsent -= count
                self._changed.notify_all()
            if self._on_drain is not None:
                self._on_drain()

    def _rest(self, poll: select.poll) -> None:
        for fd, events in poll.poll():
            if fd == self._bell_out:
                self._silence()
            elif events & _GONE:
                raise BrokenPipeError("the peer closed its end")

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell_out, 512)

    def _shut(self) -> None:
        """Drop everything and tell whoever waits."""
        with self._changed:
            gone = not self._stopping
            self.closed.set()
            self._blocks.clear()
            self._dropped = self._unsent > 0
            self._unsent = 0
            self._changed.notify_all()
            os.close(self._bell_in)
            os.close(self._bell_out)
        if gone and self._on_closed is not None:
            self._on_closed()
        if self._on_drain is not None:
            self._on_drain()
