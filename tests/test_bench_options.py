"""What the programs that measure say to numbers that are not allowed: one line, at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.options import Parser, number, whole

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", " 7", "1_0", "+3", "٣", "0x10", "65", "99999999999999999999"])
def test_whole_numbers_out_of_bounds_are_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("what it does")
    parser.add_argument("--points", type=whole(1, 64))
    with pytest.raises(SystemExit) as refused:
        parser.parse_args([f"--points={text}"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"argument --points: {text!r} must be a whole number from 1 to 64" in said
    assert parser.parse_args(["--points", "64"]).points == 64


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "soon", "61"])
def test_so_are_other_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("what it does")
    parser.add_argument("--seconds", type=number(0, 60))
    with pytest.raises(SystemExit):
        parser.parse_args([f"--seconds={text}"])
    assert f"argument --seconds: {text!r} must be a number from 0 to 60\n" in capsys.readouterr().err
    assert parser.parse_args(["--seconds", "0.5"]).seconds == 0.5


def test_every_program_bounds_its_numbers() -> None:
    # the CUDA programs run on a machine with a GPU and keep to themselves
    programs = [path for path in (ROOT / "bench").glob("*.py") if not path.name.startswith("cuda")]
    assert len(programs) > 8
    unbounded = [path.name for path in programs if re.search(r"type=(int|float)\b", path.read_text(encoding="utf-8"))]
    assert unbounded == []


@pytest.mark.parametrize("command", ["-m bench.cancel --points 0", "bench/fuzz_protocol.py x", "bench/fuzz_daemon.py 0"])
def test_a_program_ends_with_that_line(command: str) -> None:
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "must be a whole number of at least 1" in done.stderr
