"""Which shards of a conversion are finished, in a file beside them, so that a second run goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    shards = [list(pair) for pair in zip(names, sizes, strict=True)]
    return {"version": 1, "source": source_files(plan), "experts": plan.experts, "dense": plan.dense, "shards": shards}


def source_files(plan: Conversion) -> list[list[Any]]:
    """Name, size and time of change of each weight file of the source. Raises OSError."""
    stats = [(path.name, path.stat()) for path in plan.checkpoint.files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Make the directory and hold it against other conversions, which would write the same partial files; a killed one holds nothing.

    Raises ModelError when another one is at work or there can be no such directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written ({error.strerror})", "io") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{directory}: another conversion is writing there", "io") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


@dataclass(slots=True)
class Journal:
    """Checksums of finished shards, in a small file that is replaced whole."""

    directory: Path
    fingerprint: dict[str, Any]
    checksums: dict[str, int]

    @classmethod
    def open(cls, directory: Path, fingerprint: dict[str, Any], texts: Sequence[str] = ()) -> Journal:
        """Begin, or go on with the journal that is there. Raises ModelError when the directory holds anything else's work: weights, another
        conversion, or files of the names `texts`."""
        path = directory / JOURNAL
        if path.exists():
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
                checksums = {str(name): int(value) for name, value in there.pop("checksums").items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ModelError(f"{path}: not a journal of a conversion; remove it and the shards beside it to begin anew", "io") from None
            if there != fingerprint:
                raise ModelError(f"{path}: belongs to a conversion from another source or with other options; an empty directory is needed", "io")
            return cls(directory, fingerprint, checksums)
        refuse_occupied(directory, texts)
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
