"""From one checkpoint to another with smaller experts, shard by shard: bounded memory, resumable, nothing half-written under a final name.

A shard is written under a name that ends in `.partial`, forced to the disk, renamed, and entered with its checksum in a journal; config.json
comes last of all, so a directory with one is whole. A second run with the same source and options checks the finished shards against the
journal and goes on from there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from glm53serve.model.conversion import Conversion, Work, plan_conversion, works_of
from glm53serve.model.errors import ModelError
from glm53serve.model.journal import JOURNAL, Journal, fingerprint_of, sole_writer, source_files, write_whole
from glm53serve.model.safetensors_file import INDEX
from glm53serve.model.shards import DISK_RESERVE, SHARD_BYTES, header_bytes, plan_shards, shard_names

COPIED = (".json", ".jinja", ".txt", ".model", ".md")
Progress = Callable[[int, int], None]
"""(bytes written or found finished, bytes in all)"""
Create = Callable[[Path], BinaryIO]
"""Opens a new file for writing."""


def convert(
    source: Path,
    target: Path,
    experts: str = "int4",
    dense: str = "bf16",
    *,
    threads: int = 2,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
    opened: Create | None = None,
) -> Conversion:
    """Write a converted model. Raises ModelError (one line): a bad source, an occupied, foreign or busy target, a full disk."""
    plan = plan_conversion(source, experts, dense)
    with sole_writer(target):
        _convert(plan, target, threads, SHARD_BYTES if shard_bytes is None else shard_bytes, progress, opened or _create)
    return plan


def _convert(plan: Conversion, target: Path, threads: int, shard_bytes: int, progress: Progress | None, create: Create) -> None:
    shards = plan_shards(plan.units, shard_bytes)
    names = shard_names(len(shards))
    headers = [header_bytes(entries) for entries in shards]
    sizes = [len(h) + sum(e.nbytes for e in entries) for h, entries in zip(headers, shards, strict=True)]
    fingerprint, texts = fingerprint_of(plan, names, sizes), _texts(plan.checkpoint.directory)
    try:
        journal = Journal.open(target, fingerprint, [path.name for path in texts])
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

                    journal.add(name, _write_shard(target / name, header, works_of(plan, entries), pool, threads, report, create))
                written += size
                if progress is not None:
                    progress(written, total)
        _check_source(plan, target, fingerprint)
        _finish(plan, target, texts, {e.name: name for name, entries in zip(names, shards, strict=True) for e in entries})
    except OSError as error:
        detail = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise ModelError(f"{target}: cannot be written ({detail}); finished shards are kept, the same command goes on from them", "io") from None


def _create(path: Path) -> BinaryIO:
    return path.open("wb", buffering=0)


def _write_shard(
    path: Path, header: bytes, works: Sequence[Work], pool: ThreadPoolExecutor, ahead: int, report: Callable[[int], None], create: Create
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


def _check_source(plan: Conversion, target: Path, fingerprint: dict[str, Any]) -> None:
    """Files that were replaced meanwhile may have given a mixture of two models."""
    try:
        same = source_files(plan) == fingerprint["source"]
    except OSError:
        same = False
    if not same:
        raise ModelError(f"{plan.checkpoint.directory}: its files changed during the conversion; {target} has to be emptied and made anew", "io")


def _check_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed + DISK_RESERVE > free:
        raise ModelError(f"{target}: {needed / 1e9:.2f} GB are still to be written, the disk has {free / 1e9:.2f} GB free", "io")


def _texts(source: Path) -> list[Path]:
    """The text files of a model that its conversions have too."""
    listed = sorted(path for path in source.iterdir() if path.suffix in COPIED and path.is_file())
    return [path for path in listed if path.name not in (INDEX, "config.json", JOURNAL) and not path.name.startswith(".")]


def _finish(plan: Conversion, target: Path, texts: Sequence[Path], weight_map: dict[str, str]) -> None:
    """Index, text files, and config.json last; the journal goes."""
    source = plan.checkpoint.directory
    index = json.dumps({"metadata": {"total_size": plan.total}, "weight_map": weight_map}, indent=0)
    for path in texts:
        write_whole(target / path.name, path.read_bytes())
    write_whole(target / INDEX, index.encode())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
    write_whole(target / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    (target / JOURNAL).unlink(missing_ok=True)
