"""`convert`: what is written, what survives a kill or a full disk, and that the result computes what its dequantised source does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53serve.cli import main
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.convert import convert
from glm53serve.model.errors import ModelError
from glm53serve.model.journal import JOURNAL
from glm53serve.model.quant import dequantise, requantise
from glm53serve.model.reference import ReferenceModel
from glm53serve.model.synth import synth
from glm53serve.model.verify import verify
from glm53serve.model.weights import FfnWeights, Matrix
from tests.rawmodel import Raw, blob

SMALL_SHARDS = 200_000


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "source"
    synth(path, "tiny", fmt=request.param, seed=11)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


class Dequantised:
    """The source with every matrix rounded as the conversion rounds it, in float32."""

    def __init__(self, source: Path, expert_bits: int) -> None:
        self.checkpoint = open_checkpoint(source)
        self.bits = expert_bits

    def expert(self, layer: int, expert: int) -> FfnWeights:
        w = self.checkpoint.expert(layer, expert)
        return FfnWeights(*(self.rounded(m) for m in (w.gate, w.up, w.down)))

    def rounded(self, m: Matrix) -> Matrix:
        return Matrix("f32", m.rows, m.cols, dequantise(requantise(m, self.bits)))


@pytest.mark.parametrize(("experts", "bits"), [("int4", 4), ("int8", 8), ("bf16", 16)])
def test_round_trip(source: Path, tmp_path: Path, experts: str, bits: int) -> None:
    """Logits and tokens of the converted model equal those of its dequantised source."""
    convert(source, tmp_path / "out", experts)
    out, wanted = open_checkpoint(tmp_path / "out"), Dequantised(source, bits)
    assert {out.expert(1, e).gate.format for e in range(4)} == {experts}
    ids = np.random.default_rng(0).integers(0, 255, 40)
    c = out.config
    ours = ReferenceModel(c, out.layer, out, out.embedding(), out.final_norm(), out.lm_head(), np.float64)
    theirs = ReferenceModel(c, out.layer, wanted, out.embedding(), out.final_norm(), out.lm_head(), np.float64)
    a, b = ours.forward(ids, ours.new_state()), theirs.forward(ids, theirs.new_state())
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(a.argmax(axis=1), b.argmax(axis=1))
    if wanted.checkpoint.layer(0).ffn.gate.format == "bf16":  # type: ignore[union-attr]
        s = wanted.checkpoint
        plain = ReferenceModel(c, s.layer, wanted, s.embedding(), s.final_norm(), s.lm_head(), np.float64)
        exact = plain.forward(ids, plain.new_state())
        np.testing.assert_array_equal(exact, b)


def test_engine_round_trip(source: Path, tmp_path: Path) -> None:
    """The same through the engine: scores of an answer."""
    from glm53serve.load import load
    from glm53serve.oneshot import teacher_forced
    from glm53serve.settings import Settings

    out = tmp_path / "out"
    convert(source, out)
    plain = tmp_path / "plain"
    shutil.copytree(out, plain)
    opened = open_checkpoint(out)
    # the int4 experts written out as float32: the dequantised model as files
    for path in opened.files:
        tensors: dict[str, Raw] = {}
        for info in (t for t in opened.tensors.values() if opened.files[t.shard] == path and not t.name.endswith(".qs")):
            data = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
            tensors[info.name] = Raw(info.dtype, info.shape, data.tobytes())
        for layer in opened.config.sparse_layers:
            for e in range(opened.config.n_routed_experts):
                for role in ("gate", "up", "down"):
                    m = getattr(opened.expert(layer, e), role)
                    name = f"model.language_model.layers.{layer}.mlp.experts.{e}.{role}_proj.weight"
                    if name in tensors:
                        tensors[name] = Raw("F32", (m.rows, m.cols), dequantise(m).tobytes())
        (plain / path.name).write_bytes(blob(tensors))
    (plain / "model.safetensors.index.json").unlink()
    settings = Settings.from_environ({"GLM53_BITS": "32", "GLM53_MAXT": "128"})
    ids = np.random.default_rng(1).integers(0, 255, 30).tolist()
    rows = []
    for directory in (out, plain):
        loaded = load(directory, settings, slots=1, specials_stop=False, backend="cpu")
        rows.append(teacher_forced(loaded, ids))
        loaded.engine.close()
    assert rows[0][0] == rows[1][0]
    np.testing.assert_allclose(rows[0][1], rows[1][1], rtol=0, atol=1e-4)


def test_what_is_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, "int4", "int8", shard_bytes=SMALL_SHARDS)
    there, here = open_checkpoint(source), open_checkpoint(out)
    assert here.config == there.config
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not list(out.glob("*.partial")) and not (out / JOURNAL).exists()
    assert len(here.files) > 3
    for layer in here.config.sparse_layers:
        for e in range(here.config.n_routed_experts):
            pieces = here.expert_pieces(layer, e)
            assert [p.role for p in pieces] == ["gate", "gate.scale", "up", "up.scale", "down", "down.scale"]
            assert len({p.path for p in pieces}) == 1
            assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(pieces))
    formats = {name: stored.format for name, stored in here.dense_matrices()}
    assert formats["embed_tokens.weight"] == formats["layers.0.self_attn.b_proj.weight"] == "bf16"
    assert formats["layers.0.self_attn.f_b_proj.weight"] == formats["lm_head.weight"] == "int8"
    kinds = verify(source, out)
    assert kinds["small tensors"].relative == 0 and kinds["embed_tokens"].relative == 0
    assert 0.03 < kinds["experts.gate"].relative < 0.2
    assert 0 < kinds["lm_head"].relative < 0.01


def test_small_tensors_keep_every_bit(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    there, here = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for layer in range(there.config.num_layers):
        a, b = there.layer(layer), here.layer(layer)
        for part in ("input_norm", "post_norm"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
        for site in ("hc_attn", "hc_ffn"):
            for part in ("fn", "base", "scale"):
                np.testing.assert_array_equal(getattr(getattr(a, site), part), getattr(getattr(b, site), part))


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def test_kill_and_resume(source: Path, tmp_path: Path) -> None:
    """kill -9 in the middle; the second run keeps the finished shards and the result is the same to the byte."""
    convert(source, tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    out = tmp_path / "out"
    program = (
        "import sys, time; from pathlib import Path; import glm53serve.model.convert as c; made, out = c._made, Path(sys.argv[2])\n"
        "def stops(work):\n"
        "    while len(list(out.glob('*.safetensors'))) >= 4: print('four', flush=True); time.sleep(600)\n"
        "    return made(work)\n"
        f"c._made = stops; c.convert(Path(sys.argv[1]), out, threads=1, shard_bytes={SMALL_SHARDS})"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(source), str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"four\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finished = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert finished and not (out / "config.json").exists()
    with pytest.raises(ModelError):
        open_checkpoint(out)
    # one finished shard is damaged meanwhile: it is found out by its checksum and made again
    damaged = sorted(finished)[0]
    with (out / damaged).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff\x00\xff\x00\xff")
    convert(source, out, shard_bytes=SMALL_SHARDS)
    assert files_of(out) == files_of(tmp_path / "whole")
    kept = [name for name, made in finished.items() if (out / name).stat().st_mtime_ns == made]
    journalled = len(finished) - 1
    assert len(kept) >= journalled - 1 and damaged not in kept


def test_another_conversion_is_not_continued(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, shard_bytes=SMALL_SHARDS, progress=stop)
    assert not list(out.glob("*.partial"))
    with pytest.raises(ModelError, match="other options"):
        convert(source, out, "int8", shard_bytes=SMALL_SHARDS)
    convert(source, out, shard_bytes=SMALL_SHARDS)
    open_checkpoint(out)
    with pytest.raises(ModelError, match="holds a model already"):
        convert(source, out)


def test_nobody_elses_file_is_overwritten(source: Path, tmp_path: Path) -> None:
    """A target with a text file of a name that would be written is refused and left as it is; other files are in nobody's way."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    (out / "notes").write_text("mine too")
    with pytest.raises(ModelError, match=r"tokenizer\.json would be overwritten"):
        convert(source, out)
    with pytest.raises(ModelError, match=r"tokenizer\.json would be overwritten"):
        synth(out, "tiny")
    assert files_of(out) == {"tokenizer.json": b"mine", "notes": b"mine too"}
    (out / "tokenizer.json").unlink()
    convert(source, out)
    assert (out / "notes").read_text() == "mine too"
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(ModelError, match=r"cannot be written \([^)]*\)$"):
            convert(source, target)


def test_two_conversions_do_not_write_the_same_files(source: Path, tmp_path: Path) -> None:
    """A second one is refused while the first is at work, whatever it is asked for; the first is not disturbed."""
    out, refused = tmp_path / "out", []

    def another(_done: int, _total: int) -> None:
        for experts in ("int4", "int8") if len(refused) < 4 else ():
            with pytest.raises(ModelError, match="another conversion is writing there") as failure:
                convert(source, out, experts, shard_bytes=SMALL_SHARDS)
            refused.append(str(failure.value))

    convert(source, out, shard_bytes=SMALL_SHARDS, progress=another)
    assert len(refused) == 4
    convert(source, tmp_path / "alone", shard_bytes=SMALL_SHARDS)
    assert files_of(out) == files_of(tmp_path / "alone")


@pytest.mark.parametrize("change", [os.utime, os.unlink])
def test_a_source_that_changes_meanwhile_makes_no_model(tmp_path: Path, change: Any) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    synth(source, "tiny", seed=6)
    weights = next(source.glob("*.safetensors"))

    def changed(done: int, total: int) -> None:
        if done == total and weights.exists():
            change(weights)

    with pytest.raises(ModelError, match="changed during the conversion"):
        convert(source, out, progress=changed)
    assert not (out / "config.json").exists()


class FullAfter:
    """A file on a disk that is full after some bytes."""

    def __init__(self, path: Path, room: list[int]) -> None:
        self.file = path.open("wb", buffering=0)
        self.room = room

    def __enter__(self) -> FullAfter:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, data: Any) -> int:
        if self.room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room[0]])
        self.room[0] -= count
        return count


def test_a_full_disk_is_one_line_and_loses_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    room = [2 * SMALL_SHARDS + 50_000]
    with pytest.raises(ModelError, match="the disk is full") as failure:
        convert(source, out, shard_bytes=SMALL_SHARDS, opened=lambda path: FullAfter(path, room))  # type: ignore[arg-type,return-value]
    assert "\n" not in str(failure.value)
    assert list(out.glob("*.safetensors")) and not list(out.glob("*.partial")) and not (out / "config.json").exists()
    convert(source, out, shard_bytes=SMALL_SHARDS)
    convert(source, tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_disk_too_small_is_told_before_writing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"still to be written, the disk has 0\.00 GB free"):
        convert(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors*"))


def test_progress_reaches_the_end(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "out", shard_bytes=SMALL_SHARDS, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][1] == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", str(source), out, "--verify"]) == 0
    said = capsys.readouterr()
    assert "experts.down" in said.out and "small tensors" in said.out and said.err == ""
    assert main(["convert", str(source), out]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "holds a model already" in said.err
    assert main(["convert", str(source), out, "--verify"]) == 0
    assert main(["convert", str(tmp_path / "nothing"), out + "2"]) == 1


def test_an_interrupted_source_value_is_named(tmp_path: Path) -> None:
    """A value that cannot be quantised ends the conversion with the tensor's name."""
    source = tmp_path / "source"
    synth(source, "tiny", seed=2)
    piece = open_checkpoint(source).expert_pieces(2, 1)[2]
    with piece.path.open("r+b") as file:
        file.seek(piece.offset)
        file.write(b"\x80\x7f")
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.experts\.1\.down_proj\.weight: .*not a finite number"):
        convert(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial"))


def test_packed_experts_mtp_and_vision_are_carried(tmp_path: Path) -> None:
    """Experts that lie packed become single ones; tensors of the vision tower are copied."""
    source = tmp_path / "source"
    synth(source, "tiny", seed=4)
    opened = open_checkpoint(source)
    tensors: dict[str, Raw] = {}
    for info in opened.tensors.values():
        if ".mlp.experts." not in info.name:
            data = np.fromfile(opened.files[info.shard], np.uint8, info.nbytes, offset=info.offset)
            tensors[info.name] = Raw(info.dtype, info.shape, data.tobytes())
    c = opened.config
    for layer in c.sparse_layers:
        experts = [opened.expert(layer, e) for e in range(c.n_routed_experts)]
        at = f"model.language_model.layers.{layer}.mlp.experts."
        both = np.stack([np.concatenate([w.gate.data, w.up.data]) for w in experts])
        down = np.stack([w.down.data for w in experts])
        tensors[at + "gate_up_proj"] = Raw("BF16", both.shape, both.tobytes())
        tensors[at + "down_proj"] = Raw("BF16", down.shape, down.tobytes())
    tensors["model.visual.x"] = Raw("BF16", (3, 5), bytes(range(30)))
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, packed)
    (packed / "model.safetensors").write_bytes(blob(tensors))
    convert(packed, tmp_path / "a")
    convert(source, tmp_path / "b")
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert [t.name for t in a.vision_tensors] == ["model.visual.x"]
    for layer in c.sparse_layers:
        for e in range(c.n_routed_experts):
            x, y = a.expert(layer, e), b.expert(layer, e)
            np.testing.assert_array_equal(x.up.data, y.up.data)
            np.testing.assert_array_equal(x.down.scale, y.down.scale)


def test_an_expert_of_mixed_formats_is_refused_and_can_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, mixed, out = tmp_path / "source", tmp_path / "mixed", tmp_path / "out"
    synth(source, "tiny", seed=4)
    opened = open_checkpoint(source)
    tensors: dict[str, Raw] = {}
    for info in opened.tensors.values():
        data = np.fromfile(opened.files[info.shard], np.uint8, info.nbytes, offset=info.offset)
        if info.name.endswith("experts.2.down_proj.weight"):
            tensors[info.name] = Raw("F32", info.shape, (data.view(np.uint16).astype(np.uint32) << 16).tobytes())
        else:
            tensors[info.name] = Raw(info.dtype, info.shape, data.tobytes())
    mixed.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        shutil.copy(source / name, mixed)
    (mixed / "model.safetensors").write_bytes(blob(tensors))
    asked = ["generate", "--backend", "cpu", "--prompt", "x", "--max-tokens", "1", "--model"]
    assert main([*asked, str(mixed)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "experts.2.down_proj.weight: f32" in said and "glm53serve convert" in said
    convert(mixed, out)
    assert main([*asked, str(out)]) == 0


def test_verify_knows_every_way_to_store_a_network(tmp_path: Path) -> None:
    """Convolutions as one or as three, a head of its own or the embedding's: the same network has no error, whichever is the source."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    synth(plain, "tiny", seed=4)
    opened = open_checkpoint(plain)
    tensors: dict[str, Raw] = {}
    for info in opened.tensors.values():
        data = np.fromfile(opened.files[info.shard], np.uint8, info.nbytes, offset=info.offset)
        tensors[info.name] = Raw(info.dtype, info.shape, data.tobytes())
    embedding = tensors["model.language_model.embed_tokens.weight"]
    config = json.loads((plain / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    for directory in (plain, other):
        if directory == plain:
            tensors["lm_head.weight"] = embedding
        else:
            del tensors["lm_head.weight"]
            for name in [name for name in tensors if ".q_conv1d." in name]:
                q, k, v = (tensors.pop(name.replace(".q_", f".{which}_")) for which in "qkv")
                tensors[name.replace(".q_conv1d.", ".conv1d.")] = Raw(q.dtype, (3 * q.shape[0], *q.shape[1:]), q.data + k.data + v.data)
            directory.mkdir()
        for path in directory.glob("model*"):
            path.unlink()
        (directory / "model.safetensors").write_bytes(blob(tensors))
        (directory / "config.json").write_text(json.dumps(config))
    for source, target in ((plain, other), (other, plain)):
        kinds = verify(source, target)
        assert kinds["lm_head"].tensors == 1 and {kind.worst for kind in kinds.values()} == {0.0}
