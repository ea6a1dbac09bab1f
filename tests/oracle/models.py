"""The small random models of the golden data: their configurations and how their weights are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from formats import Tensors

PREFIX = "model.language_model."
KDA, DSA = "linear_attention", "deepseek_sparse_attention"


@dataclass(frozen=True)
class Golden:
    """One golden model: config.json as committed, storage format, shard count, tensor prefix on disk, prompt length, matrix gain."""

    name: str
    config: dict[str, Any]
    kind: str
    shards: int = 1
    prefix: str = PREFIX
    prompt: int = 112
    greedy: int = 20
    gain: float = 1.0


def text_keys(**changes: Any) -> dict[str, Any]:
    """Text keys every golden states, with `changes`; a value `...` removes the key."""
    keys: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "vocab_size": 64,
        "intermediate_size": 40,
        "moe_intermediate_size": 12,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "swiglu_limit": 1.5,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "qk_rope_head_dim": 0,
        "attention_bias": False,
        "index_topk": 16,
        "index_kpool": 4,
        "index_n_heads": 8,
        "index_head_dim": 8,
        "index_kpool_always_select_tail": True,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": [63],
        "layer_types": [KDA, DSA, KDA, KDA, DSA],
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    }
    keys.update(changes)
    return {k: v for k, v in keys.items() if v is not ...}


def nested(text: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A config.json with a `text_config`, as published."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {"model_type": "glm5_next_text", **text},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **top,
    }


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}

GOLDENS = (
    Golden(
        "nested-f32",
        nested(text_keys(num_hidden_layers=4, layer_types=[KDA, DSA, KDA, DSA], mlp_layer_types=["dense", "sparse", "sparse", "sparse"])),
        "f32",
        shards=3,
    ),
    Golden(
        "flat-bf16",
        {
            "model_type": "glm5_next",
            **text_keys(
                hidden_size=40,
                hc_mult=1,
                index_kpool=2,
                index_topk=14,
                linear_conv_kernel_dim=3,
                linear_lower_bound=None,
                tie_word_embeddings=True,
                index_n_heads=16,
                linear_num_heads=3,
                linear_head_dim=12,
                qk_nope_head_dim=10,
                v_head_dim=14,
                num_attention_heads=3,
                num_key_value_heads=3,
                layer_types=[DSA, KDA, KDA, DSA, KDA],
                mlp_layer_types=...,
                first_k_dense_replace=3,
                n_routed_experts=6,
                num_experts_per_tok=2,
            ),
        },
        "bf16",
        prefix="model.",
    ),
    Golden(
        "shared-f32",
        {
            "model_type": "glm5_next_text",
            **text_keys(
                hc_mult=3,
                index_kpool=5,
                index_topk=20,
                index_head_dim=12,
                index_topk_pattern="FFSFF",
                hc_sinkhorn_iters=6,
                linear_attn_config={"num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 3, "gate_lower_bound": -3.0},
                layer_types=["linear_attention", "full_attention", "indexed_attention", "linear_attention", "attention"],
                moe_intermediate_size=12,
                n_routed_experts=6,
                num_experts_per_tok=2,
                v_head_dim=12,
            ),
        },
        "f32",
        prompt=118,
    ),
    Golden(
        "grouped-bf16",
        nested(
            text_keys(
                num_hidden_layers=8,
                layer_types=...,
                mlp_layer_types=...,
                n_group=4,
                topk_group=2,
                n_routed_experts=12,
                num_experts_per_tok=3,
                n_shared_experts=2,
                norm_topk_prob=False,
                routed_scaling_factor=1.3,
                moe_intermediate_size=8,
                hc_mult=2,
                index_topk=12,
                linear_attn_config={"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": None, "safe_gate": False},
            )
        ),
        "bf16",
        shards=2,
    ),
    Golden(
        "ragged-fp8",
        nested(
            text_keys(
                hidden_size=40,
                intermediate_size=136,
                moe_intermediate_size=130,
                n_routed_experts=4,
                num_experts_per_tok=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                qk_nope_head_dim=34,
                v_head_dim=33,
                q_lora_rank=136,
                kv_lora_rank=24,
                hc_mult=3,
                num_hidden_layers=4,
                layer_types=[KDA, DSA, KDA, DSA],
                mlp_layer_types=["dense", "sparse", "dense", "sparse"],
            ),
            quantization_config=FP8_CONFIG,
        ),
        "fp8",
        shards=2,
        gain=0.9,
    ),
    Golden(
        "container-int4",
        nested(
            text_keys(
                hidden_size=40,
                hc_mult=3,
                index_kpool=2,
                index_topk=16,
                moe_intermediate_size=67,
                n_routed_experts=5,
                num_experts_per_tok=2,
                num_hidden_layers=4,
                layer_types=[KDA, DSA, DSA, KDA],
                mlp_layer_types=["dense", "sparse", "sparse", "dense"],
                linear_lower_bound=-4.0,
            )
        ),
        "int4",
        shards=2,
        gain=0.9,
    ),
    Golden(
        "single-pool-bf16",
        nested(
            text_keys(
                index_kpool=1,
                index_n_heads=16,
                index_topk=11,
                hc_mult=2,
                hc_sinkhorn_iters=1,
                num_hidden_layers=4,
                layer_types=[KDA, DSA, KDA, DSA],
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                n_routed_experts=6,
                num_experts_per_tok=2,
            )
        ),
        "bf16",
        prompt=100,
    ),
)


def tensor_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    """On-disk names (model spec 2) and shapes of the text network of a library text config."""
    h, n, p, d = c.hidden_size, c.hc_mult, c.linear_num_heads * c.linear_head_dim, c.linear_head_dim
    shapes: dict[str, tuple[int, ...]] = {PREFIX + "embed_tokens.weight": (c.vocab_size, h)}

    def ffn(base: str, width: int) -> None:
        shapes.update({f"{base}gate_proj.weight": (width, h), f"{base}up_proj.weight": (width, h), f"{base}down_proj.weight": (h, width)})

    for layer in range(c.num_hidden_layers):
        at = f"{PREFIX}layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (h,)
        for site in ("attn", "ffn"):
            shapes.update({f"{at}hc_{site}_fn": ((2 + n) * n, n * h), f"{at}hc_{site}_base": ((2 + n) * n,), f"{at}hc_{site}_scale": (3,)})
        a = at + "self_attn."
        if c.layer_types[layer] == KDA:
            for s in "qkv":
                shapes.update({f"{a}{s}_proj.weight": (p, h), f"{a}{s}_conv1d.weight": (p, 1, c.linear_conv_kernel_dim)})
            for s in "fg":
                shapes.update({f"{a}{s}_a_proj.weight": (d, h), f"{a}{s}_b_proj.weight": (p, d)})
            shapes.update({a + "dt_bias": (p,), a + "A_log": (c.linear_num_heads,), a + "b_proj.weight": (c.linear_num_heads, h)})
            shapes.update({a + "o_norm.weight": (d,), a + "o_proj.weight": (h, p)})
        else:
            heads, qk, v, q, kv = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.q_lora_rank, c.kv_lora_rank
            shapes.update({a + "q_a_proj.weight": (q, h), a + "q_a_layernorm.weight": (q,), a + "q_b_proj.weight": (heads * qk, q)})
            shapes.update({a + "kv_a_proj_with_mqa.weight": (kv, h), a + "kv_a_layernorm.weight": (kv,)})
            shapes.update({a + "kv_b_proj.weight": (heads * (qk + v), kv), a + "o_proj.weight": (h, heads * v)})
            if c.indexer_types[layer] == "full":
                i, dim = a + "indexer.", c.index_head_dim
                shapes.update({i + "wq_b.weight": (c.index_n_heads * dim, q), i + "wk.weight": (dim, h), i + "weights_proj.weight": (c.index_n_heads, h)})
                shapes.update({i + "k_norm.weight": (dim,), i + "k_norm.bias": (dim,)})
                shapes.update({i + "index_kpool_compress_ape": (c.index_kpool, dim), i + "index_kpool_compress_gate": (dim, h)})
        if c.mlp_layer_types[layer] == "dense":
            ffn(at + "mlp.", c.intermediate_size)
        else:
            shapes.update({at + "mlp.gate.weight": (c.n_routed_experts, h), at + "mlp.gate.e_score_correction_bias": (c.n_routed_experts,)})
            for e in range(c.n_routed_experts):
                ffn(f"{at}mlp.experts.{e}.", c.moe_intermediate_size)
            ffn(at + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts)
    shapes[PREFIX + "norm.weight"] = (h,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, h)
    return shapes


def draw(name: str, shape: tuple[int, ...], rng: torch.Generator, gain: float, tied: bool) -> torch.Tensor:
    """One random float32 tensor, far from its initial value (model spec 12), so that every term of the network counts."""

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng)

    if name.endswith("norm.weight"):
        return between(0.7, 1.3)
    if name.endswith("A_log"):
        return between(-1, 1.5)
    if name.endswith("dt_bias"):
        return between(-2.5, 0.5)
    if name.endswith("_base"):
        return between(-0.8, 0.8)
    if name.endswith("_scale"):
        return between(0.5, 1.5)
    if name.endswith("e_score_correction_bias"):
        return between(-0.25, 0.25)
    if name.endswith("compress_ape"):
        return between(-1, 1)
    if name.endswith(".bias"):
        return between(-0.4, 0.4)
    normal = torch.randn(shape, generator=rng)
    if name.endswith("conv1d.weight"):
        return normal * 0.6
    if "embed_tokens" in name:
        return normal * 0.3 if tied else normal
    if len(shape) == 2 and (shape[0] > 128 or shape[1] > 128):
        normal[128:] *= 1.6
        normal[:, 128:] *= 0.6
    quiet = 1.0 if name.endswith(("lm_head.weight", "mlp.gate.weight")) else gain * 1.1
    return normal * quiet / shape[-1] ** 0.5


def draw_model(text_config: Any, seed: int, gain: float) -> Tensors:
    """All tensors of a model, float32, in file order."""
    rng = torch.Generator().manual_seed(seed)
    return {name: draw(name, shape, rng, gain, text_config.tie_word_embeddings) for name, shape in tensor_shapes(text_config).items()}
