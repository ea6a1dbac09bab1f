"""A strict client of the serve protocol: starts an engine as a gateway does and believes nothing it says without checking.

    with Client(["glm53"], model, slots=2) as client:
        turn = client.submit(b"What is 2 + 3?", max_tokens=16).wait()
        print(turn.text)

Every frame is checked for its grammar (`harness.frames`) and its order (`harness.ledger`); the first violation is raised by whatever
call is waiting, and by every later one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from harness.engine_process import DEFAULT_TIMEOUT, Engine, NoAnswer
from harness.frames import Frame, ProtocolViolation
from harness.ledger import Ledger, Turn
from harness.notes import CancelLine, ReuseLine

EMAP_SECONDS = 1.0
"""How long the handshake waits for an EMAP; a model without sparse layers sends none."""
_OfTurn = TypeVar("_OfTurn", ReuseLine, CancelLine)


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
        super().__init__([*engine, cap], merged, keep=keep, patience=patience)
        try:
            self.wait_until("READY", lambda: self.ledger.ready or self.ledger.load_fail is not None)
            if self.ledger.load_fail is None:
                with contextlib.suppress(NoAnswer):
                    self.wait_until("the first EMAP", lambda: self.ledger.emap is not None, EMAP_SECONDS)
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

    def reuse(self, turn: Turn, timeout: float | None = None) -> ReuseLine:
        """The REUSE line of a turn."""
        return self._note("REUSE", ReuseLine, turn, timeout)

    def cancel_line(self, turn: Turn, timeout: float | None = None) -> CancelLine:
        """The CANCEL line of a turn."""
        return self._note("CANCEL", CancelLine, turn, timeout)

    def _note(self, word: str, kind: type[_OfTurn], turn: Turn, timeout: float | None) -> _OfTurn:
        def found() -> list[_OfTurn]:
            return [note for note in self.notes if isinstance(note, kind) and note.id == turn.id]

        self.wait_until(f"the {word} line of turn {turn.id}", lambda: bool(found()), timeout)
        with self.lock:
            return found()[-1]

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
