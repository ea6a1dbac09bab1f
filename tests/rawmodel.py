"""Model directories as plain Python values, so that a test can rename, reshape, cut or forge any part of one.

    raw = RawModel.read(directory)                 # config and tensors: name -> Raw(dtype, shape, bytes)
    raw.tensors["lm_head.weight"].shape = (3,)     # whatever
    raw.write(other_directory)
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LANGUAGE = "model.language_model."


@dataclass
class Raw:
    """One tensor: dtype word of the format, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def f32(self) -> np.ndarray:
        """Values of an F32 or BF16 tensor."""
        if self.dtype == "F32":
            return np.frombuffer(self.data, np.float32).reshape(self.shape)
        assert self.dtype == "BF16"
        return (np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)


def raw_array(dtype: str, array: np.ndarray) -> Raw:
    """A tensor from an array that already has the stored bytes."""
    return Raw(dtype, tuple(array.shape), np.ascontiguousarray(array).tobytes())


@dataclass
class RawModel:
    """config.json and every tensor of a model directory."""

    config: dict[str, Any]
    tensors: dict[str, Raw]

    @classmethod
    def read(cls, directory: Path) -> RawModel:
        """Read a small model directory completely."""
        tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            blob = path.read_bytes()
            start = 8 + int.from_bytes(blob[:8], "little")
            for name, entry in json.loads(blob[8:start]).items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    tensors[name] = Raw(entry["dtype"], tuple(entry["shape"]), blob[start + first : start + last])
        return cls(json.loads((directory / "config.json").read_text()), tensors)

    def copy(self) -> RawModel:
        """An independent copy."""
        return deepcopy(self)

    @property
    def text(self) -> dict[str, Any]:
        """The object the text keys are in."""
        return self.config.get("text_config", self.config)

    def rename(self, old: str, new: str) -> None:
        """Replace a part of every tensor's name."""
        self.tensors = {name.replace(old, new): raw for name, raw in self.tensors.items()}

    def write(self, directory: Path, shards: int = 1) -> Path:
        """Write config and weights; with more than one shard, an index too."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        names = list(self.tensors)
        if shards == 1:
            (directory / "model.safetensors").write_bytes(blob(self.tensors))
            return directory
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = names[i::shards]
            (directory / file).write_bytes(blob({name: self.tensors[name] for name in part}))
            weight_map.update(dict.fromkeys(part, file))
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory


def blob(tensors: dict[str, Raw]) -> bytes:
    """A safetensors file."""
    header, offset = {}, 0
    for name, raw in tensors.items():
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [offset, offset + len(raw.data)]}
        offset += len(raw.data)
    return framed(json.dumps(header).encode()) + b"".join(raw.data for raw in tensors.values())


def framed(header: bytes) -> bytes:
    """A header with its length in front."""
    return len(header).to_bytes(8, "little") + header
