"""The attention half of a DSA layer on the CPU: latent attention over the pools its indexer picks (model spec 5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import Linear
from glm53serve.cpu.rows import Piece
from glm53serve.cpu.state import SlotState
from glm53serve.model import reference_math as m
from glm53serve.model.config import FULL, ModelConfig
from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.weights import DsaWeights, Matrix

F32 = NDArray[np.float32]
Pools = NDArray[np.int64] | None
"""Pools a row attends, ascending; None = all complete ones."""


def widened(kv_b: Matrix, bits: int) -> F32:
    """kv_b as float32, rounded to BF16 when the dense matrices have fewer than 32 bits (half of it is used transposed, across any groups)."""
    values = dequantise(kv_b)
    return dequantise(requantise(Matrix("f32", kv_b.rows, kv_b.cols, values), max(bits, 16)))


class DsaLayer:
    """Weights of one DSA layer in the form the products use, and the way of rows through it."""

    def __init__(self, config: ModelConfig, index: int, w: DsaWeights, bits: int) -> None:
        self.config = config
        self.index = index
        self.full = config.indexer_kinds[index] == FULL
        i = w.indexer
        self.project = Linear([w.q_a, w.kv_a] + ([i.wk, i.gate] if i else []), bits)
        self.weigh = Linear([i.weights_proj], max(bits, 16)) if i else None
        self.q_a_norm = w.q_a_norm
        self.kv_a_norm = w.kv_a_norm
        self.from_query = Linear([w.q_b] + ([i.wq_b] if i else []), bits)
        kv_b = widened(w.kv_b, bits).reshape(config.num_heads, config.qk_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.kv_b = kv_b
        self.out = Linear([w.o_proj], bits)
        self.indexer = i

    def __call__(self, x: F32, pieces: tuple[Piece, ...], slots: dict[int, SlotState], chosen: list[Pools]) -> tuple[F32, list[Pools]]:
        """Normalised rows x [rows, H] -> y [rows, H] and the pools of each row.

        `chosen` are the pools of the DSA layer before, used by a shared indexer layer. The slots' rows grow.
        """
        c = self.config
        q_low, lat, *index_raw = self.project.split(x)
        qr = m.rms(q_low, self.q_a_norm, c.rms_norm_eps)
        latents = m.rms(lat, self.kv_a_norm, c.rms_norm_eps)
        from_query = self.from_query.split(qr)
        q = from_query[0].reshape(len(x), c.num_heads, c.qk_head_dim)
        for piece in pieces:
            rows = slice(piece.first, piece.first + piece.count)
            store = slots[piece.slot].dsa[self.index]
            store.reserve(piece.start + piece.count, piece.start)
            store.latents[piece.start : piece.start + piece.count] = latents[rows]
            if self.full:
                self._store_keys(index_raw[0][rows], index_raw[1][rows], piece, slots[piece.slot])
        if self.full:
            chosen = self._select(x, from_query[1], pieces, slots)
        o = np.empty((len(x), c.num_heads, c.v_head_dim), np.float32)
        for piece in pieces:
            rows = slice(piece.first, piece.first + piece.count)
            tokens = [self._tokens(chosen[piece.first + t], piece.start + t) for t in range(piece.count)]
            o[rows] = m.latent_attention(q[rows], slots[piece.slot].dsa[self.index].latents, self.kv_b, tokens)
        return self.out(o.reshape(len(x), -1)), chosen

    def _store_keys(self, wk: F32, e: F32, piece: Piece, slot: SlotState) -> None:
        assert self.indexer is not None
        kp = self.config.index_kpool
        raw = slot.raw[self.index]
        held = piece.start % kp
        k = np.concatenate([raw[0, :held], m.index_key(wk, self.indexer.k_norm_weight, self.indexer.k_norm_bias)])
        e = np.concatenate([raw[1, :held], e])
        done = len(k) // kp
        first = piece.start // kp
        slot.dsa[self.index].pool_keys[first : first + done] = m.pool_keys(k[: done * kp], e[: done * kp], self.indexer.ape)
        left = len(k) - done * kp
        raw[0, :left], raw[1, :left] = k[done * kp :], e[done * kp :]

    def _select(self, x: F32, from_query: F32, pieces: tuple[Piece, ...], slots: dict[int, SlotState]) -> list[Pools]:
        """Pools of each row; scores are not computed where every complete pool fits the budget."""
        assert self.weigh is not None
        c, kp = self.config, self.config.index_kpool
        budget = c.index_topk // kp
        chosen: list[Pools] = [None] * len(x)
        weights: F32 | None = None
        for piece in pieces:
            skip = min(piece.count, max(0, (budget + 1) * kp - 1 - piece.start))
            if skip == piece.count:
                continue
            if weights is None:
                weights = self.weigh(x)
            keys = slots[piece.slot].dsa[self.index].pool_keys
            for t in range(skip, piece.count):
                row, position = piece.first + t, piece.start + t
                qi = from_query[row].reshape(1, c.index_n_heads, c.index_head_dim)
                scores = m.index_scores(qi, weights[row : row + 1], keys[: (position + 1) // kp])
                chosen[row] = m.select_pools(scores[0], position, c.index_topk, kp)
        return chosen

    def _tokens(self, pools: Pools, position: int) -> NDArray[np.int64]:
        if pools is None:
            return np.arange(position + 1)
        return m.selected_tokens(pools, position, self.config.index_kpool)
