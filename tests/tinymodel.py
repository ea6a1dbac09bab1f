"""Small random models in memory, every feature selectable, for tests that compare kernels and backends with the reference.

    model = tiny_model(seed=1, index_kpool=5, index_topk=20, weight_format="int4")
    logits = model.reference(np.float64).forward(ids, state)

All parameters are moved well away from neutral values, so a wrong formula shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from glm53serve.model import quant
from glm53serve.model.config import DENSE, DSA, FULL, KDA, SHARED, SPARSE, ModelConfig
from glm53serve.model.reference import ReferenceModel
from glm53serve.model.weights import (
    DsaWeights,
    F32Array,
    FfnWeights,
    HyperConnection,
    IndexerWeights,
    KdaWeights,
    LayerWeights,
    Matrix,
    MatrixFormat,
    MoeWeights,
)

TINY = ModelConfig(
    hidden_size=48,
    num_layers=6,
    vocab_size=96,
    intermediate_size=64,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    swiglu_limit=2.0,
    rms_norm_eps=1e-5,
    num_heads=4,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_head_dim=16,
    v_head_dim=12,
    index_topk=16,
    index_kpool=4,
    index_n_heads=6,
    index_head_dim=16,
    kda_heads=3,
    kda_head_dim=16,
    conv_width=4,
    gate_lower_bound=-5.0,
    hc_mult=4,
    hc_eps=1e-6,
    hc_sinkhorn_iters=20,
    layer_kinds=(KDA, DSA, KDA, KDA, DSA, DSA),
    mlp_kinds=(DENSE,) + (SPARSE,) * 5,
    indexer_kinds=(FULL,) * 6,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
    num_nextn_predict_layers=0,
    eos_token_ids=(95,),
    has_vision=False,
)

SHARED_INDEXER: dict[str, Any] = {"indexer_kinds": (FULL,) * 5 + (SHARED,)}
"""Overrides that make the last layer read the selection of the one before it."""
FEATURES: dict[str, dict[str, Any]] = {
    "base": {},
    "pool 1, 2 streams, 5 Sinkhorn rounds": {"index_kpool": 1, "index_topk": 12, "hc_mult": 2, "hc_sinkhorn_iters": 5},
    "pool 5, 1 stream": {"index_kpool": 5, "index_topk": 20, "hc_mult": 1},
    "pool 2, groups, unbounded gate, raw weights": {
        "index_kpool": 2,
        "index_topk": 10,
        "n_group": 4,
        "topk_group": 2,
        "gate_lower_bound": None,
        "norm_topk_prob": False,
    },
    "shared indexer": SHARED_INDEXER,
    "conv 3, 3 streams, bound -3, no shared expert": {"conv_width": 3, "hc_mult": 3, "gate_lower_bound": -3.0, "n_shared_experts": 0},
}
"""Named overrides of TINY that together switch every feature of the text network."""


@dataclass(frozen=True)
class TinyModel:
    """A whole random model: weights as backends receive them, and an ExpertSource."""

    config: ModelConfig
    layers: tuple[LayerWeights, ...]
    experts: dict[tuple[int, int], FfnWeights]
    embedding: Matrix
    final_norm: F32Array
    lm_head: Matrix

    def layer(self, index: int) -> LayerWeights:
        """Weights of a layer."""
        return self.layers[index]

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """Weights of a routed expert."""
        return self.experts[layer, expert]

    def reference(self, dtype: DTypeLike = np.float64) -> ReferenceModel:
        """The reference over these weights."""
        return ReferenceModel(self.config, self.layer, self, self.embedding, self.final_norm, self.lm_head, dtype)


def random_ids(config: ModelConfig, count: int, seed: int = 0) -> NDArray[np.int64]:
    """`count` uniformly drawn token ids."""
    return np.random.default_rng([seed, 77]).integers(0, config.vocab_size, count)


def tiny_model(seed: int = 0, weight_format: MatrixFormat = "f32", expert_format: MatrixFormat | None = None, gain: float = 1.0, **overrides: Any) -> TinyModel:
    """A random model of TINY's shape with `overrides`.

    weight_format is that of every Matrix but the embedding and the head (f32); expert_format, when given, that of the routed experts.
    `gain` scales all matrices (above 1: a rougher network with larger logits).
    """
    maker = _Maker(replace(TINY, **overrides), np.random.default_rng(seed), weight_format, expert_format or weight_format, gain)
    return maker.model()


def as_matrix(values: NDArray[Any], weight_format: MatrixFormat = "f32") -> Matrix:
    """Values [rows, cols] stored in a format, rounded to it."""
    rows, cols = values.shape
    values = np.ascontiguousarray(values, dtype=np.float32)
    if weight_format == "f32":
        return Matrix("f32", rows, cols, values)
    if weight_format == "bf16":
        return Matrix("bf16", rows, cols, quant.f32_to_bf16(values))
    quantise: dict[str, Callable[[F32Array], tuple[NDArray[Any], F32Array]]] = {
        "fp8": quant.quantise_fp8,
        "int8": quant.quantise_int8,
        "int4": quant.quantise_int4,
    }
    return Matrix(weight_format, rows, cols, *quantise[weight_format](values))


@dataclass
class _Maker:
    config: ModelConfig
    rng: np.random.Generator
    weight_format: MatrixFormat
    expert_format: MatrixFormat
    gain: float

    def normal(self, *shape: int, scale: float = 1.0, centre: float = 0.0) -> F32Array:
        return (centre + scale * self.rng.standard_normal(shape)).astype(np.float32)

    def norm(self, size: int) -> F32Array:
        return self.normal(size, scale=0.3, centre=1.0)

    def matrix(self, rows: int, cols: int, scale: float = 1.0, weight_format: MatrixFormat | None = None) -> Matrix:
        values = self.normal(rows, cols, scale=self.gain * scale * cols**-0.5)
        return as_matrix(values, weight_format or self.weight_format)

    def hyper(self) -> HyperConnection:
        n = self.config.hc_mult
        outs, width = (2 + n) * n, n * self.config.hidden_size
        scale = self.rng.uniform(0.5, 1.5, 3).astype(np.float32)
        return HyperConnection(self.normal(outs, width, scale=width**-0.5), self.normal(outs, scale=0.8), scale)

    def kda(self) -> KdaWeights:
        c = self.config
        h, p, d, k = c.hidden_size, c.kda_width, c.kda_head_dim, c.conv_width
        return KdaWeights(
            q_proj=self.matrix(p, h, 1.5),
            k_proj=self.matrix(p, h, 1.5),
            v_proj=self.matrix(p, h, 1.5),
            q_conv=self.normal(p, k, scale=k**-0.5),
            k_conv=self.normal(p, k, scale=k**-0.5),
            v_conv=self.normal(p, k, scale=k**-0.5),
            f_a=self.matrix(d, h),
            f_b=self.matrix(p, d),
            dt_bias=self.normal(p, scale=1.5, centre=-1.0),
            a_log=self.rng.uniform(-1.0, 1.5, c.kda_heads).astype(np.float32),
            b_proj=self.matrix(c.kda_heads, h),
            g_a=self.matrix(d, h),
            g_b=self.matrix(p, d),
            o_norm=self.norm(d),
            o_proj=self.matrix(h, p, 1.5),
        )

    def dsa(self, index: int) -> DsaWeights:
        c = self.config
        h, di = c.hidden_size, c.index_head_dim
        indexer = None
        if c.indexer_kinds[index] == FULL:
            indexer = IndexerWeights(
                wq_b=self.matrix(c.index_n_heads * di, c.q_lora_rank, 2.0),
                wk=self.matrix(di, h),
                k_norm_weight=self.norm(di),
                k_norm_bias=self.normal(di, scale=0.3),
                weights_proj=self.matrix(c.index_n_heads, h),
                ape=self.normal(c.index_kpool, di),
                gate=self.matrix(di, h),
            )
        return DsaWeights(
            q_a=self.matrix(c.q_lora_rank, h),
            q_a_norm=self.norm(c.q_lora_rank),
            q_b=self.matrix(c.num_heads * c.qk_head_dim, c.q_lora_rank, 2.0),
            kv_a=self.matrix(c.kv_lora_rank, h),
            kv_a_norm=self.norm(c.kv_lora_rank),
            kv_b=self.matrix(c.num_heads * (c.qk_head_dim + c.v_head_dim), c.kv_lora_rank, 1.5),
            o_proj=self.matrix(h, c.num_heads * c.v_head_dim, 1.5),
            indexer=indexer,
        )

    def ffn(self, width: int, weight_format: MatrixFormat | None = None) -> FfnWeights:
        h = self.config.hidden_size
        gate, up = (self.matrix(width, h, 1.5, weight_format) for _ in range(2))
        return FfnWeights(gate, up, self.matrix(h, width, 1.5, weight_format))

    def moe(self) -> MoeWeights:
        c = self.config
        router = self.normal(c.n_routed_experts, c.hidden_size, scale=c.hidden_size**-0.5)
        shared = self.ffn(c.n_shared_experts * c.moe_intermediate_size) if c.n_shared_experts else None
        return MoeWeights(router, self.normal(c.n_routed_experts, scale=0.25), shared)

    def layer(self, index: int) -> LayerWeights:
        c = self.config
        return LayerWeights(
            index=index,
            input_norm=self.norm(c.hidden_size),
            post_norm=self.norm(c.hidden_size),
            hc_attn=self.hyper(),
            hc_ffn=self.hyper(),
            attention=self.kda() if c.layer_kinds[index] == KDA else self.dsa(index),
            ffn=self.moe() if c.mlp_kinds[index] == SPARSE else self.ffn(c.intermediate_size),
        )

    def model(self) -> TinyModel:
        c = self.config
        return TinyModel(
            config=c,
            layers=tuple(self.layer(i) for i in range(c.num_layers)),
            experts={(layer, e): self.ffn(c.moe_intermediate_size, self.expert_format) for layer in c.sparse_layers for e in range(c.n_routed_experts)},
            embedding=as_matrix(self.normal(c.vocab_size, c.hidden_size)),
            final_norm=self.norm(c.hidden_size),
            lm_head=as_matrix(self.normal(c.vocab_size, c.hidden_size, scale=self.gain * 1.2 * c.hidden_size**-0.5)),
        )
