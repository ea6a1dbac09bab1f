"""The harness's client lets nothing pass that the wire does not allow. An engine that misbehaves on purpose is played by a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.client import Client, prompt_frame
from harness.engine_process import EngineGone, NoAnswer
from harness.frames import Data, Done, Echo, Emap, Error, Frame, FrameParser, Prof, ProtocolViolation
from harness.ledger import Ledger, Turn
from harness.notes import CancelLine, HaltLine, ReuseLine, parse_note
from tests.patience import PATIENCE

HELLO = b"\x01\x01READY\x01\x01\nCAPS vision=0 slots=2\nSTAT 0 0.00 0.0 0.3\nEMAP 2 3 408001408001\n"
ACCEPT = b"ACCEPT 1 4\n"
DATA = b"DATA 1 3\na\nb\n"
END = b"HITS 2 3 15\nPROF 0.010 4 1 0.000 0.000 0.001 0.002 0.001 1\nDONE 1 STAT 1 9.50 100.0 0.3 4 1\n"
EMAP = b"EMAP 2 3 408001408002\n"


def parse(stream: bytes) -> list[Frame]:
    """The frames of a whole stream, its end included."""
    parser = FrameParser()
    frames = parser.feed(stream)
    parser.end()
    return frames


def play(*answers: bytes, turns: tuple[Turn, ...] = (), cancels: tuple[int, ...] = (), eof: bool = False, hello: bytes = HELLO) -> Ledger:
    """A ledger that has seen the handshake and then `answers`, with `turns` sent and `cancels` asked before."""
    ledger = Ledger()
    for frame in parse(hello):
        ledger.feed(frame)
    for turn in turns:
        ledger.submitted(turn)
    for id in cancels:
        ledger.cancelled(id)
    ledger.stdin_closed = eof
    for frame in parse(b"".join(answers)):
        ledger.feed(frame)
    return ledger


def test_every_kind_of_line_is_read() -> None:
    frames = parse(
        HELLO
        + ACCEPT
        + b"ECHO 1 1 0 0.000000 0\n\n\nECHO 1 2 1 -0.250000 2 7 -0.250000 9 -3.000000\n\xff\x00\n"
        + DATA
        + b"DATA 1 0 -1.000000 1 5 -0.500000\n\n"
        + END
        + EMAP
        + b"ERROR 9 CONTEXT_EXCEEDED prompt_tokens=70 requested=4 capacity=64\nERROR 0 BAD_FRAME\nERROR 3 IO model.layers.1.mlp\n"
    )
    echo, data, done = frames[6], frames[7], frames[11]
    assert isinstance(echo, Echo) and echo.payload == b"\xff\x00" and echo.pos == 1 and echo.score.best == ((7, -0.25), (9, -3.0))
    assert isinstance(data, Data) and data.payload == b"a\nb" and data.score is None
    assert isinstance(done, Done) and done.length_limited and done.prompt_tokens == 4
    assert isinstance(frames[10], Prof) and frames[10].forward_time == pytest.approx(0.004)
    assert isinstance(frames[-3], Error) and frames[-3].detail.startswith("prompt_tokens=70")


@given(st.lists(st.integers(1, 40), max_size=40))
@settings(max_examples=60)
def test_any_split_gives_the_same_frames(sizes: list[int]) -> None:
    stream = HELLO + ACCEPT + DATA + END + EMAP
    parser, got, at = FrameParser(), [], 0
    for size in [*sizes, len(stream)]:
        got += parser.feed(stream[at : at + size])
        at += size
    parser.end()
    assert got == parse(stream)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b"READY\n",
        b"CAPS vision=2 slots=1\n",
        b"CAPS vision=0 slots=1 \n",
        b"STAT 0 0.00 0.0 0.31\n",
        b"STAT 0 0.0 0.0 0.3\n",
        b"EMAP 2 3 00\n",
        b"EMAP 1 1 C0\n",
        b"EMAP 1 1 c0\n",
        b"EMAP 0 0 \n",
        b"HITS 2 5 ff\n",
        b"ACCEPT 1\n",
        b"ACCEPT 1  4\n",
        b"ACCEPT 01 4\n",
        b"ACCEPT 1 4\r\n",
        b"DATA 1 3\nabcd\n",
        b"DATA 1 70000\n",
        b"DATA 1 1 -0.5 1 3 -0.5\na\n",
        b"DATA 1 1 -0.500000 2 3 -0.500000\na\n",
        b"DATA 1 1 -0.500000 2 3 -0.500000 4 -0.100000\na\n",
        b"DATA 1 1 0.500000 1 3 -0.500000\na\n",
        b"ECHO 1 1 0\na\n",
        b"PROF 0.010 4 1 0.000 0.000 0.001 0.002 0.001\n",
        b"DONE 1 STAT 1 9.5 100.0 0.3 4 1\n",
        b"DONE 1 STAT 1 9.50 100.0 0.3 4 2\n",
        b"DONE 1 STAT 1 9.50 100.0 0.3 4 1 0\n",
        b"ERROR 1 WRONG\n",
        b"ERROR 1 SLOT_BUSY please wait\n",
        b"ERROR 1 IO\n",
        b"ERROR 1 CONTEXT_EXCEEDED\n",
        b"ERROR 1\n",
        b"DATA 1 3\nab",
        b"DATA 1",
    ],
)
def test_anything_else_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse(line or b"\n")


def test_a_turn_is_booked() -> None:
    turn = Turn(1, max_tokens=1)
    ledger = play(ACCEPT, DATA, END, turns=(turn,))
    assert turn.outcome == "DONE" and turn.text == b"a\nb" and not ledger.settled(turn)
    assert ledger.owed == "the EMAP of 1"
    for frame in parse(EMAP):
        ledger.feed(frame)
    assert ledger.settled(turn) and not ledger.owed and isinstance(turn.emap, Emap)


def test_end_of_input_waives_the_emap() -> None:
    turn = Turn(1, max_tokens=1)
    assert play(ACCEPT, DATA, END, turns=(turn,), eof=True).settled(turn)


def test_a_duplicate_does_not_end_the_turn_in_flight() -> None:
    first, second, third = Turn(1, max_tokens=1), Turn(1, max_tokens=1), Turn(1, raw=True)
    ledger = play(ACCEPT, b"ERROR 1 DUPLICATE_ID\nERROR 1 BAD_FRAME\n", DATA, END, EMAP, turns=(first, second, third))
    assert (first.outcome, second.outcome, third.outcome) == ("DONE", "DUPLICATE_ID", "BAD_FRAME")
    assert not ledger.owed


def test_a_cancel_ends_the_turn_or_comes_too_late() -> None:
    early, late = Turn(1, max_tokens=1), Turn(1, max_tokens=1)
    play(ACCEPT, b"ERROR 1 CANCELLED\n", EMAP, turns=(early,), cancels=(1,))
    assert early.outcome == "CANCELLED" and early.ended_as == 6
    ledger = play(ACCEPT, DATA, END, EMAP, b"ERROR 1 NOT_FOUND\n", turns=(late,), cancels=(1,))
    assert late.outcome == "DONE" and len(ledger.not_found) == 1




@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (b"ACCEPT 2 4\n", "never sent"),
        (DATA, "DATA before ACCEPT"),
        (ACCEPT + ACCEPT, "two ACCEPTs"),
        (ACCEPT + DATA + DATA, "more than the budget"),
        (ACCEPT + b"DATA 1 1 -0.500000 1 3 -0.500000\na\n", "a tail nobody asked for"),
        (ACCEPT + DATA + END + EMAP + DATA, "DATA after the end"),
        (ACCEPT + DATA + END + EMAP + END, "two ends"),
        (ACCEPT + DATA + END + EMAP + b"ERROR 1 INTERNAL\n", "two ends of different kinds"),
        (ACCEPT + DATA + END + b"ERROR 0 BAD_FRAME\n", "no EMAP behind DONE"),
        (ACCEPT + b"ERROR 1 INTERNAL\nERROR 1 NOT_FOUND\n", "no EMAP behind a failed turn"),
        (ACCEPT + END, "emitted is not the DATA frames"),
        (ACCEPT + DATA + END.replace(b"0.3 4 1", b"0.3 5 1"), "PROF and DONE disagree"),
        (ACCEPT + DATA + END.replace(b"0.3 4 1", b"0.3 4 0"), "a used budget that is not length limited"),
        (b"ACCEPT 1 5\n" + DATA + END, "ACCEPT and DONE disagree"),
        (ACCEPT + DATA + END.partition(b"\n")[2], "PROF without HITS"),
        (ACCEPT + DATA + END.partition(b"\n")[2].partition(b"\n")[2], "DONE without PROF"),
        (ACCEPT + END.partition(b"\n")[0] + b"\n" + DATA, "DATA inside the block"),
        (ACCEPT + DATA + END.replace(b"HITS 2 3", b"HITS 3 2"), "HITS of another shape"),
        (ACCEPT + DATA + END + b"EMAP 1 1 00\n", "EMAP of another shape"),
        (EMAP, "an EMAP that ends nothing"),
        (ACCEPT + b"ERROR 1 CANCELLED\n", "nobody cancelled"),
        (b"ERROR 1 NOT_FOUND\n", "nobody cancelled either"),
        (b"ERROR 1 DUPLICATE_ID\n", "sent once"),
        (ACCEPT + b"ERROR 1 SLOT_BUSY\n", "refused after ACCEPT"),
        (b"ERROR 0 BAD_FRAME\n", "no damaged frame was sent"),
        (ACCEPT + b"ECHO 1 1 0 0.000000 0\na\n", "ECHO without logprobs"),
        (b"\x01\x01READY\x01\x01\n", "a second READY"),
        (b"CAPS vision=0 slots=2\n", "CAPS out of place"),
    ],
)
def test_frames_out_of_order_are_violations(answers: bytes, why: str) -> None:
    with pytest.raises(ProtocolViolation):
        play(answers, turns=(Turn(1, max_tokens=1),))


@pytest.mark.parametrize(
    "answers",
    [
        ACCEPT + b"ECHO 1 1 0 -0.500000 1 3 -0.500000\na\n",
        ACCEPT + b"ECHO 1 1 0 0.000000 0\na\nECHO 1 1 2 -0.500000 1 3 -0.500000\na\n",
        ACCEPT + b"ECHO 1 1 4 -0.500000 1 3 -0.500000\na\n",
        ACCEPT + b"ECHO 1 1 1 -0.500000 2 3 -0.500000 4 -0.600000\na\n",
        ACCEPT + b"ECHO 1 1 0 0.000000 0\na\nDATA 1 1 -0.500000 1 3 -0.500000\na\n",
        ACCEPT + b"DATA 1 1\na\n",
    ],
)
def test_scores_out_of_order_are_violations(answers: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        play(answers, turns=(Turn(1, max_tokens=1, logprobs=1),))


@pytest.mark.parametrize(
    "hello", [b"CAPS vision=0 slots=2\n", b"\x01\x01READY\x01\x01\nSTAT 0 0.00 0.0 0.3\n", b"LOAD_FAIL kind=io x\nCAPS vision=0 slots=1\n"]
)
def test_a_handshake_out_of_order_is_a_violation(hello: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        play(hello=hello)


def test_notes_on_stderr() -> None:
    assert parse_note("REUSE 5 10 1000 10 10 extend") == ReuseLine(5, 10, 1000, 10, 10, "extend")
    assert parse_note("CANCEL 51 1000 0 10") == CancelLine(51, 1000, 0, 10)
    assert parse_note("HALT layer 4 of 8, back to 10") == HaltLine(4, 8, 10, False)
    assert parse_note("HALT layer 4 of 8, back to 10 on the device") == HaltLine(4, 8, 10, True)
    assert parse_note("loading") is None
    for line in ("REUSE 5 10 1000 10 extend", "CANCEL 51 1000 0", "HALT layer 4, back to 10"):
        with pytest.raises(ProtocolViolation):
            parse_note(line)


SCRIPT = """
import os, sys
def say(*parts):
    for part in parts:
        os.write(1, part)
def line():
    return sys.stdin.buffer.readline()
say({hello!r})
{body}
"""


def scripted(tmp_path: Path, body: str) -> Client:
    """A client of an engine that is a script: `say(bytes)`, `line()` reads one line of stdin."""
    path = tmp_path / "engine.py"
    path.write_text(SCRIPT.format(hello=HELLO, body=body))
    return Client([sys.executable, str(path)], tmp_path, slots=2)


def test_a_turn_through_a_process(tmp_path: Path) -> None:
    body = f"head, text = line(), line(); say({ACCEPT!r}); os.write(2, b'REUSE 1 0 4 0 0 cold\\n'); say({DATA + END + EMAP!r}); line()"
    with scripted(tmp_path, body) as client:
        turn = client.submit(b"abcd", 1, 1).wait(PATIENCE)
        assert turn.text == b"a\nb" and turn.ended_at >= turn.sent_at
        assert client.reuse(turn).word == "cold"
        client.expect_quiet(0.02)
        client.finish(PATIENCE)


def test_what_belongs_together_leaves_in_one_write(tmp_path: Path) -> None:
    with scripted(tmp_path, "say(b'ERROR 5 NOT_FOUND\\n' * os.read(0, 65536).count(b'CANCEL 5\\n')); line()") as client:
        with client.in_one_write():
            client.cancel(5)
            client.cancel(5)
        client.wait_until("both answers", lambda: len(client.ledger.not_found) == 2, PATIENCE)


def test_a_violation_reaches_whoever_waits(tmp_path: Path) -> None:
    with scripted(tmp_path, "line(); say(b'NONSENSE\\n'); line(); line()") as client:
        turn = client.submit(b"abcd", max_tokens=1)
        with pytest.raises(ProtocolViolation, match="NONSENSE"):
            turn.wait(PATIENCE)


def test_an_engine_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    with scripted(tmp_path, "line(); os.write(2, b'out of luck\\n'); sys.exit(3)") as client:
        turn = client.submit(b"abcd", max_tokens=1)
        with pytest.raises(EngineGone, match=r"exit code 3.*out of luck"):
            turn.wait(PATIENCE)


def test_an_engine_that_is_silent(tmp_path: Path) -> None:
    with scripted(tmp_path, "line(); line(); line()") as client:
        with pytest.raises(NoAnswer, match="turn 1"):
            client.submit(b"abcd", max_tokens=1).wait(0.1)
        client.kill()


def test_words_nobody_asked_for(tmp_path: Path) -> None:
    with scripted(tmp_path, "line(); say(b'ERROR 5 NOT_FOUND\\n' * 2); line()") as client:
        client.cancel(5)
        with pytest.raises(ProtocolViolation, match="no CANCEL"):
            client.wait_until("nothing", lambda: False, PATIENCE)


def test_an_unfinished_end(tmp_path: Path) -> None:
    with scripted(tmp_path, f"line(); say({ACCEPT!r})") as client:
        client.submit(b"abcd", max_tokens=1)
        with pytest.raises(ProtocolViolation, match="owed"):
            client.finish(PATIENCE)


def test_the_bytes_of_a_prompt() -> None:
    assert prompt_frame(5, 1, b"a\n", 9, 0.5, 1, seed=3, logprobs=2, pin=1) == b"PROMPT 5 1 2 9 0.5 1 seed=3 logprobs=2 pin=1\na\n\n"
    assert prompt_frame(5, 1, b"", 9, verb="SUBMIT") == b"SUBMIT 5 1 0 9 0 1\n\n"
