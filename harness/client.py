"""A strict client of the serve protocol: starts an engine as a gateway does and believes nothing it says without checking.

    with Client(["glm53"], model, slots=2) as client:
        turn = client.submit(b"What is 2 + 3?", max_tokens=16).wait()
        print(turn.text)

Every frame is checked for its grammar (`harness.frames`) and its order (`harness.ledger`); the first violation is raised by whatever
call is waiting, and by every later one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from harness.frames import Frame, FrameParser, ProtocolViolation
from harness.ledger import Ledger, Turn

DEFAULT_TIMEOUT = 120.0
_OURS = ("GLM53_", "COLI_", "SERVE", "SNAP", "KV_SLOTS", "NGEN")


class EngineGone(Exception):
    """The engine ended, or closed its stdout, while something was still expected of it."""


class NoAnswer(Exception):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True)
class ReuseLine:
    """`REUSE` on stderr: what a turn took over from its slot."""

    id: int
    reused: int
    prompt_tokens: int
    filled_before: int
    common: int
    word: str


@dataclass(frozen=True, slots=True)
class CancelLine:
    """`CANCEL` on stderr: where a cancelled turn stood."""

    id: int
    prompt_tokens: int
    emitted: int
    filled: int


@dataclass(frozen=True, slots=True)
class HaltLine:
    """`HALT` on stderr: a chunk stopped inside."""

    layer: int
    layers: int
    filled: int
    on_device: bool


Noted = ReuseLine | CancelLine | HaltLine
_REUSE = re.compile(r"REUSE (\d+) (\d+) (\d+) (\d+) (\d+) (cold|equal|shorter|diverged|extend|pin|image)")
_CANCEL = re.compile(r"CANCEL (\d+) (\d+) (\d+) (\d+)")
_HALT = re.compile(r"HALT layer (\d+) of (\d+), back to (\d+)( on the device)?")


def parse_note(line: str) -> Noted | None:
    """A REUSE, CANCEL or HALT line of stderr, or None for any other line. Raises ProtocolViolation on a malformed one."""
    if m := _REUSE.fullmatch(line):
        return ReuseLine(int(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), m[6])
    if m := _CANCEL.fullmatch(line):
        return CancelLine(int(m[1]), int(m[2]), int(m[3]), int(m[4]))
    if m := _HALT.fullmatch(line):
        return HaltLine(int(m[1]), int(m[2]), int(m[3]), m[4] is not None)
    if re.match(r"(REUSE|CANCEL|HALT) [0-9l]", line):
        raise ProtocolViolation(f"a malformed note on stderr: {line[:200]!r}")
    return None


def prompt_frame(
    id: int,
    slot: int,
    prompt: bytes,
    max_tokens: int,
    temperature: float | str = 0,
    top_p: float | str = 1,
    *,
    seed: int | None = None,
    logprobs: int = 0,
    pin: int = 0,
    verb: str = "PROMPT",
) -> bytes:
    """The bytes of one PROMPT (or SUBMIT) frame."""
    keys = (f" seed={seed}" if seed is not None else "") + (f" logprobs={logprobs}" if logprobs else "") + (f" pin={pin}" if pin else "")
    return f"{verb} {id} {slot} {len(prompt)} {max_tokens} {temperature} {top_p}{keys}\n".encode() + prompt + b"\n"


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


class Client(Engine):
    """A gateway's side of one engine process, with the order of every frame checked.

    engine: the executable and its leading arguments; it is started with one bare number after them, as gateways do.
    model: model directory. slots: KV_SLOTS. env: further variables. Raises EngineGone when it cannot be started.
    """

    def __init__(
        self,
        engine: Sequence[str],
        model: str | Path,
        *,
        slots: int = 1,
        env: Mapping[str, str] | None = None,
        cap: str = "0",
        keep: bool = False,
        patience: float = DEFAULT_TIMEOUT,
    ) -> None:
        given = dict(env or {})
        base = {"SERVE": "1", "SERVE_BATCH": "1", "SNAP": str(model), "KV_SLOTS": str(slots), "NGEN": "1024", "GLM53_VERBOSE": "1"}
        merged = {**base, **given}
        self.ledger = Ledger(accept=merged.get("GLM53_ACCEPT", "1") != "0", caps=merged.get("GLM53_CAPS", "1") != "0")
        self._next_id = 1
        self._sparse_wait = 1.0
        super().__init__([*engine, cap], merged, keep=keep, patience=patience)
        try:
            self.wait_until("READY", lambda: self.ledger.ready or self.ledger.load_fail is not None)
            if self.ledger.load_fail is None:
                with contextlib.suppress(NoAnswer):
                    self.wait_until("the first EMAP", lambda: self.ledger.emap is not None, self._sparse_wait)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.ready_at = time.monotonic()

    def on_frame(self, frame: Frame) -> None:
        """Books the frame."""
        self.ledger.feed(frame)

    def fresh_id(self) -> int:
        """An id not used before by this client."""
        self._next_id += 1
        return self._next_id - 1

    def submit(
        self,
        prompt: bytes,
        slot: int = 0,
        max_tokens: int = 16,
        temperature: float | str = 0,
        top_p: float | str = 1,
        *,
        seed: int | None = None,
        logprobs: int = 0,
        pin: int = 0,
        id: int | None = None,
        verb: str = "PROMPT",
        cancel: bool = False,
    ) -> Turn:
        """Send a prompt (with `cancel`, its CANCEL in the same write). Returns at once; see `Turn.wait`."""
        number = self.fresh_id() if id is None else id
        data = prompt_frame(number, slot, prompt, max_tokens, temperature, top_p, seed=seed, logprobs=logprobs, pin=pin, verb=verb)
        turn = Turn(number, slot, max_tokens, logprobs, wait_for=self._wait_turn)
        with self.lock:
            self.ledger.submitted(turn)
            if cancel:
                self.ledger.cancelled(number)
        turn.sent_at = self.write(data + (f"CANCEL {number}\n".encode() if cancel else b""))
        if cancel:
            turn.cancelled_at = turn.sent_at
        return turn

    def raw(self, data: bytes, id: int, *, max_tokens: int = 0, logprobs: int = 0) -> Turn:
        """Write bytes made by hand that must be answered under `id` (0 is allowed): by an ERROR, or, given a budget, as a turn."""
        turn = Turn(id, 0, max_tokens, logprobs, raw=True, wait_for=self._wait_turn)
        with self.lock:
            self.ledger.submitted(turn)
        turn.sent_at = self.write(data)
        return turn

    def cancel(self, turn: Turn | int) -> float:
        """Send CANCEL. Returns the monotonic second just before the write."""
        number = turn if isinstance(turn, int) else turn.id
        with self.lock:
            self.ledger.cancelled(number)
        at = self.write(f"CANCEL {number}\n".encode())
        if isinstance(turn, Turn):
            turn.cancelled_at = at
        return at

    def stop(self, turn: Turn | int) -> float:
        """Send STOP. Returns the monotonic second just before the write."""
        if isinstance(turn, Turn):
            turn.stopped = True
        return self.write(f"STOP {turn if isinstance(turn, int) else turn.id}\n".encode())

    def answer(self, prompt: bytes, slot: int = 0, max_tokens: int = 16, *, logprobs: int = 0, pin: int = 0) -> Turn:
        """Submit greedily and wait; the turn must end with DONE. Raises ProtocolViolation when it does not."""
        turn = self.submit(prompt, slot, max_tokens, logprobs=logprobs, pin=pin).wait()
        if turn.done is None:
            raise ProtocolViolation(f"turn {turn.id} ended with {turn.outcome}, expected DONE")
        return turn

    def _wait_turn(self, turn: Turn, timeout: float | None) -> Turn:
        self.wait_until(f"the end of turn {turn.id}", lambda: self.ledger.settled(turn), timeout)
        return turn

    def wait_tokens(self, turn: Turn, count: int, timeout: float | None = None) -> None:
        """Block until `count` DATA frames of the turn have come, or it has ended."""
        self.wait_until(f"{count} tokens of turn {turn.id}", lambda: len(turn.tokens) >= count or turn.ended, timeout)

    def wait_accept(self, turn: Turn, timeout: float | None = None) -> None:
        """Block until the ACCEPT of the turn has come, or it has ended."""
        self.wait_until(f"the ACCEPT of turn {turn.id}", lambda: turn.accept is not None or turn.ended, timeout)

    def not_found(self, id: int, timeout: float | None = None) -> None:
        """Send CANCEL for an id that is not in flight and wait for its NOT_FOUND: a cheap proof that the stream is aligned."""
        before = len(self.ledger.not_found)
        self.cancel(id)
        self.wait_until(f"NOT_FOUND of {id}", lambda: any(e.id == id for e in self.ledger.not_found[before:]), timeout)

    def reuse(self, turn: Turn, timeout: float = 10.0) -> ReuseLine:
        """The REUSE line of a turn."""
        found: list[ReuseLine] = []

        def look() -> bool:
            found[:] = [n for n in self.notes if isinstance(n, ReuseLine) and n.id == turn.id][-1:]
            return bool(found)

        self.wait_until(f"the REUSE line of turn {turn.id}", look, timeout)
        return found[0]

    def cancel_line(self, turn: Turn, timeout: float = 10.0) -> CancelLine:
        """The CANCEL line of a turn."""
        found: list[CancelLine] = []

        def look() -> bool:
            found[:] = [n for n in self.notes if isinstance(n, CancelLine) and n.id == turn.id][-1:]
            return bool(found)

        self.wait_until(f"the CANCEL line of turn {turn.id}", look, timeout)
        return found[0]

    def expect_quiet(self, seconds: float) -> None:
        """Nothing may come for that long. Raises ProtocolViolation."""
        with self.lock:
            before = self.frame_count
        time.sleep(seconds)
        with self.lock:
            if self.violation is not None:
                raise self.violation
            if self.frame_count != before:
                raise ProtocolViolation(f"{self.frame_count - before} frames came unasked; the last is {self.ledger.last_line[:200]!r}")

    def finish(self, timeout: float | None = None) -> None:
        """End of input; the engine must settle what it owes and exit with 0. Raises ProtocolViolation."""
        with self.lock:
            self.ledger.stdin_closed = True
        self.close_stdin()
        code = self.wait_exit(timeout)
        if code != 0 or self.ledger.owed:
            raise ProtocolViolation(f"after EOF: exit code {code}, owed: {self.ledger.owed or 'nothing'}; stderr ends {self.stderr_lines[-3:]}")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        self.close()
