"""The two ends of the network on the CPU (model spec 0, 7.1)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import Linear
from glm53serve.cpu.threads import physical_cores
from glm53serve.model.config import ModelConfig
from glm53serve.model.quant import dequantise
from glm53serve.model.reference_math import final_hidden
from glm53serve.model.weights import Matrix

F32 = NDArray[np.float32]


class _Output(Protocol):
    def __call__(self, streams: F32) -> F32: ...


class CpuHead:
    """Embedding rows and logits.

    The embedding is used as stored, row by row; `lm_head` takes the format that `bits` names (4, 8, 16 or 32). `threads`: 0 = all physical
    cores.
    """

    def __init__(self, config: ModelConfig, embedding: Matrix, final_norm: F32, lm_head: Matrix, bits: int, threads: int = 0) -> None:
        self.config = config
        self.embedding = embedding
        self._output: _Output
        try:
            from glm53serve.cpu.output import CompiledOutput
        except ImportError:
            self._output = PlainOutput(config, final_norm, lm_head, bits)
        else:
            self._output = CompiledOutput(config, final_norm, lm_head, bits, threads or physical_cores())

    def embed(self, ids: NDArray[np.int64]) -> F32:
        """Streams of token ids [rows]: float32 [rows, hc_mult, H], every stream the embedding row. Raises ValueError outside the vocabulary."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise ValueError(f"token ids {ids.min()}..{ids.max()}: the vocabulary has 0..{self.config.vocab_size - 1}")
        e = self.embedding
        if e.format == "fp8":
            rows = dequantise(e)[ids]
        else:
            rows = dequantise(Matrix(e.format, len(ids), e.cols, e.data[ids], None if e.scale is None else e.scale[ids]))
        return np.repeat(rows[:, None, :], self.config.hc_mult, axis=1)

    def logits(self, streams: F32) -> F32:
        """Streams [rows, hc_mult, H] -> logits float32 [rows, V]."""
        return self._output(streams)


class PlainOutput:
    """Final norm and head in NumPy."""

    def __init__(self, config: ModelConfig, final_norm: F32, lm_head: Matrix, bits: int) -> None:
        self.config = config
        self.final_norm = final_norm
        self.lm_head = Linear([lm_head], bits)

    def __call__(self, streams: F32) -> F32:
        """Streams [rows, hc_mult, H] -> logits [rows, V]."""
        return self.lm_head(final_hidden(streams, self.final_norm, self.config.rms_norm_eps))
