"""Every case of the harness passes on the shipped model; and the harness is no rubber stamp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cases import case_names, run_case, run_cases
from harness.rig import Rig

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "glm53serve" / "data" / "glm53-nano"
ENGINE = [str(Path(sys.executable).parent / "glm53")]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig(ENGINE, MODEL)
    yield rig
    rig.close()


@pytest.mark.parametrize("name", case_names())
def test_case(rig: Rig, name: str) -> None:
    result = run_case(rig, name)
    assert result.status == "PASS", result.line()


def test_the_model_directory_stays_clean(rig: Rig) -> None:
    rig.fresh(b"What is 2 + 3?", 2, 1)
    assert not (MODEL / ".coli_usage").exists()


def test_an_engine_that_is_none_fails_every_case() -> None:
    results = run_cases([sys.executable, "-c", "print('hello')"], MODEL, ["handshake", "empty", "proof"])
    assert [result.status for result in results] == ["FAIL"] * 3


def test_the_program() -> None:
    command = [sys.executable, "harness/glm53_serve_harness.py", "--engine", ENGINE[0], "--model", str(MODEL)]
    run = subprocess.run([*command, "--cases", "handshake,empty"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and lines[-1] == "2 passed, 0 failed, 0 skipped"
    assert [line.split()[:2] for line in lines[:-1]] == [["PASS", "handshake"], ["PASS", "empty"]]
    broken = subprocess.run(
        [sys.executable, "harness/glm53_serve_harness.py", "--engine", "/bin/true", "--model", str(MODEL), "--cases", "handshake"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert broken.returncode == 1 and broken.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    unknown = subprocess.run([*command, "--cases", "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 2 and "nonsense" in unknown.stderr
