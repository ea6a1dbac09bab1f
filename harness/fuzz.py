"""Random bursts for a live engine, every answer held against an independent reading of the protocol."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from harness.bursts import PROMPTS, Frames
from harness.client import Client
from harness.ledger import Turn
from harness.reading import SERVED, Reading
from harness.rig import Rig

SLOTS = 3
CAPACITY = 64


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
    client.wait_until("the answers of a burst", lambda: all(client.ledger.settled(turn) for _, turn in turns))
    barrier = rng.randrange(10**12, 10**13)
    client.not_found(barrier)

    def answered() -> Counter[int]:
        return Counter(error.id for error in client.ledger.not_found[late:])

    cancelled = Counter(turn.id for _, turn in turns if turn.outcome == "CANCELLED")
    # a prompt that is refused while its CANCEL is already known ends with that one ERROR
    refused = {turn.id for _, turn in turns if turn.outcome not in ("DONE", "CANCELLED", "BAD_FRAME")}
    client.wait_until("the answers of CANCELs", lambda: all((answered() + cancelled)[id] >= 1 or id in refused for id in cancels))
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
