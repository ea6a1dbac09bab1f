"""Where compiled kernels are kept, and what a start does when they cannot be kept or are no longer what they were. Only the smallest ones are compiled here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm53serve.load import shipped_model, usage_path
from harness.engine_process import child_environment

pytest.importorskip("numba")
ROOT = Path(__file__).resolve().parent.parent

READ_ONLY_PACKAGE = """
import pathlib, resource, sys
from glm53serve.cpu import warm
from glm53serve.cpu.kernels import cache
writable = cache._writable
cache._writable = lambda folder: "__pycache__" not in folder.parts and writable(folder)
warm.MODULES = ("bandwidth",)
"""
START = """
warm.ensure_compiled(print)
from glm53serve.cpu.kernels import bandwidth
assert bandwidth.read.address
"""


def start(home: Path | str, before: str = "") -> list[str]:
    """What a start says whose package cannot be written."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY_PACKAGE + before + START],
        env=child_environment({"HOME": str(home)}), capture_output=True, text=True, cwd=ROOT, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_damaged_cache_is_compiled_again_once(tmp_path: Path) -> None:
    assert start(tmp_path) == ["compiling the CPU kernels for this processor, once; it takes about half a minute"]
    assert start(tmp_path) == []
    for path in tmp_path.rglob("*.nb[ci]"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (line,) = start(tmp_path)
    assert line.startswith(str(tmp_path / ".cache" / "glm53serve" / "kernels-")) and ": the compiled kernels there are damaged (" in line
    assert start(tmp_path) == []


NOWHERE = ["compiling the CPU kernels for this processor, at every start, for there is no folder to keep them in; it takes about half a minute"]


def test_a_home_that_cannot_be_written_or_is_not_there_costs_a_compilation(tmp_path: Path) -> None:
    assert start("/dev/null") == NOWHERE
    assert start(tmp_path, "def home(cls): raise RuntimeError('Could not determine home directory.')\npathlib.Path.home = classmethod(home)") == NOWHERE


def test_a_full_disk_costs_a_compilation(tmp_path: Path) -> None:
    once, full = start(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert once.endswith("once; it takes about half a minute")
    assert full.startswith(str(tmp_path)) and full.endswith(": compiled kernels cannot be kept there ([Errno 27] File too large); every start compiles them")


def test_without_a_home_the_shipped_model_keeps_no_usage_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def home(_cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(home))
    assert usage_path(shipped_model(), "") == Path("/dev/null")
    assert usage_path(tmp_path, "") == tmp_path / ".coli_usage"
