"""Final norm and head by compiled kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.kernels import rows
from glm53serve.cpu.kernels.fields import Arguments, address
from glm53serve.cpu.kernels.team import shared_team
from glm53serve.cpu.packing import GROUP, pack_dense, pad_vector
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.cpu.rows import GROUP_ROWS
from glm53serve.cpu.state import padded
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import Matrix

F32 = NDArray[np.float32]


class CompiledOutput:
    """Mean of the streams, final norm, product with the head, a row group at a time."""

    def __init__(self, config: ModelConfig, final_norm: F32, lm_head: Matrix, bits: int, threads: int) -> None:
        self.config = config
        self.team = shared_team(threads)
        self.norm = pad_vector(final_norm)
        self.parts = pack_dense([(lm_head, lm_head.rows)], bits)
        self.width = padded(config.vocab_size, GROUP)
        self.count = Cell()
        self._room = 0

    def _build(self, room: int) -> None:
        c = self.config
        hidden = padded(c.hidden_size, GROUP)
        streams, y = zeros(room, c.hc_mult, hidden), zeros(room, self.width)
        form = Form(room, hidden, {part.kind for part in self.parts})
        program = Program(self.team.threads)
        arguments = Arguments(
            rows.FINAL_FIELDS,
            count=self.count.at,
            streams=address(streams),
            stream_row=streams.strides[0],
            stream=streams.strides[1],
            n=c.hc_mult,
            width=c.hidden_size,
            eps=float(c.rms_norm_eps),
            norm=address(self.norm),
            form=form.at,
        )
        program.by_row(rows.final.address, arguments)
        program.matmul(self.parts, form, self.count, y)
        # all or nothing: memory may run out before the last of them
        self.streams, self.y, self.program, self._room = streams, y, program, room

    def __call__(self, streams: F32) -> F32:
        """Streams [rows, hc_mult, H] -> logits float32 [rows, V]."""
        out = np.empty((len(streams), self.config.vocab_size), np.float32)
        for first in range(0, len(streams), GROUP_ROWS):
            some = streams[first : first + GROUP_ROWS]
            if len(some) > self._room:
                self._build(min(GROUP_ROWS, max(8, 2 * len(some))))
            self.streams[: len(some), :, : self.config.hidden_size] = some
            self.count.set(len(some))
            self.program.run(self.team, len(some))
            out[first : first + len(some)] = self.y[: len(some), : self.config.vocab_size]
        return out
