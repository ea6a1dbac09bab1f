"""What the kernels are compiled for, and where the compiled code is kept. Imported before any other module of this package."""

from __future__ import annotations

import llvmlite.binding
import numba

from glm53serve.cpu.kernels.cache import cache_folder


def _features() -> frozenset[str]:
    """Features of the processor that LLVM compiles for: the host's, unless Numba was told otherwise."""
    if numba.config.CPU_NAME not in (None, "", "host"):
        named = (numba.config.CPU_FEATURES or "").split(",")
        return frozenset(f[1:] for f in named if f.startswith("+"))
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


FOLDER = cache_folder()
JIT = {"nogil": True, "cache": True, "error_model": "numpy"}
"""How functions are compiled; `forgo_cache` changes it for the modules that are imported afterwards."""
CFUNC = {"nopython": True, "cache": True, "error_model": "numpy"}
"""How kernels are compiled; likewise."""


def forgo_cache() -> None:
    """Neither look for compiled code nor keep it from now on."""
    JIT["cache"] = CFUNC["cache"] = False


if not numba.config.CACHE_DIR:
    if FOLDER is None:
        forgo_cache()
    else:
        numba.config.CACHE_DIR = str(FOLDER)

FEATURES = _features()
LANES = 16 if "avx512f" in FEATURES else 8
"""float32 lanes of the vectors the kernels work with; sums are split over as many, so results may differ in the last bits between machines."""
VECTOR_BYTES = 4 * LANES
HAS_VNNI = "avx512vnni" in FEATURES and "avx512vl" in FEATURES and "avx512bw" in FEATURES
HAS_AVX2 = "avx2" in FEATURES
HAS_FMA = "fma" in FEATURES or LANES == 16
