"""The outbound grammar of the serve protocol: bytes of an engine's stdout to frames, and nothing that is outside it.

A gateway stops for good on a line whose kind or field count it does not know, so this parser raises on the first such byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

MAX_PIECE = 65536
MAX_LOGPROBS = 32


class ProtocolViolation(Exception):
    """The engine wrote something the protocol does not allow; the message says what, and shows the line."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One outbound frame: the line as it came (without LF) and the monotonic second its last byte was read."""

    line: bytes
    at: float


@dataclass(frozen=True, slots=True)
class Ready(Frame):
    """The engine is loaded."""


@dataclass(frozen=True, slots=True)
class LoadFail(Frame):
    """The engine could not load its model: `kind` is nomem, io, format or unsupported."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Caps(Frame):
    """What the engine can do."""

    vision: bool
    slots: int


@dataclass(frozen=True, slots=True)
class Stat(Frame):
    """The fourth handshake figure: peak RSS in GB."""

    rss_gb: float


@dataclass(frozen=True, slots=True)
class Emap(Frame):
    """Where every routed expert is and how often it was used: one byte each, `tier << 6 | heat`, row-major [rows, cols]."""

    rows: int
    cols: int
    cells: bytes


@dataclass(frozen=True, slots=True)
class Hits(Frame):
    """Experts a turn used: bit row*cols+col in byte i>>3 at 1<<(i&7)."""

    rows: int
    cols: int
    bits: bytes


@dataclass(frozen=True, slots=True)
class Score:
    """A token's natural log probability and the k best (id, log probability), best first; k = 0 where nothing predicts the position."""

    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Accept(Frame):
    """The prompt was taken: its number of tokens."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Data(Frame):
    """One token of an answer, as bytes."""

    id: int
    payload: bytes
    score: Score | None


@dataclass(frozen=True, slots=True)
class Echo(Frame):
    """One token of a prompt, its position and score."""

    id: int
    payload: bytes
    pos: int
    score: Score


@dataclass(frozen=True, slots=True)
class Prof(Frame):
    """Where a turn's time went, in seconds."""

    wall: float
    prompt: int
    emitted: int
    disk: float
    wait: float
    experts: float
    attention: float
    head: float
    forwards: int

    @property
    def forward_time(self) -> float:
        """Seconds in the network: disk + experts + attention + head."""
        return self.disk + self.experts + self.attention + self.head


@dataclass(frozen=True, slots=True)
class Done(Frame):
    """A turn ended well."""

    id: int
    emitted: int
    tokens_per_second: float
    hit_percent: float
    rss_gb: float
    prompt_tokens: int
    length_limited: bool


@dataclass(frozen=True, slots=True)
class Error(Frame):
    """A frame was refused, or a turn failed or was cancelled."""

    id: int
    code: str
    detail: str


_INT = rb"(0|[1-9][0-9]{0,19})"
_TAIL = rb"((?: -?[0-9]+\.[0-9]{6}(?: [0-9]+)(?: [0-9]+ -?[0-9]+\.[0-9]{6})*)?)"
_CODES = (
    rb"(BAD_FRAME|DUPLICATE_ID|BAD_REQUEST|SLOT_BUSY|EMPTY_PROMPT|CANCELLED|NOT_FOUND|NO_MEMORY|DEVICE_LOST|INTERNAL"
    rb"|IO(?= )|CONTEXT_EXCEEDED(?= ))"
)


def _f(digits: int) -> bytes:
    return rb"([0-9]+\.[0-9]{%d})" % digits


_LINES: dict[bytes, re.Pattern[bytes]] = {
    b"\x01\x01READY\x01\x01": re.compile(rb"\x01\x01READY\x01\x01"),
    b"LOAD_FAIL": re.compile(rb"LOAD_FAIL kind=(nomem|io|format|unsupported) (.+)"),
    b"CAPS": re.compile(rb"CAPS vision=([01]) slots=" + _INT),
    b"STAT": re.compile(rb"STAT 0 0\.00 0\.0 " + _f(1)),
    b"EMAP": re.compile(rb"EMAP " + _INT + b" " + _INT + rb" ([0-9a-f]*)"),
    b"HITS": re.compile(rb"HITS " + _INT + b" " + _INT + rb" ([0-9a-f]*)"),
    b"ACCEPT": re.compile(rb"ACCEPT " + _INT + b" " + _INT),
    b"ECHO": re.compile(rb"ECHO " + _INT + b" " + _INT + b" " + _INT + _TAIL),
    b"DATA": re.compile(rb"DATA " + _INT + b" " + _INT + _TAIL),
    b"PROF": re.compile(rb"PROF " + b" ".join([_f(3), _INT, _INT, *[_f(3)] * 5, _INT])),
    b"DONE": re.compile(rb"DONE " + b" ".join([_INT, b"STAT", _INT, _f(2), _f(1), _f(1), _INT, rb"([01])"])),
    b"ERROR": re.compile(rb"ERROR " + _INT + b" " + _CODES + rb"(?: (.+))?"),
}
_DETAIL = {b"CONTEXT_EXCEEDED": re.compile(rb"prompt_tokens=[0-9]+ requested=[0-9]+ capacity=[0-9]+"), b"IO": re.compile(rb"\S.*")}


def _score(tail: bytes, line: bytes) -> Score | None:
    if not tail:
        return None
    words = tail.split()
    best = tuple((int(words[i]), float(words[i + 1])) for i in range(2, len(words), 2))
    count = int(words[1])
    if count != len(best) or count > MAX_LOGPROBS:
        raise ProtocolViolation(f"the tail names {count} candidates and lists {len(best)}: {line[:200]!r}")
    if any(a[1] < b[1] for a, b in pairwise(best)):
        raise ProtocolViolation(f"candidates are not in falling order: {line[:200]!r}")
    score = Score(float(words[0]), best)
    if score.logprob > 0 or (best and score.logprob > best[0][1] + 2e-6):
        raise ProtocolViolation(f"a log probability is above 0 or above the best one: {line[:200]!r}")
    return score


def _hex(rows: int, cols: int, text: bytes, size: int, line: bytes) -> bytes:
    if rows * cols == 0 or len(text) != 2 * size:
        raise ProtocolViolation(f"{len(text)} hex digits for {rows} x {cols}, expected {2 * size}: {line[:80]!r}")
    return bytes.fromhex(text.decode("ascii"))


class FrameParser:
    """Incremental and strict: feed it what was read, in any pieces, and get whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._counted: tuple[re.Match[bytes], int] | None = None

    def feed(self, chunk: bytes, at: float = 0.0) -> list[Frame]:
        """The frames that `chunk` completes. `at` is stamped on them. Raises ProtocolViolation."""
        self._buffer += chunk
        frames: list[Frame] = []
        while (frame := self._next(at)) is not None:
            frames.append(frame)
        return frames

    def end(self) -> None:
        """The stream has ended; raises ProtocolViolation when it ended inside a frame."""
        if self._buffer or self._counted is not None:
            raise ProtocolViolation(f"stdout ended inside a frame: {bytes(self._buffer[:120])!r}")

    def _next(self, at: float) -> Frame | None:
        if self._counted is None:
            cut = self._buffer.find(b"\n")
            if cut < 0:
                return None
            line = bytes(self._buffer[:cut])
            del self._buffer[: cut + 1]
            pattern = _LINES.get(line.split(b" ", 1)[0])
            match = None if pattern is None else pattern.fullmatch(line)
            if match is None:
                raise ProtocolViolation(f"not a line of the protocol: {line[:200]!r}")
            if not line.startswith((b"DATA ", b"ECHO ")):
                return _line_frame(match, at)
            size = int(match[2])
            if size > MAX_PIECE:
                raise ProtocolViolation(f"a token of {size} bytes: {line[:200]!r}")
            self._counted = (match, size)
        match, size = self._counted
        if len(self._buffer) <= size:
            return None
        if self._buffer[size] != 10:
            raise ProtocolViolation(f"{size} payload bytes are not followed by LF but by {self._buffer[size]}: {match[0][:200]!r}")
        payload = bytes(self._buffer[:size])
        del self._buffer[: size + 1]
        self._counted = None
        line = match[0]
        if line.startswith(b"DATA "):
            return Data(line, at, int(match[1]), payload, _score(match[3], line))
        score = _score(match[4], line)
        if score is None:
            raise ProtocolViolation(f"ECHO without a score: {line[:200]!r}")
        return Echo(line, at, int(match[1]), payload, int(match[3]), score)


def _line_frame(m: re.Match[bytes], at: float) -> Frame:
    line = m[0]
    kind = line.split(b" ", 1)[0]
    if kind == b"CAPS":
        return Caps(line, at, m[1] == b"1", int(m[2]))
    if kind == b"STAT":
        return Stat(line, at, float(m[1]))
    if kind == b"EMAP":
        rows, cols = int(m[1]), int(m[2])
        cells = _hex(rows, cols, m[3], rows * cols, line)
        if any(cell >> 6 > 2 for cell in cells):
            raise ProtocolViolation(f"an expert in tier 3: {line[:80]!r}")
        return Emap(line, at, rows, cols, cells)
    if kind == b"HITS":
        rows, cols = int(m[1]), int(m[2])
        return Hits(line, at, rows, cols, _hex(rows, cols, m[3], (rows * cols + 7) // 8, line))
    if kind == b"ACCEPT":
        return Accept(line, at, int(m[1]), int(m[2]))
    if kind == b"PROF":
        wall, disk, wait, experts, attention, head = (float(m[i]) for i in (1, 4, 5, 6, 7, 8))
        return Prof(line, at, wall, int(m[2]), int(m[3]), disk, wait, experts, attention, head, int(m[9]))
    if kind == b"DONE":
        return Done(line, at, int(m[1]), int(m[2]), float(m[3]), float(m[4]), float(m[5]), int(m[6]), m[7] == b"1")
    if kind == b"ERROR":
        shape = _DETAIL.get(m[2])
        if (m[3] is None) != (shape is None) or (shape is not None and shape.fullmatch(m[3]) is None):
            raise ProtocolViolation(f"an error with a wrong detail: {line[:200]!r}")
        return Error(line, at, int(m[1]), m[2].decode(), (m[3] or b"").decode("utf-8", "replace"))
    if kind == b"LOAD_FAIL":
        return LoadFail(line, at, m[1].decode(), m[2].decode("utf-8", "replace"))
    return Ready(line, at)
