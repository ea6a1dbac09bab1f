"""A second parser of the inbound wire, for whole strings and as plain as can be, and a maker of frames that knows what they must give.

Frames are compared as tuples: what the wire answers to depends on nothing else.
"""

from __future__ import annotations

import math
import random
import re

from glm53serve.serve.frames import Cancel, Frame, Ignored, Image, Prompt, Refused, Stop

Told = tuple[object, ...]

FLOAT = rb"-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
PROMPT = re.compile(
    rb" *(?:PROMPT|SUBMIT) +(\d{1,20}) +(-?\d{1,20}) +(\d{1,20}) +(-?\d{1,20}) +(" + FLOAT + rb") +(" + FLOAT + rb")"
    rb"(?: +(\d{1,20}))?((?: +[^ =]+=[^ ]*)*) *"
)
IMAGE = re.compile(rb" *IMAGE +(\d{1,20}) +(\d{1,20}) +(\d{1,20}) +(\d{1,20}) *")
CONTROL = re.compile(rb" *(CANCEL|STOP) +(\d{1,20}) *")
DIGITS = re.compile(rb"\d{1,20}")
TWO_GIB = 2**31
HIGHEST = {b"seed": 2**64 - 1, b"logprobs": 32, b"pin": 1, b"ids": 1}


def told(frame: Frame) -> Told:
    """A frame as a tuple."""
    match frame:
        case Prompt():
            floats = repr(frame.temperature), repr(frame.top_p)
            options = frame.seed, frame.logprobs, frame.pin, frame.problem is not None
            return ("PROMPT", frame.id, frame.slot, frame.max_tokens, *floats, *options, frame.payload)
        case Image():
            return ("IMAGE", frame.id, frame.size, frame.grid_h, frame.grid_w)
        case Cancel():
            return ("CANCEL", frame.id)
        case Stop():
            return ("STOP", frame.id)
        case Refused():
            return ("REFUSED", frame.id, str(frame.code))
        case Ignored():
            return ("IGNORED",)


def naive(data: bytes, payload_limit: int = 16 << 20, image_limit: int = 256 << 20) -> list[Told]:
    """The frames of a whole input, its end included."""
    out: list[Told] = []
    while data:
        line, newline, data = data.partition(b"\n")
        ended = not newline
        if line.endswith(b"\r") and not ended:
            line = line[:-1]
        cut = ended or len(line) > 4096
        if cut:
            line = line[:4096]
            line = line[: len(line) - len(line.split(b" ")[-1])]
        parts = [p for p in re.split(rb" +", line) if p]
        verb = parts[0] if parts else b""
        if verb in (b"CANCEL", b"STOP"):
            found = CONTROL.fullmatch(line)
            good = found and not cut and 0 < int(found[2]) < 2**64
            out.append((verb.decode(), int(found[2])) if found and good else ("REFUSED", 0, "BAD_FRAME"))
            continue
        if verb not in (b"PROMPT", b"SUBMIT", b"IMAGE"):
            out.append(("IGNORED",))
            continue
        bytes_at = 2 if verb == b"IMAGE" else 3
        ident = int(parts[1]) if len(parts) > 1 and DIGITS.fullmatch(parts[1]) and int(parts[1]) < 2**64 else 0
        size = int(parts[bytes_at]) if len(parts) > bytes_at and DIGITS.fullmatch(parts[bytes_at]) else None
        extra = int(parts[7]) if verb != b"IMAGE" and len(parts) > 7 and DIGITS.fullmatch(parts[7]) else None
        refused = ("REFUSED", ident, "BAD_FRAME")
        answer = refused if cut else (_image(line) if verb == b"IMAGE" else _prompt(line)) or refused
        if extra is not None and extra + (size or 0) > TWO_GIB:
            extra, answer = None, refused
        if size is None or size > TWO_GIB or ended:
            out.append(refused)
            continue
        if size > (image_limit if verb == b"IMAGE" else payload_limit):
            answer = refused
        payload, data = data[: size + (extra or 0)], data[size + (extra or 0) :]
        end = re.match(rb"\r?\n", data)
        if end:
            data = data[end.end() :]
        else:
            answer = refused
            data = data.partition(b"\n")[2]
        if answer[0] == "PROMPT":
            answer = (*answer, b"" if extra is not None else payload)
        out.append(answer)
    return out


def _prompt(line: bytes) -> Told | None:
    found = PROMPT.fullmatch(line)
    if not found or not 0 < int(found[1]) < 2**64:
        return None
    keys = dict(item.split(b"=", 1) for item in found[8].split(b" ") if item)
    known = {key: text for key, text in keys.items() if key in HIGHEST}
    if not all(DIGITS.fullmatch(text) for text in known.values()):
        return None
    values = {key: int(text) for key, text in known.items()}
    slot, max_tokens = (int(text) if b"-" not in text else min(-1, int(text)) for text in (found[2], found[4]))
    logprobs = values.get(b"logprobs", 0)
    if max_tokens < (1 if logprobs == 0 else 0):
        return None
    temperature, top_p = float(found[5]), float(found[6])
    bad = found[7] is not None or any(not math.isfinite(x) or x < 0 for x in (temperature, top_p))
    bad = bad or any(value > HIGHEST[key] for key, value in values.items())
    options = values.get(b"seed"), logprobs, values.get(b"pin", 0) != 0, bad
    return ("PROMPT", int(found[1]), slot, max_tokens, repr(temperature), repr(top_p), *options)


def _image(line: bytes) -> Told | None:
    found = IMAGE.fullmatch(line)
    if not found or not 0 < int(found[1]) < 2**64:
        return None
    return ("IMAGE", *(int(number) for number in found.groups()))


PAYLOAD_BITS = [b"hello", b"\n", b"\r\n", b"\0", b"\xff\xfe", b"PROMPT 9 0 3 1 0 1\nabc\n", b"CANCEL 5\n", b" ", b"STOP 1", b"IMAGE 1 2 3 4\n"]
WORDS = [b"", b"x", b"+5", b"1_0", b"0x1", b"-1", b"1.5", b"\xd9\xa3", b"1" * 21, b"nan", b"5\r", b"\0", b"seed", b"=3", b"-", b"--1", b"1-"]


class Maker:
    """Makes frames from a random source; payloads stay below 4 KiB. `limit` is the payload limit of the parser under test."""

    def __init__(self, rng: random.Random, limit: int = 4096) -> None:
        self.rng = rng
        self.limit = limit

    def payload(self) -> bytes:
        """Some bytes, often such as look like frames."""
        rng = self.rng
        if rng.random() < 0.2:
            return rng.randbytes(rng.randrange(200))
        return b"".join(rng.choice(PAYLOAD_BITS) for _ in range(rng.randrange(6)))

    def ident(self) -> int:
        """An id, now and then a very large one."""
        return self.rng.choice([self.rng.randrange(1, 100), self.rng.randrange(1, 2**64), 2**64 - 1])

    def end(self) -> bytes:
        """A line end."""
        return self.rng.choice([b"\n", b"\n", b"\r\n"])

    def header(self, size: int) -> tuple[list[bytes], Told]:
        """The fields of a legal PROMPT and what it gives, without its payload."""
        rng = self.rng
        ident, slot, logprobs = self.ident(), rng.randrange(20), rng.choice([None, 0, 1, 32])
        max_tokens = rng.randrange(0 if logprobs else 1, 50)
        temperature, top_p = (rng.choice([b"0", b"1", b"0.7", b"1e-05", b".5", b"2.", b"0.95", b"1E+2"]) for _ in range(2))
        seed, pin = rng.choice([None, 0, 2**64 - 1]), rng.choice([None, 0, 1])
        keys = [b"%s=%d" % (key, value) for key, value in ((b"seed", seed), (b"logprobs", logprobs), (b"pin", pin)) if value is not None]
        keys += rng.choice([[], [], [b"ids=1"], [b"colour=blue", b"x="], [b"y==z"]])
        rng.shuffle(keys)
        if keys and rng.random() < 0.2:
            keys.insert(0, rng.choice([b"seed=junk", b"pin=7"]) if seed is not None and pin is not None else b"z=1")
        fields = [rng.choice([b"PROMPT", b"SUBMIT"]), b"%d" % ident, b"%d" % slot, b"%d" % size, b"%d" % max_tokens, temperature, top_p, *keys]
        bad = rng.random() < 0.15
        if bad and rng.random() < 0.5:
            temperature = fields[5] = rng.choice([b"nan", b"-nan", b"inf", b"-1", b"1e999", b"-.5"])
        elif bad:
            fields.append(rng.choice([b"ids=2", b"ids=" + b"9" * 20]))
        return fields, ("PROMPT", ident, slot, max_tokens, repr(float(temperature)), repr(float(top_p)), seed, logprobs or 0, bool(pin), bad)

    def line(self, fields: list[bytes]) -> bytes:
        """Fields as a header line."""
        return self.rng.choice([b" ", b" ", b" ", b"  "]).join(fields) + self.end()

    def good(self) -> tuple[bytes, Told]:
        """A legal frame (or ignored line) and what it gives."""
        rng = self.rng
        kind = rng.randrange(10)
        if kind < 6:
            payload = self.payload()
            fields, expected = self.header(len(payload))
            if rng.random() < 0.1:
                extra = self.payload()
                fields.insert(7, b"%d" % len(extra))
                return self.line(fields) + payload + extra + self.end(), (*expected[:-1], True, b"")
            return self.line(fields) + payload + self.end(), (*expected, payload)
        if kind == 6:
            payload, ident = self.payload(), self.ident()
            return self.line([b"IMAGE", b"%d" % ident, b"%d" % len(payload), b"2", b"4"]) + payload + self.end(), ("IMAGE", ident, len(payload), 2, 4)
        if kind < 9:
            verb, ident = rng.choice([b"CANCEL", b"STOP"]), self.ident()
            return self.line([verb, b"%d" % ident]), (verb.decode(), ident)
        return rng.choice([b"\n", b"\r\n", b"prompt 1 0 0 1 0 1\n", b"HELLO\n", b"x" * 5000 + b"\n", b"\xff\0\n"]), ("IGNORED",)

    def refused(self) -> tuple[bytes, Told]:
        """A damaged frame behind which the input is aligned, and its refusal."""
        rng = self.rng
        payload = self.payload()
        fields, _ = self.header(len(payload))
        ident = int(fields[1])
        kind = rng.randrange(8)
        if kind == 0:
            at = rng.choice([1, 2, 4, 5, 6])
            legal = {2: [b"-1"], 5: [b"-1", b"1.5", b"nan", b"1" * 21], 6: [b"-1", b"1.5", b"nan", b"1" * 21, b"5\r"]}
            word = rng.choice([w for w in WORDS if w and w not in legal.get(at, [])])
            fields[at] = word
            ident = 0 if at == 1 else ident
        elif kind == 1:
            fields = fields[: rng.randrange(4, 7)]
            fields[3] = b"%d" % len(payload)
        elif kind == 2:
            fields.append(b"pad=" + b"x" * 4096)
        elif kind == 3:
            payload = rng.randbytes(self.limit + 1 + rng.randrange(300))
            fields[3] = b"%d" % len(payload)
        elif kind == 4:
            junk = rng.choice([b"x", b"\rx", b"\0more", b"\r\r", b"CANCEL 1"])
            return self.line(fields) + payload + junk + b"\n", ("REFUSED", ident, "BAD_FRAME")
        elif kind == 5:
            fields[3] = rng.choice([b"%d" % (2**31 + 1), b"9" * 20])
            return self.line(fields), ("REFUSED", ident, "BAD_FRAME")
        elif kind == 6:
            verb = rng.choice([b"CANCEL", b"STOP"])
            rest = rng.choice([[], [b"0"], [b"1", b"2"], [b"-1"], [b"%d" % 2**64], [b"1.0"], [b"x" * 4100]])
            return self.line([verb, *rest]), ("REFUSED", 0, "BAD_FRAME")
        else:
            fields[4:] = [b"-3", b"0", b"1"]
        return self.line(fields) + payload + self.end(), ("REFUSED", ident, "BAD_FRAME")

    def wild(self) -> bytes:
        """A frame damaged in any way, or garbage: nothing is promised behind it."""
        rng = self.rng
        frame = bytearray((self.good() if rng.random() < 0.7 else self.refused())[0])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(frame) + 1)
            kind = rng.randrange(5)
            if kind == 0:
                del frame[at : at + rng.randrange(1, 8)]
            elif kind == 1:
                frame[at:at] = rng.choice(WORDS)
            elif kind == 2:
                frame[at:at] = rng.choice([b" ", b"\n", b"\r", b"\r\n", rng.randbytes(3)])
            elif kind == 3 and at < len(frame):
                frame[at] ^= 1 << rng.randrange(8)
            else:
                del frame[at:]
        return bytes(frame)

    def cut(self, data: bytes) -> list[bytes]:
        """The same bytes in random pieces: single ones, small ones or large ones."""
        rng = self.rng
        size = rng.choice([1, 3, 17, 200, 5000]) if len(data) < 4000 else rng.choice([40, 500, 5000])
        pieces, at = [], 0
        while at < len(data):
            step = int(rng.random() * size) + 1
            pieces.append(data[at : at + step])
            at += step
        return pieces
