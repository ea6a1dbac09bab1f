"""The committed SPIR-V modules: which there are, what they were built from, and loading them checked.

`python -m glm53serve.vulkan.modules build` compiles every module (developers; needs glslangValidator and spirv-val),
`... check` compares the committed files with the manifest and the sources (no compiler), `... check --rebuild` compiles
again and compares the bytes. The modules for matrix units need glslang 13 or newer, the others give the same bytes with 12 and 13.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from glm53serve.vulkan.errors import VulkanUnavailable

HERE = Path(__file__).resolve().parent
SHADERS = HERE / "shaders"
BINARIES = HERE / "spv"
FLAGS = ["-Os", "--quiet"]
UNITS = "gemm_coop.comp"
UNITS_COMPILER = 13
FORMATS = {"f32": 0, "bf16": 1, "fp8": 2, "int8": 3, "int4": 4}


def _variants() -> dict[str, tuple[str, list[str]]]:
    plain = "hc_dots hc_pre hc_post kda_prep kda kda_out dsa_norm dsa_pool dsa_score dsa_topk attn_scores attn_softmax attn_mix attn_sum route moe_sort copy"
    found = {name: (f"{name}.comp", list[str]()) for name in plain.split()}
    for name, number in FORMATS.items():
        for kernel in ("gemv", "gemm", "gemm_coop"):
            found[f"{kernel}_{name}"] = (f"{kernel}.comp", [f"-DFMT={number}"])
            found[f"{kernel}_expert_{name}"] = (f"{kernel}.comp", [f"-DFMT={number}", "-DEXPERT"])
    return found


VARIANTS = _variants()
"""Module name -> (source file, defines)."""


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _expanded(path: Path) -> str:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        include = re.match(r'\s*#include\s+"([^"]+)"', line)
        lines.append(_expanded(path.parent / include.group(1)) if include else line.rstrip())
    return "\n".join(lines)


@cache
def compiler_version() -> str | None:
    """First line of `glslangValidator --version`, None where it is not installed."""
    if shutil.which("glslangValidator") is None:
        return None
    return subprocess.run(["glslangValidator", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compiles(name: str) -> bool:
    """Whether the installed compiler can build a module."""
    version = re.search(r":(\d+)\.", compiler_version() or "")
    return version is not None and (VARIANTS[name][0] != UNITS or int(version.group(1)) >= UNITS_COMPILER)


def _target(source: str) -> list[str]:
    return ["--target-env", "vulkan1.2" if source == UNITS else "vulkan1.1"]


def compile_module(name: str, out: Path, validate: bool = True) -> None:
    """Compile one module to `out` and validate it. Raises RuntimeError with the tools' words."""
    source, defines = VARIANTS[name]
    done = subprocess.run(
        ["glslangValidator", "-V", "-S", "comp", *_target(source), *FLAGS, "-I.", *defines, "-o", str(out), source], cwd=SHADERS, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
    if not validate:
        return
    checked = subprocess.run(["spirv-val", *_target(source), str(out)], capture_output=True, text=True)
    if checked.returncode:
        raise RuntimeError(f"{name}: spirv-val: {checked.stderr}")


def build() -> None:
    """Compile every module and write the manifest. Raises RuntimeError when the compiler is too old for some."""
    if not all(compiles(name) for name in VARIANTS):
        raise RuntimeError(f"glslangValidator {UNITS_COMPILER} or newer is needed, found {compiler_version() or 'none'}")
    BINARIES.mkdir(exist_ok=True)
    for old in BINARIES.glob("*.spv"):
        old.unlink()
    entries = {}
    for name, (source, defines) in sorted(VARIANTS.items()):
        compile_module(name, BINARIES / f"{name}.spv")
        entries[name] = {
            "source": source,
            "defines": defines,
            "source_sha256": _sha(_expanded(SHADERS / source).encode()),
            "spv_sha256": _sha((BINARIES / f"{name}.spv").read_bytes()),
        }
    manifest = {"compiler": compiler_version(), "flags": FLAGS, "modules": entries}
    (BINARIES / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@cache
def manifest() -> dict[str, Any]:
    """The committed manifest."""
    found: dict[str, Any] = json.loads((BINARIES / "manifest.json").read_text(encoding="utf-8"))
    return found


def differences(rebuild: bool = False) -> list[str]:
    """What does not agree between sources, binaries and manifest; with `rebuild` also between them and a fresh build."""
    found = list[str]()
    entries = manifest()["modules"]
    if manifest()["flags"] != FLAGS or set(entries) != set(VARIANTS):
        found.append("the manifest lists other modules or flags")
    for name, (source, defines) in VARIANTS.items():
        entry = entries.get(name)
        if entry is None:
            continue
        committed = (BINARIES / f"{name}.spv").read_bytes()
        if entry["defines"] != defines or entry["source_sha256"] != _sha(_expanded(SHADERS / source).encode()):
            found.append(f"{name}: the source changed, build again")
        if entry["spv_sha256"] != _sha(committed):
            found.append(f"{name}.spv: not the file that was built")
    if rebuild:
        names = [name for name in VARIANTS if name in entries and compiles(name)]
        with ThreadPoolExecutor(2) as pool:
            same = dict(zip(names, pool.map(_rebuilds, names), strict=True))
        found += [f"{name}: a fresh build by {compiler_version()} differs" for name in names if not same[name]]
    return found


def _rebuilds(name: str) -> bool:
    """Whether a fresh build gives the committed bytes."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "fresh.spv"
        compile_module(name, fresh, validate=False)
        return fresh.read_bytes() == (BINARIES / f"{name}.spv").read_bytes()


def load(name: str) -> bytes:
    """The code of a module. A file that is not the built one is refused: drivers accept garbage and crash later.

    Raises VulkanUnavailable.
    """
    try:
        code = (BINARIES / f"{name}.spv").read_bytes()
        wanted = manifest()["modules"][name]["spv_sha256"]
    except (OSError, KeyError) as error:
        raise VulkanUnavailable(f"the shader {name} is missing from the installation") from error
    if _sha(code) != wanted:
        raise VulkanUnavailable(f"the shader {name} is not the file that was built (wrong SHA-256); install glm53serve again")
    return code


def main(words: list[str]) -> int:
    """Command line of this module."""
    if words == ["build"]:
        build()
        print(f"{len(VARIANTS)} modules, {sum(f.stat().st_size for f in BINARIES.glob('*.spv'))} bytes")
        return 0
    if words[:1] == ["check"] and words[1:] in ([], ["--rebuild"]):
        found = differences(rebuild=len(words) == 2)
        print("\n".join(found) or "ok")
        return 1 if found else 0
    print("usage: python -m glm53serve.vulkan.modules build | check [--rebuild]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
