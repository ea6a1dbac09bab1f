"""Decoding on a device that runs ahead: more turns than it takes rows, and a device that fails."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from glm53serve.engine.decode_loop import DecodeLoop
from harness.frames import Data
from tests.patience import PATIENCE
from tests.served import CHUNK, Fresh, Served, at_ask, count_asks, in_flight_together, load_tiny, same
from tests.step_device import EngineStepDevice

PROMPTS = [b"one two", b"three", b"4 5 6", b"seven eight nine", b"t"]


class SmallDevice(EngineStepDevice):
    """Takes two rows; raises `failure` once when it is waited for, if there is one."""

    buckets = (1, 2)
    failure: Exception | None = None

    def wait(self, step: int) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        super().wait(step)


def start(model: Path, usage: Path) -> tuple[Served, SmallDevice]:
    loaded = load_tiny(model, len(PROMPTS))
    device = SmallDevice(loaded.engine, random.Random(3))
    loaded.engine.ahead = DecodeLoop(device, depth=2)
    return Served(loaded, usage), device


def test_more_turns_than_the_device_has_rows(model: Path, fresh: Fresh, tmp_path: Path) -> None:
    served, _ = start(model, tmp_path / "usage")
    for _ in range(2):
        with in_flight_together(served):
            turns = [served.submit(prompt, slot, max_tokens=30 + 5 * slot, logprobs=0) for slot, prompt in enumerate(PROMPTS)]
        for turn, prompt in zip(turns, PROMPTS, strict=True):
            served.wait(turn)
            assert turn.outcome == "DONE" and turn.text == b"".join(text for text, _ in fresh.answer(prompt, turn.max_tokens))
    assert served.close() == 0


def test_a_device_that_fails_costs_its_turns_and_nothing_else(model: Path, fresh: Fresh, tmp_path: Path) -> None:
    served, device = start(model, tmp_path / "usage")
    served.wait(served.submit(PROMPTS[0], 0, max_tokens=3, logprobs=0))
    device.failure = RuntimeError("the device says no")
    failed = served.wait(served.submit(PROMPTS[1], 1, max_tokens=20, logprobs=0))
    assert failed.outcome == "INTERNAL"
    assert any("the device says no" in line for line in served.log)
    for slot in (0, 1):
        turn = served.wait(served.submit(PROMPTS[2], slot, max_tokens=6))
        assert same(served.said(turn), fresh.answer(PROMPTS[2], 6))
    assert served.close() == 0


def test_a_long_prompt_leaves_a_step_to_the_others_after_every_chunk(model: Path, fresh: Fresh, tmp_path: Path) -> None:
    served, _ = start(model, tmp_path / "usage")
    long = bytes(b"abcdefghij klmnop"[i * i % 17] for i in range(12 * CHUNK))
    with in_flight_together(served):
        first = served.submit(PROMPTS[0], 0, max_tokens=60, logprobs=0)
        second = served.submit(long, 1, max_tokens=2, logprobs=0)
    served.wait(second)
    served.wait(first)
    before = next(at for at, frame in enumerate(served.frames) if frame is second.tokens[0])
    between = sum(isinstance(frame, Data) and frame.id == first.id for frame in served.frames[:before])
    assert between >= 10, f"{between} tokens during 12 chunks"
    assert first.text == b"".join(text for text, _ in fresh.answer(PROMPTS[0], 60))
    assert served.close() == 0


@pytest.mark.parametrize("how", ["CANCEL", "STOP"])
def test_an_end_does_not_wait_for_another_prompts_chunk(how: str, model: Path, fresh: Fresh, tmp_path: Path) -> None:
    served, _ = start(model, tmp_path / "usage")
    ended_inside: list[bool] = []

    def end() -> None:
        (served.cancel if how == "CANCEL" else served.stop)(first)
        with served._changed:
            ended_inside.append(served._changed.wait_for(lambda: first.ended, PATIENCE))

    with at_ask(served, 2 * count_asks(fresh, PROMPTS[0]) + 3, end):  # in the other prompt's second chunk
        with in_flight_together(served):
            first = served.submit(PROMPTS[0], 0, max_tokens=240, logprobs=0)
            second = served.submit(PROMPTS[3] * 3, 1, max_tokens=6)
        served.wait(second)
    assert ended_inside == [True]
    assert same(served.said(second), fresh.answer(PROMPTS[3] * 3, 6))
    assert first.outcome == ("CANCELLED" if how == "CANCEL" else "DONE") and first.accept is not None
    answer, sent = fresh.answer(PROMPTS[0], 240), len(first.tokens)
    assert [frame.payload for frame in first.tokens] == [text for text, _ in answer[:sent]]
    # the slot holds what was sent, and the logits by which the answer would have gone on
    slot = served.loaded.engine.slots[0]
    assert slot.filled == len(slot.history) == first.accept.prompt_tokens + sent
    assert slot.resumable and slot.logits is not None
    assert served.loaded.tokenizer.text(int(slot.logits.argmax())) == answer[sent][0]
    if how == "CANCEL":
        assert f"CANCEL {first.id} {first.accept.prompt_tokens} {sent} {slot.filled}" in served.log
    for index in (0, 1):
        turn = served.wait(served.submit(PROMPTS[2], index, max_tokens=6, logprobs=0))
        assert turn.text == b"".join(text for text, _ in fresh.answer(PROMPTS[2], 6))
    assert served.close() == 0
