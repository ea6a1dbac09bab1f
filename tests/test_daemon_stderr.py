"""Lines for people never hold the daemon up, whoever does or does not read them."""

from __future__ import annotations

import contextlib
import os
import pty
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53serve.serve.stderr import StderrLog
from tests.patience import PATIENCE, returns


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def read_until(fd: int, wanted: bytes) -> bytes:
    os.set_blocking(fd, False)
    out, end = b"", time.monotonic() + PATIENCE
    while wanted not in out and time.monotonic() < end:
        try:
            out += os.read(fd, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
    return out


def flood(log: StderrLog, lines: int) -> None:
    """Many lines, which must be taken promptly although nobody reads them."""

    def write() -> None:
        for number in range(lines):
            log(f"line {number} " + "x" * 80)

    assert returns(write), "a line nobody reads held its writer up"


def test_a_line_is_out_when_the_call_returns(pipe: tuple[int, int]) -> None:
    log = StderrLog(pipe[1])
    log("one")
    log("two \udcff é")
    assert os.read(pipe[0], 100) == b"one\ntwo \\udcff \xc3\xa9\n"


def test_a_full_pipe_holds_nobody_up_and_its_lines_come_later_in_order(pipe: tuple[int, int]) -> None:
    log = StderrLog(pipe[1])
    flood(log, 2000)
    lines = read_until(pipe[0], b"line 1999 ").split(b"\n")
    assert [line.split()[1] for line in lines[:2000]] == [b"%d" % n for n in range(2000)]
    assert os.get_blocking(pipe[1]), "the descriptor is shared with whoever started us"


def test_more_than_the_limit_is_dropped_and_said(pipe: tuple[int, int]) -> None:
    log = StderrLog(pipe[1], limit=10_000)
    flood(log, 2000)
    out = read_until(pipe[0], b"lines lost")
    kept = out.count(b"line ")
    assert 0 < kept < 2000 and out.endswith(b"glm53: %d lines lost, nobody read them\n" % (2000 - kept))
    log("again")
    assert read_until(pipe[0], b"again\n").endswith(b"again\n")


def test_a_terminal_nobody_reads() -> None:
    master, slave = pty.openpty()
    flood(StderrLog(slave), 3000)
    assert b"line 2999" in read_until(master, b"line 2999")
    os.close(slave)
    os.close(master)


def test_a_reader_that_is_gone_and_a_closed_descriptor(pipe: tuple[int, int], tmp_path: Path) -> None:
    log = StderrLog(pipe[1])
    os.close(pipe[0])
    flood(log, 100)
    closed = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.close(closed)
    flood(StderrLog(closed), 100)


def test_a_file_is_appended_to_where_it_stands(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before\n")
    StderrLog(fd)("after")
    assert (tmp_path / "file").read_bytes() == b"before\nafter\n"
    os.close(fd)
