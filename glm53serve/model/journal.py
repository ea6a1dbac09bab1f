"""Which shards of a conversion are finished, in a file beside them, so that a second run goes on from there."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53serve.model.conversion import COPY_BYTES, Conversion
from glm53serve.model.errors import ModelError
from glm53serve.model.shards import refuse_occupied

JOURNAL = "convert.journal.json"


def write_whole(path: Path, content: bytes) -> None:
    """Put a small file in its place, on the disk and never half-written. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def fingerprint_of(plan: Conversion, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """What a journal must say to belong to this conversion: source files, options, the shards they make."""
    stats = [(path.name, path.stat()) for path in plan.checkpoint.files]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"version": 1, "source": files, "experts": plan.experts, "dense": plan.dense, "shards": [list(pair) for pair in zip(names, sizes, strict=True)]}


@dataclass(slots=True)
class Journal:
    """Checksums of finished shards, in a small file that is replaced whole."""

    directory: Path
    fingerprint: dict[str, Any]
    checksums: dict[str, int]

    @classmethod
    def open(cls, directory: Path, fingerprint: dict[str, Any]) -> Journal:
        """Begin, or go on with the journal that is there. Raises ModelError when the directory holds anything else's work."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / JOURNAL
        if path.exists():
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
                checksums = {str(name): int(value) for name, value in there.pop("checksums").items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ModelError(f"{path}: not a journal of a conversion; remove it and the shards beside it to begin anew", "io") from None
            if there != fingerprint:
                raise ModelError(f"{path}: belongs to a conversion from another source or with other options; an empty directory is needed", "io")
            return cls(directory, fingerprint, checksums)
        refuse_occupied(directory)
        journal = cls(directory, fingerprint, {})
        journal._save()
        return journal

    def finished(self, name: str, size: int) -> bool:
        """True when a shard is whole: the size and the checksum the journal has."""
        path = self.directory / name
        if name not in self.checksums or not path.exists() or path.stat().st_size != size:
            return False
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(COPY_BYTES):
                checksum = zlib.crc32(block, checksum)
        return checksum == self.checksums[name]

    def add(self, name: str, checksum: int) -> None:
        """A shard was finished."""
        self.checksums[name] = checksum
        self._save()

    def _save(self) -> None:
        write_whole(self.directory / JOURNAL, json.dumps({**self.fingerprint, "checksums": self.checksums}, indent=1).encode())
