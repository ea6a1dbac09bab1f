"""What the kernels are compiled for, and where the compiled code is kept. Imported before any other module of this package."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import llvmlite.binding
import numba

_HERE = Path(__file__).parent


def _features() -> frozenset[str]:
    """Features of the processor that LLVM compiles for: the host's, unless Numba was told otherwise."""
    if numba.config.CPU_NAME not in (None, "", "host"):
        named = (numba.config.CPU_FEATURES or "").split(",")
        return frozenset(f[1:] for f in named if f.startswith("+"))
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


def _sources() -> str:
    """Numba checks only the file a function stands in, not the ones it calls, so the cache's place names all of them."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cache_folder() -> Path:
    """Beside the package when that can be written (a virtual environment, a checkout), else the user's cache directory."""
    name = f"kernels-{_sources()}"
    beside = _HERE / "__pycache__" / name
    return beside if _writable(beside) else Path.home() / ".cache" / "glm53serve" / name


if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(_cache_folder())

FEATURES = _features()
LANES = 16 if "avx512f" in FEATURES else 8
"""float32 lanes of the vectors the kernels work with; sums are split over as many, so results may differ in the last bits between machines."""
VECTOR_BYTES = 4 * LANES
HAS_VNNI = "avx512vnni" in FEATURES and "avx512vl" in FEATURES and "avx512bw" in FEATURES
HAS_AVX2 = "avx2" in FEATURES
HAS_FMA = "fma" in FEATURES or LANES == 16
