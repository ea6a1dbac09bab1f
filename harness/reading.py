"""An independent reading of the protocol: what a stream of bytes asks, and how each frame in it must be answered.

It goes through the bytes as a whole. Where the protocol leaves more than one answer, it lists them all; where it leaves the meaning open, it
raises `Doubtful`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

LIMIT = 16 << 20
ALIGNED = 2 << 30
_NATURAL = re.compile(rb"[0-9]{1,20}")
_INTEGER = re.compile(rb"-?[0-9]{1,20}")
_FLOAT = re.compile(rb"-?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)")
_NO_FLOAT = re.compile(rb"\+5|1_0|0x1|[A-Za-df-hj-mo-z][a-z]*|-?")
_KEYS = {b"seed": (1 << 64) - 1, b"logprobs": 32, b"pin": 1, b"ids": 1}
SERVED = "DONE"


class Doubtful(Exception):
    """The protocol does not say what these bytes mean."""


@dataclass(slots=True)
class Ask:
    """One frame that wants an answer: a prompt (`verb` PROMPT), anything refused as damaged (PROMPT, id 0 allowed), or a CANCEL."""

    verb: str
    id: int
    answers: set[str]
    slot: int = -1
    max_tokens: int = 0
    logprobs: int = 0
    greedy: bool = False
    payload: bytes = b""


@dataclass(slots=True)
class Reading:
    """What a burst asks. `missing`: bytes that would bring the stream back to a frame boundary."""

    asks: list[Ask] = field(default_factory=list)
    stops: set[int] = field(default_factory=set)
    missing: bytes = b""


def _bad(id: int) -> Ask:
    return Ask("PROMPT", id, {"BAD_FRAME"})


def _id(fields: list[bytes]) -> int:
    if not fields or not _NATURAL.fullmatch(fields[0]):
        return 0
    if int(fields[0]) >= 1 << 64:
        raise Doubtful("an id over u64")
    return int(fields[0])


class _Cut(Exception):
    """The stream ends inside a frame; `missing` would bring it to the frame's end."""

    def __init__(self, missing: bytes) -> None:
        super().__init__(missing)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class _Header:
    """A header line: its verb and fields, whether it is too long, and where the next byte is."""

    verb: bytes
    fields: list[bytes]
    long: bool
    end: int

    def size(self) -> int | None:
        """Bytes of the payload that a PROMPT, SUBMIT or IMAGE names; None when they cannot be read."""
        place = 1 if self.verb == b"IMAGE" else 2
        return int(self.fields[place]) if len(self.fields) > place and _NATURAL.fullmatch(self.fields[place]) else None

    def extra(self) -> int:
        """Bytes that an old gateway announces behind a PROMPT's payload."""
        return int(self.fields[6]) if self.verb != b"IMAGE" and len(self.fields) > 6 and _NATURAL.fullmatch(self.fields[6]) else 0


def read(stream: bytes, slots: int, capacity: int) -> Reading:
    """Read a whole burst. Raises Doubtful."""
    out = Reading()
    images: set[int] = set()
    at = 0
    try:
        while at < len(stream):
            header = _header(stream, at)
            at = header.end
            if header.verb in (b"CANCEL", b"STOP"):
                _control(header, out)
            elif header.verb in (b"PROMPT", b"SUBMIT", b"IMAGE"):
                at = _with_payload(stream, header, slots, capacity, images, out)
            elif header.long:
                raise Doubtful("a long line of nothing")
    except _Cut as cut:
        out.missing = cut.missing
    return out


def _header(stream: bytes, at: int) -> _Header:
    cut = stream.find(b"\n", at)
    if cut < 0:
        raise _Cut(b"\n")
    line = stream[at:cut]
    long = len(line) > 4096
    if long:
        line = line[:4096].rsplit(b" ", 1)[0]
    elif line.endswith(b"\r"):
        line = line[:-1]
    if line.startswith(b" ") or line.endswith((b" ", b"\r")) or b"\x00" in line[:1]:
        raise Doubtful("blanks around a header")
    verb, *fields = [part for part in line.split(b" ") if part] or [b""]
    return _Header(verb, fields, long, cut + 1)


def _control(header: _Header, out: Reading) -> None:
    """A CANCEL or a STOP."""
    if header.long:
        raise Doubtful("a long control line")
    if len(header.fields) != 1 or not _NATURAL.fullmatch(header.fields[0]):
        out.asks.append(_bad(0))
    elif (id := _id(header.fields)) == 0:
        raise Doubtful("id 0")
    elif header.verb == b"CANCEL":
        out.asks.append(Ask("CANCEL", id, set()))
    else:
        out.stops.add(id)


def _with_payload(stream: bytes, header: _Header, slots: int, capacity: int, images: set[int], out: Reading) -> int:
    """A PROMPT or an IMAGE, whose ids are collected in `images`. Returns where the next frame begins."""
    id, size, extra = _id(header.fields), header.size(), header.extra()
    ask = None
    if header.verb == b"IMAGE":
        damaged = header.long or id == 0 or len(header.fields) != 4 or not all(_NATURAL.fullmatch(field) for field in header.fields)
        if damaged or size is None or size > 1 << 16:
            raise Doubtful("a damaged IMAGE")
        images.add(id)
    else:
        ask = _bad(id) if header.long or id == 0 else _prompt(id, header.fields, slots)
    if size is None or size > ALIGNED:
        out.asks.append(_bad(id))
        return header.end
    if size + extra > 1 << 20 and size <= LIMIT:
        raise Doubtful("too long to send")
    end, terminated = _frame_end(stream, header.end + size + extra)
    if ask is None and not terminated:
        raise Doubtful("a damaged IMAGE")
    if size > LIMIT or not terminated:
        ask = _bad(id)
    if ask is not None:
        ask.payload = stream[header.end : header.end + size]
        if SERVED in ask.answers:
            _content(ask, id in images, capacity)
        out.asks.append(ask)
    return end


def _frame_end(stream: bytes, at: int) -> tuple[int, bool]:
    """Where the next frame begins, when the payload ends at `at`, and whether a line end stands there; else a line is skipped."""
    behind = stream[at : at + 2]
    if at >= len(stream) or behind == b"\r":
        raise _Cut(b"x" * max(0, at - len(stream)) + b"\n")
    if behind[:1] == b"\n":
        return at + 1, True
    if behind == b"\r\n":
        return at + 2, True
    cut = stream.find(b"\n", at)
    if cut < 0:
        raise _Cut(b"\n")
    return cut + 1, False


def _content(ask: Ask, image: bool, capacity: int) -> None:
    """What the payload decides."""
    if not ask.payload:
        ask.answers = {"EMPTY_PROMPT"}
        return
    if image:
        ask.answers = {"BAD_REQUEST"}
    if len(ask.payload) >= capacity:
        ask.answers.add("CONTEXT_EXCEEDED")


def _prompt(id: int, fields: list[bytes], slots: int) -> Ask:
    """What the header of a PROMPT decides; answers that depend on what is in flight are added by `expect_in_order`."""
    if len(fields) < 6:
        return _bad(id)
    slot, budget, temperature, top_p = fields[1], fields[3], fields[4], fields[5]
    if not _NATURAL.fullmatch(fields[2]) or not _INTEGER.fullmatch(slot) or not _INTEGER.fullmatch(budget):
        return _bad(id)
    for number in (temperature, top_p):
        if not _FLOAT.fullmatch(number):
            if _NO_FLOAT.fullmatch(number):
                return _bad(id)
            raise Doubtful("something like a number")
    options = fields[6:]
    old = bool(options) and _NATURAL.fullmatch(options[0]) is not None
    texts: dict[bytes, bytes] = {}
    for option in options[1 if old else 0 :]:
        key, equals, text = option.partition(b"=")
        if not equals or not key:
            raise Doubtful("an option that is none")
        if key in _KEYS:
            texts[key] = text
    values = {key: int(text) for key, text in texts.items() if _NATURAL.fullmatch(text)}
    unclear = len(values) < len(texts)
    if b"-0" in (slot, budget, temperature, top_p) or len(budget) > 9 or (old and int(options[0]) > 1 << 16):
        raise Doubtful("numbers at the edge")
    floats = [float(temperature), float(top_p)]
    logprobs, tokens = values.get(b"logprobs", 0), int(budget)
    out_of_range = any(values.get(key, 0) > high for key, high in _KEYS.items())
    wrong = not all(0 <= value < float("inf") for value in floats) or out_of_range or old or not 0 <= int(slot) < slots
    if unclear:
        return _bad(id)
    if tokens < 0 or (tokens == 0 and logprobs == 0):
        return _bad(id)
    if wrong:
        return Ask("PROMPT", id, {"BAD_REQUEST"} | ({"BAD_FRAME"} if tokens == 0 else set()))
    return Ask("PROMPT", id, {SERVED}, int(slot), tokens, logprobs, floats[0] <= 1e-4)


def expect_in_order(reading: Reading) -> None:
    """Add the answers that depend on whether earlier frames of the burst are still in flight."""
    slots: set[int] = set()
    ids: set[int] = set()
    if any(n > 2 for n in Counter(ask.id for ask in reading.asks if ask.verb == "PROMPT" and ask.answers != {"BAD_FRAME"}).values()):
        raise Doubtful("which of three prompts of one id a refusal means")
    for place, ask in enumerate(reading.asks):
        if ask.verb == "CANCEL":
            continue
        may_run = SERVED in ask.answers
        if ask.answers != {"BAD_FRAME"} and ask.id in ids:
            ask.answers.add("DUPLICATE_ID")
        if ask.slot in slots:
            ask.answers.add("SLOT_BUSY")
        if may_run:
            slots.add(ask.slot)
            ids.add(ask.id)
            if any(other.verb == "CANCEL" and other.id == ask.id for other in reading.asks[place + 1 :]):
                ask.answers.add("CANCELLED")
