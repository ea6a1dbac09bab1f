"""The serve harness against the drop-in command on the CUDA backend, as a person starts it; where there is no GPU, that it starts so at all, on the CPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from glm53serve.cuda.cupy_runtime import available
from glm53serve.load import shipped_model
from harness.cases import CASES, case_names

ROOT = Path(__file__).resolve().parent.parent.parent
DROP_IN = "import sys; from glm53serve.cli import main_drop_in; sys.exit(main_drop_in(sys.argv[1:]))"


def run_harness(folder: Path, backend: str, cases: list[str]) -> None:
    """Run these cases against an executable of the drop-in command. Fails with the harness's report when one of them does not pass."""
    engine = folder / "glm53"
    engine.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(DROP_IN)} "$@"\n')
    engine.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLM53_", "COLI_"))}
    command = [
        sys.executable, "harness/glm53_serve_harness.py", "--engine", shlex.quote(str(engine)), "--model", str(shipped_model()), "--tolerance", "1e-3",
        "--cases", ",".join(cases),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=290, env={**environ, "GLM53_BACKEND": backend})
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{len(cases)} passed, 0 failed, 0 skipped", done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(available() is None, reason="needs an NVIDIA GPU and the packages of glm53serve[cuda]")
@pytest.mark.parametrize("about", sorted({case.__module__ for case in CASES.values()}), ids=lambda name: name.rpartition("_")[2])
def test_every_case_passes_on_the_device(tmp_path: Path, about: str) -> None:
    run_harness(tmp_path, "cuda", [name for name in case_names() if CASES[name].__module__ == about])


def test_the_drop_in_command_passes_on_the_cpu(tmp_path: Path) -> None:
    run_harness(tmp_path, "cpu", ["handshake", "two_slots"])
