"""What the halves of compiled layers have in common: hyper-connections, forms of activations, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.kernels import rows
from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.memory import ChunkMemory, GroupMemory, Slots, p64
from glm53serve.cpu.packing import Packed, pad_vector
from glm53serve.cpu.program import Cell, Form, Program
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import HyperConnection, Matrix

F32 = NDArray[np.float32]


def f32_matrix(values: F32) -> Matrix:
    """float32 [rows, cols] as a Matrix."""
    return Matrix("f32", values.shape[0], values.shape[1], np.ascontiguousarray(values, np.float32))


@dataclass(slots=True)
class Site:
    """An mHC site and the norm after it."""

    fn: Packed
    base: F32
    scale: F32
    norm: F32

    @classmethod
    def of(cls, config: ModelConfig, w: HyperConnection, norm: F32) -> Site:
        """Pad the stored site."""
        n, h = config.hc_mult, config.hidden_size
        fn = pk.pack(pk.pad_head_columns(f32_matrix(w.fn.reshape(-1, n * h)), h), False)
        return cls(fn, np.ascontiguousarray(w.base), np.ascontiguousarray(w.scale), pad_vector(norm))


class Builder:
    """Adds the operations of sub-layers to programs."""

    def __init__(self, config: ModelConfig, group: GroupMemory, chunk: ChunkMemory, slots: Slots, threads: int) -> None:
        self.config = config
        self.group = group
        self.chunk = chunk
        self.slots = slots
        self.threads = threads
        self.zero = group.zero
        self.hidden = p64(config.hidden_size)
        self._streams = Form(0, config.hc_mult * self.hidden, set(), chunk.streams.reshape(len(chunk.streams), -1))

    def program(self) -> Program:
        """An empty program."""
        return Program(self.threads)

    def collapse(self, p: Program, site: Site, form: Form, out_at: Cell) -> None:
        """mHC before a sub-layer: its normalised input goes to form."""
        c, g, chunk = self.config, self.group, self.chunk
        y = g.buffer("hc", p64(site.fn.rows))
        p.matmul([site.fn], self._streams, g.count, y, x_at=g.first)
        arguments = Arguments(
            rows.COLLAPSE_FIELDS,
            count=g.count.at,
            at=g.first.at,
            out_at=out_at.at,
            streams=address(chunk.streams),
            stream_row=chunk.streams.strides[0],
            stream=chunk.streams.strides[1],
            n=c.hc_mult,
            width=c.hidden_size,
            y=address(y),
            y_stride=y.strides[0],
            base=address(site.base),
            scale=address(site.scale),
            norm_eps=float(c.rms_norm_eps),
            hc_eps=float(c.hc_eps),
            iterations=c.hc_sinkhorn_iters,
            norm=address(site.norm),
            form=form.at,
            mixes=address(chunk.mixes),
            mix_stride=chunk.mixes.strides[0],
        )
        p.by_row(rows.collapse.address, arguments)

    def expand(self, p: Program, y: F32, y_at: Cell, y2: F32 | None = None) -> None:
        """mHC after a sub-layer."""
        chunk = self.chunk
        arguments = Arguments(
            rows.EXPAND_FIELDS,
            count=self.group.count.at,
            at=self.group.first.at,
            y_at=y_at.at,
            streams=address(chunk.streams),
            stream_row=chunk.streams.strides[0],
            stream=chunk.streams.strides[1],
            n=self.config.hc_mult,
            y=address(y),
            y_stride=y.strides[0],
            y2=0 if y2 is None else address(y2),
            y2_stride=0 if y2 is None else y2.strides[0],
            mixes=address(chunk.mixes),
            mix_stride=chunk.mixes.strides[0],
        )
        p.by_row(rows.expand.address, arguments)

    def shape(self, p: Program, form: Form, count: Cell) -> None:
        """Forms of a matrix that a product wrote, where any are wanted."""
        if form.permuted is not None or form.bytes is not None:
            p.by_row(rows.shape.address, Arguments(rows.SHAPE_FIELDS, count=count.at, form=form.at))

    def swiglu(self, p: Program, both: F32, width: int, form: Form, count: Cell, at: Cell, per_row: int = 1) -> None:
        """Gate in the first `width` columns of both, up in the next."""
        arguments = Arguments(
            rows.SWIGLU_FIELDS,
            count=count.at,
            at=at.at,
            gate=address(both),
            up=address(both) + 4 * width,
            stride=both.strides[0],
            limit=float(self.config.swiglu_limit),
            form=form.at,
        )
        p.by_row(rows.swiglu.address, arguments, per_row * max(1, width // 512))


def kinds_of(parts: list[Packed]) -> set[int]:
    """Kinds of product among packed matrices."""
    return {part.kind for part in parts}
