"""The writer thread: whole blocks in order, nobody waits for a slow peer, and a peer that leaves is noticed."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53serve.serve.outbox import Outbox
from tests.patience import PATIENCE, returns


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            assert fd in ends  # the test closed it


def read_exactly(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(fd, 1 << 16)
        assert piece
        data += piece
    return bytes(data)


def test_blocks_of_many_threads_stay_whole_and_in_their_order(pipe: tuple[int, int]) -> None:
    outbox = Outbox(pipe[1])
    rng = random.Random(1)
    sizes = [[rng.choice([1, 40, 4096, 5000, 70_000]) for _ in range(40)] for _ in range(4)]

    def send(who: int) -> None:
        for number, size in enumerate(sizes[who]):
            assert outbox.send(b"<%d %d %d>" % (who, number, size) + bytes([65 + who]) * size)

    threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    received = bytearray(read_exactly(pipe[0], sum(len(f"<{w} {n} {s}>") + s for w in range(4) for n, s in enumerate(sizes[w]))))
    for thread in threads:
        thread.join()
    following = [0] * 4
    while received:
        head, _, rest = received.partition(b">")
        who, number, size = map(int, head[1:].split())
        assert number == following[who] and rest[:size] == bytes([65 + who]) * size
        following[who] += 1
        received = rest[size:]
    assert following == [40] * 4
    assert outbox.flush(PATIENCE) and outbox.close() and not outbox.send(b"late")


def test_send_never_waits_and_room_says_when_to(pipe: tuple[int, int]) -> None:
    drained = threading.Event()
    outbox = Outbox(pipe[1], on_drain=drained.set)
    assert returns(lambda: [outbox.send(bytes(1 << 20)) for _ in range(64)]), "nobody reads yet"
    assert outbox.unsent_bytes > 60 << 20 and not outbox.room() and not outbox.wait_room(0.05)
    assert outbox.room(65 << 20)
    reader = threading.Thread(target=lambda: read_exactly(pipe[0], 64 << 20))
    reader.start()
    assert outbox.wait_room(PATIENCE) and outbox.unsent_bytes < 1 << 20
    reader.join(PATIENCE)
    assert outbox.flush(PATIENCE) and outbox.unsent_bytes == 0 and drained.is_set()
    assert outbox.close()


def test_a_closed_peer_ends_it_once_and_everything_is_dropped(pipe: tuple[int, int]) -> None:
    calls: list[str] = []
    outbox = Outbox(pipe[1], on_closed=lambda: calls.append(threading.current_thread().name))
    outbox.send(bytes(1 << 20))
    os.close(pipe[0])
    assert outbox.closed.wait(PATIENCE)
    outbox._thread.join(PATIENCE)
    assert calls == ["outbox"] and outbox.unsent_bytes == 0 and outbox.room(1)
    assert not outbox.send(b"x") and outbox.wait_room(0) and outbox.flush(0)
    assert isinstance(outbox.error, BrokenPipeError)
    assert not outbox.close()


def test_a_peer_that_leaves_is_noticed_although_nothing_is_written(pipe: tuple[int, int]) -> None:
    left = threading.Event()
    outbox = Outbox(pipe[1], on_closed=left.set)
    outbox.send(b"hello")
    assert read_exactly(pipe[0], 5) == b"hello" and not left.wait(0.05)
    os.close(pipe[0])
    assert left.wait(PATIENCE)


def test_a_waiting_turn_goes_on_when_the_peer_leaves(pipe: tuple[int, int]) -> None:
    outbox = Outbox(pipe[1])
    outbox.send(bytes(4 << 20))
    done = threading.Event()
    waiter = threading.Thread(target=lambda: outbox.wait_room() and done.set())
    waiter.start()
    assert not done.wait(0.05)
    os.close(pipe[0])
    assert done.wait(PATIENCE)
    waiter.join()


def test_close_does_not_hang_on_a_peer_that_does_not_read(pipe: tuple[int, int]) -> None:
    calls: list[int] = []
    outbox = Outbox(pipe[1], on_closed=lambda: calls.append(1))
    outbox.send(bytes(1 << 20))
    kept: list[bool] = []
    assert returns(lambda: kept.append(outbox.close(0.1)))
    assert kept == [False] and outbox.closed.wait(PATIENCE) and not calls
    assert not outbox.close()
    os.fstat(pipe[1])  # the descriptor was left open


def test_close_does_not_wait_for_a_writer_that_is_held_up_and_knows_what_has_left(pipe: tuple[int, int]) -> None:
    go_on = threading.Event()

    def held_up() -> None:
        go_on.wait()

    outbox = Outbox(pipe[1], on_drain=held_up)
    outbox.send(b"hello")
    assert read_exactly(pipe[0], 5) == b"hello" and outbox.flush(PATIENCE)
    kept: list[bool] = []
    assert returns(lambda: kept.append(outbox.close()))
    assert kept == [True] and not outbox.closed.is_set()
    go_on.set()
    assert outbox.closed.wait(PATIENCE) and outbox.close()


@pytest.mark.parametrize("after", [0, 3])
def test_a_failing_write_is_a_closed_peer(pipe: tuple[int, int], after: int) -> None:
    left = [after]

    def fault() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "injected")

    outbox = Outbox(pipe[1], fault=fault)
    for _ in range(after):
        outbox.send(b"x")
        assert outbox.flush(PATIENCE)
    outbox.send(b"y")
    assert outbox.closed.wait(PATIENCE)
    assert outbox.error is not None and outbox.error.errno == errno.EIO
    assert os.read(pipe[0], 100) == b"x" * after if after else not select.select([pipe[0]], [], [], 0)[0]


def test_files_sockets_and_nonblocking_pipes(tmp_path: Path, pipe: tuple[int, int]) -> None:
    path = tmp_path / "out"
    with open(path, "wb") as file:
        outbox = Outbox(file.fileno())
        for number in range(1000):
            outbox.send(b"%d\n" % number)
        assert outbox.close(PATIENCE)
    assert path.read_bytes().split() == [b"%d" % number for number in range(1000)]

    ours, theirs = socket.socketpair()
    outbox = Outbox(ours.fileno())
    outbox.send(bytes(1 << 20))
    assert read_exactly(theirs.fileno(), 1 << 20) == bytes(1 << 20)
    theirs.close()
    assert outbox.closed.wait(PATIENCE)
    ours.close()

    os.set_blocking(pipe[1], False)
    outbox = Outbox(pipe[1])
    outbox.send(bytes(1 << 20))
    assert read_exactly(pipe[0], 1 << 20) == bytes(1 << 20)
    assert outbox.close(PATIENCE)


def test_a_descriptor_that_takes_a_part_gets_the_rest(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[: max(1, len(data) // 3)] if fd == pipe[1] else data))
    outbox = Outbox(pipe[1])
    block = random.Random(2).randbytes(20_000)
    outbox.send(block)
    outbox.send(b"end")
    assert read_exactly(pipe[0], 20_003) == block + b"end"
    assert outbox.close(PATIENCE)


def test_a_closed_descriptor() -> None:
    read, write = os.pipe()
    os.close(write)
    calls: list[str] = []
    outbox = Outbox(write, on_closed=lambda: calls.append(threading.current_thread().name))
    assert outbox.send(b"x") and outbox.closed.wait(PATIENCE) and not outbox.send(b"x")
    outbox._thread.join(PATIENCE)
    assert calls == ["outbox"] and outbox.error is not None and not outbox.close()
    os.close(read)


def test_an_outbox_that_was_never_used(pipe: tuple[int, int]) -> None:
    calls: list[int] = []
    outbox = Outbox(pipe[1], on_closed=lambda: calls.append(1))
    os.close(pipe[0])
    assert outbox.close(1) and outbox.close(1) and outbox.closed.is_set() and not calls and not outbox.send(b"x")


def test_close_ends_the_writer_whatever_it_is_doing(pipe: tuple[int, int]) -> None:
    drainer = threading.Thread(target=lambda: read_exactly(pipe[0], 1), daemon=True)
    drainer.start()
    for number in range(300):
        outbox = Outbox(pipe[1])
        if number % 3:
            outbox.send(b"x" * 300 * (number % 3))
        closer = threading.Thread(target=outbox.close, daemon=True)
        closer.start()
        closer.join(PATIENCE)
        assert not closer.is_alive() and outbox.closed.wait(PATIENCE)
    drainer.join(PATIENCE)
