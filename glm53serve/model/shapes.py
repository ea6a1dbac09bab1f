"""The shapes random models come in, as config.json objects."""

from __future__ import annotations

from typing import Any

from glm53serve.model.errors import ModelError

SHAPES: dict[str, dict[str, Any]] = {
    # the shipped model
    "nano": {
        "hidden_size": 192, "num_hidden_layers": 8, "vocab_size": 1024, "intermediate_size": 512,
        "moe_intermediate_size": 64, "n_routed_experts": 12,
        "num_experts_per_tok": 4, "num_attention_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 64, "v_head_dim": 64,
        "index_topk": 64, "index_kpool": 4, "index_n_heads": 4, "index_head_dim": 32,
        "linear_num_heads": 4, "linear_head_dim": 64,
        "first_k_dense_replace": 1, "max_position_embeddings": 8192,
    },
    # the smallest with every part: KDA KDA KDA DSA
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "intermediate_size": 256,
        "moe_intermediate_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32,
        "index_topk": 32, "index_kpool": 4, "index_n_heads": 4, "index_head_dim": 32,
        "linear_num_heads": 4, "linear_head_dim": 32,
        "first_k_dense_replace": 1, "max_position_embeddings": 32768,
    },
    # 449 M parameters: large enough to be bound by memory, small enough for any machine
    "mid": {
        "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096, "intermediate_size": 3072,
        "moe_intermediate_size": 512, "n_routed_experts": 32,
        "num_experts_per_tok": 8, "num_attention_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 256,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
        "index_topk": 512, "index_kpool": 16, "index_n_heads": 8, "index_head_dim": 128,
        "linear_num_heads": 16, "linear_head_dim": 128,
        "first_k_dense_replace": 1, "max_position_embeddings": 32768,
    },
    # the published model's widths
    "flash": {
        "hidden_size": 4096, "num_hidden_layers": 45, "vocab_size": 154880, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "n_routed_experts": 288,
        "num_experts_per_tok": 8, "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 256, "v_head_dim": 256,
        "index_topk": 2048, "index_kpool": 4, "index_n_heads": 32, "index_head_dim": 128,
        "linear_num_heads": 64, "linear_head_dim": 128,
        "first_k_dense_replace": 3, "max_position_embeddings": 1048576,
    },
}  # fmt: skip

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def shape_config(shape: str, layers: int | None = None, experts: int | None = None, fp8: bool = False) -> dict[str, Any]:
    """The config.json object of a shape with another number of layers or routed experts; experts per token are clipped to the experts there are.

    Every fourth layer is DSA. The end id is the last id of the vocabulary. Raises ModelError naming a value that is not allowed.
    """
    if shape not in SHAPES:
        raise ModelError(f"shape is {shape!r}, must be one of {', '.join(SHAPES)}", "unsupported")
    for name, value, high in (("layers", layers, 4096), ("experts", experts, 65536)):
        if value is not None and not 1 <= value <= high:
            raise ModelError(f"{name} is {value}, must be a whole number from 1 to {high}", "unsupported")
    text = dict(SHAPES[shape])
    text["num_hidden_layers"] = count = layers or text["num_hidden_layers"]
    text["n_routed_experts"] = experts or text["n_routed_experts"]
    text["num_experts_per_tok"] = min(text["num_experts_per_tok"], text["n_routed_experts"])
    text["first_k_dense_replace"] = dense = min(text["first_k_dense_replace"], count)
    text.update(
        model_type="glm5_next_text",
        num_key_value_heads=text["num_attention_heads"],
        qk_rope_head_dim=0,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        hidden_act="silu",
        swiglu_limit=10.0,
        rms_norm_eps=1e-5,
        attention_bias=False,
        index_kpool_always_select_tail=True,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        hc_mult=4,
        hc_eps=1e-6,
        hc_sinkhorn_iters=20,
        layer_types=["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(count)],
        mlp_layer_types=["dense" if i < dense else "sparse" for i in range(count)],
        indexer_types=["full"] * count,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        eos_token_id=[text["vocab_size"] - 1],
    )
    config: dict[str, Any] = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": text}
    if fp8:
        config["quantization_config"] = FP8
    return config
