"""Where compiled kernels are kept. Does not import Numba."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

from glm53serve.home import user_cache

_HERE = Path(__file__).parent
_DAY = 86400


def _sources() -> str:
    """Numba checks only the file a function stands in, not the ones it calls, so the cache's place names all of them."""
    digest = hashlib.sha256(version("numba").encode())
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


@cache
def cache_folder() -> Path | None:
    """Beside the package when that can be written (a virtual environment, a checkout), else in the user's cache directory; None when neither can."""
    name = f"kernels-{_sources()}"
    user = user_cache()
    places = [_HERE / "__pycache__" / name] + ([user / name] if user is not None else [])
    return next(filter(_writable, places), None)


def remove_older(folder: Path) -> None:
    """Delete what other versions of the kernels left next to `folder`, unless a process may still be writing it (changed within a day)."""
    for other in folder.parent.glob("kernels-*"):
        with contextlib.suppress(FileNotFoundError):  # another start deletes as well
            if other != folder and time.time() - other.stat().st_mtime > _DAY:
                shutil.rmtree(other, ignore_errors=True)
