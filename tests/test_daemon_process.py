"""The daemon as a process: started with descriptors missing, signalled at bad moments, short of what it needs."""

from __future__ import annotations

import itertools
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rawmodel import LANGUAGE, RawModel

from glm53serve.model.synth import synth
from harness.client import prompt_frame
from harness.engine_process import child_environment
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("compiled_kernels")
MODEL = Path(__file__).resolve().parent.parent / "glm53serve" / "data" / "glm53-nano"
# SIGHUP has its meaning whatever started these tests (nohup ignores it)
PROGRAM = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
PROGRAM += "from glm53serve.cli import main_drop_in; sys.exit(main_drop_in(['0']))"
LONG = 100_000
"""Tokens of an answer that no pause of this process outlasts."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a daemon whose answers find no end before LONG."""
    directory = tmp_path_factory.mktemp("endless")
    synth(directory, "tiny", seed=3)
    return {"SNAP": str(directory), "GLM53_MAXT": str(LONG + 20_000)}


@contextmanager
def engine(tmp_path: Path, first: str = "", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon on pipes (or what `options` give). `first` is run by the shell that becomes it."""
    own = {"SERVE": "1", "SERVE_BATCH": "1", "SNAP": str(MODEL), "KV_SLOTS": "2", "GLM53_VERBOSE": "1", "COLI_USAGE": str(tmp_path / "usage")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ["bash", "-c", first + ' exec "$@"', "bash", sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, env=child_environment({**own, **options.pop("env", {})}), bufsize=0, **{**pipes, **options})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


def read_until(fd: int, wanted: bytes) -> bytes:
    out, end = b"", time.monotonic() + PATIENCE
    while wanted not in out and time.monotonic() < end:
        if select.select([fd], [], [], 0.1)[0]:
            data = os.read(fd, 1 << 16)
            if not data:
                break
            out += data
    assert wanted in out, out[-300:]
    return out


def end(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> float:
    """Signal it: seconds to exit 0."""
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0
    return time.monotonic() - began


def soon(seconds: Callable[[], float]) -> bool:
    """Whether the end comes within 2 s; what holds it up does so every time, a machine that stands still does not."""
    return any(seconds() < 2.0 for _ in range(5))


@pytest.mark.parametrize("closed", [c for n in range(4) for c in itertools.combinations((0, 1, 2), n)])
def test_started_without_standard_descriptors(tmp_path: Path, closed: tuple[int, ...]) -> None:
    with engine(tmp_path, "".join(f"exec {fd}{'<' if fd == 0 else '>'}&-;" for fd in closed)) as process:
        assert process.stdin is not None and process.stdout is not None
        if 0 not in closed:
            process.stdin.write(prompt_frame(1, 0, b"What is 2 + 3?", 2))
        process.stdin.close()
        process.stdin = None
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert (b"READY" in out) == (1 not in closed) and b"Traceback" not in err
        assert (b"DONE 1 " in out) == (not {0, 1} & set(closed))


def test_no_terminal_frame_after_a_signal_even_to_a_peer_that_reads_late(tmp_path: Path, endless: dict[str, str]) -> None:
    with engine(tmp_path, env=endless) as process:
        assert process.stdin is not None and process.stdout is not None
        read_until(process.stdout.fileno(), b"EMAP")
        process.stdin.write(prompt_frame(1, 0, b"abc", LONG) + prompt_frame(2, 1, b"hello " * 3000, LONG))
        read_until(process.stdout.fileno(), b"ACCEPT 2")
        time.sleep(0.05)
        process.stdin.write(b"CANCEL 7\n" * 8000)  # fills the pipe, so that frames wait while the end begins
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        out = process.stdout.read()
        assert process.wait(PATIENCE) == 0
        ends = [line for line in out.split(b"\n") if line.startswith((b"DONE", b"ERROR 1 ", b"ERROR 2 "))]
        assert not ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_takes_nothing_does_not_hold_the_end_up(tmp_path: Path, number: signal.Signals) -> None:
    def seconds() -> float:
        master, slave = pty.openpty()
        try:
            with engine(tmp_path, stdout=slave) as process:
                os.close(slave)
                assert process.stdin is not None
                read_until(master, b"EMAP")
                process.stdin.write(b"CANCEL 7\n" * 5000)
                time.sleep(0.3)
                return end(process, number)
        finally:
            os.close(master)

    assert soon(seconds)


def test_an_unread_stderr_holds_nothing_up(tmp_path: Path, endless: dict[str, str]) -> None:
    def seconds() -> float:
        with engine(tmp_path, env=endless) as process:
            assert process.stdin is not None and process.stdout is not None
            read_until(process.stdout.fileno(), b"EMAP")
            process.stdin.write(b"what a line is this, which nobody knows and everybody ignores\n" * 3000)
            process.stdin.write(prompt_frame(1, 0, b"abc", LONG))
            read_until(process.stdout.fileno(), b"DATA 1 ")
            process.stdin.write(b"CANCEL 1\n")
            read_until(process.stdout.fileno(), b"ERROR 1 CANCELLED")
            return end(process)

    assert soon(seconds)


def test_an_interrupt_is_for_whoever_owns_the_terminal(tmp_path: Path) -> None:
    with engine(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        read_until(process.stdout.fileno(), b"EMAP")
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"CANCEL 9\n")
        read_until(process.stdout.fileno(), b"ERROR 9 NOT_FOUND")


@pytest.mark.parametrize("descriptors", [8, 9, 10, 12])
def test_short_of_descriptors_it_says_so_or_serves(tmp_path: Path, descriptors: int) -> None:
    with engine(tmp_path, f"ulimit -n {descriptors};") as process:
        out, err = process.communicate(prompt_frame(1, 0, b"What is 2 + 3?", 2), timeout=PATIENCE)
        if process.returncode == 0:
            assert b"DONE 1 " in out
        else:
            assert process.returncode == 1 and out.startswith(b"LOAD_FAIL kind=io ") and out.count(b"\n") == 1
            assert err.count(b"\n") == 1 and b"Too many open files" in err


@pytest.mark.parametrize(("tensor", "pattern"), [("lm_head.weight", 0x7F80), (LANGUAGE + "embed_tokens.weight", 0x7FC0)])
def test_a_model_whose_numbers_overflow_ends_its_turns_and_says_nothing(tmp_path: Path, tensor: str, pattern: int) -> None:
    """Logits become infinite, or NaN spreads through all layers."""
    synth(tmp_path / "tiny", "tiny")
    raw = RawModel.read(tmp_path / "tiny")
    values = np.frombuffer(raw.tensors[tensor].data, np.uint16).reshape(raw.tensors[tensor].shape).copy()
    values[:, 0] = pattern
    raw.tensors[tensor].data = values.tobytes()
    raw.write(tmp_path / "odd")
    shutil.copy(tmp_path / "tiny" / "tokenizer.json", tmp_path / "odd")
    with engine(tmp_path, env={"SNAP": str(tmp_path / "odd"), "GLM53_VERBOSE": "0"}) as process:
        frames = prompt_frame(1, 0, b"abc", 3, 1, 0.9) + prompt_frame(2, 1, b"abc", 3)
        out, err = process.communicate(frames, timeout=PATIENCE)
    assert (process.returncode, err) == (0, b"")
    assert b"DONE 1 " in out and b"DONE 2 " in out
