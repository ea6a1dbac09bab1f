"""The weights of a checkpoint as the backends receive them (model spec 2, 9).

Small tensors (norms, biases, convolution taps, mHC, router) arrive as float32 arrays. Matrices arrive as `Matrix`, in the format
they are stored in; a backend keeps, repacks or requantises them as it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]
MatrixFormat = Literal["f32", "bf16", "fp8", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix W[rows, cols]; a product is `x @ W.T`.

    format  data                                                    scale
    f32     float32 [rows, cols]                                    None
    bf16    uint16  [rows, cols], the upper half of a float32       None
    fp8     uint8   [rows, cols], e4m3                              float32 [ceil(rows/128), ceil(cols/128)], multiplied
    int8    int8    [rows, cols]                                    float32 [rows]
    int4    uint8   [rows, ceil(cols/2)], column c in byte c//2,    float32 [rows, ceil(cols/64)]
            low nibble when c is even, value nibble - 8

    `data` and `scale` may be views of a memory map (read-only, possibly unaligned).
    """

    format: MatrixFormat
    rows: int
    cols: int
    data: NDArray[Any]
    scale: F32Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales as stored."""
        return int(self.data.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """mHC site parameters (model spec 3): fn [(2+n)n, nH], base [(2+n)n], scale [3], float32."""

    fn: F32Array
    base: F32Array
    scale: F32Array


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """A KDA layer's attention half (model spec 4). Convolution taps are float32 [P, K], tap K-1 is the current token."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    q_conv: F32Array
    k_conv: F32Array
    v_conv: F32Array
    f_a: Matrix
    f_b: Matrix
    dt_bias: F32Array
    a_log: F32Array
    b_proj: Matrix
    g_a: Matrix
    g_b: Matrix
    o_norm: F32Array
    o_proj: Matrix


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The k-pool indexer of a full DSA layer (model spec 5.2, 5.3). ape is float32 [kpool, index_head_dim]."""

    wq_b: Matrix
    wk: Matrix
    k_norm_weight: F32Array
    k_norm_bias: F32Array
    weights_proj: Matrix
    ape: F32Array
    gate: Matrix


@dataclass(frozen=True, slots=True)
class DsaWeights:
    """A DSA layer's attention half (model spec 5). kv_b is [heads x (qk + v), kv_lora_rank], keys first within a head."""

    q_a: Matrix
    q_a_norm: F32Array
    q_b: Matrix
    kv_a: Matrix
    kv_a_norm: F32Array
    kv_b: Matrix
    o_proj: Matrix
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """A clamped SwiGLU feed-forward: gate and up [width, H], down [H, width] (model spec 6)."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router (float32 [E, H]), selection bias (float32 [E]) and the shared expert; routed experts come from an ExpertSource."""

    router: F32Array
    bias: F32Array
    shared: FfnWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything of one layer but its routed experts."""

    index: int
    input_norm: F32Array
    post_norm: F32Array
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attention: KdaWeights | DsaWeights
    ffn: FfnWeights | MoeWeights


class ExpertSource(Protocol):
    """Where routed experts come from: the checkpoint's memory map, or a budgeted store over disk reads."""

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """Weights of one routed expert, as stored. Raises `glm53serve.model.errors.CheckpointError` when it cannot be read."""
        ...
