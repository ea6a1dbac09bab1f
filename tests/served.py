"""A daemon inside the test process, on two pipes, with every frame checked by the strict client's books.

Runs the product's own `Daemon` (parser, inbox, desk, schedule, outbox) on a tiny random model; tests may patch any of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm53serve.engine.seam import Batch, Halt
from glm53serve.load import Loaded, load
from glm53serve.model.synth import synth
from glm53serve.oneshot import teacher_forced
from glm53serve.serve.daemon import Daemon
from glm53serve.settings import Settings
from harness.frames import Frame, FrameParser, ProtocolViolation
from harness.ledger import Ledger, Turn
from tests.patience import PATIENCE

CHUNK = 9
CAPACITY = 256


def tiny_model(directory: Path, seed: int = 5) -> Path:
    """A random model with KDA and DSA layers whose prompts soon drop pools."""
    synth(directory, "tiny", seed=seed)
    return directory


def load_tiny(directory: Path, slots: int, **variables: str) -> Loaded:
    """Load it at 32 bits with small chunks."""
    environ = {"GLM53_BITS": "32", "GLM53_PREFILL_CHUNK": str(CHUNK), "GLM53_MAXT": str(CAPACITY), "OMP_NUM_THREADS": "1", **variables}
    return load(directory, Settings.from_environ(environ), slots=slots, specials_stop=False)


@dataclass(slots=True)
class Fresh:
    """Answers as an engine gives them that has never seen anything else: token texts and scores."""

    loaded: Loaded
    known: dict[tuple[bytes, int], list[tuple[bytes, float]]] = field(default_factory=dict)

    def answer(self, prompt: bytes, count: int) -> list[tuple[bytes, float]]:
        """(text, log-probability) of up to `count` greedy tokens after the prompt."""
        from glm53serve.engine.sampling import Sampling, choose, score

        key = (prompt, count)
        if key not in self.known:
            engine, tokenizer = self.loaded.engine, self.loaded.tokenizer
            slot = engine.slots[0]
            _, logits = teacher_forced(self.loaded, tokenizer.encode(prompt))
            out: list[tuple[bytes, float]] = []
            for number in range(count):
                token = choose(logits, Sampling(), number)
                if token in self.loaded.stop_ids:
                    break
                out.append((tokenizer.text(token), score(logits, token, 1).logprob))
                if number + 1 < count:
                    logits = engine.forward_step([(slot, token)])[0][0]
            self.known[key] = out
        return self.known[key]


def count_asks(fresh: Fresh, prompt: bytes) -> int:
    """How often a chunk with this prompt asks whether to halt."""
    asks = 0

    def ask() -> bool:
        nonlocal asks
        asks += 1
        return False

    engine = fresh.loaded.engine
    engine.empty(engine.slots[0])
    engine.forward_prefill(engine.slots[0], fresh.loaded.tokenizer.encode(prompt), ask, guard=True)
    return asks


class Served:
    """A running daemon and the client's side of its pipes. `log` collects the verbose lines, `frames` what came, in its order."""

    def __init__(self, loaded: Loaded, usage: Path, **variables: str) -> None:
        self.loaded = loaded
        self.ledger = Ledger()
        self.frames: list[Frame] = []
        self.log: list[str] = []
        self.violation: Exception | None = None
        self._changed = threading.Condition()
        self._parser = FrameParser()
        self._next = 1
        to_daemon, self._write_fd = os.pipe()
        self._read_fd, from_daemon = os.pipe()
        self._fds = [to_daemon, from_daemon]
        settings = Settings.from_environ({"GLM53_VERBOSE": "1", "COLI_USAGE": str(usage), **variables})
        self.daemon = Daemon(loaded, settings, to_daemon, from_daemon, self._note)
        self.daemon.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_until(lambda: self.ledger.ready)

    def _note(self, line: str) -> None:
        with self._changed:
            self.log.append(line)
            self._changed.notify_all()

    def _read(self) -> None:
        while data := os.read(self._read_fd, 1 << 16):
            with self._changed:
                try:
                    for frame in self._parser.feed(data, time.monotonic()):
                        self.frames.append(frame)
                        self.ledger.feed(frame)
                except (ProtocolViolation, AssertionError) as error:
                    self.violation = error
                self._changed.notify_all()
                if self.violation is not None:
                    return

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition on what has arrived; a broken rule of the protocol is raised."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.violation is not None or ready(), PATIENCE)
        if self.violation is not None:
            raise self.violation
        assert came, f"nothing after {PATIENCE} s; the daemon owes {self.ledger.owed}"

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        os.write(self._write_fd, data)

    def submit(self, prompt: bytes, slot: int = 0, max_tokens: int = 4, logprobs: int = 1, pin: int = 0) -> Turn:
        """Send a PROMPT and book it."""
        turn = Turn(self._next, slot, max_tokens, logprobs)
        self._next += 1
        with self._changed:
            self.ledger.submitted(turn)
        self.raw(b"PROMPT %d %d %d %d 0 1 logprobs=%d pin=%d\n%s\n" % (turn.id, slot, len(prompt), max_tokens, logprobs, pin, prompt))
        return turn

    def cancel(self, turn: Turn) -> None:
        """Send a CANCEL and book it."""
        with self._changed:
            self.ledger.cancelled(turn.id)
        self.raw(b"CANCEL %d\n" % turn.id)

    def stop(self, turn: Turn) -> None:
        """Send a STOP."""
        turn.stopped = True
        self.raw(b"STOP %d\n" % turn.id)

    def wait(self, turn: Turn) -> Turn:
        """Wait until nothing more may come for a turn."""
        self.wait_until(lambda: self.ledger.settled(turn))
        return turn

    def said(self, turn: Turn) -> list[tuple[bytes, float]]:
        """(text, log-probability) of the tokens a turn was answered with."""
        return [(frame.payload, frame.score.logprob if frame.score else 0.0) for frame in turn.tokens]

    def word(self, turn: Turn) -> str:
        """The reuse word of a turn; empty when it never began."""
        return next((line.split()[-1] for line in self.log if line.startswith(f"REUSE {turn.id} ")), "")

    def halted(self) -> int:
        """How many chunks were halted so far."""
        return sum(line.startswith("HALT ") for line in self.log)

    def close(self) -> int:
        """End the input, wait for the end; the daemon's exit code."""
        os.close(self._write_fd)
        code = self.daemon.wait()
        for fd in self._fds:
            os.close(fd)
        self._reader.join(PATIENCE)
        os.close(self._read_fd)
        if self.violation is not None:
            raise self.violation
        return code


def same(said: Sequence[tuple[bytes, float]], wanted: Sequence[tuple[bytes, float]]) -> bool:
    """Equal texts, and scores equal to rounding."""
    return [t for t, _ in said] == [t for t, _ in wanted] and all(abs(a - b) < 2e-4 for (_, a), (_, b) in zip(said, wanted, strict=True))


@contextmanager
def at_ask(served: Served, number: int, action: Callable[[], object]) -> Iterator[None]:
    """Do something, in the engine's thread, at the n-th halt question of prompt chunks from now on."""
    engine = served.loaded.engine
    original = type(engine).forward_span
    left = number

    def forward_span(self: Any, ids: Sequence[int], batch: Batch, halt: Halt) -> Any:
        def ask() -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                action()
            return halt()

        return original(self, ids, batch, ask if batch.rows > len(batch.spans) else halt)

    type(engine).forward_span = forward_span  # type: ignore[method-assign]
    try:
        yield
    finally:
        type(engine).forward_span = original  # type: ignore[method-assign]


@contextmanager
def in_flight_together(served: Served) -> Iterator[None]:
    """The engine's thread waits in the first prompt chunk that is submitted inside until every turn that is submitted inside is accepted."""
    accepted = threading.Event()
    with at_ask(served, 1, lambda: accepted.wait(PATIENCE)):
        try:
            yield
            served.wait_until(lambda: all(turn.accept is not None for turn in served.ledger.in_flight))
        finally:
            accepted.set()


@contextmanager
def cancel_at_ask(served: Served, number: int) -> Iterator[list[int]]:
    """Cancel whatever turn is being prefilled at the n-th halt question from now on. Yields the ids that were cancelled."""
    desk = served.daemon._desk
    cancelled: list[int] = []

    def cancel() -> None:
        turn = desk._prefilling
        if turn is not None and turn.busy:
            served.ledger.cancelled(turn.id)
            cancelled.append(turn.id)
            assert desk.cancel(turn.id)

    with at_ask(served, number, cancel):
        yield cancelled
