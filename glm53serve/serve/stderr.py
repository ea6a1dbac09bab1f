"""Lines for people on stderr, from any thread, without ever waiting for somebody to read them."""

from __future__ import annotations

import os
import select
import stat
import threading

WAITING_LIMIT = 1 << 20
"""Unwritten bytes from which on lines are dropped."""


class StderrLog:
    """Writes lines to a descriptor (pipe, terminal, file, socket) in order; what it does not take at once is left to a thread.

    A full pipe or a stopped terminal holds nobody up: lines wait, at most `limit` bytes of them, the rest is dropped and counted. A closed
    descriptor is no error.
    """

    def __init__(self, fd: int = 2, limit: int = WAITING_LIMIT) -> None:
        self._fd = _of_our_own(fd)
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._lost = 0
        self._draining = False

    def __call__(self, line: str) -> None:
        """Write a line; it is out before this returns unless the descriptor takes nothing more at the moment."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if len(self._waiting) + len(data) > self._limit and self._waiting:
                self._lost += 1
                return
            self._waiting += data
            if self._draining:
                return
            self._write()
            if self._waiting:
                self._draining = True
                threading.Thread(target=self._drain, name="stderr", daemon=True).start()

    def _write(self) -> None:
        """Write what the descriptor takes without waiting. Under the lock."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            while self._waiting and poll.poll(0):
                # no more than that is sure not to block on a pipe that is ready, should it be blocking
                count = os.write(self._fd, self._waiting[: select.PIPE_BUF])
                del self._waiting[:count]
        except BlockingIOError:
            return
        except OSError:
            self._waiting.clear()

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                self._write()
                if not self._waiting and self._lost:
                    self._waiting += b"glm53: %d lines lost, nobody read them\n" % self._lost
                    self._lost = 0
                    self._write()
                if not self._waiting:
                    self._draining = False
                    return


def _of_our_own(fd: int) -> int:
    """The pipe or terminal behind a descriptor, opened once more so that it can be non-blocking for us alone; else the descriptor itself."""
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISFIFO(kind) or os.isatty(fd):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        pass
    return fd
