"""The reader thread: frames arrive at once, bounded, from any kind of descriptor, and it always ends when told to."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm53serve.serve.frames import Cancel, Frame, Prompt, Refused, Stop
from glm53serve.serve.inbox import FRAME_OVERHEAD, Eof, Inbox
from tests.patience import PATIENCE, returns

PROMPT = b"PROMPT 1 0 5 1 0 1\nhello\n"


def none(_: Frame) -> bool:
    return False


def until(condition: Callable[[], bool]) -> bool:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            assert fd in ends  # the test closed it


def test_frames_in_order_then_the_end_again_and_again(pipe: tuple[int, int]) -> None:
    inbox = Inbox(pipe[0], none)
    inbox.start()
    os.write(pipe[1], PROMPT + b"PROMPT 2 0 1 1 0 1\nx\nPROMPT 3")
    os.close(pipe[1])
    first, second, third = (inbox.get(PATIENCE) for _ in range(3))
    assert isinstance(first, Prompt) and first.payload == b"hello"
    assert isinstance(second, Prompt) and second.id == 2
    assert isinstance(third, Refused) and third.id == 0
    assert inbox.get(PATIENCE) == Eof() == inbox.get(PATIENCE)
    assert inbox.waiting_bytes == 0 and inbox.error is None
    inbox.stop()


def test_half_a_frame_delays_nothing_and_the_rest_completes_it(pipe: tuple[int, int]) -> None:
    seen: list[Frame] = []
    inbox = Inbox(pipe[0], lambda frame: isinstance(frame, Cancel | Stop) and not seen.append(frame))
    inbox.start()
    os.write(pipe[1], b"CANCEL 4\n" + PROMPT[:-3])
    assert until(lambda: seen == [Cancel(4)])
    assert inbox.get(0.05) is None
    os.write(pipe[1], PROMPT[-3:] + b"STOP 5\n")
    assert isinstance(inbox.get(PATIENCE), Prompt)
    assert until(lambda: seen == [Cancel(4), Stop(5)])
    assert inbox.get(0) is None  # what on_frame handled is not queued
    inbox.stop()


def test_on_frame_runs_in_the_reader_the_moment_a_frame_is_parsed(pipe: tuple[int, int]) -> None:
    """Nobody gets frames, so nothing but the reader can have seen the CANCEL."""
    arrived = threading.Event()
    threads: list[str] = []

    def on_frame(frame: Frame) -> bool:
        threads.append(threading.current_thread().name)
        if isinstance(frame, Cancel):
            arrived.set()
        return False

    inbox = Inbox(pipe[0], on_frame)
    inbox.start()
    os.write(pipe[1], PROMPT * 3 + b"CANCEL 1\n")
    assert arrived.wait(PATIENCE) and set(threads) == {"inbox"}
    assert [type(inbox.get(PATIENCE)) for _ in range(4)] == [Prompt, Prompt, Prompt, Cancel]
    inbox.stop()


def test_stop_and_poke_wake_whoever_waits(pipe: tuple[int, int]) -> None:
    inbox = Inbox(pipe[0], none)
    inbox.start()
    got: list[object] = []
    waiter = threading.Thread(target=lambda: [got.append(inbox.get()) for _ in range(2)])
    waiter.start()
    inbox.poke()
    assert until(lambda: got == [None])
    assert returns(inbox.stop)
    waiter.join(PATIENCE)
    assert got == [None, Eof()]
    inbox.stop()
    os.write(pipe[1], b"x")  # the descriptor was left alone


def test_reading_stops_while_too_much_waits_and_goes_on_afterwards() -> None:
    ours, theirs = socket.socketpair()
    cancels: list[int] = []
    inbox = Inbox(ours.fileno(), lambda frame: isinstance(frame, Cancel) and not cancels.append(frame.id), limit=200_000)
    inbox.start()
    payload = bytes(50_000)
    written = [0]

    def write() -> None:
        for i in range(40):
            theirs.sendall(b"PROMPT %d 0 50000 1 0 1\n%s\nCANCEL %d\n" % (i + 1, payload, i + 1))
            written[0] += 1
        theirs.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert until(lambda: inbox.waiting_bytes >= 200_000)
    assert cancels  # honoured although nobody takes a prompt
    time.sleep(0.2)
    assert inbox.waiting_bytes < 200_000 + 65536 + 50_000 + 4 * FRAME_OVERHEAD and written[0] < 40
    ids = []
    while isinstance(frame := inbox.get(PATIENCE), Prompt):
        ids.append(frame.id)
    assert frame == Eof() and ids == list(range(1, 41)) and cancels == ids
    writer.join(PATIENCE)
    inbox.stop()
    ours.close()


def test_many_tiny_frames_are_bounded_too(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    inbox = Inbox(pipe[0], none, limit=1 << 20)
    inbox.start()
    sent = 0
    quiet_since = time.monotonic()
    while sent < 1 << 20 and time.monotonic() - quiet_since < 0.3:
        try:
            sent += os.write(pipe[1], b"STOP 1\n" * 512)
            quiet_since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)
    # what waits, one read beyond it and what the pipe itself holds
    assert sent < (1 << 20) / FRAME_OVERHEAD * 7 + (1 << 16) + (1 << 16) + 4096
    inbox.stop()  # also out of that wait


def test_unsent_replies_hold_reading_up_until_they_shrink(pipe: tuple[int, int]) -> None:
    backlog = [1 << 20]
    inbox = Inbox(pipe[0], none, backlog=lambda: backlog[0], limit=1 << 20)
    inbox.start()
    os.write(pipe[1], PROMPT)
    assert inbox.get(0.1) is None
    backlog[0] = 0
    inbox.wake()
    assert isinstance(inbox.get(PATIENCE), Prompt)
    inbox.stop()


def test_a_file_and_a_nonblocking_pipe_are_read_alike(tmp_path: Path, pipe: tuple[int, int]) -> None:
    path = tmp_path / "frames"
    path.write_bytes(PROMPT * 1000)
    with open(path, "rb") as file:
        inbox = Inbox(file.fileno(), none)
        inbox.start()
        assert sum(isinstance(inbox.get(PATIENCE), Prompt) for _ in range(1000)) == 1000
        assert inbox.get(PATIENCE) == Eof()
    os.set_blocking(pipe[0], False)
    inbox = Inbox(pipe[0], none)
    inbox.start()
    time.sleep(0.02)
    os.write(pipe[1], PROMPT)
    assert isinstance(inbox.get(PATIENCE), Prompt)
    inbox.stop()


def test_a_descriptor_that_cannot_be_read_counts_as_ended(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    inbox = Inbox(read, none)
    inbox.start()
    assert inbox.get(PATIENCE) == Eof() and inbox.error is not None
    os.close(write)
    directory = os.open(tmp_path, os.O_RDONLY)
    inbox = Inbox(directory, none)
    inbox.start()
    assert inbox.get(PATIENCE) == Eof() and inbox.error is not None
    os.close(directory)


def test_stop_ends_the_reader_whatever_it_is_doing(pipe: tuple[int, int]) -> None:
    for number in range(300):
        inbox = Inbox(pipe[0], none)
        inbox.start()
        if number % 3 == 0:
            os.write(pipe[1], b"\n")
        if number % 2:
            time.sleep(0.0002)
        stopper = threading.Thread(target=inbox.stop, daemon=True)
        stopper.start()
        stopper.join(PATIENCE)
        assert not stopper.is_alive() and inbox.ended.is_set()
