"""Compiling the kernels ahead of time, so that no start waits for it twice."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

from glm53serve.cpu.kernels.cache import cache_folder, remove_older

MODULES = ("team", "rows", "router", "matmul", "experts", "kda", "dsa", "bandwidth")
"""Modules of `glm53serve.cpu.kernels` that compile something when they are imported."""


Note = Callable[[str], None]


def _marker(folder: Path) -> Path:
    import llvmlite.binding

    return folder / f"compiled-for-{llvmlite.binding.get_host_cpu_name()}"


def is_compiled() -> bool:
    """Whether the kernels of this version lie in the cache, compiled for this processor. Raises ImportError without Numba."""
    folder = cache_folder()
    return folder is not None and _marker(folder).exists()


def compile_all(progress: Callable[[str, int, int], None] | None = None, note: Note = lambda _line: None) -> None:
    """Compile every kernel into the cache, or load it from there; other versions' kernels are deleted.

    progress(module, number, count) is called before each module. A damaged cache is replaced, one that cannot be written gone without; `note` is
    told. Raises ImportError without Numba.
    """
    from glm53serve.cpu.kernels.target import FOLDER, JIT

    for number, name in enumerate(MODULES):
        if progress is not None:
            progress(name, number, len(MODULES))
        _load(name, note)
    if FOLDER is None or not JIT["cache"] or _marker(FOLDER).exists():
        return
    try:
        _marker(FOLDER).touch()
    except OSError as error:
        note(f"{FOLDER}: the kernels that were compiled cannot be marked as complete ({error.strerror})")
        return
    remove_older(FOLDER)


def _load(name: str, note: Note) -> None:
    """Import a module of kernels, in spite of whatever is wrong with the cache."""
    from numba import config
    from numba.core.errors import NumbaError

    from glm53serve.cpu.kernels.target import FOLDER, JIT, forgo_cache

    damaged = False
    while True:
        try:
            importlib.import_module(f"glm53serve.cpu.kernels.{name}")
            return
        except NumbaError:
            raise
        except Exception as error:
            # what is read from a damaged file may raise anything; what the cache has no part in is raised again without it
            if not JIT["cache"]:
                raise
            reason = " ".join(str(error).split())
            if damaged or FOLDER is None or isinstance(error, OSError):
                note(f"{config.CACHE_DIR}: compiled kernels cannot be kept there ({reason}); every start compiles them")
                forgo_cache()
            else:
                note(f"{config.CACHE_DIR}: the compiled kernels there are damaged ({reason}); compiling them again, which takes about half a minute")
                shutil.rmtree(FOLDER, ignore_errors=True)
                damaged = True


def ensure_compiled(note: Note) -> None:
    """Have the kernels ready; when they must be compiled first, `note` is told. Raises ImportError without Numba."""
    if not is_compiled():
        often = "at every start, for there is no folder to keep them in" if cache_folder() is None else "once"
        note(f"compiling the CPU kernels for this processor, {often}; it takes about half a minute")
    compile_all(note=note)


if __name__ == "__main__":
    compile_all(lambda name, number, count: print(f"compiling kernels {number + 1}/{count}: {name}", flush=True), print)
