"""Runs of bytes of a checkpoint's files as arrays: read into memory of their own, or views of the mapped file."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.errors import CheckpointError
from glm53serve.model.stored import Extent

READ_BYTES = 1 << 30
"""Most bytes of one read; the system's own limit is a little under 2 GiB."""


class ExtentReader:
    """Arrays from `files`, by shard number. mapped: `view` gives read-only views, whose pages are read when touched."""

    def __init__(self, files: Sequence[Path], mapped: bool) -> None:
        self.files = files
        self.mapped = mapped
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def read(self, extent: Extent) -> NDArray[Any]:
        """An extent in memory of its own. Raises CheckpointError."""
        return _read(self.files[extent.shard], extent)

    def view(self, extent: Extent) -> NDArray[Any]:
        """An extent of the mapped file, possibly unaligned; without maps the same as `read`. Raises CheckpointError."""
        if not self.mapped:
            return self.read(extent)
        data = self._maps.get(extent.shard)
        if data is None:
            data = self._maps[extent.shard] = _map(self.files[extent.shard])
        if extent.offset + extent.nbytes > data.size:
            raise CheckpointError(f"{self.files[extent.shard]}: {data.size} bytes now, it had more when it was opened", "io")
        return data[extent.offset : extent.offset + extent.nbytes].view(extent.dtype).reshape(extent.shape)

    def close(self) -> None:
        """Forget the memory maps; each goes when the last view of it does."""
        self._maps.clear()


def _read(path: Path, extent: Extent) -> NDArray[Any]:
    data = np.empty(extent.nbytes, np.uint8)
    view, position = data.data, extent.offset
    try:
        with path.open("rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view[:READ_BYTES]], position)
                if count == 0:
                    size = os.fstat(file.fileno()).st_size
                    raise CheckpointError(f"{path}: {extent.tensor}: the file has {size} bytes now, it had more when it was opened", "io")
                view, position = view[count:], position + count
    except OSError as reason:
        raise CheckpointError(f"{path}: {extent.tensor}: cannot be read ({reason.strerror})", "io") from None
    return data.view(extent.dtype).reshape(extent.shape)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as reason:
        full = isinstance(reason, OSError) and reason.errno == errno.ENOMEM
        raise CheckpointError(f"{path}: cannot be mapped ({reason})", "nomem" if full else "io") from None
