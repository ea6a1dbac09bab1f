"""Names and shapes of the tensors a configuration needs (model spec 2, 8), and the other names they go by.

Canonical names are those on disk without the text prefix: `embed_tokens.weight`, `layers.3.self_attn.q_a_proj.weight`, `lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from glm53serve.model.config import FULL, KDA, SPARSE, ModelConfig

PREFIXES = ("model.language_model.", "model.")
VISION_PREFIX = "model.visual."
PACKED_GATE_UP = "mlp.experts.gate_up_proj"
PACKED_DOWN = "mlp.experts.down_proj"
FUSED_CONV = "self_attn.conv1d.weight"
CONTAINER_F32 = ("dt_bias", "A_log", "e_score_correction_bias", "index_kpool_compress_ape", "norm.weight", "norm.bias", "_fn", "_base", "_scale")
"""Ends of the names of small tensors that the int4 container stores as F32 (model spec 9)."""
_RENAMED = ((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"), (".self_attn.forget_gate.", ".self_attn."))


@dataclass(frozen=True, slots=True)
class Need:
    """What the config needs under one name. Matrices may be stored in any weight format, the rest only as F32 or BF16.

    `also` are other shapes the same numbers may have. A packed matrix has a leading expert axis.
    """

    shape: tuple[int, ...]
    matrix: bool = False
    also: tuple[tuple[int, ...], ...] = ()


Needs = Iterator[tuple[str, Need]]


def canonical(name: str) -> str | None:
    """The canonical name of a text tensor; None when the name has no text prefix (and is not lm_head's)."""
    if name.startswith("lm_head."):
        return name
    for prefix in PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            break
    else:
        return None
    if rest.startswith("lm_head."):
        return None
    if ".mlp." not in rest:
        for there, ours in _RENAMED:
            rest = rest.replace(there, ours, 1)
    return rest


def disk_name(name: str) -> str:
    """The name of a canonical one in files we write."""
    return name if name.startswith("lm_head.") else PREFIXES[0] + name


def end_needs(c: ModelConfig, head: bool) -> Needs:
    """Embedding, final norm and, unless it is tied, the head."""
    yield "embed_tokens.weight", Need((c.vocab_size, c.hidden_size), True)
    yield "norm.weight", Need((c.hidden_size,))
    if head:
        yield "lm_head.weight", Need((c.vocab_size, c.hidden_size), True)


def layer_needs(c: ModelConfig, layer: int, present: Container[str]) -> Needs:
    """Everything of one trunk layer but its routed experts."""
    at = f"layers.{layer}."
    yield from _norm_needs(c, at)
    n = c.hc_mult
    for site in ("attn", "ffn"):
        yield f"{at}hc_{site}_fn", Need(((2 + n) * n, n * c.hidden_size))
        yield f"{at}hc_{site}_base", Need(((2 + n) * n,))
        yield f"{at}hc_{site}_scale", Need((3,))
    if c.layer_kinds[layer] == KDA:
        yield from _kda_needs(c, f"{at}self_attn.", at + FUSED_CONV in present)
    else:
        yield from _dsa_needs(c, f"{at}self_attn.", c.indexer_kinds[layer] == FULL)
    if c.mlp_kinds[layer] == SPARSE:
        yield from _moe_needs(c, f"{at}mlp.")
    else:
        yield from ffn_needs(c.hidden_size, c.intermediate_size, f"{at}mlp.")


def routed_needs(c: ModelConfig, layer: int, present: Container[str]) -> Needs:
    """The routed experts of one layer: packed over all experts where a packed tensor is present, else one by one."""
    at, h, width = f"layers.{layer}.", c.hidden_size, c.moe_intermediate_size
    packed_in, packed_out = at + PACKED_GATE_UP in present, at + PACKED_DOWN in present
    if packed_in:
        yield at + PACKED_GATE_UP, Need((c.n_routed_experts, 2 * width, h), True)
    if packed_out:
        yield at + PACKED_DOWN, Need((c.n_routed_experts, h, width), True)
    into, out = Need((width, h), True), Need((h, width), True)
    for e in range(c.n_routed_experts):
        if not packed_in:
            yield f"{at}mlp.experts.{e}.gate_proj.weight", into
            yield f"{at}mlp.experts.{e}.up_proj.weight", into
        if not packed_out:
            yield f"{at}mlp.experts.{e}.down_proj.weight", out


def mtp_needs(c: ModelConfig, layer: int, present: Container[str]) -> Needs:
    """The MTP block stored as layer `layer` (num_layers or above): a DSA + MoE layer without hyper-connections (model spec 8)."""
    at, h = f"layers.{layer}.", c.hidden_size
    yield from _norm_needs(c, at)
    yield from _dsa_needs(c, f"{at}self_attn.", True)
    yield from _moe_needs(c, f"{at}mlp.")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{at}{norm}.weight", Need((h,))
    yield f"{at}eh_proj.weight", Need((h, 2 * h), True)
    yield from routed_needs(c, layer, present)


def ffn_needs(hidden: int, width: int, at: str) -> Needs:
    """One SwiGLU feed-forward."""
    yield f"{at}gate_proj.weight", Need((width, hidden), True)
    yield f"{at}up_proj.weight", Need((width, hidden), True)
    yield f"{at}down_proj.weight", Need((hidden, width), True)


def _norm_needs(c: ModelConfig, at: str) -> Needs:
    yield f"{at}input_layernorm.weight", Need((c.hidden_size,))
    yield f"{at}post_attention_layernorm.weight", Need((c.hidden_size,))


def _kda_needs(c: ModelConfig, at: str, fused_conv: bool) -> Needs:
    h, p, d, k = c.hidden_size, c.kda_width, c.kda_head_dim, c.conv_width
    for name in "qkv":
        yield f"{at}{name}_proj.weight", Need((p, h), True)
    if fused_conv:
        yield f"{at}conv1d.weight", Need((3 * p, 1, k), also=((3 * p, k),))
    else:
        for name in "qkv":
            yield f"{at}{name}_conv1d.weight", Need((p, 1, k), also=((p, k),))
    for name in "fg":
        yield f"{at}{name}_a_proj.weight", Need((d, h), True)
        yield f"{at}{name}_b_proj.weight", Need((p, d), True)
    yield f"{at}dt_bias", Need((p,))
    yield f"{at}A_log", Need((c.kda_heads,), also=((1, 1, c.kda_heads, 1),))
    yield f"{at}b_proj.weight", Need((c.kda_heads, h), True)
    yield f"{at}o_norm.weight", Need((d,))
    yield f"{at}o_proj.weight", Need((h, p), True)


def _dsa_needs(c: ModelConfig, at: str, indexer: bool) -> Needs:
    h, heads, q_rank, kv_rank = c.hidden_size, c.num_heads, c.q_lora_rank, c.kv_lora_rank
    yield f"{at}q_a_proj.weight", Need((q_rank, h), True)
    yield f"{at}q_a_layernorm.weight", Need((q_rank,))
    yield f"{at}q_b_proj.weight", Need((heads * c.qk_head_dim, q_rank), True)
    yield f"{at}kv_a_proj_with_mqa.weight", Need((kv_rank, h), True)
    yield f"{at}kv_a_layernorm.weight", Need((kv_rank,))
    yield f"{at}kv_b_proj.weight", Need((heads * (c.qk_head_dim + c.v_head_dim), kv_rank), True)
    yield f"{at}o_proj.weight", Need((h, heads * c.v_head_dim), True)
    if indexer:
        dim = c.index_head_dim
        yield f"{at}indexer.wq_b.weight", Need((c.index_n_heads * dim, q_rank), True)
        yield f"{at}indexer.wk.weight", Need((dim, h), True)
        yield f"{at}indexer.k_norm.weight", Need((dim,))
        yield f"{at}indexer.k_norm.bias", Need((dim,))
        yield f"{at}indexer.weights_proj.weight", Need((c.index_n_heads, h), True)
        yield f"{at}indexer.index_kpool_compress_ape", Need((c.index_kpool, dim))
        yield f"{at}indexer.index_kpool_compress_gate", Need((dim, h), True)


def _moe_needs(c: ModelConfig, at: str) -> Needs:
    yield f"{at}gate.weight", Need((c.n_routed_experts, c.hidden_size))
    yield f"{at}gate.e_score_correction_bias", Need((c.n_routed_experts,))
    if c.n_shared_experts:
        yield from ffn_needs(c.hidden_size, c.n_shared_experts * c.moe_intermediate_size, f"{at}shared_experts.")
