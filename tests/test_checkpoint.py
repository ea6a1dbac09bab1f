"""Checkpoints under every name, packing and format that may lie on disk: equal weights out (model spec 2, 8, 9)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rawmodel import LANGUAGE, Raw, RawModel, raw_array

from glm53serve.model import quant
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.errors import CheckpointError
from glm53serve.model.synth import synth
from glm53serve.model.weights import Matrix

NANO = Path(__file__).parents[1] / "glm53serve" / "data" / "glm53-nano"
GOLDEN = sorted(p.parent for p in (Path(__file__).parent / "data" / "golden").glob("*/config.json"))
CONFIG: dict[str, Any] = {
    "model_type": "glm5_next", "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 40, "intermediate_size": 20, "moe_intermediate_size": 18,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 10, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "v_head_dim": 8, "index_topk": 8, "index_kpool": 4, "index_n_heads": 2, "index_head_dim": 6, "linear_num_heads": 2,
    "linear_head_dim": 8, "linear_conv_kernel_dim": 3, "hc_mult": 2, "layer_types": ["linear_attention", "attention", "attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "full", "shared"],
}  # fmt: skip


def base_model(folder: Path) -> RawModel:
    """A small random F32 model with a KDA, a DSA and a shared-indexer layer."""
    from glm53serve.model import layout
    from glm53serve.model.config_file import parse_config

    config = parse_config(CONFIG)
    rng = np.random.default_rng(0)
    tensors = {}
    needs = dict(layout.end_needs(config, head=True))
    for layer in range(config.num_layers):
        needs.update(layout.layer_needs(config, layer, ()))
        if layer in config.sparse_layers:
            needs.update(layout.routed_needs(config, layer, ()))
    for name, need in needs.items():
        disk = name if name.startswith("lm_head") else LANGUAGE + name
        tensors[disk] = raw_array("F32", rng.standard_normal(need.shape, np.float32))
    return RawModel(dict(CONFIG), tensors)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RawModel:
    return base_model(tmp_path_factory.mktemp("base"))


def flatten(value: Any, at: str = "") -> Iterator[tuple[str, np.ndarray | int | None]]:
    """Every array of nested weights by its path; matrices dequantised."""
    if isinstance(value, Matrix):
        yield at, quant.dequantise(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from flatten(getattr(value, field.name), f"{at}.{field.name}")
    else:
        yield at, value


def everything(checkpoint: Checkpoint) -> dict[str, Any]:
    """All weights of a checkpoint as float32."""
    found = {"embedding": quant.dequantise(checkpoint.embedding()), "head": quant.dequantise(checkpoint.lm_head()), "norm": checkpoint.final_norm()}
    for layer in range(checkpoint.config.num_layers):
        found.update(flatten(checkpoint.layer(layer), f"{layer}"))
    for layer in checkpoint.config.sparse_layers:
        for expert in range(checkpoint.config.n_routed_experts):
            found.update(flatten(checkpoint.expert(layer, expert), f"{layer}.{expert}"))
    return found


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(right[name], value, err_msg=name)


def plain_values(raw: RawModel) -> dict[str, np.ndarray]:
    return {name: tensor.f32() for name, tensor in raw.tensors.items()}


def test_values_arrive_where_they_belong(base: RawModel, tmp_path: Path) -> None:
    c = open_checkpoint(base.write(tmp_path))
    t = {name.removeprefix(LANGUAGE): value for name, value in plain_values(base).items()}
    kda, dsa, shared = c.layer(0), c.layer(1), c.layer(2)
    seen = everything(c)
    for ours, disk in {
        "0.attention.f_b": "layers.0.self_attn.f_b_proj.weight", "0.attention.g_a": "layers.0.self_attn.g_a_proj.weight",
        "0.attention.b_proj": "layers.0.self_attn.b_proj.weight", "0.attention.o_norm": "layers.0.self_attn.o_norm.weight",
        "0.attention.a_log": "layers.0.self_attn.A_log", "0.attention.dt_bias": "layers.0.self_attn.dt_bias",
        "0.hc_ffn.fn": "layers.0.hc_ffn_fn", "0.hc_attn.scale": "layers.0.hc_attn_scale", "0.ffn.up": "layers.0.mlp.up_proj.weight",
        "1.attention.kv_a": "layers.1.self_attn.kv_a_proj_with_mqa.weight", "1.attention.kv_b": "layers.1.self_attn.kv_b_proj.weight",
        "1.attention.indexer.ape": "layers.1.self_attn.indexer.index_kpool_compress_ape",
        "1.attention.indexer.gate": "layers.1.self_attn.indexer.index_kpool_compress_gate",
        "1.attention.indexer.k_norm_bias": "layers.1.self_attn.indexer.k_norm.bias",
        "1.ffn.bias": "layers.1.mlp.gate.e_score_correction_bias", "1.ffn.router": "layers.1.mlp.gate.weight",
        "1.ffn.shared.down": "layers.1.mlp.shared_experts.down_proj.weight", "2.1.up": "layers.2.mlp.experts.1.up_proj.weight",
        "2.2.down": "layers.2.mlp.experts.2.down_proj.weight", "embedding": "embed_tokens.weight", "head": "lm_head.weight", "norm": "norm.weight",
    }.items():  # fmt: skip
        np.testing.assert_array_equal(seen[ours], t[disk], err_msg=ours)
    np.testing.assert_array_equal(kda.attention.k_conv, t["layers.0.self_attn.k_conv1d.weight"][:, 0, :])
    assert dsa.attention.indexer is not None and shared.attention.indexer is None
    assert (c.has_mtp, c.has_vision, c.notes) == (False, False, [])
    assert c.dense_bytes + c.expert_bytes == sum(len(r.data) for r in base.tensors.values())
    assert c.expert_bytes == 2 * 3 * 3 * 18 * 24 * 4


# -- other names and packings of the same numbers


def plain_prefix(raw: RawModel) -> None:
    raw.rename(LANGUAGE, "model.")


def hyper_connection_names(raw: RawModel) -> None:
    raw.rename(".hc_attn_", ".attn_hc.")
    raw.rename(".hc_ffn_", ".ffn_hc.")


def forget_gate_names(raw: RawModel) -> None:
    for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
        raw.rename(f".self_attn.{part}", f".self_attn.forget_gate.{part}")


def decay_shape(raw: RawModel) -> None:
    for name, tensor in raw.tensors.items():
        if name.endswith("A_log"):
            tensor.shape = (1, 1, *tensor.shape, 1)


def flat_convolutions(raw: RawModel) -> None:
    for name, tensor in raw.tensors.items():
        if "_conv1d" in name:
            tensor.shape = (tensor.shape[0], tensor.shape[2])


def fused_convolutions(raw: RawModel) -> None:
    for layer in sorted({name.split("q_conv1d")[0] for name in raw.tensors if "q_conv1d" in name}):
        parts = [raw.tensors.pop(f"{layer}{c}_conv1d.weight") for c in "qkv"]
        _, one, taps = parts[0].shape
        raw.tensors[f"{layer}conv1d.weight"] = Raw(parts[0].dtype, (3 * parts[0].shape[0], one, taps), b"".join(p.data for p in parts))


def packed_experts(raw: RawModel) -> None:
    """One tensor for all gates and ups of a layer and one for all downs, in whatever format the single ones have; scales likewise."""
    single = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight(.*)")
    found: dict[tuple[str, str], dict[tuple[int, str], Raw]] = {}
    for name in list(raw.tensors):
        if m := single.fullmatch(name):
            kind = "down_proj" if m[3] == "down" else "gate_up_proj"
            found.setdefault((m[1] + kind, m[4]), {})[int(m[2]), m[3]] = raw.tensors.pop(name)
    for (name, suffix), parts in found.items():
        experts = 1 + max(e for e, _ in parts)
        order = ("down",) if name.endswith("down_proj") else ("gate", "up")
        pieces = [parts[e, kind] for e in range(experts) for kind in order]
        first = pieces[0].shape
        flat = len(first) == 1 and pieces[0].dtype in ("U8", "F32")
        shape = (len(pieces) * first[0],) if flat else (experts, len(order) * first[0], *first[1:])
        raw.tensors[name + suffix] = Raw(pieces[0].dtype, shape, b"".join(p.data for p in pieces))


def everything_renamed(raw: RawModel) -> None:
    for change in (hyper_connection_names, forget_gate_names, decay_shape, fused_convolutions, packed_experts, plain_prefix):
        change(raw)


def packed_downs_only(raw: RawModel) -> None:
    before = dict(raw.tensors)
    packed_experts(raw)
    for name in [n for n in raw.tensors if n.endswith("gate_up_proj")]:
        del raw.tensors[name]
    raw.tensors |= {n: r for n, r in before.items() if re.search(r"experts\.\d+\.(gate|up)_proj", n)}


ALIASES = [
    plain_prefix, hyper_connection_names, forget_gate_names, decay_shape, flat_convolutions, fused_convolutions, packed_experts, packed_downs_only,
    everything_renamed,
]  # fmt: skip


@pytest.mark.parametrize("change", ALIASES, ids=lambda f: f.__name__)
def test_other_names_give_equal_weights(base: RawModel, tmp_path: Path, change: Callable[[RawModel], None]) -> None:
    expected = everything(open_checkpoint(base.write(tmp_path / "plain")))
    raw = base.copy()
    change(raw)
    assert set(raw.tensors) != set(base.tensors) or any(raw.tensors[n].shape != base.tensors[n].shape for n in raw.tensors)
    assert_same(everything(open_checkpoint(raw.write(tmp_path / "one"))), expected)
    assert_same(everything(open_checkpoint(raw.write(tmp_path / "many", shards=4))), expected)


def test_shards_without_an_index(base: RawModel, tmp_path: Path) -> None:
    expected = everything(open_checkpoint(base.write(tmp_path, shards=3)))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(everything(open_checkpoint(tmp_path)), expected)


# -- formats


def store(raw: RawModel, select: Callable[[str], bool], fmt: str) -> dict[str, np.ndarray]:
    """Store chosen matrices of an F32 model in a format; returns the float32 values they then have, by name."""
    values = {}
    for name in [n for n, r in raw.tensors.items() if len(r.shape) == 2 and select(n)]:
        w = raw.tensors[name].f32()
        cols = w.shape[1]
        if fmt == "bf16":
            bits = quant.f32_to_bf16(w)
            raw.tensors[name] = raw_array("BF16", bits)
            values[name] = quant.bf16_to_f32(bits)
        elif fmt == "fp8":
            data, scale = quant.quantise_fp8(w)
            raw.tensors[name] = raw_array("F8_E4M3", data)
            raw.tensors[name + "_scale_inv"] = raw_array("F32", scale)
            values[name] = quant.dequantise_fp8(data, scale)
        elif fmt == "int4":
            data, scale = quant.quantise_int4(w)
            raw.tensors[name] = raw_array("U8", data.reshape(-1))
            raw.tensors[name + ".qs"] = raw_array("F32", scale.reshape(-1))
            values[name] = quant.dequantise_int4(data, scale, cols)
        else:
            data, scale = quant.quantise_int8(w)
            raw.tensors[name] = raw_array("I8", data)
            raw.tensors[name + ".qs"] = raw_array("F32", scale)
            values[name] = quant.dequantise_int8(data, scale)
    return values


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def is_matrix(name: str) -> bool:
    """Matrices, as against router, hyper-connection and pool offsets, which are 2-D but never quantised."""
    return not name.endswith(("gate.weight", "_fn", "_ape"))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("select", [is_expert, is_matrix], ids=lambda f: f.__name__)
def test_formats_give_their_float_values(base: RawModel, tmp_path: Path, fmt: str, select: Callable[[str], bool]) -> None:
    """A model stored in a format and a float32 model with the values it stands for give equal weights, packed or not."""
    raw, widened = base.copy(), base.copy()
    values = store(raw, select, fmt)
    assert len(values) > 15
    for name, value in values.items():
        widened.tensors[name] = raw_array("F32", value)
    expected = everything(open_checkpoint(widened.write(tmp_path / "f32")))
    opened = open_checkpoint(raw.write(tmp_path / fmt))
    assert opened.expert(1, 0).up.format == fmt
    assert_same(everything(opened), expected)
    if fmt != "fp8":
        packed_experts(raw)
        assert_same(everything(open_checkpoint(raw.write(tmp_path / "packed"))), expected)


def test_packed_fp8_with_whole_blocks(tmp_path: Path) -> None:
    raw = base_model(tmp_path)
    raw.config |= {"moe_intermediate_size": 128, "hidden_size": 24}
    rng = np.random.default_rng(1)
    for name, tensor in raw.tensors.items():
        if "expert" in name and not name.endswith("bias"):
            shape = tuple(128 if n == 18 else n for n in tensor.shape)
            raw.tensors[name] = raw_array("F32", rng.standard_normal(shape, np.float32))
    store(raw, is_expert, "fp8")
    expected = everything(open_checkpoint(raw.write(tmp_path / "single")))
    packed_experts(raw)
    assert_same(everything(open_checkpoint(raw.write(tmp_path / "packed"))), expected)


def test_packed_fp8_block_over_gate_and_up_is_refused(base: RawModel, tmp_path: Path) -> None:
    raw = base.copy()
    store(raw, is_expert, "fp8")
    packed_experts(raw)
    for name in [n for n in raw.tensors if n.endswith("gate_up_proj_scale_inv")]:
        raw.tensors[name] = raw_array("F32", np.ones((3, 1, 1), np.float32))
    with pytest.raises(CheckpointError, match=r"gate_up_proj: F8_E4M3 \[3, 36, 24\], a scale block that spans") as caught:
        open_checkpoint(raw.write(tmp_path))
    assert caught.value.kind == "unsupported"


def test_shaped_containers(base: RawModel, tmp_path: Path) -> None:
    """int4 and int8 arrays may be flat or have their rows."""
    raw = base.copy()
    store(raw, is_expert, "int4")
    expected = everything(open_checkpoint(raw.write(tmp_path / "flat")))
    for name, tensor in raw.tensors.items():
        if is_expert(name):
            rows = 24 if "down_proj" in name else 18
            tensor.shape = (rows, tensor.shape[0] // rows)
    assert_same(everything(open_checkpoint(raw.write(tmp_path / "shaped"))), expected)


@pytest.mark.parametrize(("fmt", "packed"), [("bf16", False), ("bf16", True), ("fp8", False), ("int8", False), ("int8", True), ("int4", False), ("int4", True)])
def test_pieces_are_the_expert(base: RawModel, tmp_path: Path, fmt: str, packed: bool) -> None:
    """Reading the byte ranges of `expert_pieces` gives exactly the arrays of `expert`."""
    raw = base.copy()
    store(raw, is_expert, fmt)
    if packed:
        packed_experts(raw)
    c = open_checkpoint(raw.write(tmp_path, shards=3))
    for layer in (1, 2):
        for expert in range(3):
            weights = c.expert(layer, expert)
            arrays = {}
            for piece in c.expert_pieces(layer, expert):
                with piece.path.open("rb") as file:
                    file.seek(piece.offset)
                    arrays[piece.role] = np.frombuffer(file.read(piece.nbytes), piece.dtype).reshape(piece.shape)
                assert piece.format == fmt
            for role in ("gate", "up", "down"):
                matrix = getattr(weights, role)
                np.testing.assert_array_equal(arrays.pop(role), matrix.data)
                if matrix.scale is not None:
                    np.testing.assert_array_equal(arrays.pop(f"{role}.scale"), matrix.scale)
            assert not arrays
    for layer, expert in ((0, 0), (1, 3), (1, -1), (3, 0)):
        with pytest.raises(IndexError):
            c.expert(layer, expert)


# -- head, MTP, vision


def test_head_ties(base: RawModel, tmp_path: Path) -> None:
    raw = base.copy()
    raw.config["tie_word_embeddings"] = True
    own = open_checkpoint(raw.write(tmp_path / "own"))
    np.testing.assert_array_equal(own.lm_head().data, raw.tensors["lm_head.weight"].f32())
    del raw.tensors["lm_head.weight"]
    tied = open_checkpoint(raw.write(tmp_path / "tied"))
    np.testing.assert_array_equal(tied.lm_head().data, tied.embedding().data)
    assert tied.notes == ["lm_head is tied to the embedding"]
    raw.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"^lm_head\.weight: missing, the config needs \[40, 24\]$"):
        open_checkpoint(raw.write(tmp_path / "none"))


def test_mtp_block_is_kept_out_and_reported(tmp_path: Path) -> None:
    c = open_checkpoint(NANO)
    assert c.has_mtp and c.mtp_bytes == 1438320 and c.notes[0].startswith("MTP block: 61 tensors")
    raw = RawModel.read(NANO)
    assert c.dense_bytes + c.expert_bytes + c.mtp_bytes == sum(len(r.data) for r in raw.tensors.values())
    expected = everything(c)
    raw.text["num_nextn_predict_layers"] = 0
    although = open_checkpoint(raw.write(tmp_path / "although"))
    assert although.has_mtp and "although num_nextn_predict_layers is 0" in although.notes[0]
    assert_same(everything(although), expected)
    raw.tensors = {n: r for n, r in raw.tensors.items() if ".layers.8." not in n}
    raw.text["num_nextn_predict_layers"] = 1
    without = open_checkpoint(raw.write(tmp_path / "without"))
    assert not without.has_mtp and "served without drafts" in without.notes[0]
    assert_same(everything(without), expected)


def test_mtp_block_in_part_is_refused(tmp_path: Path) -> None:
    raw = RawModel.read(NANO)
    del raw.tensors[LANGUAGE + "layers.8.hnorm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.8\.hnorm\.weight: missing, the config needs \[192\] \(the MTP block, layer 8 on, is there in part\)"):
        open_checkpoint(raw.write(tmp_path))


def test_vision_tensors_are_kept_out_and_reported(base: RawModel, tmp_path: Path) -> None:
    raw = base.copy()
    raw.tensors["model.visual.blocks.0.attn.qkv.weight"] = Raw("BF16", (3, 2), bytes(12))
    c = open_checkpoint(raw.write(tmp_path))
    assert c.has_vision and c.vision_bytes == 12 and c.notes == ["vision tower: 1 tensors, 12 bytes, not used by the text path"]
    assert c.dense_bytes + c.expert_bytes == sum(len(r.data) for r in base.tensors.values())
    raw = base.copy()
    raw.config["vision_config"] = {"depth": 1}
    assert open_checkpoint(raw.write(tmp_path / "without")).notes == ["vision_config is there, the files have no vision tower"]


@pytest.mark.parametrize("directory", GOLDEN, ids=lambda p: p.name)
def test_golden_models_open(directory: Path) -> None:
    c = open_checkpoint(directory)
    assert all(np.isfinite(v).all() for v in everything(c).values() if isinstance(v, np.ndarray))


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    """A file whose data are a hole opens as well as a full one, and no map is made until a weight is asked for."""
    synth(tmp_path / "m", "tiny")
    (path,) = (tmp_path / "m").glob("*.safetensors")
    size = path.stat().st_size
    with path.open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.truncate(header)
        file.truncate(size)
    c = open_checkpoint(tmp_path / "m")
    assert c._extents._maps == {}
    assert not c.embedding().data.any()


def test_index_may_be_of_any_size_and_order(base: RawModel, tmp_path: Path) -> None:
    base.write(tmp_path, shards=5)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] = dict(reversed(value["weight_map"].items()))
    index.write_text(json.dumps(value | {"metadata": {"total_size": 1}}))
    (tmp_path / "stray.safetensors").write_bytes(b"not part of the model")
    assert open_checkpoint(tmp_path).config.num_layers == 3
