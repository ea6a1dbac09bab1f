"""Random models: the shapes, formats and file layout promised, and numbers a network can live with."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rawmodel import LANGUAGE, RawModel

from glm53serve.cli import main
from glm53serve.engine.tokenizer import Tokenizer
from glm53serve.model import quant, shards
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.config import DENSE, DSA, KDA, SPARSE
from glm53serve.model.config_file import parse_config
from glm53serve.model.errors import ModelError
from glm53serve.model.reference import ReferenceModel
from glm53serve.model.shapes import shape_config
from glm53serve.model.shards import Entry, Unit, plan_shards, write_model
from glm53serve.model.synth import plan, synth

FORMATS = ("bf16", "fp8", "int4")


def reference(c: Checkpoint) -> ReferenceModel:
    return ReferenceModel(c.config, c.layer, c, c.embedding(), c.final_norm(), c.lm_head())


def test_tiny_is_what_it_says(tmp_path: Path) -> None:
    synth(tmp_path, "tiny")
    c = open_checkpoint(tmp_path)
    assert (c.config.hidden_size, c.config.n_routed_experts, c.config.num_experts_per_tok) == (128, 4, 2)
    assert c.config.layer_kinds == (KDA, KDA, KDA, DSA) and c.config.mlp_kinds == (DENSE, SPARSE, SPARSE, SPARSE)
    assert not list(tmp_path.glob("*.partial"))


def test_nano_has_the_shipped_shape() -> None:
    shipped = parse_config(json.loads((Path(__file__).parents[1] / "glm53serve/data/glm53-nano/config.json").read_text()))
    ours = parse_config(shape_config("nano"))
    same = {name: getattr(shipped, name) for name in shipped.__dataclass_fields__ if name not in ("eos_token_ids", "num_nextn_predict_layers")}
    assert same == {name: getattr(ours, name) for name in same}


def test_mid_and_flash_parameters() -> None:
    """449 M, and the published model's 313,326,811,966 (model spec 11)."""
    for shape, parameters in (("mid", 448_794_864), ("flash", 313_326_811_966)):
        units, _ = plan(parse_config(shape_config(shape)), "bf16")
        assert sum(int(np.prod(e.shape, dtype=np.int64)) for unit in units for e in unit.entries) == parameters


def test_layers_and_experts() -> None:
    c = parse_config(shape_config("flash", layers=5, experts=3))
    assert c.layer_kinds == (KDA, KDA, KDA, DSA, KDA) and c.mlp_kinds == (DENSE,) * 3 + (SPARSE,) * 2
    assert (c.n_routed_experts, c.num_experts_per_tok, c.hidden_size, c.vocab_size) == (3, 3, 4096, 154880)
    assert parse_config(shape_config("flash", layers=2)).mlp_kinds == (DENSE, DENSE)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", ["tiny", "nano"])
def test_formats(tmp_path: Path, shape: str, fmt: str) -> None:
    synth(tmp_path, shape, fmt=fmt)
    c = open_checkpoint(tmp_path)
    tensors = RawModel.read(tmp_path).tensors
    layer = c.config.sparse_layers[0]
    assert c.expert(layer, 0).gate.format == fmt
    assert c.embedding().format == "bf16" and c.layer(3).attention.kv_b.format == "bf16"
    assert c.layer(3).attention.q_a.format == ("fp8" if fmt == "fp8" else "bf16")
    assert c.layer(0).attention.o_proj.format == "bf16"
    assert c.layer(0).ffn.up.format == ("fp8" if fmt == "fp8" else "bf16")
    assert tensors[LANGUAGE + "layers.0.hc_attn_fn"].dtype == ("F32" if fmt == "int4" else "BF16")
    assert tensors[LANGUAGE + "layers.0.hc_attn_base"].dtype == "F32"
    if fmt == "int4":
        packed = tensors[f"{LANGUAGE}layers.{layer}.mlp.experts.0.up_proj.weight"]
        assert packed.dtype == "U8" and len(packed.shape) == 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_numbers_are_sensible(tmp_path: Path, fmt: str) -> None:
    """Logits spread a few units and differ by row, states stay of order one over hundreds of tokens, greedy answers do not end by themselves."""
    synth(tmp_path, "tiny", fmt=fmt, seed=3)
    c = open_checkpoint(tmp_path)
    model = reference(c)
    state = model.new_state()
    ids = np.random.default_rng(0).integers(0, 512, 300)
    logits = model.forward(ids, state)
    assert np.isfinite(logits).all() and 1.5 < logits.std() < 5
    assert len(set(logits.argmax(1).tolist())) > 50
    assert 0.5 < np.abs(state.layers[0].s).max() < 100
    assert (logits[:, c.config.eos_token_ids[0]] == 0).all()


def test_weights_are_real_and_spread(tmp_path: Path) -> None:
    """No repeated or constant rows, mean zero, spread 1 / sqrt(columns), in every format alike."""
    for fmt in FORMATS:
        synth(tmp_path / fmt, "nano", fmt=fmt)
        c = open_checkpoint(tmp_path / fmt)
        w = np.concatenate([quant.dequantise(c.expert(1, e).down) for e in range(12)])
        assert abs(w.std() * 8 - 1) < 0.05 and abs(w.mean()) < 0.002
        assert len(np.unique(w[:, :16].copy().view("V64"))) == len(w)


def test_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synth(tmp_path / name, "tiny", fmt="int4", seed=seed)
    a, b, c = (next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "abc")
    assert a == b and a != c


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_expert_is_one_run_of_bytes(tmp_path: Path, fmt: str) -> None:
    synth(tmp_path, "tiny", fmt=fmt)
    c = open_checkpoint(tmp_path)
    for layer in c.config.sparse_layers:
        for expert in range(4):
            pieces = c.expert_pieces(layer, expert)
            assert len(pieces) == (3 if fmt == "bf16" else 6)
            for one, following in pairwise(pieces):
                assert one.path == following.path and one.offset + one.nbytes == following.offset
    assert c.expert_pieces(1, 0)[0].offset % 4096 == 0


def test_many_shards(tmp_path: Path) -> None:
    """Cut into several files, the same weights; no expert is cut."""
    config = parse_config(shape_config("tiny"))
    units, _ = plan(config, "int4")
    for limit in (1, 100_000, 10**12):
        files = plan_shards(units, limit)
        assert sorted(e.name for f in files for e in f) == sorted(e.name for u in units for e in u.entries)
        for unit in units:
            assert sum(unit.entries[0] in f for f in files) == 1
            assert next(f for f in files if unit.entries[0] in f).count(unit.entries[-1]) == 1
    assert len(plan_shards(units, 1)) == len(units)


def test_model_over_several_files_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synth(tmp_path / "one", "tiny")
    monkeypatch.setattr(shards, "SHARD_BYTES", 300_000)
    synth(tmp_path / "many", "tiny")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 4
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    np.testing.assert_array_equal(one.lm_head().data, many.lm_head().data)
    np.testing.assert_array_equal(one.expert(3, 3).down.data, many.expert(3, 3).down.data)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_safetensors_library_reads_it(tmp_path: Path, fmt: str) -> None:
    """The header order and padding of our files are within the format."""
    from safetensors import safe_open

    synth(tmp_path, "tiny", fmt=fmt)
    ours = RawModel.read(tmp_path).tensors
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="np") as file:
        assert set(file.keys()) == set(ours)
        for name, raw in ours.items():
            assert tuple(file.get_slice(name).get_shape()) == raw.shape
            if raw.dtype in ("F32", "U8"):
                assert file.get_tensor(name).tobytes() == raw.data


def test_tokenizer_is_one_token_a_byte(tmp_path: Path) -> None:
    synth(tmp_path, "tiny")
    tokenizer = Tokenizer(tmp_path)
    payload = bytes(range(256)) + "grüß 日本\n\n  x".encode()
    assert tokenizer.encode(payload) == list(payload)
    assert not tokenizer.special_ids
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert library.get_vocab_size() == 256 and library.decode(library.encode("a ß\n").ids) == "a ß\n"


# -- what is refused, and what is left behind


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"shape": "huge"}, "shape is 'huge', must be one of nano, tiny, mid, flash"),
        ({"layers": 0}, "layers is 0, must be a whole number from 1"),
        ({"experts": -1}, "experts is -1"),
        ({"experts": 10**9}, "experts is 1000000000"),
        ({"fmt": "int3"}, "format is 'int3', must be one of bf16, fp8, int4"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        synth(tmp_path / "m", **({"shape": "tiny"} | arguments))
    assert not (tmp_path / "m").exists()


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**12, 10**12 - 10**10, 10**10))
    assert main(["synth", str(tmp_path / "m"), "--shape", "flash"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == f"glm53serve: {tmp_path / 'm'}: the model takes 626.66 GB, the disk has 10.00 GB free\n"
    assert not (tmp_path / "m").exists()


def test_occupied_directory(tmp_path: Path) -> None:
    synth(tmp_path, "tiny")
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    with pytest.raises(ModelError, match=r"holds a model already \(config.json\)"):
        synth(tmp_path, "nano")
    assert before == {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        synth(tmp_path / "file" / "m", "tiny")
    assert caught.value.kind == "io"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_on_the_way_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    units = [Unit((Entry(f"t{i}", "F32", (4,)),)) for i in range(3)]

    def data(entry: Entry) -> list[np.ndarray]:
        if entry.name == "t2":
            raise error
        return [np.zeros(4, np.float32)]

    with pytest.raises(ModelError if isinstance(error, OSError) else KeyboardInterrupt):
        write_model(tmp_path / "m", units, data, {"config.json": "{}"}, limit=20)
    assert not (tmp_path / "m").exists()


def test_command(tmp_path: Path) -> None:
    assert main(["synth", str(tmp_path / "m"), "--shape", "tiny", "--layers", "2", "--experts", "1", "--format", "fp8", "--seed", "5"]) == 0
    c = open_checkpoint(tmp_path / "m").config
    assert (c.num_layers, c.n_routed_experts, c.num_experts_per_tok) == (2, 1, 1)
