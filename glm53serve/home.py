"""Where a user keeps what can be made again."""

from __future__ import annotations

from pathlib import Path


def user_cache() -> Path | None:
    """This program's folder in the user's cache directory; None for a user without a home (no HOME, no entry), as containers and services have them."""
    try:
        return Path.home() / ".cache" / "glm53serve"
    except RuntimeError:
        return None
