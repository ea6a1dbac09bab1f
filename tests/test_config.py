"""config.json in every spelling, and what is refused (model spec 1)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53serve.model.config import DENSE, DSA, FULL, KDA, SHARED, SPARSE, ModelConfig, load_config
from glm53serve.model.config_file import parse_config
from glm53serve.model.errors import ConfigError

NANO = Path(__file__).parents[1] / "glm53serve" / "data" / "glm53-nano"
RAW = json.loads((NANO / "config.json").read_text())
GOLDEN = sorted((Path(__file__).parent / "data" / "golden").glob("*/config.json"))


def nano(**changes: Any) -> dict[str, Any]:
    """The shipped model's config with text keys changed; `...` removes one."""
    text = {k: v for k, v in (RAW["text_config"] | changes).items() if v is not ...}
    return RAW | {"text_config": text}


def flat(**changes: Any) -> dict[str, Any]:
    """A flat config with nothing but the type and `changes`."""
    return {"model_type": "glm5_next", **changes}


def test_shipped_model() -> None:
    c = load_config(NANO)
    assert (c.hidden_size, c.num_layers, c.vocab_size, c.n_routed_experts, c.num_experts_per_tok) == (192, 8, 1024, 12, 4)
    assert c.layer_kinds == (KDA, KDA, KDA, DSA) * 2
    assert c.mlp_kinds == (DENSE,) + (SPARSE,) * 7
    assert c.eos_token_ids == (998, 1005, 1007)
    assert (c.kda_width, c.gate_lower_bound, c.index_kpool, c.num_nextn_predict_layers, c.has_vision) == (256, -5.0, 4, 1, False)


def test_absent_keys_have_the_library_defaults() -> None:
    c = parse_config(flat())
    assert c == ModelConfig(
        hidden_size=4096, num_layers=45, vocab_size=154880, intermediate_size=12288, moe_intermediate_size=2048, n_routed_experts=288,
        num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, swiglu_limit=10.0,
        rms_norm_eps=1e-5, num_heads=64, q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=256, v_head_dim=256, index_topk=2048, index_kpool=16,
        index_n_heads=32, index_head_dim=128, kda_heads=64, kda_head_dim=128, conv_width=4, gate_lower_bound=-5.0, hc_mult=4, hc_eps=1e-6,
        hc_sinkhorn_iters=20, layer_kinds=(KDA, KDA, KDA, DSA) * 11 + (KDA,), mlp_kinds=(DENSE,) * 3 + (SPARSE,) * 42,
        indexer_kinds=(FULL,) * 45, tie_word_embeddings=False, max_position_embeddings=1048576, num_nextn_predict_layers=0, eos_token_ids=(),
        has_vision=False,
    )  # fmt: skip


def test_flat_equals_nested() -> None:
    text = RAW["text_config"]
    for name in ("glm5_next", "glm5_next_text"):
        assert parse_config(text | {"model_type": name}) == parse_config(RAW)


def test_text_keys_come_from_text_config_alone() -> None:
    assert parse_config(RAW | {"hidden_size": 77, "hidden_act": "gelu"}) == parse_config(RAW)


def test_unknown_keys_and_leftovers_are_ignored() -> None:
    extra = {"indexer_rope_interleave": True, "head_dim": 0, "initializer_range": 1, "new_key": {"a": [1]}, "rope_theta": None}
    assert parse_config(nano(**extra)) == parse_config(RAW)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.parent.name)
def test_golden_models_load(path: Path) -> None:
    assert load_config(path.parent).num_layers >= 4


# -- end ids


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(generation if isinstance(generation, str) else json.dumps(generation))
    return folder


def test_end_ids_generation_config_then_top_then_text(tmp_path: Path) -> None:
    config = nano(eos_token_id=[3, 4])
    assert load_config(write(tmp_path, config)).eos_token_ids == (3, 4)
    assert load_config(write(tmp_path, config | {"eos_token_id": 2})).eos_token_ids == (2,)
    assert load_config(write(tmp_path, config | {"eos_token_id": 2}, {"eos_token_id": [1, 7]})).eos_token_ids == (1, 7)
    assert load_config(write(tmp_path, config, {"eos_token_id": 9})).eos_token_ids == (9,)
    assert load_config(write(tmp_path, config, {"temperature": 1.0})).eos_token_ids == (3, 4)


# -- derived lists


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"linear_lower_bound": ...}, -5.0),
        ({"linear_lower_bound": -2.5}, -2.5),
        ({"linear_lower_bound": None}, None),
        ({"linear_lower_bound": None, "linear_attn_config": None}, None),
        ({"linear_lower_bound": None, "linear_attn_config": {}}, -5.0),
        ({"linear_lower_bound": -2.5, "linear_attn_config": {}}, -2.5),
        ({"linear_lower_bound": -2.5, "linear_attn_config": {"gate_lower_bound": -3}}, -3.0),
        ({"linear_lower_bound": -2.5, "linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_lower_bound": -2.5, "linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
        ({"linear_lower_bound": None, "linear_attn_config": {"safe_gate": False}}, None),
        ({"linear_lower_bound": -2.5, "linear_attn_config": {"safe_gate": False}}, -2.5),
    ],
)
def test_gate_bound(changes: dict[str, Any], bound: float | None) -> None:
    assert parse_config(nano(**changes)).gate_lower_bound == bound


def test_linear_attn_config_overrides() -> None:
    inner = {"num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 5, "kda_layers": [0, 1, 2, 4, 5, 6], "full_attn_layers": [4, 8]}
    c = parse_config(nano(linear_attn_config=inner))
    assert (c.kda_heads, c.kda_head_dim, c.conv_width) == (3, 16, 5)
    c = parse_config(nano(linear_attn_config={"num_heads": 3}))
    assert (c.kda_heads, c.kda_head_dim, c.conv_width) == (3, 64, 4)


def indexer_case(**keys: Any) -> dict[str, Any]:
    return flat(num_hidden_layers=4, layer_types=["attention"] * 4, **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "FFFF"),
        ({"index_topk_freq": 0}, "FFFF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"index_topk_pattern": ["F", "F", "S", "F"]}, "FFSF"),
        ({"index_topk_pattern": ["full", "shared", "full", "full"]}, "FSFF"),
        ({"index_topk_pattern": "FSFS", "indexer_types": ["full"] * 4}, "FFFF"),
        # i: max(i - 2 + 1, 0) mod 2 -> 0 0 1 0
        ({"index_topk_freq": 2}, "FFSF"),
        # max(i - 1 + 1, 0) mod 2 -> 0 1 0 1
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS"),
    ],
)
def test_indexer_kinds(keys: dict[str, Any], expected: str) -> None:
    assert parse_config(indexer_case(**keys)).indexer_kinds == tuple({"F": FULL, "S": SHARED}[k] for k in expected)


def test_indexer_entries_of_kda_layers_are_ignored() -> None:
    c = parse_config(nano(indexer_types=["shared", "shared", "shared", "full"] * 2))
    assert c.indexer_kinds == (FULL,) * 8


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_layer_types": ..., "first_k_dense_replace": ...}, 3),
        ({"mlp_layer_types": ..., "first_k_dense_replace": 5}, 5),
        ({"mlp_layer_types": ..., "first_k_dense_replace": 0}, 0),
        ({"mlp_layer_types": ..., "first_k_dense_replace": 99}, 8),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6, "first_k_dense_replace": ...}, 2),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6, "first_k_dense_replace": 2}, 2),
    ],
)
def test_dense_layers(changes: dict[str, Any], dense: int) -> None:
    assert parse_config(nano(**changes)).mlp_kinds == (DENSE,) * dense + (SPARSE,) * (8 - dense)


def test_dense_layers_need_not_come_first() -> None:
    c = parse_config(nano(mlp_layer_types=["sparse", "dense"] * 4, first_k_dense_replace=...))
    assert c.sparse_layers == (0, 2, 4, 6)


def test_tie_may_stand_in_both_places() -> None:
    assert not parse_config(RAW).tie_word_embeddings
    assert parse_config(RAW | {"tie_word_embeddings": True}).tie_word_embeddings
    assert parse_config(nano(tie_word_embeddings=True)).tie_word_embeddings


def test_expert_alias() -> None:
    assert parse_config(nano(n_routed_experts=..., num_local_experts=16)).n_routed_experts == 16
    assert parse_config(nano(num_local_experts=12)) == parse_config(RAW)


LINEAR = ("linear_attention", "mamba")
ATTENTION = ("indexed_attention", "full_attention", "attention", "deepseek_sparse_attention")


@settings(max_examples=60)
@given(st.data())
def test_every_spelling_means_the_same(data: st.DataObject) -> None:
    """A random network written down in randomly chosen spellings reads back as that network."""
    pick = data.draw
    layers = pick(st.integers(1, 9))
    kinds = pick(st.lists(st.sampled_from((KDA, DSA)), min_size=layers, max_size=layers))
    indexers = [FULL] * layers
    for i in range(1, layers):
        if kinds[i] == DSA and kinds[i - 1] == DSA and indexers[i - 1] == FULL and pick(st.booleans()):
            indexers[i] = SHARED
    dense, heads, dim, conv = pick(st.integers(0, layers)), pick(st.integers(1, 9)), pick(st.integers(1, 99)), pick(st.integers(1, 6))
    experts, mla = pick(st.integers(8, 99)), pick(st.integers(1, 8))
    bound = pick(st.sampled_from((None, -5.0, -1.25)))
    text: dict[str, Any] = {
        "num_hidden_layers": layers,
        "layer_types": [pick(st.sampled_from(LINEAR if kind == KDA else ATTENTION)) for kind in kinds],
        pick(st.sampled_from(("n_routed_experts", "num_local_experts"))): experts,
        "num_attention_heads": mla,
        "num_key_value_heads": mla,
    }
    if pick(st.booleans()):
        text["linear_attn_config"] = {"num_heads": heads, "head_dim": dim, "short_conv_kernel_size": conv}
        text["linear_attn_config"] |= {"gate_lower_bound": bound, "safe_gate": bound is not None}
        text["linear_lower_bound"] = -4.0
    else:
        text |= {"linear_num_heads": heads, "linear_head_dim": dim, "linear_conv_kernel_dim": conv, "linear_lower_bound": bound}
    how = pick(st.sampled_from(("types", "string", "list")))
    letters = "".join("F" if kind == FULL else "S" for kind in indexers)
    text |= {"types": {"indexer_types": indexers}, "string": {"index_topk_pattern": letters}, "list": {"index_topk_pattern": list(letters)}}[how]
    if pick(st.booleans()):
        text["mlp_layer_types"] = [DENSE] * dense + [SPARSE] * (layers - dense)
    else:
        text["first_k_dense_replace"] = dense
    if pick(st.booleans()):
        text |= {"scoring_func": "sigmoid", "mhc": True, "index_kpool_compress": True, "moe_router_dtype": "float32", "qk_head_dim": 256}
    raw = {"model_type": "glm5_next", "text_config": text} if pick(st.booleans()) else {"model_type": "glm5_next_text"} | text
    assert parse_config(json.loads(json.dumps(raw))) == replace(
        parse_config(flat()),
        num_layers=layers, layer_kinds=tuple(kinds), indexer_kinds=tuple(indexers), mlp_kinds=(DENSE,) * dense + (SPARSE,) * (layers - dense),
        n_routed_experts=experts, num_heads=mla, kda_heads=heads, kda_head_dim=dim, conv_width=conv, gate_lower_bound=bound,
    )  # fmt: skip


# -- refusals: what the line must say

REFUSED: list[tuple[dict[str, Any], str]] = [
    (nano(num_key_value_heads=2), "num_key_value_heads is 2, must equal num_attention_heads 4"),
    (nano(index_kpool=0), "index_kpool is 0"),
    (nano(index_kpool=5), "index_topk 64 is not a multiple of index_kpool 5"),
    (nano(q_lora_rank=None), "q_lora_rank is null"),
    (nano(qk_rope_head_dim=64), "qk_rope_head_dim is 64, only 0"),
    (nano(layer_types=["linear_attention"] * 7), "layer_types has 7 entries, num_hidden_layers is 8"),
    (nano(layer_types=["linear_attention"] * 7 + ["sliding_attention"]), 'layer_types[7] is "sliding_attention"'),
    (nano(mlp_layer_types=["dense"] * 9), "mlp_layer_types has 9 entries"),
    (nano(mlp_layer_types=["dense"] * 7 + ["moe"]), 'mlp_layer_types[7] is "moe"'),
    (nano(indexer_types=["full"] * 7), "indexer_types has 7 entries"),
    (nano(indexer_types=["full"] * 7 + ["none"]), 'indexer_types[7] is "none"'),
    (nano(indexer_types=..., index_topk_pattern="FFFX" * 2), 'index_topk_pattern[3] is "X"'),
    (nano(indexer_types=["full"] * 3 + ["shared"] * 5), "layer 3 shares the indexer of the layer before it"),
    (indexer_case(indexer_types=["shared", "full", "full", "full"]), "layer 0 shares"),
    (indexer_case(indexer_types=["full", "shared", "shared", "full"]), "layer 2 shares"),
    (nano(n_group=5), "n_routed_experts 12 is not a multiple of n_group 5"),
    (nano(n_group=12, topk_group=12), "n_group 12 leaves 1 expert a group"),
    (nano(n_group=2, topk_group=3), "topk_group 3 is more than n_group 2"),
    (nano(n_group=6, topk_group=1), "num_experts_per_tok 4 is more than the 2 experts"),
    (nano(num_experts_per_tok=13), "num_experts_per_tok 13 is more than the 12 experts"),
    (nano(num_local_experts=13), "num_local_experts is 13, n_routed_experts is 12"),
    (nano(index_kpool_always_select_tail=False), "index_kpool_always_select_tail is false"),
    (nano(attention_bias=True), "attention_bias is true, only false"),
    (nano(hidden_act="gelu"), 'hidden_act is "gelu", only "silu"'),
    (nano(scoring_func="softmax"), 'scoring_func is "softmax"'),
    (nano(topk_method="greedy"), 'topk_method is "greedy"'),
    (nano(mhc=False), "mhc is false"),
    (nano(mla_use_nope=False), "mla_use_nope is false"),
    (nano(index_kpool_compress=False), "index_kpool_compress is false"),
    (nano(moe_router_dtype="bfloat16"), 'moe_router_dtype is "bfloat16"'),
    (nano(qk_head_dim=32), "qk_head_dim is 32, qk_nope_head_dim is 64"),
    (nano(first_k_dense_replace=3), "first_k_dense_replace is 3, mlp_layer_types[1] is sparse"),
    (nano(linear_attn_config={"kda_layers": [0, 1]}), "linear_attn_config: kda_layers is [0, 1], layer_types says [0, 1, 2, 4, 5, 6]"),
    (nano(linear_attn_config={"gate_lower_bound": 1.0}), "linear_attn_config: gate_lower_bound is 1.0"),
    (nano(linear_attn_config=[]), "linear_attn_config is [], must be an object"),
    (nano(hidden_size="192"), 'hidden_size is "192", must be a whole number'),
    (nano(hidden_size=192.5), "hidden_size is 192.5"),
    (nano(hidden_size=True), "hidden_size is true"),
    (nano(hidden_size=-1), "hidden_size is -1"),
    (nano(vocab_size=10**400), "vocab_size is a number of 1329 bits"),
    (nano(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    (flat(num_hidden_layers=4096, n_routed_experts=65536), "4096 layers of 65536 experts are more than the 262144"),
    (nano(rms_norm_eps=float("nan")), "rms_norm_eps is NaN"),
    (nano(swiglu_limit=None), "swiglu_limit is null"),
    (nano(routed_scaling_factor=10**400), "routed_scaling_factor is a number"),
    (nano(norm_topk_prob="yes"), 'norm_topk_prob is "yes"'),
    (nano(eos_token_id=[1, "x"]), "eos_token_id is [1"),
    (RAW | {"text_config": []}, "text_config is [], must be an object"),
    (RAW | {"model_type": "deepseek_v3"}, 'model_type is "deepseek_v3"'),
    (RAW | {"model_type": ["glm5_next"]}, "model_type is ["),
    (RAW | {"text_config": {"model_type": "llama"}}, 'text_config: model_type is "llama"'),
    ({}, "model_type is missing"),
    (RAW | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size is [64, 64]"),
    (RAW | {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, 'fmt is "e5m2"'),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "m/config.json")
    message = str(caught.value)
    assert message.startswith("m/config.json: ") and says in message and "\n" not in message
    assert caught.value.kind in ("format", "unsupported")


@pytest.mark.parametrize(
    ("text", "generation", "says", "kind"),
    [
        ("{", None, "config.json: not JSON", "format"),
        ("[1]", None, "a JSON object is needed", "format"),
        ("[" * 100000, None, "nested too deeply", "format"),
        ('{"model_type": "glm5_next", "model_type": "glm5_next"}', None, 'key "model_type" is there twice', "format"),
        ('{"model_type": "glm5_next"}', "{]", "generation_config.json: not JSON", "format"),
        ('{"model_type": "glm5_next"}', '{"eos_token_id": -1}', "generation_config.json: eos_token_id is -1", "format"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, generation: str | None, says: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text, generation))
    assert says in str(caught.value) and caught.value.kind == kind


def test_missing_files(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no such") as caught:
            load_config(directory)
        assert caught.value.kind == "io"
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=5
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted({*RAW["text_config"], "linear_attn_config", "n_group", "index_topk_freq", "index_topk_pattern"})), json_values))
def test_any_value_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    try:
        assert isinstance(parse_config(nano(**changes)), ModelConfig)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) <= 1000
