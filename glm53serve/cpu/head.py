"""The two ends of the network on the CPU (model spec 0, 7.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import Linear
from glm53serve.model.config import ModelConfig
from glm53serve.model.quant import dequantise
from glm53serve.model.reference_math import final_hidden
from glm53serve.model.weights import Matrix

F32 = NDArray[np.float32]


class CpuHead:
    """Embedding rows and logits.

    The embedding is used as stored, row by row; `lm_head` takes the format that `bits` names (4, 8, 16 or 32).
    """

    def __init__(self, config: ModelConfig, embedding: Matrix, final_norm: F32, lm_head: Matrix, bits: int) -> None:
        self.config = config
        self.embedding = embedding
        self.final_norm = final_norm
        self.lm_head = Linear([lm_head], bits)

    def embed(self, ids: NDArray[np.int64]) -> F32:
        """Streams of token ids [rows]: float32 [rows, hc_mult, H], every stream the embedding row. Raises ValueError outside the vocabulary."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise ValueError(f"token ids {ids.min()}..{ids.max()}: the vocabulary has 0..{self.config.vocab_size - 1}")
        e = self.embedding
        scale = None if e.scale is None or e.format == "fp8" else e.scale[ids]
        if e.format == "fp8":
            rows = dequantise(e)[ids]
        else:
            rows = dequantise(Matrix(e.format, len(ids), e.cols, e.data[ids], scale))
        return np.repeat(rows[:, None, :], self.config.hc_mult, axis=1)

    def logits(self, streams: F32) -> F32:
        """Streams [rows, hc_mult, H] -> logits float32 [rows, V]."""
        return self.lm_head(final_hidden(streams, self.final_norm, self.config.rms_norm_eps))
