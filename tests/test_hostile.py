"""Damaged, forged and mismatched model directories: each gives one clear line and exit code 1, no traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rawmodel import LANGUAGE, Raw, RawModel, blob, framed

from glm53serve.cli import main
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.errors import CheckpointError, ConfigError, ModelError, one_line
from glm53serve.model.info import describe
from glm53serve.model.synth import synth

L0 = LANGUAGE + "layers.0."
L3 = LANGUAGE + "layers.3."
Q = L0 + "self_attn.q_proj.weight"
UP = LANGUAGE + "layers.2.mlp.experts.1.up_proj.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RawModel]:
    """A tiny random model in each stored format."""
    found = {}
    for fmt in ("bf16", "fp8", "int4"):
        directory = tmp_path_factory.mktemp("models") / fmt
        synth(directory, "tiny", fmt=fmt)
        found[fmt] = RawModel.read(directory)
    return found


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def forge(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Rewrite the header of the weight file without moving its data."""

    def apply(directory: Path) -> None:
        header, data = header_of(directory / FILE)
        change(header)
        (directory / FILE).write_bytes(framed(json.dumps(header).encode()) + data)

    return apply


def cut(count: int) -> Callable[[Path], None]:
    """Cut the end of the weight file."""
    return lambda d: os.truncate(d / FILE, (d / FILE).stat().st_size - count)


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda d: (d / name).write_bytes(data) and None


def overlap(header: dict[str, Any]) -> None:
    names = [n for n in header if n != "__metadata__"]
    size = header[names[1]]["data_offsets"]
    other = next(n for n in names[2:] if header[n]["shape"] == header[names[1]]["shape"] and header[n]["dtype"] == header[names[1]]["dtype"])
    header[other]["data_offsets"] = size


def entry(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(values)


def extra_file(directory: Path) -> None:
    header, data = header_of(directory / FILE)
    first, last = header[Q]["data_offsets"]
    (directory / "more.safetensors").write_bytes(blob({Q: Raw("BF16", tuple(header[Q]["shape"]), data[first:last])}))


def index(weight_map: Any, **files: Any) -> Callable[[Path], None]:
    return lambda d: (d / INDEX).write_text(json.dumps({"weight_map": weight_map})) and None


def index_of_all(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        weight_map = dict.fromkeys((n for n in header_of(directory / FILE)[0] if n != "__metadata__"), FILE)
        change(weight_map)
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def directory_instead(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / FILE).mkdir()


def pipe_instead(name: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        if not hasattr(os, "mkfifo"):
            pytest.skip("no named pipes here")
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return apply


# file-level damage: what is done to the directory, what the line must say, kind
FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no weights": (lambda d: (d / FILE).unlink(), "no *.safetensors file", "io"),
    "empty file": (overwrite(FILE, b""), f"{FILE}: 0 bytes, not a whole safetensors file", "format"),
    "seven bytes": (overwrite(FILE, b"1234567"), "7 bytes, not a whole", "format"),
    "text": (overwrite(FILE, b"<html>404 Not Found</html>"), "a header of", "format"),
    "length beyond file": (overwrite(FILE, b"\xff" * 8 + b"{}"), "a header of 18446744073709551615 bytes in a file of 10", "format"),
    "header not json": (overwrite(FILE, framed(b"{nope}")), "safetensors header: not JSON", "format"),
    "header not utf-8": (overwrite(FILE, framed(b'{"\xff":1}')), "not UTF-8 at byte 2", "format"),
    "header a list": (overwrite(FILE, framed(b"[]")), "a JSON object is needed", "format"),
    "header too deep": (overwrite(FILE, framed(b'{"a":' + b"[" * 100000)), "nested too deeply", "format"),
    "tensor twice": (overwrite(FILE, framed(b'{"a":{},"a":{}}')), 'key "a" is there twice', "format"),
    "cut data": (cut(1), "(truncated)", "format"),
    "cut half": (cut(700_000), "(truncated)", "format"),
    "bytes behind": (lambda d: (d / FILE).write_bytes((d / FILE).read_bytes() + b"!!"), "2 bytes after the last tensor", "format"),
    "overlap": (forge(overlap), "its bytes overlap those of", "format"),
    "gap": (forge(lambda h: h.pop(Q) and None), "bytes before it belong to no tensor", "format"),
    "offsets backwards": (forge(entry(Q, data_offsets=[10, 0])), f"{Q}: data_offsets is [10, 0]", "format"),
    "offsets beyond": (forge(entry(Q, data_offsets=[0, 1 << 61], dtype="Q9")), "overlap", "format"),
    "offsets huge": (forge(entry(Q, data_offsets=[0, 1 << 70])), "data_offsets is [0, 1180591620717411303424]", "format"),
    "negative shape": (forge(entry(Q, shape=[-128, -128])), f"{Q}: shape is [-128, -128]", "format"),
    "shape lies": (forge(entry(Q, shape=[128, 129])), f"{Q}: 32768 bytes, BF16 [128, 129] needs 33024", "format"),
    "dtype lies": (forge(entry(Q, dtype="F32")), f"{Q}: 32768 bytes, F32 [128, 128] needs 65536", "format"),
    "dtype a number": (forge(entry(Q, dtype=4)), f"{Q}: dtype is 4", "format"),
    "entry a list": (forge(lambda h: h.update({Q: [1]})), f"{Q}: header entry is [1]", "format"),
    "in two files": (extra_file, f"{Q}: is also in {FILE}", "format"),
    "index broken": (overwrite(INDEX, b"{"), f"{INDEX}: not JSON", "format"),
    "index empty": (overwrite(INDEX, b"{}"), "weight_map is null", "format"),
    "index names nothing": (index({}), "no *.safetensors file", "io"),
    "index names a missing file": (index({Q: "gone.safetensors"}), "names gone.safetensors, which is not there", "io"),
    "index leaves the directory": (index({Q: "../x.safetensors"}), 'file is "../x.safetensors", must be the name of a file beside', "format"),
    "index names a number": (index({Q: 3}), f"{Q}: file is 3", "format"),
    "index promises more": (index_of_all(lambda m: m.update({"model.x": FILE})), f"model.x: not in {FILE}", "format"),
    "index promises less": (index_of_all(lambda m: m.pop(Q) and None), f"{Q}: not in {INDEX}", "format"),
    "a directory": (directory_instead, "not a regular file", "io"),
    "a pipe": (pipe_instead(FILE), "not a regular file", "io"),
    "config a pipe": (pipe_instead("config.json"), "config.json: not a regular file", "io"),
    "config gone": (lambda d: (d / "config.json").unlink(), "config.json: no such file", "io"),
    "config broken": (overwrite("config.json", b'{"model_type": '), "config.json: not JSON", "format"),
}


def drop(name: str) -> Callable[[RawModel], None]:
    return lambda m: m.tensors.pop(name) and None


def put(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[RawModel], None]:
    size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I32": 4}.get(dtype, 1)
    return lambda m: m.tensors.update({name: Raw(dtype, shape, bytes(size * int(np.prod(shape))))})


def both(*changes: Callable[[RawModel], None]) -> Callable[[RawModel], None]:
    def apply(raw: RawModel) -> None:
        for change in changes:
            change(raw)

    return apply


def text(**values: Any) -> Callable[[RawModel], None]:
    return lambda m: m.text.update(values)


def rename(old: str, new: str) -> Callable[[RawModel], None]:
    return lambda m: m.rename(old, new)


# tensors that do not fit the config: stored format, what is done, the whole line, kind
TENSORS: dict[str, tuple[str, Callable[[RawModel], None], str, str]] = {
    "missing": ("bf16", drop(Q), f"{Q}: missing, the config needs [128, 128]", "format"),
    "missing expert": ("int4", drop(UP), f"{UP}: missing, the config needs [64, 128]", "format"),
    "missing norm": ("bf16", drop(LANGUAGE + "norm.weight"), f"{LANGUAGE}norm.weight: missing, the config needs [128]", "format"),
    "missing head": ("bf16", drop("lm_head.weight"), "lm_head.weight: missing, the config needs [512, 128]", "format"),
    "unknown": ("bf16", put("model.extra", "F32", (2,)), "model.extra: F32 [2], the config needs no such tensor", "format"),
    "unknown prefix": ("bf16", put("transformer.h.0", "F32", (2,)), "transformer.h.0: F32 [2], the config needs no such tensor", "format"),
    "renamed": (
        "bf16",
        rename(L0 + "self_attn.q_proj", L0 + "self_attn.query"),
        f"{L0}self_attn.query.weight: BF16 [128, 128], the config needs no such tensor; {Q}: missing, the config needs [128, 128]",
        "format",
    ),
    "shape": ("bf16", put(Q, "BF16", (128, 127)), f"{Q}: BF16 [128, 127], the config needs [128, 128]", "format"),
    "rank": ("bf16", put(Q, "BF16", (128 * 128,)), f"{Q}: BF16 [16384], the config needs [128, 128]", "format"),
    "transposed": ("bf16", put(UP, "BF16", (128, 64)), f"{UP}: BF16 [128, 64], the config needs [64, 128]", "format"),
    "norm shape": ("bf16", put(L0 + "input_layernorm.weight", "BF16", (127,)), f"{L0}input_layernorm.weight: BF16 [127], the config needs [128]", "format"),
    "convolution width": (
        "bf16",
        put(L0 + "self_attn.q_conv1d.weight", "BF16", (128, 1, 5)),
        f"{L0}self_attn.q_conv1d.weight: BF16 [128, 1, 5], the config needs [128, 1, 4]",
        "format",
    ),
    "half floats": ("bf16", put(Q, "F16", (128, 128)), f"{Q}: F16 [128, 128], the config needs F32, BF16, F8_E4M3, I8, U8 [128, 128]", "unsupported"),
    "quantised norm": (
        "bf16",
        put(L0 + "input_layernorm.weight", "I8", (128,)),
        f"{L0}input_layernorm.weight: I8 [128], the config needs F32 or BF16 [128]",
        "unsupported",
    ),
    "fp8 without scale": (
        "fp8",
        drop(UP + "_scale_inv"),
        f"{UP}_scale_inv: missing, the config needs the scales of {UP}",
        "format",
    ),
    "scale without fp8": (
        "bf16",
        put(Q + "_scale_inv", "F32", (1, 1)),
        f"{Q}_scale_inv: F32 [1, 1], the config needs no such tensor",
        "format",
    ),
    "fp8 scale grid": ("fp8", put(UP + "_scale_inv", "F32", (1, 2)), f"{UP}_scale_inv: F32 [1, 2], the config needs F32 [1, 1]", "format"),
    "fp8 scale dtype": ("fp8", put(UP + "_scale_inv", "BF16", (1, 1)), f"{UP}_scale_inv: BF16 [1, 1], the config needs F32 [1, 1]", "format"),
    "int4 without scale": ("int4", drop(UP + ".qs"), f"{UP}.qs: missing, the config needs the scales of {UP}", "format"),
    "int4 length": ("int4", put(UP, "U8", (4095,)), f"{UP}: U8 [4095], the config needs [64, 128] as U8 [4096]", "format"),
    "int4 scales": ("int4", put(UP + ".qs", "F32", (64,)), f"{UP}.qs: F32 [64], the config needs F32 [64, 2]", "format"),
    "two names": (
        "bf16",
        put("model.layers.0.self_attn.q_proj.weight", "BF16", (128, 128)),
        f"model.layers.0.self_attn.q_proj.weight: BF16 [128, 128], {Q} is the same weight: the config needs one of them",
        "format",
    ),
    "packed and single": (
        "bf16",
        put(LANGUAGE + "layers.1.mlp.experts.down_proj", "BF16", (4, 128, 64)),
        f"{LANGUAGE}layers.1.mlp.experts.0.down_proj.weight: BF16 [128, 64], the config needs no such tensor",
        "format",
    ),
    "packed the other way": (
        "bf16",
        both(
            lambda m: [m.tensors.pop(f"{LANGUAGE}layers.1.mlp.experts.{e}.down_proj.weight") for e in range(4)] and None,
            put(LANGUAGE + "layers.1.mlp.experts.down_proj", "BF16", (4, 64, 128)),
        ),
        f"{LANGUAGE}layers.1.mlp.experts.down_proj: BF16 [4, 64, 128], the config needs [4, 128, 64]",
        "format",
    ),
    "more layers than files": (
        "bf16",
        text(num_hidden_layers=5, layer_types=["linear_attention"] * 3 + ["attention"] + ["linear_attention"], mlp_layer_types=None, indexer_types=None),
        f"{LANGUAGE}layers.4.input_layernorm.weight: missing, the config needs [128]",
        "format",
    ),
    "fewer experts": (
        "bf16",
        text(n_routed_experts=3),
        f"{LANGUAGE}layers.1.mlp.experts.3.gate_proj.weight: BF16 [64, 128], the config needs no such tensor",
        "format",
    ),
    "indexer of a shared layer": (
        "bf16",
        text(layer_types=["linear_attention"] * 2 + ["attention"] * 2, indexer_types=["full"] * 3 + ["shared"]),
        f"{LANGUAGE}layers.2.self_attn.q_proj.weight: BF16 [128, 128], the config needs no such tensor; "
        f"{LANGUAGE}layers.2.self_attn.q_a_proj.weight: missing, the config needs [64, 128]",
        "format",
    ),
    "part of an mtp block": (
        "bf16",
        put(LANGUAGE + "layers.4.enorm.weight", "BF16", (128,)),
        f"{LANGUAGE}layers.4.input_layernorm.weight: missing, the config needs [128] (the MTP block, layer 4 on, is there in part)",
        "format",
    ),
    "a second mtp block": (
        "bf16",
        put(LANGUAGE + "layers.5.enorm.weight", "BF16", (128,)),
        f"{LANGUAGE}layers.5.enorm.weight: BF16 [128], the config needs no such tensor",
        "format",
    ),
    "other width": ("bf16", text(hidden_size=256), f"{LANGUAGE}embed_tokens.weight: BF16 [512, 128], the config needs [512, 256]", "format"),
    "not this architecture": ("bf16", lambda m: m.config.update(model_type="llama"), 'model_type is "llama"', "unsupported"),
}


def check_line(directory: Path, says: str, kind: str, capsys: pytest.CaptureFixture[str], whole: bool) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_checkpoint(directory)
    message = str(caught.value)
    assert (message.startswith(says) if whole else says in message), message
    assert caught.value.kind == kind and "\n" not in message
    # the same through the command: exactly that line, exit code 1
    capsys.readouterr()
    assert main(["info", str(directory)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == f"glm53serve: {message}\n"


@pytest.mark.parametrize("case", FILES)
def test_damaged_files(case: str, models: dict[str, RawModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, says, kind = FILES[case]
    directory = models["bf16"].write(tmp_path / "m")
    change(directory)
    check_line(directory, says, kind, capsys, whole=False)


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case: str, models: dict[str, RawModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fmt, change, line, kind = TENSORS[case]
    raw = models[fmt].copy()
    change(raw)
    check_line(raw.write(tmp_path / "m"), line, kind, capsys, whole="model_type" not in line)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [L0 + "self_attn.dt_bias", L3 + "hc_ffn_base", LANGUAGE + "norm.weight"])
def test_small_tensors_must_be_finite(models: dict[str, RawModel], tmp_path: Path, name: str, value: float) -> None:
    raw = models["int4"].copy()
    values = raw.tensors[name].f32().copy()
    values[3] = value
    raw.tensors[name].data = values.tobytes()
    c = open_checkpoint(raw.write(tmp_path))
    with pytest.raises(CheckpointError, match=rf"{name}: element 3 is -?(nan|inf), the config needs finite numbers"):
        for layer in range(c.config.num_layers):
            c.layer(layer)
        c.final_norm()


def test_unreadable_file(models: dict[str, RawModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models["bf16"].write(tmp_path)
    plain = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)") as caught:
        open_checkpoint(directory)
    assert caught.value.kind == "io"


def test_file_that_vanishes_after_opening(models: dict[str, RawModel], tmp_path: Path) -> None:
    directory = models["bf16"].write(tmp_path)
    c = open_checkpoint(directory)
    (directory / FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped") as caught:
        c.embedding()
    assert caught.value.kind == "io"


def test_file_that_shrinks_after_opening(models: dict[str, RawModel], tmp_path: Path) -> None:
    directory = models["bf16"].write(tmp_path)
    c = open_checkpoint(directory)
    os.truncate(directory / FILE, 5000)
    with pytest.raises(CheckpointError, match="5000 bytes now") as caught:
        c.embedding()
    assert caught.value.kind == "io"


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_breaks_out(data: st.DataObject, models: dict[str, RawModel], tmp_path: Path) -> None:
    """Any few bytes of a header changed: it still opens, or it is one of our one-line errors."""
    directory = models["int4"].write(tmp_path)
    path = directory / FILE
    whole = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        describe(directory)
    except ModelError as error:
        assert "\n" not in str(error) and str(error).isprintable()


def test_messages_stay_one_printable_line() -> None:
    assert one_line("a\nb\x1b[31m\u202e\ud800 c") == "a b\\x1b[31m\\u202e\\ud800 c"
    assert len(one_line("x" * 5000)) == 1000
