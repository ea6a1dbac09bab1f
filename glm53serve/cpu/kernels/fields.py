"""Arguments of kernels: named int64 (or float32) fields in one flat array, addressed by offset from native code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def offsets(names: Sequence[str]) -> list[int]:
    """Byte offset of each field, in order."""
    return [8 * i for i in range(len(names))]


class Arguments:
    """One kernel's arguments. Whole numbers and addresses are stored as int64, floats as float32 in the field's first four bytes."""

    def __init__(self, names: Sequence[str], **values: int | float) -> None:
        missing, unknown = set(names) - set(values), set(values) - set(names)
        if missing or unknown:
            raise TypeError(f"fields missing {sorted(missing)}, unknown {sorted(unknown)}")
        self.array: NDArray[np.int64] = np.array([_word(values[name]) for name in names], np.int64)
        self.address = address(self.array)


def _word(value: int | float) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<i", struct.pack("<f", value))[0]) & 0xFFFFFFFF
    return int(value)


def address(array: NDArray[np.generic]) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])
