"""Random lives of several slots against an engine that has never seen anything else, with the states that were reached counted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from glm53serve.engine.decode_loop import DecodeLoop
from glm53serve.engine.engine import Engine
from harness.ledger import Turn
from tests.patience import PATIENCE
from tests.served import CAPACITY, Fresh, Served, cancel_at_ask, load_tiny, same
from tests.step_device import EngineStepDevice

SLOTS = 3
ROUNDS = 70


@pytest.fixture(params=["host", "ahead"])
def served(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Decoding step by step with the host, or on a device that runs ahead of it."""
    loaded = load_tiny(model, SLOTS, GLM53_CHECKPOINT_GB="0.01", COLI_PIN_SLOTS="2")
    if request.param == "ahead":
        loaded.engine.ahead = DecodeLoop(EngineStepDevice(loaded.engine, random.Random(3)), depth=2)
    daemon = Served(loaded, tmp_path / "usage")
    yield daemon
    assert daemon.close() == 0


def _next_prompt(rng: random.Random, history: bytes, pinned: bytes) -> bytes:
    """A prompt that stands in some relation to what a slot has seen."""
    some = bytes(rng.choice(b"abcdefgh \n") for _ in range(rng.randint(1, 30)))
    kind = rng.random()
    if kind < 0.35:
        prompt = history + some
    elif kind < 0.5:
        prompt = history[: rng.randint(0, len(history))] + some
    elif kind < 0.6:
        prompt = history
    elif kind < 0.7:
        prompt = history[: rng.randint(0, len(history))]
    elif kind < 0.85:
        prompt = pinned + some
    else:
        prompt = some
    return prompt[: CAPACITY - 20] or some


def _end_after(served: Served, turn: Turn, count: int, how: Callable[[Turn], None]) -> None:
    """CANCEL or STOP a turn that `held_at` holds after `count` tokens, or that has ended before."""
    served.wait_until(lambda: turn.ended or len(turn.tokens) >= count)
    how(turn)
    desk, until = served.daemon._desk, time.monotonic() + PATIENCE
    while not turn.ended and (known := desk._turns.get(turn.id)) is not None and not (known.cancelled or known.stopped):
        assert time.monotonic() < until, "the frame was not read"
        time.sleep(0.001)


@contextmanager
def held_at(served: Served, slot: int, count: int) -> Iterator[None]:
    """The engine's thread computes nothing more once the turn on a slot has sent `count` tokens, until the block is left."""
    engine, go_on = served.loaded.engine, threading.Event()
    original = type(engine).run_layers

    def run_layers(self: Engine, *arguments: Any) -> Any:
        turn = served.daemon._desk._slots.get(slot)
        if turn is not None and turn.emitted >= count:
            assert go_on.wait(PATIENCE)
        return original(self, *arguments)

    type(engine).run_layers = run_layers  # type: ignore[method-assign]
    try:
        yield
    finally:
        type(engine).run_layers = original  # type: ignore[method-assign]
        go_on.set()


@pytest.mark.parametrize("seed", [1])
def test_every_answer_is_a_fresh_engines(served: Served, fresh: Fresh, seed: int) -> None:
    rng = random.Random(seed)
    history, pinned = [b""] * SLOTS, [b""] * SLOTS
    reached: Counter[str] = Counter()
    for _ in range(ROUNDS):
        slots = rng.sample(range(SLOTS), rng.choice((1, 1, 2, 3)))
        what = rng.choice(("answer", "answer", "halt", "cancel", "stop"))
        turns = []
        halts = served.halted()
        ends = what in ("cancel", "stop")
        victim, after = rng.randrange(len(slots)), rng.randint(0, 3)
        with cancel_at_ask(served, rng.randint(1, 25) if what == "halt" else 0) as hit:
            with held_at(served, slots[victim], after) if ends else nullcontext():
                for slot in slots:
                    prompt = _next_prompt(rng, history[slot], pinned[slot])
                    pin = rng.random() < 0.25
                    turns.append((served.submit(prompt, slot, rng.randint(1, 6), rng.choice((0, 1)), int(pin)), prompt, pin))
                if ends:
                    _end_after(served, turns[victim][0], after, served.cancel if what == "cancel" else served.stop)
            for turn, _, _ in turns:
                served.wait(turn)
        for turn, prompt, pin in turns:
            wanted = fresh.answer(prompt, turn.max_tokens)
            said = served.said(turn)
            if not turn.logprobs:
                wanted = [(text, 0.0) for text, _ in wanted]
            assert same(said, wanted[: len(said)]), (turn, prompt, said, wanted)
            if turn.outcome == "DONE" and not turn.stopped:
                assert len(said) == len(wanted), (turn, wanted)
            history[turn.slot] = prompt + b"".join(text for text, _ in said)
            if pin and turn.outcome == "DONE":
                pinned[turn.slot] = prompt
            reached[served.word(turn)] += 1
            reached[f"{turn.outcome} after {'some' if said else 'no'} tokens"] += 1
        reached["halted"] += served.halted() - halts
        reached["cancelled at an ask"] += len(hit)
        reached[f"{len(turns)} turns"] += 1
    prompt = b"once more, with feeling"
    for word in ("diverged", "equal"):
        turn = served.wait(served.submit(prompt, 0, 1, logprobs=0))
        assert [text for text, _ in served.said(turn)] == [text for text, _ in fresh.answer(prompt, 1)]
        reached[served.word(turn)] += 1
        assert word != "equal" or served.word(turn) == "equal"
    assert not served.ledger.owed
    wanted_states = {"cold", "equal", "shorter", "diverged", "extend", "pin", "halted", "1 turns", "2 turns", "3 turns"}
    wanted_states |= {"DONE after some tokens", "CANCELLED after some tokens", "CANCELLED after no tokens"}
    assert wanted_states <= set(reached), reached
    assert reached["halted"] >= 3 and reached["extend"] >= 10 and reached["pin"] >= 5, reached
