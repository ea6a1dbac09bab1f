"""config.json and generation_config.json to a `ModelConfig`: every spelling resolved, every contradiction refused (model spec 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm53serve.model.config import DENSE, DSA, FULL, KDA, SHARED, SPARSE, ModelConfig
from glm53serve.model.errors import ConfigError, ErrorKind
from glm53serve.model.jsonfile import read_object, short

MODEL_TYPES = ("glm5_next", "glm5_next_text")
LAYER_NAMES = {
    "linear_attention": KDA,
    "mamba": KDA,
    "indexed_attention": DSA,
    "full_attention": DSA,
    "attention": DSA,
    "deepseek_sparse_attention": DSA,
}
MLP_NAMES = {"dense": DENSE, "sparse": SPARSE}
INDEXER_NAMES = {"full": FULL, "shared": SHARED}
PATTERN_NAMES = {"F": FULL, "S": SHARED, **INDEXER_NAMES}
# model spec 1.4: keys without effect whose other values would describe another network
FIXED: dict[str, tuple[Any, ...]] = {
    "mhc": (True,),
    "mla_use_nope": (True,),
    "index_kpool_compress": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_router_dtype": ("float32",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
}
MAX_LAYERS = 4096
MAX_SIZE = 1 << 24
MAX_EXPERTS_IN_ALL = 1 << 18


class _Keys:
    """Typed look-ups in one JSON object; every complaint names the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def fail(self, message: str, kind: ErrorKind = "format") -> ConfigError:
        return ConfigError(f"{self.where}: {message}", kind)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, default: int, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(f"{key} is {short(value)}, must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.values.get(key, default)
        # range first: a huge whole number has no float
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (low <= value <= high) or not math.isfinite(value):
            raise self.fail(f"{key} is {short(value)}, must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {short(value)}, must be true or false")
        return value

    def object(self, key: str) -> Mapping[str, Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(f"{key} is {short(value)}, must be an object")
        return value

    def kinds(self, key: str, names: Mapping[str, str], layers: int) -> tuple[str, ...] | None:
        """A list (or for patterns a string) with one known name a layer; None when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, str)):
            raise self.fail(f"{key} is {short(value)}, must be a list of {layers} names")
        if len(value) != layers:
            raise self.fail(f"{key} has {len(value)} entries, num_hidden_layers is {layers}")
        for i, name in enumerate(value):
            if not isinstance(name, str) or name not in names:
                raise self.fail(f"{key}[{i}] is {short(name)}, must be one of {', '.join(names)}", "unsupported")
        return tuple(names[name] for name in value)


def load_config(directory: Path | str) -> ModelConfig:
    """Read a model directory's config.json (and generation_config.json for the end ids).

    Nested and flat files, all spellings and defaults of model spec 1. Raises ConfigError (one line; kind io, format or unsupported) on the
    first thing that is unreadable, out of range, contradictory, or not this architecture. Absent keys have the library's defaults.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory", "io")
    path = directory / "config.json"
    raw = read_object(path, ConfigError)
    config = parse_config(raw, str(path))
    ids = _generation_ids(directory / "generation_config.json")
    if ids is None:
        return config
    return replace(config, eos_token_ids=ids)


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The checked configuration of a parsed config.json; `where` begins every message. Raises ConfigError."""
    top = _Keys(where, raw)
    nested = top.object("text_config")
    text = top if nested is None else _Keys(f"{where}: text_config", nested)
    _check_type(top, required=True)
    if nested is not None:
        _check_type(text, required=False)
    _check_quantization(top, text)
    for key, allowed in FIXED.items():
        value = text.values.get(key)
        if value is not None and not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
            raise text.fail(f"{key} is {short(value)}, only {' or '.join(short(a) for a in allowed)} is supported", "unsupported")

    layers = text.whole("num_hidden_layers", 45, high=MAX_LAYERS)
    kpool = text.whole("index_kpool", 16)
    topk = text.whole("index_topk", 2048)
    if topk % kpool:
        raise text.fail(f"index_topk {topk} is not a multiple of index_kpool {kpool}")
    if not text.flag("index_kpool_always_select_tail", True) and kpool > 1:
        raise text.fail(f"index_kpool_always_select_tail is false, only true is supported with index_kpool {kpool}", "unsupported")
    heads, qk_dim = _mla_heads(text)
    layer_kinds = text.kinds("layer_types", LAYER_NAMES, layers) or tuple(DSA if i % 4 == 3 else KDA for i in range(layers))
    experts, per_token, groups, kept_groups = _routing(text)
    if layers * experts > MAX_EXPERTS_IN_ALL:
        raise text.fail(f"{layers} layers of {experts} experts are more than the {MAX_EXPERTS_IN_ALL} experts supported", "unsupported")
    kda_heads, kda_dim, conv, bound = _linear(text, layer_kinds)
    return ModelConfig(
        hidden_size=text.whole("hidden_size", 4096),
        num_layers=layers,
        vocab_size=text.whole("vocab_size", 154880),
        intermediate_size=text.whole("intermediate_size", 12288),
        moe_intermediate_size=text.whole("moe_intermediate_size", 2048),
        n_routed_experts=experts,
        num_experts_per_tok=per_token,
        n_shared_experts=text.whole("n_shared_experts", 1, low=0, high=1024),
        n_group=groups,
        topk_group=kept_groups,
        norm_topk_prob=text.flag("norm_topk_prob", True),
        routed_scaling_factor=text.number("routed_scaling_factor", 2.5, -1e6, 1e6),
        swiglu_limit=text.number("swiglu_limit", 10.0, 0.0, 1e30),
        rms_norm_eps=text.number("rms_norm_eps", 1e-5, 0.0, 1.0),
        num_heads=heads,
        q_lora_rank=_q_rank(text),
        kv_lora_rank=text.whole("kv_lora_rank", 512),
        qk_head_dim=qk_dim,
        v_head_dim=text.whole("v_head_dim", 256),
        index_topk=topk,
        index_kpool=kpool,
        index_n_heads=text.whole("index_n_heads", 32),
        index_head_dim=text.whole("index_head_dim", 128),
        kda_heads=kda_heads,
        kda_head_dim=kda_dim,
        conv_width=conv,
        gate_lower_bound=bound,
        hc_mult=text.whole("hc_mult", 4, high=64),
        hc_eps=text.number("hc_eps", 1e-6, 0.0, 1.0),
        hc_sinkhorn_iters=text.whole("hc_sinkhorn_iters", 20, high=10000),
        layer_kinds=layer_kinds,
        mlp_kinds=_mlp_kinds(text, layers),
        indexer_kinds=_indexer_kinds(text, layer_kinds),
        tie_word_embeddings=top.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False),
        max_position_embeddings=text.whole("max_position_embeddings", 1048576, high=1 << 40),
        num_nextn_predict_layers=text.whole("num_nextn_predict_layers", 0, low=0, high=64) if "num_nextn_predict_layers" in text else 0,
        eos_token_ids=_end_ids(top) or _end_ids(text) or (),
        has_vision=top.object("vision_config") is not None,
    )


def _check_type(keys: _Keys, required: bool) -> None:
    value = keys.values.get("model_type")
    if value is None and not required:
        return
    if value not in MODEL_TYPES:
        there = "missing" if value is None else short(value)
        raise keys.fail(f"model_type is {there}, must be {' or '.join(MODEL_TYPES)}", "unsupported")


def _check_quantization(top: _Keys, text: _Keys) -> None:
    """FP8 is decided by the tensors; a config that announces another block size or number format would be read wrongly (model spec 9)."""
    for keys in (top, text):
        value = keys.object("quantization_config")
        if value is None or value.get("quant_method") != "fp8":
            continue
        block, fmt = value.get("weight_block_size", [128, 128]), value.get("fmt", "e4m3")
        if block != [128, 128]:
            raise keys.fail(f"quantization_config.weight_block_size is {short(block)}, only [128, 128] is supported", "unsupported")
        if fmt != "e4m3":
            raise keys.fail(f"quantization_config.fmt is {short(fmt)}, only e4m3 is supported", "unsupported")


def _mla_heads(text: _Keys) -> tuple[int, int]:
    heads, kv_heads = text.whole("num_attention_heads", 64), text.whole("num_key_value_heads", 64)
    if heads != kv_heads:
        raise text.fail(f"num_key_value_heads is {kv_heads}, must equal num_attention_heads {heads}")
    rope = text.whole("qk_rope_head_dim", 0, low=0)
    if rope:
        raise text.fail(f"qk_rope_head_dim is {rope}, only 0 is supported", "unsupported")
    nope = text.whole("qk_nope_head_dim", 256)
    if "qk_head_dim" in text and text.whole("qk_head_dim", nope) != nope:
        raise text.fail(f"qk_head_dim is {text.values['qk_head_dim']}, qk_nope_head_dim is {nope}: they must be equal")
    return heads, nope


def _q_rank(text: _Keys) -> int:
    if text.values.get("q_lora_rank", 1536) is None:
        raise text.fail("q_lora_rank is null, a query projection without a latent is not supported", "unsupported")
    return text.whole("q_lora_rank", 1536)


def _routing(text: _Keys) -> tuple[int, int, int, int]:
    """(experts, experts per token, groups, groups kept), checked against each other (model spec 1.5)."""
    key = "n_routed_experts" if "n_routed_experts" in text else "num_local_experts"
    experts = text.whole(key, 288, high=1 << 16) if key in text else 288
    if "num_local_experts" in text and text.whole("num_local_experts", experts, high=1 << 16) != experts:
        raise text.fail(f"num_local_experts is {text.values['num_local_experts']}, n_routed_experts is {experts}: they mean the same")
    per_token = text.whole("num_experts_per_tok", 8, high=1 << 16)
    groups, kept = text.whole("n_group", 1, high=1 << 16), text.whole("topk_group", 1, high=1 << 16)
    if experts % groups:
        raise text.fail(f"n_routed_experts {experts} is not a multiple of n_group {groups}")
    if groups > 1 and experts // groups < 2:
        raise text.fail(f"n_group {groups} leaves {experts // groups} expert a group, at least 2 are needed")
    if kept > groups:
        raise text.fail(f"topk_group {kept} is more than n_group {groups}")
    left = kept * (experts // groups)
    if per_token > left:
        raise text.fail(f"num_experts_per_tok {per_token} is more than the {left} experts there are to choose from")
    return experts, per_token, groups, kept


def _linear(text: _Keys, layer_kinds: tuple[str, ...]) -> tuple[int, int, int, float | None]:
    """(KDA heads, head dim, convolution width, gate lower bound), with `linear_attn_config` on top (model spec 1.3)."""
    heads, dim, conv = text.whole("linear_num_heads", 64), text.whole("linear_head_dim", 128), text.whole("linear_conv_kernel_dim", 4, high=256)
    bound = _bound(text, "linear_lower_bound", -5.0)
    values = text.object("linear_attn_config")
    if values is None:
        return heads, dim, conv, bound
    inner = _Keys(f"{text.where}: linear_attn_config", values)
    heads, dim = inner.whole("num_heads", heads), inner.whole("head_dim", dim)
    conv = inner.whole("short_conv_kernel_size", conv, high=256)
    bound = _bound(inner, "gate_lower_bound", bound)
    if bound is None and inner.flag("safe_gate", True):
        bound = -5.0
    _check_layer_lists(inner, layer_kinds)
    return heads, dim, conv, bound


def _bound(keys: _Keys, key: str, default: float | None) -> float | None:
    if keys.values.get(key, default) is None:
        return None
    return keys.number(key, default if default is not None else 0.0, -1e6, 0.0)


def _check_layer_lists(keys: _Keys, layer_kinds: tuple[str, ...]) -> None:
    """`kda_layers` and `full_attn_layers` decide nothing, but must not say something else than `layer_types`.

    Some writers count from 0 and some from 1, so either is taken.
    """
    for key, kind in (("kda_layers", KDA), ("full_attn_layers", DSA)):
        value = keys.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise keys.fail(f"{key} is {short(value)}, must be a list of layer numbers")
        really = [i for i, k in enumerate(layer_kinds) if k == kind]
        if sorted(value) not in (really, [i + 1 for i in really]):
            raise keys.fail(f"{key} is {short(value)}, layer_types says {short(really)}")


def _mlp_kinds(text: _Keys, layers: int) -> tuple[str, ...]:
    listed = text.kinds("mlp_layer_types", MLP_NAMES, layers)
    if "first_k_dense_replace" not in text:
        return listed or _first_dense(3, layers)
    first = text.whole("first_k_dense_replace", 3, low=0)
    derived = _first_dense(first, layers)
    if listed is not None and listed != derived:
        at = next(i for i in range(layers) if listed[i] != derived[i])
        raise text.fail(f"first_k_dense_replace is {first}, mlp_layer_types[{at}] is {listed[at]}: they disagree")
    return derived


def _first_dense(count: int, layers: int) -> tuple[str, ...]:
    return tuple(DENSE if i < count else SPARSE for i in range(layers))


def _indexer_kinds(text: _Keys, layer_kinds: tuple[str, ...]) -> tuple[str, ...]:
    layers = len(layer_kinds)
    kinds = text.kinds("indexer_types", INDEXER_NAMES, layers)
    if kinds is None:
        kinds = text.kinds("index_topk_pattern", PATTERN_NAMES, layers)
    if kinds is None:
        every = max(text.whole("index_topk_freq", 1, low=-MAX_SIZE), 1) if "index_topk_freq" in text else 1
        offset = text.whole("index_skip_topk_offset", 2, low=-MAX_SIZE) if "index_skip_topk_offset" in text else 2
        kinds = tuple(FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(layers))
    kinds = tuple(kind if layer_kinds[i] == DSA else FULL for i, kind in enumerate(kinds))
    for i, kind in enumerate(kinds):
        if kind == SHARED and (i == 0 or layer_kinds[i - 1] != DSA or kinds[i - 1] != FULL):
            raise text.fail(f"layer {i} shares the indexer of the layer before it, which must be an attention layer with a full indexer")
    return kinds


def _end_ids(keys: _Keys) -> tuple[int, ...] | None:
    """End ids of one object: None when it has none."""
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_SIZE for i in ids):
        raise keys.fail(f"eos_token_id is {short(value)}, must be a token id or a list of them")
    return tuple(ids) or None


def _generation_ids(path: Path) -> tuple[int, ...] | None:
    if not path.exists():
        return None
    return _end_ids(_Keys(str(path), read_object(path, ConfigError)))
