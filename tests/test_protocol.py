"""The inbound wire: what each line and frame gives, every refusal, and that input stays aligned behind all of them."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_protocol import Maker, Told, naive, told

from glm53serve.serve.frames import Cancel, Code, Frame, Ignored, Image, Prompt, Refused, Stop, check, check_tokens
from glm53serve.serve.protocol import Parser
from tests.patience import slowness

NEXT = b"PROMPT 77 0 2 1 0 1\nok\n"
LIMIT = 256


def parse(data: bytes, step: int | None = None, limit: int = 16 << 20) -> list[Frame]:
    """Frames of a whole input, fed in pieces of `step` bytes, end of input included."""
    parser = Parser(payload_limit=limit)
    step = step or len(data) or 1
    frames = [frame for at in range(0, len(data), step) for frame in parser.feed(data[at : at + step])]
    return frames + parser.eof()


def refused_then_next(data: bytes, ident: int, limit: int = 16 << 20) -> str:
    """Asserts: one BAD_FRAME with that id, and the frame behind it is read. Returns the reason."""
    for step in (None, 1, 7):
        frames = parse(data + NEXT, step, limit)
        assert len(frames) == 2, frames
        first, second = frames
        assert isinstance(first, Refused) and (first.id, first.code) == (ident, Code.BAD_FRAME)
        assert isinstance(second, Prompt) and (second.id, second.payload) == (77, b"ok")
    return first.reason


@pytest.mark.parametrize("verb", [b"PROMPT", b"SUBMIT"])
def test_a_prompt(verb: bytes) -> None:
    (frame,) = parse(verb + b" 18446744073709551615 3 5 10 0.7 .9 seed=18446744073709551615 logprobs=32 pin=1 ids=1 other=thing\nhello\n")
    assert frame == Prompt(18446744073709551615, 3, 10, 0.7, 0.9, b"hello", seed=18446744073709551615, logprobs=32, pin=True)


def test_a_payload_is_any_bytes() -> None:
    payload = bytes(range(256)) + b"\r\n\n\0PROMPT 1 0 2 1 0 1\nCANCEL 4\n"
    for step in (1, 2, 1000):
        (frame,) = parse(b"PROMPT 1 0 %d 1 0 1\n%s\n" % (len(payload), payload), step)
        assert isinstance(frame, Prompt) and frame.payload == payload


def test_control_lines_and_ignored_ones() -> None:
    frames = parse(b"CANCEL 5\nSTOP 6\r\n\n\r\n  \nprompt 1\n" + b"x" * 9000 + b"\nCANCEL  7 \n")
    assert frames[:2] == [Cancel(5), Stop(6)] and frames[-1] == Cancel(7)
    assert all(isinstance(f, Ignored) for f in frames[2:-1]) and len(frames) == 8
    assert frames[5] == Ignored(b"prompt 1")


@pytest.mark.parametrize("line", [b"CANCEL", b"CANCEL x", b"CANCEL 0", b"CANCEL 1 2", b"STOP -1", b"STOP +1", b"STOP 18446744073709551616", b"STOP 1_0"])
def test_control_that_does_not_parse(line: bytes) -> None:
    refused_then_next(line + b"\n", 0)


def test_line_ends_spaces_and_repeated_keys() -> None:
    (frame,) = parse(b"PROMPT  1   0 2 5 1e-05 1E+0 seed=x  seed=3 logprobs=99 logprobs=4\r\nab\r\n")
    assert frame == Prompt(1, 0, 5, 1e-05, 1.0, b"ab", seed=3, logprobs=4)


@pytest.mark.parametrize(
    ("header", "ident"),
    [
        (b"PROMPT +5 0 3 5 1 1", 0),
        (b"PROMPT 0 0 3 5 1 1", 0),
        (b"PROMPT 18446744073709551616 0 3 5 1 1", 0),
        (b"PROMPT 4 1_0 3 5 1 1", 4),
        (b"PROMPT 4 0 3 0x1 1 1", 4),
        (b"PROMPT 4 0 3 5 +1 1", 4),
        (b"PROMPT 4 0 3 5 1 one", 4),
        (b"PROMPT 4 0 3 5 1 Infinity", 4),
        (b"PROMPT 4 0 3 5 1 1.2.3", 4),
        (b"PROMPT 4 0 3 5 1", 4),
        (b"PROMPT 4 0 3", 4),
        (b"PROMPT 4 0 3 0 1 1", 4),
        (b"PROMPT 4 0 3 -0 1 1 logprobs=1", 4),
        (b"PROMPT 4 0 3 -1 1 1 logprobs=1", 4),
        (b"PROMPT 4 0 3 111111111111111111111 1 1", 4),
        (b"PROMPT 4 0 3 5 1 1 seed=x", 4),
        (b"PROMPT 4 0 3 5 1 1 pin=-1", 4),
        (b"PROMPT 4 0 3 5 1 1 word", 4),
        (b"PROMPT 4 0 3 5 1 1 =1", 4),
        (b"PROMPT 4 0 3 5 1 1 seed=1 7", 4),
        (b"PROMPT 4 0 3 5 1\t1 1", 4),
        (b"PROMPT 4 \xd9\xa3 3 5 1 1", 4),
        (b"PROMPT 4 0 3 5 1 1 pad=" + b"x" * 5000, 4),
        (b"IMAGE 4 3 2", 4),
        (b"IMAGE 4 3 2 -2", 4),
        (b"IMAGE 4 3 2 2 2", 4),
        (b"IMAGE x 3 2 2", 0),
    ],
)
def test_a_bad_header_is_refused_and_its_payload_consumed(header: bytes, ident: int) -> None:
    refused_then_next(header + b"\n" + b"a\nb\n", ident)


def test_a_header_without_readable_bytes_has_no_payload() -> None:
    for header in (b"PROMPT", b"PROMPT 4", b"PROMPT 4 0", b"PROMPT 4 0 x 5 1 1", b"PROMPT 4 0 -3 5 1 1", b"IMAGE 4", b"PROMPT 4 0 2147483649 5 1 1"):
        refused_then_next(header + b"\n", 4 if b" 4" in header else 0)


def test_the_longest_header_and_one_more() -> None:
    start = b"PROMPT 4 0 1 5 1 1 pad="
    fits = start + b"x" * (4096 - len(start))
    for end in (b"\n", b"\r\n"):
        assert [type(f) for f in parse(fits + end + b"a\n" + NEXT)] == [Prompt, Prompt]
        refused_then_next(fits + b"x" + end + b"a\n", 4)
    # what lies beyond the limit cannot be read, a field that touches it neither
    refused_then_next(b"PROMPT" + b" " * 4090 + b"44 0 1 5 1 1\n", 0)
    refused_then_next(b"PROMPT 4" + b" " * (4096 - 8 - 3) + b"0 100 1 5\n", 4)
    refused_then_next(b"PROMPT" + b" " * 4089 + b"4 0 1 5 1 1\n", 0)
    refused_then_next(fits + b"\rx\na\n", 4)


def test_payload_limits() -> None:
    body = b"PROMPT 8 0 2 1 0 1\n" * 100
    refused_then_next(b"PROMPT 4 0 257 5 1 1\n" + body[:257] + b"\n", 4, LIMIT)
    (frame,) = parse(b"PROMPT 4 0 256 5 1 1\n" + body[:256] + b"\n", None, LIMIT)
    assert isinstance(frame, Prompt) and len(frame.payload) == 256
    image, following = parse(b"IMAGE 4 1000 2 2\n" + body[:1000] + b"\n" + NEXT, 7, LIMIT)
    assert image == Image(4, 1000, 2, 2) and isinstance(following, Prompt)
    parser = Parser(image_limit=999)
    assert [type(f) for f in parser.feed(b"IMAGE 4 1000 2 2\n" + body[:1000] + b"\n" + NEXT)] == [Refused, Prompt]


def test_wrong_terminators() -> None:
    for junk in (b"x\n", b"\rx\n", b"\r\r\n", b"CANCEL 9\n", b"\0 long " + b"y" * 9000 + b"\n"):
        refused_then_next(b"PROMPT 4 0 3 5 1 1\nabc" + junk, 4)
    refused_then_next(b"IMAGE 4 3 1 1\nabc?\n", 4)


@pytest.mark.parametrize("body", [b"", b"ab", b"abc", b"abc\r", b"abcd"])
def test_input_that_ends_inside_a_frame(body: bytes) -> None:
    for step in (None, 1):
        (frame,) = parse(b"PROMPT 4 0 3 5 1 1\n" + body, step)
        assert isinstance(frame, Refused) and (frame.id, frame.code) == (4, Code.BAD_FRAME)


def test_input_that_ends_inside_a_header() -> None:
    for data, ident in ((b"PROMPT 4 0 3 5 1 1", 4), (b"PROMPT 4", 0), (b"PROMPT 4 ", 4), (b"CANCEL 4", 0), (b"CANCEL 4 ", 0), (b"STOP ", 0)):
        (frame,) = parse(data)
        assert isinstance(frame, Refused) and frame.id == ident, data
    for data in (b"", b"CANCEL", b"junk"):
        assert all(isinstance(frame, Ignored) for frame in parse(data))


def test_an_old_gateways_extra_bytes_are_consumed() -> None:
    for extra, more in ((0, b""), (4, b" seed=1")):
        frames = parse(b"PROMPT 4 0 3 5 1 1 %d%s\nabc" % (extra, more) + b"\nde\n"[:extra] + b"\n" + NEXT, 3)
        assert len(frames) == 2
        first = frames[0]
        assert isinstance(first, Prompt) and first.problem and first.old_extra
        refusal = check(first, 1, set(), set())
        assert refusal is not None and refusal.code == Code.BAD_REQUEST
    # too many to skip: the frame is refused, its own payload is still consumed
    refused_then_next(b"PROMPT 4 0 3 5 1 1 %d\nabc\n" % (1 << 31), 4)


@pytest.mark.parametrize(
    "fields",
    [b"-1 1", b"-.5 1", b"nan 1", b"1 inf", b"1 -inf", b"1 -0.1", b"1e999 1", b"1 1 logprobs=33", b"1 1 pin=2", b"1 1 seed=18446744073709551616", b"1 1 ids=2"],
)
def test_values_out_of_range_are_bad_requests(fields: bytes) -> None:
    frame, following = parse(b"PROMPT 4 0 3 5 " + fields + b"\nabc\n" + NEXT)
    assert isinstance(frame, Prompt) and frame.problem and isinstance(following, Prompt)
    refusal = check(frame, 1, set(), set())
    assert refusal is not None and refusal.code == Code.BAD_REQUEST and refusal.reason == frame.problem


def test_refusals_come_in_the_protocols_order() -> None:
    (bad,) = parse(b"PROMPT 4 9 0 5 -1 1\n\n")
    (prompt,) = parse(b"PROMPT 4 9 0 5 1 1\n\n")
    assert isinstance(bad, Prompt) and isinstance(prompt, Prompt)

    def code(refusal: Refused | None) -> str:
        assert refusal is not None
        return refusal.code

    assert code(check(bad, 1, {4}, {9})) == "DUPLICATE_ID"
    assert code(check(bad, 10, set(), {9})) == "BAD_REQUEST"
    assert code(check(prompt, 1, set(), {9})) == "BAD_REQUEST"
    assert code(check(prompt, 10, set(), {9})) == "SLOT_BUSY"
    assert code(check(prompt, 10, set(), set())) == "EMPTY_PROMPT"
    (prompt,) = parse(b"PROMPT 4 9 1 5 1 1\nx\n")
    assert isinstance(prompt, Prompt) and check(prompt, 10, {5}, {8}) is None
    assert code(check_tokens(prompt, 0, 64, True)) == "EMPTY_PROMPT"
    exceeded = check_tokens(prompt, 64, 64, True)
    assert exceeded is not None and (exceeded.code, exceeded.detail) == ("CONTEXT_EXCEEDED", "prompt_tokens=64 requested=5 capacity=64")
    assert code(check_tokens(prompt, 63, 64, True)) == "BAD_REQUEST"
    assert check_tokens(prompt, 63, 64, False) is None
    for slot in (b"-1", b"-0", b"10", b"99999999999999999999"):
        (prompt,) = parse(b"PROMPT 4 %s 1 5 1 1\nx\n" % slot)
        assert isinstance(prompt, Prompt) and code(check(prompt, 10, set(), set())) == "BAD_REQUEST"


def test_zero_tokens_are_legal_with_scores_only() -> None:
    (frame,) = parse(b"PROMPT 4 0 1 0 0 1 logprobs=1\nx\n")
    assert isinstance(frame, Prompt) and frame.max_tokens == 0 and check(frame, 1, set(), set()) is None


def test_time_is_linear_in_the_input_however_it_is_cut() -> None:
    def seconds(size: int, step: int) -> float:
        data = b"PROMPT 1 0 %d 1 0 1\n%s\n" % (size, bytes(size))
        began = time.thread_time()
        assert len(parse(data, step)) == 1
        return time.thread_time() - began

    assert seconds(16 << 20, 1 << 16) < 2.0 * slowness()
    small, large = min(seconds(1 << 15, 1) for _ in range(3)), min(seconds(1 << 18, 1) for _ in range(2))
    assert large < 8 * small * 4


def test_memory_is_bounded_by_the_payload_limit() -> None:
    parser = Parser(payload_limit=1 << 20)
    piece = bytes(1 << 16)
    tracemalloc.start()
    try:
        for header in (b"PROMPT 1 0 50000000 1 0 1\n", b"IMAGE 1 50000000 1 1\n", b"PROMPT 1 0 1 1 0 1\nxjunk"):
            parser.feed(header)
            for _ in range(762):
                assert not parser.feed(piece)
            assert parser.held_bytes == 0
            parser.feed(b"\n")
            parser.eof()
        for _ in range(762):
            parser.feed(b"x" * (1 << 16))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


WORDS = st.sampled_from(
    [b"PROMPT ", b"SUBMIT ", b"IMAGE ", b"CANCEL ", b"STOP ", b"1 ", b"0 ", b"3 ", b"7 ", b"300 ", b"2147483649 ", b"1 0 3 1 0 1", b"1 0 2 5 1 1 seed=4"]
    + [b"-1 ", b"nan ", b"0.5 ", b"1e5 ", b" ", b"\n", b"\r\n", b"\r", b"\0", b"seed=1 ", b"logprobs=3", b"pin=9", b"=", b"abc\n", b"ab", b"x" * 4090]
)
STREAMS = st.lists(st.one_of(WORDS, st.binary(max_size=6)), max_size=40).map(b"".join)


def in_pieces(data: bytes, cuts: list[int]) -> list[Told]:
    parser = Parser(payload_limit=LIMIT, image_limit=2 * LIMIT)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    frames = [frame for low, high in itertools.pairwise(edges) for frame in parser.feed(data[low:high])]
    return [told(frame) for frame in frames + parser.eof()]


@settings(max_examples=400)
@given(STREAMS, st.lists(st.integers(0, 1 << 16), max_size=12))
def test_any_bytes_in_any_pieces_give_the_frames_of_the_whole(data: bytes, cuts: list[int]) -> None:
    expected = naive(data, LIMIT, 2 * LIMIT)
    assert in_pieces(data, []) == expected
    assert in_pieces(data, cuts) == expected


@settings(max_examples=150)
@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_wild_streams_agree_with_the_naive_parser(seed: int, cuts: list[int]) -> None:
    maker = Maker(random.Random(seed), LIMIT)
    data = b"".join(maker.rng.choice([lambda: maker.good()[0], lambda: maker.refused()[0], maker.wild])() for _ in range(12))
    assert in_pieces(data, cuts) == naive(data, LIMIT, 2 * LIMIT)


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_every_sent_frame_has_one_answer_and_the_next_is_whole(seed: int) -> None:
    maker = Maker(random.Random(seed), 4096)
    pairs = [maker.good() if maker.rng.random() < 0.5 else maker.refused() for _ in range(12)]
    parser = Parser(payload_limit=4096)
    frames = [frame for piece in maker.cut(b"".join(data for data, _ in pairs)) for frame in parser.feed(piece)]
    assert [told(frame) for frame in frames] == [expected for _, expected in pairs]
    assert parser.eof() == []
