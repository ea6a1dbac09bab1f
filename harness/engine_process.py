"""An engine as a child process: its environment, its pipes, its frames as they come, its end."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from harness.frames import Frame, FrameParser, ProtocolViolation
from harness.notes import Noted, parse_note

DEFAULT_TIMEOUT = 120.0
_OURS = ("GLM53_", "COLI_", "SERVE", "SNAP", "KV_SLOTS", "NGEN")


class EngineGone(Exception):
    """The engine ended, or closed its stdout, while something was still expected of it."""


class NoAnswer(Exception):
    """The engine did not answer in time."""


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without the engine's own variables, and with `extra`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**env, **extra}


def own_variables() -> dict[str, str]:
    """The engine's variables that are set here, for programs that hand them on (`GLM53_BACKEND=cuda python bench/...`)."""
    return {name: value for name, value in os.environ.items() if name.startswith(("GLM53_", "COLI_"))}


class Engine:
    """An engine process, its three pipes and two reading threads. Frames go to `on_frame` (called under `lock`), and are kept when `keep`.

    `patience`: seconds any wait lasts that is given no timeout of its own.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, keep: bool = False, patience: float = DEFAULT_TIMEOUT) -> None:
        self.command = list(command)
        self.patience = patience
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment(env), bufsize=0
        )
        self.pid = self._process.pid
        self.lock = threading.Condition()
        self.violation: ProtocolViolation | None = None
        self.frames: list[Frame] = []
        self.frame_count = 0
        self.stderr_lines: list[str] = []
        self.notes: list[Noted] = []
        self.stdout_closed = False
        self._keep = keep
        self._abandoned = False
        self._reading = threading.Event()
        self._reading.set()
        self._stdin_lock = threading.Lock()
        self._held: list[bytes] | None = None
        os.set_blocking(self._pipe(self._process.stdin).fileno(), False)
        self._threads = [threading.Thread(target=self._read_stdout, daemon=True), threading.Thread(target=self._read_stderr, daemon=True)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def on_frame(self, frame: Frame) -> None:
        """Called for every frame, under the lock; raises ProtocolViolation to end the reading."""

    def _read_stdout(self) -> None:
        fd = self._pipe(self._process.stdout).fileno()
        parser = FrameParser()
        try:
            while True:
                self._reading.wait()
                if self._abandoned:
                    break
                try:
                    chunk = os.read(fd, 1 << 16)
                except OSError:
                    if self._abandoned:
                        break
                    raise
                at = time.monotonic()
                with self.lock:
                    if not chunk:
                        parser.end()
                        break
                    for frame in parser.feed(chunk, at):
                        self.frame_count += 1
                        if self._keep:
                            self.frames.append(frame)
                        self.on_frame(frame)
                    self.lock.notify_all()
        except ProtocolViolation as violation:
            with self.lock:
                self.violation = violation
        with self.lock:
            self.stdout_closed = True
            self.lock.notify_all()

    def _read_stderr(self) -> None:
        for raw in io.BufferedReader(io.FileIO(self._pipe(self._process.stderr).fileno(), closefd=False)):
            line = raw.decode("utf-8", "replace").rstrip("\n")
            with self.lock:
                self.stderr_lines.append(line)
                try:
                    note = parse_note(line)
                except ProtocolViolation as violation:
                    self.violation = self.violation or violation
                    note = None
                if note is not None:
                    self.notes.append(note)
                self.lock.notify_all()

    def wait_until(self, what: str, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Block until `ready()` (asked under the lock). Raises ProtocolViolation, EngineGone or NoAnswer naming `what`."""
        deadline = time.monotonic() + (self.patience if timeout is None else timeout)
        with self.lock:
            while True:
                if self.violation is not None:
                    raise self.violation
                if ready():
                    return
                if self.stdout_closed and self._process.poll() is not None and not any(t.is_alive() for t in self._threads):
                    raise EngineGone(f"{what}: the engine ended with exit code {self._process.returncode}; stderr ends {self.stderr_lines[-5:]}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NoAnswer(f"{what}: nothing within {self.patience if timeout is None else timeout:g} s; stderr ends {self.stderr_lines[-3:]}")
                self.lock.wait(min(left, 0.2))

    def write(self, data: bytes, timeout: float | None = None) -> float:
        """Write raw bytes to the engine's stdin. Returns the monotonic second just before. Raises EngineGone, NoAnswer."""
        if self._held is not None:
            self._held.append(data)
            return time.monotonic()
        deadline = time.monotonic() + (self.patience if timeout is None else timeout)
        view = memoryview(data)
        with self._stdin_lock:
            fd = self._pipe(self._process.stdin).fileno()
            at = time.monotonic()
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    if not select.select([], [fd], [], max(0.0, deadline - time.monotonic()))[1]:
                        raise NoAnswer(f"the engine does not read its stdin; {len(view)} bytes are left") from None
                except BrokenPipeError:
                    raise EngineGone(f"the engine closed its stdin; exit code {self._process.poll()}, stderr ends {self.stderr_lines[-5:]}") from None
        return at

    @contextlib.contextmanager
    def in_one_write(self) -> Iterator[None]:
        """What is written inside leaves together at the end, so that no pause of this process comes between."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
        self.write(b"".join(held))

    def pause_reading(self) -> None:
        """Stop reading the engine's stdout (what is in the middle of a read still comes)."""
        self._reading.clear()

    def resume_reading(self) -> None:
        """Read on."""
        self._reading.set()

    def close_stdout(self) -> None:
        """Close our end of the engine's stdout, as a gateway that dies does."""
        self._abandoned = True
        self._reading.clear()
        self._pipe(self._process.stdout).close()

    def close_stdin(self) -> None:
        """End of input: the engine finishes what it has and exits."""
        with self._stdin_lock:
            self._pipe(self._process.stdin).close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the engine."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the engine at once."""
        if self._process.poll() is None:
            self._process.kill()

    def wait_exit(self, timeout: float | None = None) -> int:
        """The exit code, once the process has ended and (unless we closed it) all of its output was read. Raises NoAnswer."""
        limit = self.patience if timeout is None else timeout
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the engine did not exit within {limit:g} s; stderr ends {self.stderr_lines[-3:]}") from None
        for thread in self._threads:
            if thread.is_alive() and self._reading.is_set():
                thread.join(10)
        if self.violation is not None:
            raise self.violation
        return code

    def close(self) -> None:
        """End the process, kindly at first, and release the pipes."""
        with contextlib.suppress(OSError, ValueError):
            self.close_stdin()
        self._reading.set()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                self._pipe(pipe).close()
