"""Bytes to frames: an incremental, total parser of what a gateway sends.

Pure: no I/O, no clock, no engine state. Any byte string is accepted, and how it is cut into `feed` calls never changes the frames.
A frame is reported at its end (behind its payload and terminator), so whoever got an answer knows that the input is aligned again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum

from glm53serve.serve.frames import Cancel, Code, Frame, Ignored, Image, Prompt, Refused, Stop

HEADER_LIMIT = 4096
PAYLOAD_LIMIT = 16 << 20
IMAGE_LIMIT = 256 << 20
DISCARD_LIMIT = 2 << 30
U64 = (1 << 64) - 1

_NATURAL = re.compile(rb"[0-9]{1,20}")
_INTEGER = re.compile(rb"-?[0-9]{1,20}")
_REAL = re.compile(rb"-?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|inf)")
_KEY_RANGES = {b"seed": U64, b"logprobs": 32, b"pin": 1, b"ids": 1}


def _natural(text: bytes) -> int | None:
    return int(text) if _NATURAL.fullmatch(text) else None


def _integer(text: bytes) -> int | None:
    if not _INTEGER.fullmatch(text):
        return None
    # "-0" carries a minus and is therefore out of range like any other negative number
    return -max(1, int(text[1:])) if text.startswith(b"-") else int(text)


def _real(text: bytes) -> float | None:
    return float(text) if _REAL.fullmatch(text) else None


def _identifier(fields: list[bytes]) -> int:
    """The id of a header's fields, 0 when it cannot be read."""
    number = _natural(fields[0]) if fields else None
    return number if number is not None and number <= U64 else 0


@dataclass(slots=True)
class _Pending:
    """A frame whose header has been read: what is still to consume and what to report behind it."""

    id: int
    size: int | None
    frame: Prompt | Image | None = None
    refusal: str | None = None
    extra: int = 0


def _prompt_header(fields: list[bytes]) -> _Pending:
    """Read the fields behind PROMPT or SUBMIT."""
    pending = _Pending(_identifier(fields), _natural(fields[2]) if len(fields) > 2 else None)
    options = fields[6:]
    old_extra = bool(options) and _NATURAL.fullmatch(options[0]) is not None
    if old_extra:
        extra = int(options.pop(0))
        if extra + (pending.size or 0) <= DISCARD_LIMIT:
            pending.extra = extra
        else:
            pending.refusal = f"{extra} extra bytes, at most {DISCARD_LIMIT} are skipped"
    if len(fields) < 6:
        pending.refusal = f"{len(fields)} fields, 6 are needed"
        return pending
    slot, max_tokens, temperature, top_p = _integer(fields[1]), _integer(fields[3]), _real(fields[4]), _real(fields[5])
    if not pending.id:
        pending.refusal = f"id {fields[0]!r}: must be a whole number from 1 to 2^64-1"
    elif pending.size is None:
        pending.refusal = f"bytes {fields[2]!r}: must be a whole number"
    elif slot is None or max_tokens is None or temperature is None or top_p is None:
        pending.refusal = f"slot, max_tokens, temperature or top_p is not a number: {b' '.join(fields[1:6])!r}"
    if pending.refusal or slot is None or max_tokens is None or temperature is None or top_p is None:
        return pending
    values: dict[bytes, int] = {}
    for key, text in _last_values(options).items():
        number = _natural(text) if key in _KEY_RANGES else 0
        if not key or number is None:
            pending.refusal = f"option {key + b'=' + text!r}: must be a known key and a whole number, or another key=value"
            return pending
        values[key] = number
    logprobs = values.get(b"logprobs", 0)
    if max_tokens < 1 and not (max_tokens == 0 and logprobs > 0):
        pending.refusal = f"max_tokens {max_tokens}: must be at least 1 (0 only with logprobs)"
        return pending
    pending.frame = Prompt(
        id=pending.id,
        slot=slot,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=values.get(b"seed"),
        logprobs=logprobs,
        pin=bool(values.get(b"pin", 0)),
        old_extra=old_extra,
        problem=_problem(temperature, top_p, values, old_extra),
    )
    return pending


def _last_values(options: list[bytes]) -> dict[bytes, bytes]:
    """key=value fields as a mapping, the last of a repeated key; a field without a key or `=` is under the empty key."""
    values: dict[bytes, bytes] = {}
    for option in options:
        key, equals, text = option.partition(b"=")
        values[key if equals else b""] = text if equals else option
    return values


def _problem(temperature: float, top_p: float, values: dict[bytes, int], old_extra: bool) -> str | None:
    """What makes a well-formed prompt a BAD_REQUEST, None when nothing does."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if not math.isfinite(value) or value < 0:
            return f"{name} {value}: must be finite and not negative"
    for key, high in _KEY_RANGES.items():
        if values.get(key, 0) > high:
            return f"{key.decode()}={values[key]}: must be at most {high}"
    return "a seventh field without a key (extra payload bytes) is not supported" if old_extra else None


def _image_header(fields: list[bytes]) -> _Pending:
    """Read the fields behind IMAGE."""
    pending = _Pending(_identifier(fields), _natural(fields[1]) if len(fields) > 1 else None)
    numbers = [_natural(text) for text in fields]
    if len(numbers) != 4 or not pending.id or None in numbers:
        pending.refusal = f"IMAGE fields {b' '.join(fields)[:80]!r}: must be id, bytes, grid_h, grid_w"
    else:
        pending.frame = Image(*(n for n in numbers if n is not None))
    return pending


class _State(Enum):
    HEADER = 0
    PAYLOAD = 1
    END = 2
    SKIP = 3


class Parser:
    """Bytes in, frames out. Holds at most one header line and one payload within its limit; a payload that will be refused is never kept."""

    def __init__(self, payload_limit: int = PAYLOAD_LIMIT, image_limit: int = IMAGE_LIMIT) -> None:
        self._payload_limit = payload_limit
        self._image_limit = image_limit
        self._state = _State.HEADER
        self._line = bytearray()
        self._long = False
        self._pending = _Pending(0, None)
        self._left = 0
        self._kept: bytearray | None = None
        self._payload = b""
        self._return = False

    @property
    def held_bytes(self) -> int:
        """Payload bytes held for a frame that is not complete yet."""
        return len(self._payload) + (len(self._kept) if self._kept is not None else 0)

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes of the input and return the frames they complete."""
        out: list[Frame] = []
        at, end = 0, len(data)
        while at < end:
            if self._state is _State.HEADER:
                at = self._take_line(data, at, out)
            elif self._state is _State.PAYLOAD:
                at = self._take_payload(data, at)
            elif self._state is _State.END:
                at = self._take_end(data, at, out)
            else:
                newline = data.find(b"\n", at)
                if newline < 0:
                    break
                at = newline + 1
                self._finish(out)
        return out

    def eof(self) -> list[Frame]:
        """The input has ended: a frame that is cut short is refused. The parser is then as new."""
        out: list[Frame] = []
        if self._state is not _State.HEADER:
            self._refuse("the input ended inside the frame")
            self._finish(out)
        elif self._line:
            self._begin(self._whole_fields(bytes(self._line[:HEADER_LIMIT])), "the input ended inside the header", out)
            if self._state is not _State.HEADER:
                self._finish(out)
        self._line.clear()
        self._long = False
        return out

    def _take_line(self, data: bytes, at: int, out: list[Frame]) -> int:
        newline = data.find(b"\n", at)
        end = len(data) if newline < 0 else newline
        room = HEADER_LIMIT + 1 - len(self._line)
        self._line += data[at : min(end, at + room)]
        self._long |= end - at > room
        if newline < 0:
            return end
        line = bytes(self._line)
        if line.endswith(b"\r") and not self._long:
            line = line[:-1]
        too_long = self._long or len(line) > HEADER_LIMIT
        self._line.clear()
        self._long = False
        if too_long:
            self._begin(self._whole_fields(line[:HEADER_LIMIT]), f"header over {HEADER_LIMIT} bytes", out)
        else:
            self._begin(line, None, out)
        return newline + 1

    @staticmethod
    def _whole_fields(line: bytes) -> bytes:
        """A line that was cut: without its last field, which may be incomplete."""
        return line[: line.rfind(b" ") + 1]

    def _begin(self, line: bytes, refusal: str | None, out: list[Frame]) -> None:
        """A header line is there: report it, or set up the consumption of its payload."""
        fields = [part for part in line.split(b" ") if part]
        verb = fields.pop(0) if fields else b""
        if verb in (b"PROMPT", b"SUBMIT"):
            self._await_payload(_prompt_header(fields), self._payload_limit, refusal, out)
        elif verb == b"IMAGE":
            self._await_payload(_image_header(fields), self._image_limit, refusal, out)
        elif verb in (b"CANCEL", b"STOP"):
            number = _identifier(fields)
            if refusal or len(fields) != 1 or not number:
                out.append(Refused(0, Code.BAD_FRAME, refusal or f"{verb.decode()} {b' '.join(fields)[:80]!r}: must be one id"))
            else:
                out.append(Cancel(number) if verb == b"CANCEL" else Stop(number))
        else:
            out.append(Ignored(line))

    def _await_payload(self, pending: _Pending, limit: int, refusal: str | None, out: list[Frame]) -> None:
        self._pending = pending
        if refusal:
            pending.refusal = refusal
        if pending.size is None or pending.size > DISCARD_LIMIT:
            self._refuse(pending.refusal or f"payload of {pending.size} bytes, at most {DISCARD_LIMIT} are skipped")
            self._finish(out)
            return
        if pending.size > limit and not pending.refusal:
            pending.refusal = f"payload of {pending.size} bytes, at most {limit} are taken"
        wanted = isinstance(pending.frame, Prompt) and not pending.frame.old_extra and not pending.refusal
        self._kept = bytearray() if wanted else None
        self._left = pending.size + pending.extra
        self._state = _State.PAYLOAD if self._left else _State.END

    def _take_payload(self, data: bytes, at: int) -> int:
        stop = min(len(data), at + self._left)
        self._left -= stop - at
        if self._kept is not None:
            if not self._left and not self._kept:
                self._payload = data[at:stop]
            else:
                self._kept += data[at:stop]
                if not self._left:
                    self._payload = bytes(self._kept)
                    self._kept = None
        if not self._left:
            self._state = _State.END
        return stop

    def _take_end(self, data: bytes, at: int, out: list[Frame]) -> int:
        byte = data[at : at + 1]
        if byte == b"\n":
            self._finish(out)
            return at + 1
        if byte == b"\r" and not self._return:
            self._return = True
            return at + 1
        self._refuse("no line end behind the payload")
        self._state = _State.SKIP
        return at

    def _refuse(self, reason: str) -> None:
        """The pending frame will be refused (the first reason stays); what was kept of it goes."""
        self._pending.refusal = self._pending.refusal or reason
        self._kept = None
        self._payload = b""

    def _finish(self, out: list[Frame]) -> None:
        """The pending frame is over: report it and wait for the next header."""
        pending, payload = self._pending, self._payload
        self._state, self._left, self._kept, self._payload, self._return = _State.HEADER, 0, None, b"", False
        if pending.refusal or pending.frame is None:
            out.append(Refused(pending.id, Code.BAD_FRAME, pending.refusal or "header"))
        elif isinstance(pending.frame, Prompt):
            out.append(replace(pending.frame, payload=payload))
        else:
            out.append(pending.frame)
