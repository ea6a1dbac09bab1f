"""The attention half of a KDA layer on the CPU (model spec 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import Linear
from glm53serve.cpu.rows import Piece
from glm53serve.cpu.state import SlotState
from glm53serve.model import reference_math as m
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import KdaWeights

F32 = NDArray[np.float32]


class KdaLayer:
    """Weights of one KDA layer in the form the products use, and the way of rows through it."""

    def __init__(self, config: ModelConfig, index: int, w: KdaWeights, bits: int) -> None:
        self.config = config
        self.index = index
        self.project = Linear([w.q_proj, w.k_proj, w.v_proj, w.f_a, w.g_a], bits)
        self.beta = Linear([w.b_proj], 32)
        self.f_b = Linear([w.f_b], bits)
        self.g_b = Linear([w.g_b], bits)
        self.out = Linear([w.o_proj], bits)
        self.taps = np.concatenate([w.q_conv, w.k_conv, w.v_conv])
        self.dt_bias = w.dt_bias
        self.a_log = w.a_log.ravel()
        self.o_norm = w.o_norm

    def __call__(self, x: F32, pieces: tuple[Piece, ...], slots: dict[int, SlotState]) -> F32:
        """Normalised rows x [rows, H] -> y [rows, H]; the slots' states advance."""
        c = self.config
        p, rank = c.kda_width, c.kda_head_dim
        projected = self.project(x)
        raw, f_low, g_low = projected[:, : 3 * p], projected[:, 3 * p : 3 * p + rank], projected[:, 3 * p + rank :]
        beta = m.sigmoid(self.beta(x))
        g = m.kda_log_decay(self.f_b(f_low), self.dt_bias, self.a_log, c.gate_lower_bound)
        gate = self.g_b(g_low)
        o = np.empty((len(x), c.kda_heads, c.kda_head_dim), np.float32)
        for piece in pieces:
            rows = slice(piece.first, piece.first + piece.count)
            slot = slots[piece.slot]
            state, window = slot.kda[self.index], slot.windows[self.index]
            conv_q, conv_k, conv_v = np.split(m.short_conv(raw[rows], window, self.taps), 3, axis=1)
            q, k, v = m.kda_qkv(conv_q, conv_k, conv_v, c.kda_heads)
            o[rows], after = m.kda_recurrent(q, k, v, g[rows], beta[rows], state)
            state[:] = after
            window[:] = m.next_window(raw[rows], window)
        return self.out(m.kda_gated_norm(o, gate, self.o_norm, c.rms_norm_eps).astype(np.float32, copy=False))
