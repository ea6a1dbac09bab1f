"""From one checkpoint to another with smaller experts, shard by shard: bounded memory, resumable, nothing half-written under a final name.

Routed experts become int4, int8 or BF16, an expert's six pieces side by side; other matrices stay BF16 or become int8 or int4; router, norms
and other small tensors keep every bit (model spec 9). Vision tensors are copied as they are. A shard is written under a name that ends in
`.partial`, forced to the disk, entered with its checksum in a journal, and renamed; config.json comes last of all, so a directory with one is
whole. A second run with the same source and options checks the finished shards against the journal and goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import layout
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.config import SPARSE
from glm53serve.model.errors import ModelError
from glm53serve.model.layout import Need
from glm53serve.model.quant import requantise
from glm53serve.model.safetensors_file import INDEX, TensorInfo
from glm53serve.model.shards import DISK_RESERVE, SHARD_BYTES, Entry, Unit, header_bytes, plan_shards
from glm53serve.model.stored import SCALE_SUFFIX, Extent, StoredMatrix, data_cols, scale_shape
from glm53serve.model.weights import MatrixFormat

JOURNAL = "convert.journal.json"
BITS = {"bf16": 16, "int8": 8, "int4": 4}
DTYPES: dict[MatrixFormat, str] = {"f32": "F32", "bf16": "BF16", "int8": "I8", "int4": "U8"}
F32_ENDINGS = ("dt_bias", "A_log", "e_score_correction_bias", "index_kpool_compress_ape", "norm.weight", "norm.bias", "_fn", "_base", "_scale")
"""Small tensors that the int4 container stores as F32."""
ALWAYS_BF16 = ("embed_tokens.weight", ".b_proj.weight")
"""Rows that are looked up and a tiny matrix whose rounding changes decays: never narrowed."""
COPIED = (".json", ".jinja", ".txt", ".model", ".md")
COPY_BYTES = 64 << 20
Progress = Callable[[int, int], None]
"""(bytes written or found finished, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Work:
    """The entries of one matrix (data and scales), or of one tensor that is copied, and what makes their bytes."""

    entries: tuple[Entry, ...]
    make: Callable[[], Iterator[NDArray[Any]]]
    """Gives the bytes of all entries in order."""


@dataclass(slots=True)
class Conversion:
    """What is to be written: units in order, the work behind each entry, text files."""

    checkpoint: Checkpoint
    experts: str
    dense: str
    units: list[Unit] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)
    """By the name of a work's first entry."""

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(unit.nbytes for unit in self.units)


def convert(
    source: Path,
    target: Path,
    experts: str = "int4",
    dense: str = "bf16",
    *,
    threads: int = 2,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
    opened: Callable[[Path], BinaryIO] | None = None,
) -> Conversion:
    """Write a converted model. Raises ModelError (one line): a bad source, an occupied or foreign target, a full disk."""
    plan = plan_conversion(source, experts, dense)
    shards = plan_shards(plan.units, SHARD_BYTES if shard_bytes is None else shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    headers = [header_bytes(entries) for entries in shards]
    sizes = [len(h) + sum(e.nbytes for e in entries) for h, entries in zip(headers, shards, strict=True)]
    try:
        journal = _Journal.open(target, _fingerprint(plan, names, sizes))
        done = {name: size for name, size in zip(names, sizes, strict=True) if journal.finished(name, size)}
        _check_room(target, sum(sizes) - sum(done.values()))
        written, total = 0, sum(sizes)
        with ThreadPoolExecutor(threads) as pool:
            for name, header, entries, size in zip(names, headers, shards, sizes, strict=True):
                if name not in done:
                    before = written

                    def report(count: int, before: int = before) -> None:
                        if progress is not None:
                            progress(before + count, total)

                    journal.add(name, _write_shard(target / name, header, _works(plan, entries), pool, threads, report, opened or _create))
                written += size
                if progress is not None:
                    progress(written, total)
        _finish(plan, target, {e.name: name for name, entries in zip(names, shards, strict=True) for e in entries})
    except OSError as error:
        detail = "the disk is full" if error.errno in (28, 122) else error.strerror or str(error)
        raise ModelError(f"{target}: cannot be written ({detail}); finished shards are kept, the same command goes on from them", "io") from None
    return plan


# -- what is to be written


def plan_conversion(source: Path, experts: str, dense: str) -> Conversion:
    """The tensors of the converted model in the order of the network. Raises ModelError."""
    for name, value in (("experts", experts), ("dense", dense)):
        if value not in BITS:
            raise ModelError(f"{name} is {value!r}, must be one of {', '.join(BITS)}", "unsupported")
    checkpoint = open_checkpoint(source, mapped=False)
    c, tensors = checkpoint.config, checkpoint.tensors
    plan = Conversion(checkpoint, experts, dense)
    groups = [dict(layout.end_needs(c, checkpoint.has_head))]
    groups += [dict(layout.layer_needs(c, layer, tensors)) for layer in range(c.num_layers)]
    routed = {layer: dict(layout.routed_needs(c, layer, tensors)) for layer in range(c.num_layers) if c.mlp_kinds[layer] == SPARSE}
    for layer in checkpoint.mtp_layers:
        routed[layer] = dict(layout.routed_needs(c, layer, tensors))
        groups.append({name: need for name, need in layout.mtp_needs(c, layer, tensors) if name not in routed[layer]})
    for needs in groups:
        for name, need in needs.items():
            if need.matrix:
                bits = 16 if name.endswith(ALWAYS_BF16) else BITS[dense]
                plan.units.append(Unit(_add(plan, _matrix_work(plan, name, checkpoint.stored_matrix(name, need), bits))))
            else:
                plan.units.append(Unit(_add(plan, _small_work(plan, name, need, tensors[name]))))
    for layer in routed:
        for expert in range(c.n_routed_experts):
            entries: tuple[Entry, ...] = ()
            for role, stored in zip(("gate", "up", "down"), checkpoint.stored_expert(layer, expert), strict=True):
                entries += _add(plan, _matrix_work(plan, f"layers.{layer}.mlp.experts.{expert}.{role}_proj.weight", stored, BITS[experts]))
            plan.units.append(Unit(entries, expert=True))
    for tensor in checkpoint.vision_tensors:
        plan.units.append(Unit(_add(plan, _copied(plan, tensor))))
    return plan


def _add(plan: Conversion, work: Work) -> tuple[Entry, ...]:
    plan.works[work.entries[0].name] = work
    return work.entries


def disk_name(name: str) -> str:
    """The name in files we write."""
    return name if name.startswith("lm_head.") else layout.PREFIXES[0] + name


def result_format(stored: MatrixFormat, bits: int) -> MatrixFormat:
    """The format `requantise` gives: what is already narrower stays."""
    if bits == 16:
        return "bf16" if stored in ("f32", "bf16", "fp8") else stored
    return "int4" if bits == 4 or stored == "int4" else "int8"


def _matrix_work(plan: Conversion, name: str, stored: StoredMatrix, bits: int) -> Work:
    fmt, disk = result_format(stored.format, bits), disk_name(name)
    shape: tuple[int, ...] = (stored.rows, data_cols(fmt, stored.cols))
    scales = scale_shape(fmt, stored.rows, stored.cols)
    entries: tuple[Entry, ...] = (Entry(disk, DTYPES[fmt], shape),)
    if scales is not None:
        # the container's arrays are flat
        entries = (Entry(disk, DTYPES[fmt], (prod(shape),)), Entry(disk + SCALE_SUFFIX[fmt], "F32", (prod(scales),)))

    def make() -> Iterator[NDArray[Any]]:
        try:
            matrix = requantise(plan.checkpoint.matrix(stored), bits)
        except ModelError as error:
            raise ModelError(f"{disk}: {error}", error.kind) from None
        yield np.ascontiguousarray(matrix.data)
        if matrix.scale is not None:
            yield np.ascontiguousarray(matrix.scale)

    return Work(entries, make)


def _small_work(plan: Conversion, name: str, need: Need, tensor: TensorInfo) -> Work:
    wide = tensor.dtype == "F32" or name.endswith(F32_ENDINGS)

    def make() -> Iterator[NDArray[Any]]:
        values = plan.checkpoint.small(name, need)
        yield values if wide else np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))

    return Work((Entry(disk_name(name), "F32" if wide else "BF16", need.shape),), make)


def _copied(plan: Conversion, tensor: TensorInfo) -> Work:
    def make() -> Iterator[NDArray[Any]]:
        for first in range(0, tensor.nbytes, COPY_BYTES):
            count = min(COPY_BYTES, tensor.nbytes - first)
            yield plan.checkpoint.read(Extent(tensor.shard, tensor.offset + first, count, np.dtype(np.uint8), (count,), tensor.name))

    return Work((Entry(tensor.name, tensor.dtype, tensor.shape),), make)


def _works(plan: Conversion, entries: Sequence[Entry]) -> list[Work]:
    """The works behind a shard's entries, in their order."""
    return [plan.works[e.name] for e in entries if e.name in plan.works]


# -- writing


def _create(path: Path) -> BinaryIO:
    return path.open("wb", buffering=0)


def _write_shard(
    path: Path, header: bytes, works: Sequence[Work], pool: ThreadPoolExecutor, ahead: int, report: Callable[[int], None], create: Callable[[Path], BinaryIO]
) -> int:
    """Write one shard; its checksum. The work of the next few matrices is done while one is written."""
    partial = path.with_name(path.name + ".partial")
    checksum, count = 0, 0
    pending: list[Future[list[NDArray[Any]]]] = []
    try:
        with create(partial) as file:

            def put(block: Any) -> None:
                nonlocal checksum, count
                view = memoryview(block).cast("B")
                checksum = zlib.crc32(view, checksum)
                while view:
                    taken = file.write(view)
                    count += taken
                    view = view[taken:]

            put(header)
            upcoming = iter(works)
            for work in works:
                while len(pending) <= ahead and (later := next(upcoming, None)) is not None:
                    pending.append(pool.submit(_made, later))
                start = count
                for block in pending.pop(0).result():
                    put(block)
                assert count - start == sum(e.nbytes for e in work.entries), work.entries[0].name
                report(count)
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        for future in pending:
            future.cancel()
        partial.unlink(missing_ok=True)
        raise
    return checksum


def _made(work: Work) -> list[NDArray[Any]]:
    return list(work.make())


def _check_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed + DISK_RESERVE > free:
        raise ModelError(f"{target}: {needed / 1e9:.2f} GB are still to be written, the disk has {free / 1e9:.2f} GB free", "io")


def _finish(plan: Conversion, target: Path, weight_map: dict[str, str]) -> None:
    """Index, text files, and config.json last; the journal goes."""
    source = plan.checkpoint.directory
    index = json.dumps({"metadata": {"total_size": plan.total}, "weight_map": weight_map}, indent=0)
    for path in sorted(source.iterdir()):
        if path.suffix in COPIED and path.name not in (INDEX, "config.json", JOURNAL) and path.is_file() and not path.name.startswith("."):
            _place(target / path.name, path.read_bytes())
    _place(target / INDEX, index.encode())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
    _place(target / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    (target / JOURNAL).unlink(missing_ok=True)


def _place(path: Path, content: bytes) -> None:
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


# -- the journal


def _fingerprint(plan: Conversion, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """What a journal must say to belong to this conversion: source files, options, the shards they make."""
    stats = [(path.name, path.stat()) for path in plan.checkpoint.files]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"version": 1, "source": files, "experts": plan.experts, "dense": plan.dense, "shards": [list(pair) for pair in zip(names, sizes, strict=True)]}


@dataclass(slots=True)
class _Journal:
    """Checksums of finished shards, in a small file that is replaced whole."""

    directory: Path
    fingerprint: dict[str, Any]
    checksums: dict[str, int]

    @classmethod
    def open(cls, directory: Path, fingerprint: dict[str, Any]) -> _Journal:
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
        foreign = sorted(p.name for p in directory.iterdir() if p.name == "config.json" or p.name == INDEX or p.suffix == ".safetensors")
        if foreign:
            raise ModelError(f"{directory}: holds a model already ({foreign[0]}), an empty directory is needed", "io")
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
        _place(self.directory / JOURNAL, json.dumps({**self.fingerprint, "checksums": self.checksums}, indent=1).encode())
