"""Writing a model directory shard by shard: headers first, then the data as it is produced, so nothing has to fit in memory.

The safetensors package's writers need all tensors of a file at once and choose the order; here an expert's pieces lie side by side and the
experts of a shard start at a multiple of a page, so that one aligned read fetches an expert (model spec 9).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from glm53serve.model.errors import ModelError
from glm53serve.model.safetensors_file import DTYPE_BYTES, INDEX

PAGE = 4096
SHARD_BYTES = 4_000_000_000
DISK_RESERVE = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that lie side by side in one file; experts go before everything else of their shard."""

    entries: tuple[Entry, ...]
    expert: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its data."""
        return sum(e.nbytes for e in self.entries)


Data = Callable[[Entry], Iterable[Any]]
"""Gives an entry's bytes as consecutive buffers (C-contiguous arrays)."""


def plan_shards(units: Sequence[Unit], limit: int) -> list[list[Entry]]:
    """Units in order into shards of about `limit` bytes (a unit is never cut); within a shard the experts come first."""
    shards: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    ordered = [sorted(shard, key=lambda unit: not unit.expert) for shard in shards]
    return [[entry for unit in shard for entry in unit.entries] for shard in ordered]


def shard_names(count: int) -> list[str]:
    """The usual file names of that many shards."""
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def refuse_occupied(directory: Path, texts: Collection[str] = ()) -> None:
    """Raises ModelError (io) when the directory has a model, or parts of one, or a file of the names `texts`; OSError when it cannot be listed."""
    there = sorted(p.name for p in directory.iterdir())
    model = [name for name in there if name in ("config.json", INDEX) or name.endswith(".safetensors")]
    if model:
        raise ModelError(f"{directory}: holds a model already ({model[0]}), an empty directory is needed", "io")
    if named := [name for name in there if name in texts]:
        raise ModelError(f"{directory}: {named[0]} would be overwritten, an empty directory is needed", "io")


def header_bytes(entries: Sequence[Entry]) -> bytes:
    """Length and JSON header of a file with these tensors in this order; filled with blanks so that the data start on a page."""
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def write_model(directory: Path, units: Sequence[Unit], data: Data, texts: Mapping[str, str], limit: int | None = None) -> None:
    """Write the tensors of `units`, their index and the text files (name to content) as a new model directory.

    Everything is written under names that end in `.partial` and renamed at the end, config last, so a directory with a config.json is whole.
    Raises ModelError (io) when there is a model already or the disk is too small, before anything is written; after any later failure the
    partial files are removed.
    """
    shards = plan_shards(units, SHARD_BYTES if limit is None else limit)
    names = shard_names(len(shards))
    total = sum(unit.nbytes for unit in units)
    weight_map = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=0)
    headers = [header_bytes(entries) for entries in shards]
    made = _prepare(directory, total + sum(map(len, headers)) + len(index) + sum(map(len, texts.values())), texts)
    partial: list[Path] = []
    try:
        for name, entries, header in zip(names, shards, headers, strict=True):
            partial.append(directory / f"{name}.partial")
            _write_shard(partial[-1], header, entries, data)
        for name, text in {INDEX: index, **texts}.items():
            partial.append(directory / f"{name}.partial")
            partial[-1].write_text(text, encoding="utf-8")
        for path in sorted(partial, key=lambda p: p.name.startswith("config.json")):
            path.replace(path.with_suffix(""))
    except BaseException as error:
        for path in partial:
            path.unlink(missing_ok=True)
        if made:
            _remove_empty(directory)
        if isinstance(error, OSError):
            raise ModelError(f"{directory}: cannot be written ({error.strerror})", "io") from None
        raise


def _prepare(directory: Path, needed: int, texts: Collection[str]) -> bool:
    """Make the directory and see that the model fits; True when it was not there before."""
    try:
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        refuse_occupied(directory, texts)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written ({error.strerror})", "io") from None
    if needed + DISK_RESERVE > free:
        if made:
            _remove_empty(directory)
        raise ModelError(f"{directory}: the model takes {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free", "io")
    return made


def _remove_empty(directory: Path) -> None:
    if not any(directory.iterdir()):
        directory.rmdir()


def _write_shard(path: Path, header: bytes, entries: Sequence[Entry], data: Data) -> None:
    with path.open("wb", buffering=0) as file:
        _write_all(file, header)
        for entry in entries:
            start = file.tell()
            for block in data(entry):
                _write_all(file, block)
            assert file.tell() - start == entry.nbytes, entry.name


def _write_all(file: Any, block: Any) -> None:
    view = memoryview(block).cast("B")
    while view:
        view = view[file.write(view) :]
