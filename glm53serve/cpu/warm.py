"""Compiling the kernels ahead of time, so that no start waits for it twice."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from glm53serve.cpu.kernels.cache import cache_folder, remove_older

MODULES = ("team", "rows", "router", "matmul", "experts", "kda", "dsa", "bandwidth")
"""Modules of `glm53serve.cpu.kernels` that compile something when they are imported."""


def _marker() -> Path:
    import llvmlite.binding

    return cache_folder() / f"compiled-for-{llvmlite.binding.get_host_cpu_name()}"


def is_compiled() -> bool:
    """Whether the kernels of this version lie in the cache, compiled for this processor. Raises ImportError without Numba."""
    return _marker().exists()


def compile_all(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compile every kernel into the cache, or load it from there; other versions' kernels are deleted.

    progress(module, number, count) is called before each module. Raises ImportError without Numba.
    """
    for number, name in enumerate(MODULES):
        if progress is not None:
            progress(name, number, len(MODULES))
        importlib.import_module(f"glm53serve.cpu.kernels.{name}")
    marker = _marker()
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        remove_older(marker.parent)


def ensure_compiled(note: Callable[[str], None]) -> None:
    """Have the kernels ready; when they must be compiled first, `note` is told. Raises ImportError without Numba."""
    if not is_compiled():
        note("compiling the CPU kernels for this processor, once; it takes about half a minute")
    compile_all()


if __name__ == "__main__":
    compile_all(lambda name, number, count: print(f"compiling kernels {number + 1}/{count}: {name}", flush=True))
