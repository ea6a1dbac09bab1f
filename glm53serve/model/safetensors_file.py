"""Which tensors a model directory's safetensors files hold and where, from the headers alone.

The `safetensors` package's NumPy front end has no bf16 or FP8 type and copies what it loads, and it tells no byte offsets, which reading single
experts from disk needs. The header is eight bytes of length and a JSON object, so it is read here, and every claim it makes is checked
against the file's size before anyone relies on it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from glm53serve.model.errors import CheckpointError
from glm53serve.model.jsonfile import parse_object, read_object, short

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a header describes it; `offset` counts from the start of the file numbered `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {short(list(self.shape))}"


def read_header(path: Path, shard: int = 0) -> list[TensorInfo]:
    """All tensors of one file in the order of their bytes.

    Raises CheckpointError (io, format) naming the file, and the tensor where there is one, unless the ranges cover the file's data
    exactly, without gap or overlap, and each has the bytes its dtype and shape say.
    """
    header, start, size = _header_json(path)
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            tensors.append(_tensor(path, name, entry, shard, start))
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    position, last = start, None
    for tensor in tensors:
        if tensor.offset < position:
            other = "" if last is None else f" of {last.name}"
            raise CheckpointError(f"{path}: {tensor.name}: its bytes overlap those{other}")
        if tensor.offset > position:
            raise CheckpointError(f"{path}: {tensor.name}: {tensor.offset - position} bytes before it belong to no tensor")
        position, last = tensor.offset + tensor.nbytes, tensor
        if position > size:
            raise CheckpointError(f"{path}: {tensor.name}: its bytes end at {position}, the file ends at {size} (truncated)")
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to no tensor")
    return tensors


def _header_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header object, first byte of the data, file size)."""
    try:
        # a pipe or device of that name would block or never end
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file", "io")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                there = f"{size} bytes" if len(prefix) < 8 else f"a header of {length} bytes in a file of {size}"
                raise CheckpointError(f"{path}: {there}, not a whole safetensors file")
            if length > HEADER_LIMIT:
                raise CheckpointError(f"{path}: a header of {length} bytes, at most {HEADER_LIMIT} are allowed")
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file", "io") from None
    except OSError as reason:
        raise CheckpointError(f"{path}: cannot be read ({reason.strerror})", "io") from None
    try:
        return parse_object(text), 8 + length, size
    except ValueError as reason:
        raise CheckpointError(f"{path}: safetensors header: {reason}") from None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _tensor(path: Path, name: str, entry: Any, shard: int, start: int) -> TensorInfo:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name}: {what}")

    if not isinstance(entry, dict):
        raise fail(f"header entry is {short(entry)}, must be an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise fail(f"dtype is {short(dtype)}, must be a name")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(_is_size, shape)):
        raise fail(f"shape is {short(shape)}, must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise fail(f"data_offsets is {short(offsets)}, must be a first and a last byte")
    begin, end = offsets
    size = DTYPE_BYTES.get(dtype)
    if size is not None and end - begin != prod(shape) * size:
        raise fail(f"{end - begin} bytes, {dtype} {short(shape)} needs {prod(shape) * size}")
    return TensorInfo(name, dtype, tuple(shape), shard, start + begin, end - begin)


def read_directory(directory: Path) -> tuple[list[Path], dict[str, TensorInfo]]:
    """(weight files, tensors by name) of a model directory: the files its index names, else every *.safetensors file.

    Raises CheckpointError when a file is missing or damaged, a tensor is there twice, or the index and the files disagree.
    """
    index = directory / INDEX
    weight_map = _weight_map(index) if index.exists() else None
    if weight_map is not None:
        files = [directory / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise CheckpointError(f"{index}: names {file.name}, which is not there", "io")
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors file", "io")
    tensors: dict[str, TensorInfo] = {}
    for shard, file in enumerate(files):
        _merge(tensors, read_header(file, shard), files)
    if weight_map is not None:
        _check_index(index, weight_map, files, tensors)
    return files, tensors


def _merge(tensors: dict[str, TensorInfo], found: Iterable[TensorInfo], files: list[Path]) -> None:
    for tensor in found:
        if tensor.name in tensors:
            raise CheckpointError(f"{files[tensor.shard]}: {tensor.name}: is also in {files[tensors[tensor.name].shard].name}")
        tensors[tensor.name] = tensor


def _weight_map(index: Path) -> dict[str, str]:
    value = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(value, dict):
        raise CheckpointError(f"{index}: weight_map is {short(value)}, must be an object of tensor and file names")
    seen: set[str] = set()
    for name, file in value.items():
        if not isinstance(file, str) or (file not in seen and not _is_file_name(file)):
            raise CheckpointError(f"{index}: {name}: file is {short(file)}, must be the name of a file beside the index")
        seen.add(file)
    return value


def _is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and len(text) <= 255 and not any(c in text for c in "/\\\0")


def _check_index(index: Path, weight_map: dict[str, str], files: list[Path], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        there = tensors.get(name)
        if there is None:
            raise CheckpointError(f"{index}: {name}: not in {file}")
        if files[there.shard].name != file:
            raise CheckpointError(f"{index}: {name}: not in {file} but in {files[there.shard].name}")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{files[tensor.shard]}: {name}: not in {INDEX}")
