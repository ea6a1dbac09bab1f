"""What has been asked and what has been answered: the order rules of the protocol, checked frame by frame.

Pure bookkeeping without threads: `Client` feeds it under a lock, tests feed it by hand.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.frames import Accept, Caps, Data, Done, Echo, Emap, Error, Frame, Hits, LoadFail, Prof, ProtocolViolation, Ready, Score, Stat

_NO_EMAP = ("BAD_FRAME", "DUPLICATE_ID", "NOT_FOUND")


@dataclass(eq=False)
class Turn:
    """One PROMPT (or one raw frame that wants an answer under `id`) and everything the engine said about it."""

    id: int
    slot: int = 0
    max_tokens: int = 0
    logprobs: int = 0
    raw: bool = False
    sent_at: float = 0.0
    cancelled_at: float | None = None
    stopped: bool = False
    accept: Accept | None = None
    echo: list[Echo] = field(default_factory=list)
    tokens: list[Data] = field(default_factory=list)
    hits: Hits | None = None
    prof: Prof | None = None
    done: Done | None = None
    error: Error | None = None
    ended_as: int = 0
    emap: Emap | None = None
    wait_for: Callable[[Turn, float | None], Turn] | None = field(default=None, repr=False)

    def wait(self, timeout: float | None = None) -> Turn:
        """Block until the turn has its terminal frame (and the frames that belong to it). Returns itself."""
        assert self.wait_for is not None, "this turn belongs to no client"
        return self.wait_for(self, timeout)

    @property
    def text(self) -> bytes:
        """The answer so far."""
        return b"".join(frame.payload for frame in self.tokens)

    @property
    def scores(self) -> list[Score | None]:
        """The scores of the answer's tokens; all None without logprobs."""
        return [frame.score for frame in self.tokens]

    @property
    def ended(self) -> bool:
        """Whether the terminal frame has come."""
        return self.done is not None or self.error is not None

    @property
    def ended_at(self) -> float:
        """The monotonic second of the terminal frame."""
        frame = self.done or self.error
        assert frame is not None, f"turn {self.id} has not ended"
        return frame.at

    @property
    def outcome(self) -> str:
        """`DONE`, or the error with its detail, or `in flight`."""
        if self.done is not None:
            return "DONE"
        return "in flight" if self.error is None else f"{self.error.code} {self.error.detail}".strip()


class Ledger:
    """Checks the order of frames. `accept`: whether ACCEPT frames are expected; `caps`: whether CAPS is."""

    def __init__(self, *, accept: bool = True, caps: bool = True) -> None:
        self.accept = accept
        self._start: list[type[Frame]] = [Ready, *([Caps] if caps else []), Stat]
        self.caps: Caps | None = None
        self.emap: Emap | None = None
        self.load_fail: LoadFail | None = None
        self.stdin_closed = False
        self.not_found: list[Error] = []
        self.last_line = b""
        self._open: dict[int, deque[Turn]] = {}
        self._cancels: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()
        self._hits: Hits | None = None
        self._prof: Prof | None = None
        self._emap_of: Turn | None = None
        self._turns_began = False
        self._frames = 0

    @property
    def ready(self) -> bool:
        """Whether READY, CAPS and STAT have come."""
        return not self._start

    @property
    def in_flight(self) -> list[Turn]:
        """Turns without a terminal frame."""
        return [turn for turns in self._open.values() for turn in turns]

    @property
    def owed(self) -> str:
        """What the engine still owes, in words; empty when nothing."""
        ids = [turn.id for turn in self.in_flight]
        if ids:
            return f"terminal frames of {ids}"
        if self._emap_of is not None and not self.stdin_closed:
            return f"the EMAP of {self._emap_of.id}"
        if self._hits is not None or self._prof is not None:
            return "the rest of a HITS, PROF, DONE block"
        return ""

    def settled(self, turn: Turn) -> bool:
        """Whether nothing more may come for this turn."""
        return turn.ended and (self._emap_of is not turn or self.stdin_closed)

    def submitted(self, turn: Turn) -> None:
        """A PROMPT (or a raw frame whose answer names `turn.id`) is about to be written."""
        self._open.setdefault(turn.id, deque()).append(turn)
        self._sent[turn.id] += 1

    def cancelled(self, id: int) -> None:
        """A CANCEL is about to be written."""
        self._cancels[id] += 1

    def feed(self, frame: Frame) -> Turn | None:
        """Check one frame and book it. Returns the turn it belongs to, if any. Raises ProtocolViolation."""
        self.last_line = frame.line
        self._frames += 1
        if self.load_fail is not None:
            raise self._wrong(frame, "a frame after LOAD_FAIL")
        if self._start:
            self._handshake(frame)
            return None
        if isinstance(frame, Emap):
            return self._map(frame)
        if self._emap_of is not None and not self.stdin_closed:
            raise self._wrong(frame, f"expected the EMAP that ends turn {self._emap_of.id}")
        self._emap_of = None
        if isinstance(frame, Hits):
            self._on_hits(frame)
            return None
        if self._hits is not None and self._prof is None and not isinstance(frame, Prof):
            raise self._wrong(frame, "expected PROF after HITS")
        if self._prof is not None and not isinstance(frame, Done):
            raise self._wrong(frame, "expected DONE after PROF")
        if isinstance(frame, Prof):
            if self.emap is not None and self._hits is None:
                raise self._wrong(frame, "PROF without HITS, though the handshake had an EMAP")
            self._prof = frame
            return None
        self._turns_began = True
        if isinstance(frame, Accept):
            return self._on_accept(frame)
        if isinstance(frame, Echo):
            return self._on_echo(frame)
        if isinstance(frame, Data):
            return self._on_data(frame)
        if isinstance(frame, Done):
            return self._on_done(frame)
        if isinstance(frame, Error):
            return self._on_error(frame)
        raise self._wrong(frame, "belongs to the handshake")

    def _wrong(self, frame: Frame, why: str) -> ProtocolViolation:
        return ProtocolViolation(f"{why}: {frame.line[:200]!r}")

    def _handshake(self, frame: Frame) -> None:
        if isinstance(frame, LoadFail) and self._start[0] is Ready:
            self.load_fail = frame
            return
        if not isinstance(frame, self._start[0]):
            raise self._wrong(frame, f"expected {self._start[0].__name__.upper()}")
        self._start.pop(0)
        if isinstance(frame, Caps):
            self.caps = frame

    def _map(self, frame: Emap) -> Turn | None:
        if self._hits is not None or self._prof is not None:
            raise self._wrong(frame, "inside a HITS, PROF, DONE block")
        turn, self._emap_of = self._emap_of, None
        if self.emap is None:
            if self._turns_began:
                raise self._wrong(frame, "an EMAP, though the handshake had none")
        elif turn is None:
            raise self._wrong(frame, "an EMAP that ends no turn")
        elif (frame.rows, frame.cols) != (self.emap.rows, self.emap.cols):
            raise self._wrong(frame, f"not {self.emap.rows} x {self.emap.cols} as in the handshake")
        self.emap = frame
        if turn is not None:
            turn.emap = frame
        return turn

    def _on_hits(self, frame: Hits) -> None:
        if self._hits is not None or self._prof is not None:
            raise self._wrong(frame, "inside a HITS, PROF, DONE block")
        if self.emap is None or (frame.rows, frame.cols) != (self.emap.rows, self.emap.cols):
            raise self._wrong(frame, "HITS of another shape than the handshake's EMAP")
        self._hits = frame

    def _running(self, frame: Accept | Data | Echo | Done) -> Turn:
        turns = self._open.get(frame.id)
        if not turns:
            raise self._wrong(frame, f"no turn {frame.id} is in flight")
        turn = turns[0]
        if turn.raw and not turn.max_tokens and not turn.logprobs:
            raise self._wrong(frame, f"{frame.id} was a frame that may only be refused")
        if not isinstance(frame, Accept) and self.accept and turn.accept is None:
            raise self._wrong(frame, f"before the ACCEPT of {frame.id}")
        return turn

    def _on_accept(self, frame: Accept) -> Turn:
        turn = self._running(frame)
        if not self.accept or turn.accept is not None or turn.tokens or turn.echo:
            raise self._wrong(frame, "an ACCEPT too many, or late")
        turn.accept = frame
        return turn

    def _on_echo(self, frame: Echo) -> Turn:
        turn = self._running(frame)
        if not turn.logprobs or turn.tokens:
            raise self._wrong(frame, "ECHO without logprobs or after DATA")
        if turn.echo and frame.pos != turn.echo[-1].pos + 1:
            raise self._wrong(frame, f"ECHO positions jump from {turn.echo[-1].pos}")
        if turn.accept is not None and frame.pos >= turn.accept.prompt_tokens:
            raise self._wrong(frame, f"position beyond the {turn.accept.prompt_tokens} prompt tokens")
        if not frame.score.best and frame.score.logprob != 0.0:
            raise self._wrong(frame, "a score without candidates")
        if len(frame.score.best) not in (0, turn.logprobs) or (frame.pos == 0 and frame.score.best):
            raise self._wrong(frame, f"{turn.logprobs} candidates were asked for")
        turn.echo.append(frame)
        return turn

    def _on_data(self, frame: Data) -> Turn:
        turn = self._running(frame)
        if (frame.score is not None) != (turn.logprobs > 0):
            raise self._wrong(frame, f"logprobs={turn.logprobs} was asked for")
        if frame.score is not None and len(frame.score.best) != turn.logprobs:
            raise self._wrong(frame, f"{turn.logprobs} candidates were asked for")
        if turn.accept is not None and turn.echo and turn.echo[-1].pos != turn.accept.prompt_tokens - 1:
            raise self._wrong(frame, f"the ECHOs of {frame.id} ended at {turn.echo[-1].pos} of {turn.accept.prompt_tokens}")
        if len(turn.tokens) >= turn.max_tokens:
            raise self._wrong(frame, f"more than {turn.max_tokens} tokens")
        turn.tokens.append(frame)
        return turn

    def _on_done(self, frame: Done) -> Turn:
        turn = self._running(frame)
        prof, self._prof, self._hits, hits = self._prof, None, None, self._hits
        if prof is None:
            raise self._wrong(frame, "DONE without PROF")
        if (prof.prompt, prof.emitted) != (frame.prompt_tokens, frame.emitted):
            raise self._wrong(frame, f"PROF says {prof.prompt} + {prof.emitted} tokens")
        if frame.emitted != len(turn.tokens):
            raise self._wrong(frame, f"{len(turn.tokens)} DATA frames came")
        if turn.accept is not None and frame.prompt_tokens != turn.accept.prompt_tokens:
            raise self._wrong(frame, f"ACCEPT said {turn.accept.prompt_tokens} prompt tokens")
        if frame.length_limited and turn.stopped is False and frame.emitted > turn.max_tokens:
            raise self._wrong(frame, f"the budget was {turn.max_tokens}")
        if not frame.length_limited and not turn.stopped and frame.emitted == turn.max_tokens > 0:
            raise self._wrong(frame, "the budget is used up, so the turn is length limited")
        turn.done, turn.prof, turn.hits = frame, prof, hits
        self._close(turn, emap=True)
        return turn

    def _on_error(self, frame: Error) -> Turn | None:
        turns = self._open.get(frame.id) or deque()
        if frame.code == "NOT_FOUND":
            if not self._cancels[frame.id]:
                raise self._wrong(frame, "no CANCEL of that id is unanswered")
            self._cancels[frame.id] -= 1
            self.not_found.append(frame)
            return None
        if not turns:
            raise self._wrong(frame, f"no turn {frame.id} is in flight")
        turn = turns[0]
        if frame.code == "CANCELLED":
            if not self._cancels[frame.id]:
                raise self._wrong(frame, "nobody cancelled it")
            self._cancels[frame.id] -= 1
        elif frame.code == "DUPLICATE_ID":
            # known at once, so it may overtake the first one's ACCEPT, and be overtaken by the first one's end
            waiting = [t for t in turns if not t.raw]
            if len(waiting) > 1:
                waiting.pop(0)
            if self._sent[frame.id] < 2 or not waiting or waiting[0].accept is not None:
                raise self._wrong(frame, "the id was sent once")
            turn = waiting[0]
        elif frame.code == "BAD_FRAME" and len(turns) > 1:
            turn = next((t for t in turns if t.raw), turn)
        elif frame.code in ("EMPTY_PROMPT", "CONTEXT_EXCEEDED", "SLOT_BUSY", "BAD_REQUEST") and turn.accept is not None:
            raise self._wrong(frame, "a refusal after the ACCEPT")
        turn.error = frame
        self._close(turn, emap=frame.code not in _NO_EMAP)
        return turn

    def _close(self, turn: Turn, emap: bool) -> None:
        turn.ended_as = self._frames
        turns = self._open[turn.id]
        turns.remove(turn)
        if not turns:
            del self._open[turn.id]
        if emap and self.emap is not None:
            self._emap_of = turn
