"""The CUDA kernels through NVIDIA's compiler, where it is installed: every file for the architecture they are for, and why for no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from glm53serve.cuda import compiling
from glm53serve.cuda.compiling import refusal
from glm53serve.cuda.model import defines
from glm53serve.cuda.runtime import FORMAT_CODES, MODULES, kernel_source
from glm53serve.model.config_file import parse_config
from glm53serve.model.shapes import shape_config

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compiled(tmp_path: Path, name: str, sizes: Mapping[str, int], architecture: str) -> str:
    """Compile a kernel source; what the compiler says, empty when nothing is wrong."""
    source = tmp_path / f"{name}.cu"
    source.write_text(kernel_source(name))
    options = [f"-D{key}={value}" for key, value in sizes.items()]
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-w", "-cubin", "-o", str(tmp_path / "out"), *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    return done.stderr + done.stdout if done.returncode else ""


def sizes(exact: bool) -> dict[str, int]:
    """The published widths; `exact` with every format."""
    formats = set(FORMAT_CODES) if exact else set(FORMAT_CODES) - {"f32"}
    return defines(parse_config(shape_config("flash", 4, 8, fp8=False)), formats, exact)


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize("exact", [False, True], ids=["wide", "exact"])
@pytest.mark.parametrize(("name", "own"), MODULES, ids=[name + "".join(map(str, own.values())) for name, own in MODULES])
def test_every_kernel_file_compiles(tmp_path: Path, name: str, own: dict[str, int], exact: bool) -> None:
    assert compiled(tmp_path, name, {**sizes(exact), **own}, "sm_90a") == ""


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89"])
def test_older_gpus_are_refused_for_what_the_compiler_says(tmp_path: Path, architecture: str) -> None:
    """Even the smallest file needs 9.0; when this compiles one day, `refusal` should ask for less."""
    assert "requires .target sm_90 or higher" in compiled(tmp_path, "sample", sizes(True), architecture)


def test_the_refusal_names_what_was_found_and_what_is_needed() -> None:
    assert refusal("NVIDIA H200", 9, 0) is None
    for major, minor in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0)):
        said = refusal("NVIDIA X", major, minor)
        assert said is not None and f"NVIDIA X has compute capability {major}.{minor}; the kernels need 9.0" in said and "\n" not in said


class FakeCompiler(ModuleType):
    """NVRTC that makes a cubin of any source; `runs` counts them."""

    def __init__(self) -> None:
        super().__init__("nvrtc")
        self.runs = 0

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, 13, 0

    def nvrtcCreateProgram(self, *_: object) -> tuple[int, object]:
        return 0, object()

    def nvrtcCompileProgram(self, *_: object) -> tuple[int]:
        self.runs += 1
        return (0,)

    def nvrtcGetCUBINSize(self, _: object) -> tuple[int, int]:
        return 0, 5

    def nvrtcGetCUBIN(self, _: object, room: bytes) -> tuple[int]:
        assert len(room) == 5
        return (0,)


@pytest.mark.parametrize(("cache", "runs"), [("there", 1), ("read-only", 2), ("no home", 2)])
def test_kernels_are_compiled_again_where_there_is_no_place_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, runs: int
) -> None:
    compiler, bindings = FakeCompiler(), ModuleType("cuda.bindings")
    bindings.nvrtc = compiler  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.nvrtc", compiler)):
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "a file").touch()
    place = {"there": tmp_path, "read-only": tmp_path / "a file", "no home": None}[cache]
    monkeypatch.setattr(compiling, "user_cache", lambda: place)
    for _ in range(2):
        assert compiling.compiled("sample", "text", {"HC": 4}) == b" " * 5
    assert compiler.runs == runs
