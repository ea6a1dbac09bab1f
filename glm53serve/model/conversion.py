"""What a converted model holds: its tensors in the order of the network, their formats, and what makes their bytes.

Routed experts become int4, int8 or BF16, an expert's six pieces side by side; other matrices stay BF16 or become int8 or int4; router, norms
and other small tensors keep every bit (model spec 9). Vision tensors are copied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import layout
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.config import SPARSE
from glm53serve.model.errors import ModelError
from glm53serve.model.layout import Need
from glm53serve.model.quant import requantise
from glm53serve.model.safetensors_file import TensorInfo
from glm53serve.model.shards import Entry, Unit
from glm53serve.model.stored import SCALE_SUFFIX, Extent, StoredMatrix, data_cols, scale_shape
from glm53serve.model.weights import MatrixFormat

BITS = {"bf16": 16, "int8": 8, "int4": 4}
DTYPES: dict[MatrixFormat, str] = {"f32": "F32", "bf16": "BF16", "int8": "I8", "int4": "U8"}
ALWAYS_BF16 = ("embed_tokens.weight", ".b_proj.weight")
"""Rows that are looked up and a tiny matrix whose rounding changes decays: never narrowed."""
COPY_BYTES = 64 << 20


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


def result_format(stored: MatrixFormat, bits: int) -> MatrixFormat:
    """The format `requantise` gives: what is already narrower stays."""
    if bits == 16:
        return "bf16" if stored in ("f32", "bf16", "fp8") else stored
    return "int4" if bits == 4 or stored == "int4" else "int8"


def _matrix_work(plan: Conversion, name: str, stored: StoredMatrix, bits: int) -> Work:
    fmt, disk = result_format(stored.format, bits), layout.disk_name(name)
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
    wide = tensor.dtype == "F32" or name.endswith(layout.CONTAINER_F32)

    def make() -> Iterator[NDArray[Any]]:
        values = plan.checkpoint.small(name, need)
        yield values if wide else np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))

    return Work((Entry(layout.disk_name(name), "F32" if wide else "BF16", need.shape),), make)


def _copied(plan: Conversion, tensor: TensorInfo) -> Work:
    def make() -> Iterator[NDArray[Any]]:
        for first in range(0, tensor.nbytes, COPY_BYTES):
            count = min(COPY_BYTES, tensor.nbytes - first)
            yield plan.checkpoint.read(Extent(tensor.shard, tensor.offset + first, count, np.dtype(np.uint8), (count,), tensor.name))

    return Work((Entry(tensor.name, tensor.dtype, tensor.shape),), make)


def works_of(plan: Conversion, entries: Sequence[Entry]) -> list[Work]:
    """The works behind a shard's entries, in their order."""
    return [plan.works[e.name] for e in entries if e.name in plan.works]
