"""A live daemon is sent random frames: never a desync, a crash, a hang, or an answer to something that was not asked.

`python bench/fuzz_daemon.py 10000` sends more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.fuzz import fuzz
from harness.reading import Doubtful, expect_in_order, read
from harness.rig import Rig

MODEL = Path(__file__).resolve().parent.parent / "glm53serve" / "data" / "glm53-nano"
ENGINE = [str(Path(sys.executable).parent / "glm53")]


def answers(stream: bytes) -> list[tuple[str, int, set[str]]]:
    """What the reading says of a stream."""
    reading = read(stream, 2, 64)
    assert not reading.missing
    expect_in_order(reading)
    return [(ask.verb, ask.id, ask.answers) for ask in reading.asks]


def test_the_reading_itself() -> None:
    assert answers(b"PROMPT 5 0 1 2 0 1\na\nCANCEL 5\n") == [("PROMPT", 5, {"DONE", "CANCELLED"}), ("CANCEL", 5, set())]
    assert answers(b"PROMPT 5 0 1 2 0 1\na\nSUBMIT 6 0 1 2 0 1\r\nb\r\n") == [("PROMPT", 5, {"DONE"}), ("PROMPT", 6, {"DONE", "SLOT_BUSY"})]
    assert answers(b"PROMPT 5 0 1 2 0 1\na\nPROMPT 5 1 1 2 nan 1\na\n")[1][2] == {"BAD_REQUEST", "DUPLICATE_ID"}
    assert answers(b"PROMPT 5 x 3 2 0 1\nabc\nPROMPT 6 0 0 1 0 1\n\n") == [("PROMPT", 5, {"BAD_FRAME"}), ("PROMPT", 6, {"EMPTY_PROMPT"})]
    assert answers(b"PROMPT 5 0 3 2 0 1\nabcd\nCANCEL\n\nHELLO\nSTOP 7\n") == [("PROMPT", 5, {"BAD_FRAME"}), ("PROMPT", 0, {"BAD_FRAME"})]
    assert answers(b"PROMPT 5 0 1 2 0 1 3\nabcd\n") == [("PROMPT", 5, {"BAD_REQUEST"})]
    assert answers(b"IMAGE 5 3 1 1\nabc\nPROMPT 5 0 1 2 0 1\na\n") == [("PROMPT", 5, {"BAD_REQUEST"})]
    assert answers(b"PROMPT 5 0 9999999999 1 0 1\nPROMPT 6 0 70 1 0 1\n" + b"1" * 70 + b"\n")[1][2] == {"DONE", "CONTEXT_EXCEEDED"}
    assert read(b"PROMPT 5 0 9 2 0 1\nabc", 2, 64).missing == b"xxxxxx\n"
    with pytest.raises(Doubtful):
        read(b" PROMPT 5 0 1 2 0 1\na\n", 2, 64)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_frames(seed: int) -> None:
    rig = Rig(ENGINE, MODEL)
    try:
        seen = fuzz(rig, 500, seed)
    finally:
        rig.close()
    assert all(seen[answer] for answer in ("DONE", "BAD_FRAME", "BAD_REQUEST", "EMPTY_PROMPT", "SLOT_BUSY", "DUPLICATE_ID", "CANCELLED", "NOT_FOUND")), seen
