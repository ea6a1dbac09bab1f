"""Random frames in bursts of some dozens: valid ones, refused ones, and damaged ones that may swallow or split their neighbours.

A burst whose meaning the protocol leaves open is drawn again.
"""

from __future__ import annotations

import random
from collections import Counter

from harness.reading import Doubtful, Reading, expect_in_order, read

PROMPTS = [
    b"a",
    b"0",
    b"1234567",
    b"What is 2 + 3?",
    b"\n",
    b"\n\n\n",
    b"CANCEL 1\n",
    b"PROMPT 1 0 1 1 0 1\nx\n",
    b"\x00\xff\xfe",
    b"a\r\nb",
    "ä€😀".encode(),
    b"[gMASK]<sop><|user|>What is 7 + 1?<|assistant|></think>",
    b"12345" * 20,
]


class Frames:
    """A maker of bursts."""

    def __init__(self, rng: random.Random, prompts: list[bytes], slots: int) -> None:
        self.rng = rng
        self.prompts = prompts
        self.slots = slots
        self._id = 0

    def _pick(self, *texts: str) -> str:
        return self.rng.choice(texts)

    def _space(self) -> str:
        return " " if self.rng.random() < 0.9 else "  "

    def _frame(self, fields: list[str], payload: bytes) -> bytes:
        head = fields[0] + "".join(self._space() + part for part in fields[1:])
        return head.encode() + (b"\n" if self.rng.random() < 0.9 else b"\r\n") + payload + (b"\n" if self.rng.random() < 0.9 else b"\r\n")

    def _new_id(self) -> int:
        self._id += 1 if self.rng.random() < 0.9 else self.rng.randrange(1, 1000)
        return self._id

    def valid(self, recent: list[int]) -> bytes:
        """A well-formed prompt; sometimes with an id or a slot that is taken."""
        payload = self.rng.choice(self.prompts)
        id = self.rng.choice(recent) if recent and self.rng.random() < 0.08 else self._new_id()
        recent.append(id)
        keys = [self._pick("seed=7", "logprobs=2", "pin=1", "pin=0", "ids=1", "foo=bar", "seed=9 seed=7", "logprobs=0") for _ in range(self.rng.randrange(3))]
        budget = self._pick("1", "2", "2", "0" if "logprobs=2" in keys and "logprobs=0" not in keys else "1")
        numbers = [str(self.rng.randrange(self.slots)), str(len(payload)), budget, self._pick("0", "0", "0.0", "1e-9", "0.7"), self._pick("1", "0.9", "0")]
        return self._frame([self._pick("PROMPT", "SUBMIT"), str(id), *numbers, *keys], payload)

    def refused(self) -> bytes:
        """A prompt with one thing wrong."""
        payload = self.rng.choice(self.prompts)
        fields = ["PROMPT", str(self._new_id()), str(self.rng.randrange(self.slots)), str(len(payload)), "2", "0", "1"]
        what = self.rng.randrange(12)
        if what == 0:
            fields[2] = self._pick("x", "+1", "-1", "99", "1_0")
        elif what == 1:
            fields[3], payload = "0", b""
        elif what == 2:
            fields[4] = self._pick("0", "-5", "two", "0x1")
        elif what == 3:
            fields[self.rng.randrange(5, 7)] = self._pick("nan", "inf", "-1", "-0.5", "hot", "+5", "0x1")
        elif what == 4:
            fields.append(self._pick("logprobs=33", "pin=2", "seed=99999999999999999999", "ids=5", "logprobs=some"))
        elif what == 5:
            del fields[self.rng.randrange(4, 7) :]
        elif what == 6:
            fields[3], payload = self._pick("many", "-5", "3000000000", "99999999999"), b""
            return (" ".join(fields) + "\n").encode()
        elif what == 7:
            return self._frame(fields, payload)[:-1] + b"!?\n"
        elif what == 8:
            fields.append("pad=" + "x" * self.rng.randrange(4100, 9000))
        elif what == 9:
            extra = self.rng.randrange(40)
            fields.append(str(extra))
            payload += bytes(self.rng.randrange(256) for _ in range(extra))
        elif what == 10:
            fields[1] = self._pick("x", "", "-3")
        else:
            image = f"IMAGE {fields[1]} 24 2 3\n".encode() + bytes(self.rng.randrange(256) for _ in range(24)) + b"\n"
            return image + self._frame(fields, payload)
        return self._frame(fields, payload)

    def control(self, recent: list[int]) -> bytes:
        """CANCEL or STOP of a known or unknown id, or a line that is neither."""
        if self.rng.random() < 0.2:
            return self._pick("CANCEL\n", "STOP\n", "CANCEL x\n", "STOP 1 2\n", "\n", "\r\n", "HELLO 1 2\n", "cancel 1\n").encode()
        id = self.rng.choice(recent) if recent and self.rng.random() < 0.7 else self.rng.randrange(10**9, 10**10)
        return f"{self._pick('CANCEL', 'CANCEL', 'STOP')} {id}\n".encode()

    def garbage(self) -> bytes:
        """A line of anything."""
        alphabet = self.rng.choice([bytes(range(256)), b"PROMTCANEL 0123456789\n", b"\x00\xff\n"])
        return b"#" + bytes(self.rng.choice(alphabet) for _ in range(self.rng.randrange(60))) + b"\n"

    def damaged(self, recent: list[int]) -> bytes:
        """A frame with bytes flipped, cut out or put in, mostly in its header."""
        data = bytearray(self.rng.choice([self.valid, self.control])(recent))
        for _ in range(self.rng.randrange(1, 3)):
            place = self.rng.randrange(min(len(data), 40)) if self.rng.random() < 0.8 else self.rng.randrange(len(data))
            what = self.rng.randrange(3)
            if what == 0:
                data[place] = self.rng.choice(b"0123456789 \nPx=-.\xff\x00")
            elif what == 1:
                del data[place : place + self.rng.randrange(1, 4)]
            else:
                data[place:place] = bytes(self.rng.choice(b"0123456789 \nab=") for _ in range(self.rng.randrange(1, 4)))
            if not data:
                return b"\n"
        return bytes(data)

    def burst(self, count: int, capacity: int) -> tuple[bytes, Reading, Counter[str]]:
        """A burst of `count` frames that ends at a frame boundary, its reading, and how many frames of each kind it was made of."""
        while True:
            recent: list[int] = []
            kinds: Counter[str] = Counter()
            parts = []
            for _ in range(count):
                kind = self.rng.choices(["valid", "refused", "control", "garbage", "damaged"], [30, 20, 15, 10, 25])[0]
                kinds[kind] += 1
                make = {"valid": self.valid, "control": self.control, "damaged": self.damaged}.get(kind)
                parts.append(make(recent) if make else self.refused() if kind == "refused" else self.garbage())
            stream = b"".join(parts)
            try:
                reading = read(stream, self.slots, capacity)
                while reading.missing:
                    stream += reading.missing
                    reading = read(stream, self.slots, capacity)
                expect_in_order(reading)
            except Doubtful:
                count = max(1, count - 1)
                continue
            return stream, reading, kinds
