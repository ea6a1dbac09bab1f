"""The reader: a thread that takes bytes from a file descriptor the moment they arrive and turns them into frames.

It never waits for output or computing. Each frame is first shown to `on_frame` in the reader thread, which is where CANCEL and STOP take
effect; what that does not handle waits in order for `get`. The bytes that wait are bounded: above the limit reading stops until they drain.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from glm53serve.serve.frames import Frame, Ignored, Prompt
from glm53serve.serve.protocol import Parser

WAITING_LIMIT = 64 << 20
READ_BYTES = 1 << 16
FRAME_OVERHEAD = 512
"""What a waiting frame counts beside its payload, so that a flood of tiny frames is bounded too."""


@dataclass(frozen=True, slots=True)
class Eof:
    """The input has ended; no frame follows."""


def _nothing() -> int:
    return 0


class Inbox:
    """Frames of a file descriptor (pipe, file, socket, terminal; blocking or not) that it does not own.

    on_frame(frame) -> True when it dealt with the frame, False to queue it for `get`; called in the reader thread, must not block.
    backlog() -> bytes that wait elsewhere (unsent replies) and count against `limit`; call `wake` when they have shrunk.
    A descriptor that cannot be read counts as ended; `error` says why. `crashed`: the input counts as ended because the reader failed.
    """

    def __init__(
        self,
        fd: int,
        on_frame: Callable[[Frame], bool],
        backlog: Callable[[], int] = _nothing,
        limit: int = WAITING_LIMIT,
        parser: Parser | None = None,
    ) -> None:
        self.ended = threading.Event()
        self.error: OSError | None = None
        self.crashed = False
        self._fd = fd
        self._on_frame = on_frame
        self._backlog = backlog
        self._limit = limit
        self._parser = parser or Parser()
        self._frames: deque[Frame] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._holding = False
        self._stopping = False
        self._poked = False
        try:
            os.fstat(fd)  # before the bell takes the number of a descriptor that was closed
        except OSError as error:
            self.error = error
        self._bell_out, self._bell_in = os.pipe()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """What the frames waiting for `get` count."""
        return self._waiting

    def get(self, timeout: float | None = None) -> Frame | Eof | None:
        """The next frame; Eof (again and again) behind the last one or after `stop`; None after `timeout` seconds or a `poke`."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._poked or self.ended.is_set(), timeout)
            self._poked = False
            if self._frames:
                frame = self._frames.popleft()
                self._waiting -= _weight(frame)
                if self._holding:
                    self._changed.notify_all()
                return frame
            return Eof() if self.ended.is_set() else None

    def poke(self) -> None:
        """Let a waiting `get` return."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def wake(self) -> None:
        """`backlog` has shrunk: look again whether reading may go on. Cheap while it does."""
        if self._holding:
            with self._changed:
                self._changed.notify_all()

    def stop(self) -> None:
        """End the reader thread, wherever it waits. Frames that wait can still be got, then comes Eof. The descriptor stays open."""
        with self._changed:
            already, self._stopping = self._stopping, True
            if not already and not self.ended.is_set():
                os.write(self._bell_in, b"!")
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the reader thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._bell_out, select.POLLIN)
        try:
            while self.error is None and self._wait_for_space():
                ready = [fd for fd, _ in poll.poll()]
                if self._bell_out in ready:
                    return
                data = self._read()
                if data == b"":
                    self._take(self._parser.eof())
                    return
                if data:
                    self._take(self._parser.feed(data))
        except BaseException:
            self.crashed = True
            raise
        finally:
            with self._changed:
                self.ended.set()
                os.close(self._bell_in)
                os.close(self._bell_out)
                self._changed.notify_all()

    def _read(self) -> bytes | None:
        """What has arrived: empty at the end of the input, None when there was nothing after all."""
        try:
            return os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self.error = error
            return b""

    def _wait_for_space(self) -> bool:
        """Wait while too much waits; False when the inbox was stopped."""
        if self._waiting + self._backlog() >= self._limit:
            with self._changed:
                self._holding = True
                self._changed.wait_for(lambda: self._stopping or self._waiting + self._backlog() < self._limit)
                self._holding = False
        return not self._stopping

    def _take(self, frames: list[Frame]) -> None:
        for frame in frames:
            if self._on_frame(frame):
                continue
            with self._changed:
                self._frames.append(frame)
                self._waiting += _weight(frame)
                self._changed.notify_all()


def _weight(frame: Frame) -> int:
    if isinstance(frame, Prompt):
        return FRAME_OVERHEAD + len(frame.payload)
    if isinstance(frame, Ignored):
        return FRAME_OVERHEAD + len(frame.line)
    return FRAME_OVERHEAD
