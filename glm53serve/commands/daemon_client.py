"""A small client of the daemon: starts `glm53serve serve` as a child and runs one turn at a time on its slot 0."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

READY = b"\x01\x01READY\x01\x01\n"
GRACE_SECONDS = 5.0


class DaemonGone(Exception):
    """The daemon ended, or never began; the message is one line, empty when the daemon has said why on stderr."""


@dataclass(slots=True)
class Outcome:
    """How a turn ended: `error` is empty after DONE, else the error's code and detail; `limited` when the budget or the capacity ended it."""

    error: str = ""
    limited: bool = False


class DaemonClient:
    """One daemon child in a process session of its own, so that a terminal's Ctrl-C does not reach it. Not thread-safe; use from the main thread."""

    def __init__(self, model: Path, backend: str | None) -> None:
        command = [sys.executable, "-m", "glm53serve", "serve", "--model", str(model), "--slots", "1"]
        if backend is not None:
            command += ["--backend", backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._id = 0

    def wait_ready(self) -> None:
        """Block until the daemon can take prompts. Raises DaemonGone when it cannot start."""
        line = self._out.readline()
        if line.startswith(b"LOAD_FAIL "):
            raise DaemonGone("")
        if line != READY:
            raise self._gone()

    def turn(self, prompt: bytes, max_tokens: int, temperature: float, top_p: float, outcome: Outcome) -> Iterator[bytes]:
        """Send a prompt and yield the answer's pieces as they come (a character may be split over two); `outcome` is filled at the end.

        While it runs, Ctrl-C sends CANCEL instead of raising, and the turn then ends with `outcome.error` CANCELLED.
        """
        self._id += 1
        with _Cancelling(self, self._id) as cancelling:
            self._send(b"PROMPT %d 0 %d %d %r %r\n%s\n" % (self._id, len(prompt), max_tokens, temperature, top_p, prompt))
            cancelling.prompt_is_out()
            while True:
                fields, text = self._frame()
                if fields[1] != str(self._id):
                    continue  # HITS, PROF, EMAP, or NOT_FOUND of a CANCEL that came too late
                if fields[0] == "DATA":
                    yield text
                elif fields[0] == "DONE":
                    outcome.limited = fields[-1] == "1"
                    return
                elif fields[0] == "ERROR":
                    outcome.error = " ".join(fields[2:])
                    return

    def cancel(self, id_: int) -> None:
        """Send CANCEL. A daemon that is gone is noticed by whoever reads."""
        with contextlib.suppress(DaemonGone):
            self._send(b"CANCEL %d\n" % id_)

    def close(self, at_once: bool = False) -> None:
        """End the daemon: by the end of its input, or `at_once` by SIGTERM; by force when it does not go, or when Ctrl-C says so."""
        if at_once:
            self._process.terminate()
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        self._out.close()

    # -- the pipe

    @property
    def _in(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, data: bytes) -> None:
        try:
            self._in.write(data)
            self._in.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _frame(self) -> tuple[list[str], bytes]:
        """The next frame's fields (at least two) and the bytes that belong to it."""
        line = self._out.readline()
        if not line.endswith(b"\n"):
            raise self._gone()
        fields = line.decode("utf-8", "replace").split()
        return fields + [""] * (2 - len(fields)), self._out.read(int(fields[2]) + 1)[:-1] if fields[:1] == ["DATA"] else b""

    def _gone(self) -> DaemonGone:
        try:
            code = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return DaemonGone("the daemon does not speak the protocol")
        return DaemonGone(f"the daemon ended with exit code {code}")


class _Cancelling:
    """While entered, SIGINT means CANCEL of one turn: once, and never before its prompt is wholly written.

    A handler that does not raise lets an interrupted read go on where it was, so no byte of the stream is lost.
    """

    def __init__(self, client: DaemonClient, id_: int) -> None:
        self._client = client
        self._id = id_
        self._asked = False
        self._out = False

    def __enter__(self) -> _Cancelling:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def prompt_is_out(self) -> None:
        """From now on a CANCEL may be written."""
        self._out = True
        if self._asked:
            self._client.cancel(self._id)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if first and self._out:
            self._client.cancel(self._id)
