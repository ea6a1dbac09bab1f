"""The configuration of a GLM-5.3-Flash-architecture model (model spec 1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KDA = "kda"
DSA = "dsa"
DENSE = "dense"
SPARSE = "sparse"
FULL = "full"
SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Text network sizes and constants, checked and with every spelling resolved (model spec 1.2, 1.3).

    `layer_kinds[l]` is KDA or DSA, `mlp_kinds[l]` DENSE or SPARSE, `indexer_kinds[l]` FULL or SHARED (meaningful for DSA layers only).
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int
    index_topk: int
    index_kpool: int
    index_n_heads: int
    index_head_dim: int
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    layer_kinds: tuple[str, ...]
    mlp_kinds: tuple[str, ...]
    indexer_kinds: tuple[str, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_nextn_predict_layers: int
    eos_token_ids: tuple[int, ...]
    has_vision: bool

    @property
    def kda_width(self) -> int:
        """P = heads x head dim of a KDA layer."""
        return self.kda_heads * self.kda_head_dim

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, in order (the rows of HITS and EMAP)."""
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == SPARSE)


def load_config(directory: Path | str) -> ModelConfig:
    """Read and check a model directory's config.json and generation_config.json: see `glm53serve.model.config_file.load_config`."""
    from glm53serve.model import config_file

    return config_file.load_config(directory)
