"""Random frames for a live engine, and an independent reading of the protocol that says how each must be answered.

A burst is some dozens of frames: valid ones, refused ones, and damaged ones that may swallow or split their neighbours. `read` goes through
the burst's bytes as a whole and lists what is asked in it; where the protocol leaves more than one answer, it lists them all, and where it
leaves the meaning open the burst is drawn again.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.client import Client
from harness.ledger import Turn
from harness.rig import Rig

LIMIT = 16 << 20
ALIGNED = 2 << 30
_NATURAL = re.compile(rb"[0-9]{1,20}")
_INTEGER = re.compile(rb"-?[0-9]{1,20}")
_FLOAT = re.compile(rb"-?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)")
_NO_FLOAT = re.compile(rb"\+5|1_0|0x1|[A-Za-df-hj-mo-z][a-z]*|-?")
_KEYS = {b"seed": (1 << 64) - 1, b"logprobs": 32, b"pin": 1, b"ids": 1}
SERVED = "DONE"
SLOTS = 3
CAPACITY = 64
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


def read(stream: bytes, slots: int, capacity: int) -> Reading:
    """Read a whole burst. Raises Doubtful."""
    out = Reading()
    images: set[int] = set()
    at = 0
    while at < len(stream):
        cut = stream.find(b"\n", at)
        if cut < 0:
            out.missing = b"\n"
            return out
        line = stream[at:cut]
        at = cut + 1
        long = len(line) > 4096
        if long:
            line = line[:4096].rsplit(b" ", 1)[0]
        elif line.endswith(b"\r"):
            line = line[:-1]
        if line.startswith(b" ") or line.endswith((b" ", b"\r")) or b"\x00" in line[:1]:
            raise Doubtful("blanks around a header")
        fields = [part for part in line.split(b" ") if part]
        verb = fields.pop(0) if fields else b""
        if verb in (b"CANCEL", b"STOP"):
            if long:
                raise Doubtful("a long control line")
            if len(fields) != 1 or not _NATURAL.fullmatch(fields[0]):
                out.asks.append(_bad(0))
            elif _id(fields) == 0:
                raise Doubtful("id 0")
            elif verb == b"CANCEL":
                out.asks.append(Ask("CANCEL", _id(fields), set()))
            else:
                out.stops.add(_id(fields))
            continue
        if verb not in (b"PROMPT", b"SUBMIT", b"IMAGE"):
            if long:
                raise Doubtful("a long line of nothing")
            continue
        place = 1 if verb == b"IMAGE" else 2
        size = int(fields[place]) if len(fields) > place and _NATURAL.fullmatch(fields[place]) else None
        id = _id(fields)
        if verb == b"IMAGE":
            if long or id == 0 or size is None or size > 1 << 16 or len(fields) != 4 or not all(_NATURAL.fullmatch(f) for f in fields):
                raise Doubtful("a damaged IMAGE")
            ask = None
            images.add(id)
        else:
            ask = _bad(id) if long or id == 0 else _prompt(id, fields, slots)
        extra = int(fields[6]) if verb != b"IMAGE" and len(fields) > 6 and _NATURAL.fullmatch(fields[6]) else 0
        if size is None or size > ALIGNED:
            out.asks.append(_bad(id))
            continue
        if size + extra > 1 << 20 and size <= LIMIT:
            raise Doubtful("too long to send")
        payload = stream[at : at + size]
        at += size + extra
        end = stream[at : at + 2]
        if at >= len(stream) or end == b"\r":
            out.missing = b"x" * max(0, at - len(stream)) + b"\n"
            return out
        if end[:1] == b"\n" or end == b"\r\n":
            at += 1 if end[:1] == b"\n" else 2
            if size > LIMIT:
                ask = _bad(id)
        else:
            cut = stream.find(b"\n", at)
            if cut < 0:
                out.missing = b"\n"
                return out
            at = cut + 1
            if ask is None:
                raise Doubtful("a damaged IMAGE")
            ask = _bad(id)
        if ask is not None:
            ask.payload = payload
            if SERVED in ask.answers:
                _content(ask, id in images, capacity)
            out.asks.append(ask)
    return out


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


def send_burst(client: Client, rng: random.Random, stream: bytes, reading: Reading, known: Mapping[tuple[bytes, int], bytes]) -> Counter[str]:
    """Send a burst, cut at random, and hold every answer against its reading.

    known: (prompt, budget) -> the greedy text. Returns how often each answer came. Raises AssertionError, or what the client raises.
    """
    turns = [
        (ask, Turn(ask.id, ask.slot, ask.max_tokens, ask.logprobs, raw=ask.answers == {"BAD_FRAME"}, stopped=ask.id in reading.stops))
        for ask in reading.asks
        if ask.verb == "PROMPT"
    ]
    cancels = Counter(ask.id for ask in reading.asks if ask.verb == "CANCEL")
    with client.lock:
        late = len(client.ledger.not_found)
        for _, turn in turns:
            client.ledger.submitted(turn)
        for id in cancels.elements():
            client.ledger.cancelled(id)
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 7, 60, 500, 1 << 16])
        client.write(stream[at : at + size])
        at += size
    client.wait_until("the answers of a burst", lambda: all(client.ledger.settled(turn) for _, turn in turns), 60)
    barrier = rng.randrange(10**12, 10**13)
    client.not_found(barrier, 60)

    def answered() -> Counter[int]:
        return Counter(error.id for error in client.ledger.not_found[late:])

    cancelled = Counter(turn.id for _, turn in turns if turn.outcome == "CANCELLED")
    # a prompt that is refused while its CANCEL is already known ends with that one ERROR
    refused = {turn.id for _, turn in turns if turn.outcome not in ("DONE", "CANCELLED", "BAD_FRAME")}
    client.wait_until("the answers of CANCELs", lambda: all((answered() + cancelled)[id] >= 1 or id in refused for id in cancels), 60)
    for id, count in (answered() + cancelled).items():
        assert id == barrier or 1 <= count <= cancels[id], f"{count} answers to {cancels[id]} CANCELs of {id}"
    for id, count in cancels.items():
        named = any(turn.id == id for _, turn in turns)
        assert named or answered()[id] == count, f"{answered()[id]} answers to {count} CANCELs of an unknown id"
    seen: Counter[str] = Counter()
    for ask, turn in turns:
        outcome = turn.outcome.split()[0]
        seen[outcome] += 1
        assert outcome in ask.answers, f"{ask} was answered with {turn.outcome}"
        want = known.get((ask.payload, ask.max_tokens)) if ask.greedy and ask.max_tokens else None
        if outcome == SERVED and want is not None:
            assert turn.text == want or (turn.stopped and want.startswith(turn.text)), f"{ask} was answered with {turn.text!r}, not {want!r}"
    return seen + Counter(NOT_FOUND=sum(answered().values()))


def fuzz(rig: Rig, frames: int, seed: int) -> Counter[str]:
    """Send that many random frames to an engine of the rig. Returns how often each answer came; raises AssertionError with the burst and the seed."""
    rng = random.Random(seed)
    with rig.start(1, GLM53_MAXT=str(CAPACITY), GLM53_CHECKPOINT_GB="0") as alone:
        known = {(prompt, tokens): alone.answer(prompt, 0, tokens).text for prompt in PROMPTS if len(prompt) < CAPACITY for tokens in (1, 2)}
    made = Frames(rng, PROMPTS, SLOTS)
    seen: Counter[str] = Counter()
    sent = 0
    with rig.start(SLOTS, GLM53_MAXT=str(CAPACITY)) as client:
        while sent < frames:
            stream, reading, kinds = made.burst(rng.randrange(1, 40), CAPACITY)
            sent += kinds.total()
            try:
                seen += send_burst(client, rng, stream, reading, known)
            except Exception as error:
                raise AssertionError(f"seed {seed}, after {sent} frames: {error}; the burst was {stream[:3000]!r}") from error
        client.expect_quiet(0.1)
        client.write(b"PROMPT 77 0 100 1 0 1\nhalf")
        last = client.raw(b" a frame", 77)
        client.finish()
        assert last.outcome == "BAD_FRAME", f"a frame cut short by the end of input was answered with {last.outcome}"
        assert not any("Traceback" in line for line in client.stderr_lines), client.stderr_lines[-5:]
    return seen
