"""Reading a small JSON file that somebody else wrote."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from glm53serve.model.errors import ModelError

LIMIT = 64 << 20


class DuplicateKey(ValueError):
    """One object of a JSON text has the same key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"key {short(key)} is there twice")
            seen.add(key)
    return found


def short(value: Any, limit: int = 60) -> str:
    """A value for a one-line message: its JSON text, cut when long."""
    if isinstance(value, (list, tuple)) and len(value) > 16:
        return f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object from UTF-8 bytes. Raises ValueError with a short reason: not UTF-8, not JSON, not an object, a key twice, too deep."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, there is {short(value)}")
    return value


def read_object(path: Path, error: type[ModelError]) -> dict[str, Any]:
    """The JSON object in a file of at most 64 MiB. Raises `error` (kind io or format) with one line naming the file."""
    try:
        # a pipe or device of that name would block
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path}: not a regular file", "io")
        with path.open("rb") as file:
            text = file.read(LIMIT + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such file", "io") from None
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason.strerror})", "io") from None
    if len(text) > LIMIT:
        raise error(f"{path}: larger than {LIMIT >> 20} MiB", "format")
    try:
        return parse_object(text)
    except ValueError as reason:
        raise error(f"{path}: {reason}", "format") from None
