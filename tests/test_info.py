"""`glm53serve info`: right figures, from headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm53serve.model import quant
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.config_file import parse_config
from glm53serve.model.info import dense_ram, describe, size, slot_bytes
from glm53serve.model.shapes import shape_config
from glm53serve.model.shards import header_bytes, plan_shards
from glm53serve.model.synth import plan, synth
from tests.patience import slowness

NANO = Path(__file__).parents[1] / "glm53serve" / "data" / "glm53-nano"
GOLDEN = sorted(p.parent for p in (Path(__file__).parent / "data" / "golden").glob("*/config.json"))


def test_shipped_model() -> None:
    text = describe(NANO)
    assert "8: 6 KDA, 2 DSA; feed-forward: 1 dense, 7 with experts" in text
    assert "6,232,092, 3,096,576 of them in 84 routed experts" in text
    assert "experts    6.19 MB: bf16 6.19 MB" in text
    assert "note       MTP block: 61 tensors" in text
    assert text.splitlines()[0] == f"model      {NANO}"


@pytest.mark.parametrize("directory", GOLDEN, ids=lambda p: p.name)
def test_golden_models(directory: Path) -> None:
    kind = directory.name.rsplit("-", 1)[1]
    line = next(line for line in describe(directory).splitlines() if line.startswith("experts"))
    assert f": {kind} " in line


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4"])
def test_memory_is_what_requantise_takes(tmp_path: Path, fmt: str) -> None:
    synth(tmp_path, "tiny", fmt=fmt)
    c = open_checkpoint(tmp_path)
    stored = [s for _, s in c.dense_matrices()]
    for bits in (4, 8, 16, 32):
        assert dense_ram(stored, bits) == sum(quant.requantise(c.matrix(s), bits).nbytes for s in stored)


def test_slot_of_the_real_model() -> None:
    """Model spec 11: 136 MiB of states, 9.56 MiB of windows, 23,936 bytes a token."""
    fixed, per_token = slot_bytes(parse_config(shape_config("flash")))
    assert fixed == 142_606_336 + 34 * 3 * 3 * 8192 * 4 and per_token == 23_936


def test_sizes_read_well() -> None:
    assert [size(n) for n in (0, 999, 1000, 13_906_688, 165_900_000_000)] == ["0 B", "999 B", "1.00 kB", "13.9 MB", "166 GB"]


def hollow_model(directory: Path, layers: int, experts: int) -> None:
    """A flash-sized int4 model whose data are holes in the files: all headers, no disk space."""
    directory.mkdir()
    raw = shape_config("flash", layers, experts)
    units, _ = plan(parse_config(raw), "int4")
    files = plan_shards(units, 4_000_000_000)
    weight_map = {}
    for i, entries in enumerate(files):
        path = directory / f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        header = header_bytes(entries)
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(e.nbytes for e in entries))
        weight_map.update({e.name: path.name for e in entries})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(raw))


PROBE = """
import sys, time
from glm53serve.cli import main
from glm53serve.serve.telemetry import peak_rss_gb
assert main(["info", sys.argv[1]]) == 0
print("cost", int(1e6 * peak_rss_gb() / 1024), time.process_time())
"""


@pytest.mark.parametrize(("experts", "seconds"), [(16, 1.5), (288, 5.0)])
def test_flash_sized_model_is_described_at_once(tmp_path: Path, experts: int, seconds: float) -> None:
    """45 layers in a new process: 16 experts a layer within 1.5 s of a usual machine's processor time, the whole 180 GB model within 5, neither
    over 300 MB."""
    hollow_model(tmp_path / "m", 45, experts)
    done = subprocess.run([sys.executable, "-c", PROBE, str(tmp_path / "m")], capture_output=True, text=True, check=True)
    assert "45: 34 KDA, 11 DSA; feed-forward: 3 dense, 42 with experts" in done.stdout
    if experts == 288:
        assert "313,326,811,966, 304,405,807,104 of them in 12,096 routed experts" in done.stdout
    megabytes, spent = done.stdout.rsplit("cost ", 1)[1].split()
    assert int(megabytes) < 300 and float(spent) < seconds * slowness()
