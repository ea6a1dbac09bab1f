"""What a prompt may reuse of a slot, as a table and against a brute-force statement of the rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53serve.engine.slots import BOUNDARIES_A_SLOT, Checkpoint, CheckpointPool, Origin, Slot, plan_reuse

ROW = np.zeros(4, np.float32)


def slot_with(history: list[int], filled: int, resumable: bool = True, checkpoints: tuple[tuple[int, Origin], ...] = ()) -> Slot:
    slot = Slot(0, list(history), filled, ROW, resumable)
    slot.checkpoints = [Checkpoint(length, origin, [], ROW, 10) for length, origin in checkpoints]
    return slot


@pytest.mark.parametrize(
    ("history", "filled", "resumable", "checkpoints", "prompt", "word", "reused", "common"),
    [
        ([], 0, False, (), [1, 2], "cold", 0, 0),
        ([1, 2, 3], 3, True, (), [1, 2, 3], "equal", 3, 3),
        ([1, 2, 3], 3, False, (), [1, 2, 3], "equal", 0, 3),
        ([1, 2, 3], 3, True, (), [1, 2], "shorter", 0, 2),
        ([1, 2, 3], 3, True, (), [1, 2, 9, 9], "diverged", 0, 2),
        ([1, 2, 3], 3, True, (), [9], "diverged", 0, 0),
        ([1, 2, 3], 3, True, (), [1, 2, 3, 4], "extend", 3, 3),
        ([1, 2, 3, 4], 3, True, (), [1, 2, 3, 4], "extend", 3, 3),  # the last token of a budget was sent, not computed
        ([1, 2, 3, 4], 3, True, (), [1, 2, 3, 9], "extend", 3, 3),
        ([1, 2, 3, 4], 3, True, (), [1, 2, 3], "equal", 3, 3),
        ([1, 2, 3], 3, True, ((2, "pin"),), [1, 2, 9], "pin", 2, 2),
        ([1, 2, 3], 3, True, ((2, "pin"),), [1, 2], "shorter", 0, 2),  # a checkpoint as long as the prompt leaves nothing to compute
        ([1, 2, 3], 3, True, ((1, "boundary"), (2, "pin")), [1, 2], "pin", 1, 2),
        ([1, 2, 3], 3, False, ((2, "boundary"),), [1, 2, 3], "pin", 2, 3),
        ([1, 2, 3], 3, True, ((2, "boundary"),), [1, 2, 3], "equal", 3, 3),
        ([1, 2, 3], 3, True, ((2, "rewind"),), [1, 2, 9], "shorter", 2, 2),
        ([1, 2, 3], 3, True, ((3, "pin"),), [1, 2, 9], "diverged", 0, 2),
    ],
)
def test_table(
    history: list[int], filled: int, resumable: bool, checkpoints: tuple[tuple[int, Origin], ...], prompt: list[int], word: str, reused: int, common: int
) -> None:
    reuse = plan_reuse(slot_with(history, filled, resumable, checkpoints), prompt)
    assert (reuse.word, reuse.reused, reuse.common, reuse.filled_before) == (word, reused, common, filled)


tokens = st.lists(st.integers(0, 2), max_size=8)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


@given(history=tokens, unfed=st.booleans(), resumable=st.booleans(), lengths=st.sets(st.integers(1, 8)), prompt=prompts)
def test_reused_tokens_are_always_a_prefix_of_both(history: list[int], unfed: bool, resumable: bool, lengths: set[int], prompt: list[int]) -> None:
    filled = len(history) - (1 if unfed and history else 0)
    kept = tuple((n, "boundary") for n in sorted(lengths) if n <= filled)  # a checkpoint is taken of what is computed
    reuse = plan_reuse(slot_with(history, filled, resumable, kept), prompt)  # type: ignore[arg-type]
    assert history[: reuse.reused] == prompt[: reuse.reused]
    assert reuse.reused <= len(prompt)
    if reuse.checkpoint is not None:
        assert reuse.checkpoint.length == reuse.reused < len(prompt)
    elif reuse.reused:
        assert reuse.reused == filled and reuse.word in ("equal", "extend")
    better = [n for n, _ in kept if history[:n] == prompt[:n] and n < len(prompt)]
    assert reuse.reused >= max(better, default=0), "a deeper checkpoint was passed over"


def test_overwriting_drops_the_checkpoints_behind_it() -> None:
    slot = slot_with([1, 2, 3, 4], 4, checkpoints=((1, "pin"), (3, "boundary"), (4, "pin")))
    slot.cut(2)
    assert slot.history == [1, 2] and [c.length for c in slot.checkpoints] == [1]


def test_pool_limits() -> None:
    slots = [Slot(0), Slot(1)]
    pool = CheckpointPool(slots, pins=2, budget=100)
    for n in range(1, 5):
        pool.add(slots[0], Checkpoint(n, "pin", [], ROW, 1000))
    assert [c.length for c in slots[0].checkpoints] == [3, 4], "the least recently used pins go"
    pool.touch(slots[0].checkpoints[0])
    pool.add(slots[0], Checkpoint(5, "pin", [], ROW, 1000))
    assert sorted(c.length for c in slots[0].checkpoints) == [3, 5]
    for n in range(1, 7):
        pool.add(slots[n % 2], Checkpoint(n, "boundary", [], ROW, 30))
    assert pool.boundary_bytes() <= 100
    assert sorted(c.length for s in slots for c in s.checkpoints if c.origin == "boundary") == [4, 5, 6]
    for n in range(1, 4):
        pool.add(slots[0], Checkpoint(n, "rewind", [], ROW, 1))
    assert [c.length for c in slots[0].checkpoints if c.origin == "rewind"] == [3]
    wide = CheckpointPool([Slot(0)], pins=0, budget=10**9)
    assert not wide.wanted("pin") and wide.wanted("boundary")
    only = Slot(0)
    many = CheckpointPool([only], pins=0, budget=10**9)
    for n in range(1, 30):
        many.add(only, Checkpoint(n, "boundary", [], ROW, 1))
    assert len(only.checkpoints) == BOUNDARIES_A_SLOT
