"""The CUDA backend on a real GPU, against the reference, the goldens and itself: `make test-cuda`. Skipped where there is no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from checks import WIDE_SHAPES, Churn, backend_of, greedy, logits_in_pieces, prefill, run, same_turns, wide_model  # noqa: E402
from goldens import NAMES, golden, reference_of  # noqa: E402
from tinymodel import FEATURES, random_ids, tiny_model  # noqa: E402

from glm53serve.cuda.backend import MARGIN, CudaBackend, load_backend  # noqa: E402
from glm53serve.cuda.cupy_runtime import CupyDevice, available  # noqa: E402
from glm53serve.cuda.decode import decode_loop  # noqa: E402
from glm53serve.cuda.runtime import Device  # noqa: E402
from glm53serve.engine.step_device import End, RowPlan  # noqa: E402
from glm53serve.engine.tokenizer import Tokenizer  # noqa: E402
from glm53serve.load import shipped_model  # noqa: E402
from glm53serve.model.checkpoint import open_checkpoint  # noqa: E402
from glm53serve.model.config import DSA, KDA  # noqa: E402

pytestmark = pytest.mark.skipif(available() is None, reason="needs an NVIDIA GPU and the packages of glm53serve[cuda]")


def gpu(sizes: Mapping[str, int]) -> Device:
    """The first GPU."""
    return CupyDevice(sizes)


@lru_cache
def nano(looping: bool = True) -> CudaBackend:
    """The shipped model."""
    return load_backend(open_checkpoint(shipped_model()), 16, 4096, 512, make_device=gpu, looping=looping)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_against_the_reference(name: str) -> None:
    model = tiny_model(seed=1, weight_format="bf16", **FEATURES[name])
    backend = backend_of(model, gpu)
    ids = random_ids(model.config, 52)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    for pieces in ([40] + [1] * 12, [7, 23, 1, 9, 12]):
        assert np.abs(logits_in_pieces(backend, 0, ids, pieces) - expected).max() <= 5e-4 * np.abs(expected).max()
    backend.device.close()


@pytest.mark.parametrize("fmt", ["fp8", "int8", "int4", "f32"])
def test_every_weight_format_against_the_reference(fmt: str) -> None:
    model = tiny_model(seed=1, weight_format=fmt)  # type: ignore[arg-type]
    backend = backend_of(model, gpu)
    ids = random_ids(model.config, 40)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    assert np.abs(logits_in_pieces(backend, 0, ids, [30, 10]) - expected).max() <= 5e-4 * np.abs(expected).max()
    backend.device.close()


@pytest.mark.parametrize("name", WIDE_SHAPES)
def test_prompts_of_wide_models_agree_to_the_precision_of_bf16(name: str) -> None:
    """Most rows; a few take another expert or another token, as their scores are nearly equal."""
    for kinds in ((KDA,), (DSA,)):
        model = wide_model(name, kinds)
        backend = backend_of(model, gpu, capacity=320, chunk=300, exact=False)
        ids = random_ids(model.config, 300)
        reference = model.reference(np.float64)
        expected = reference.forward(ids, reference.new_state())
        got = logits_in_pieces(backend, 0, ids, [290, 10])
        error = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
        print(f"{name}, {kinds[0]}: error / largest logit: median {np.median(error):.1e}, 9 of 10 rows within {np.quantile(error, 0.9):.1e}")
        assert np.quantile(error, 0.9) <= 2e-2
        assert np.array_equal(logits_in_pieces(backend, 1, ids, [290, 10]), got)
        backend.device.close()


@pytest.mark.parametrize("name", NAMES)
def test_goldens(name: str) -> None:
    data = golden(name)
    backend = load_backend(open_checkpoint(data.directory), 2, 512, 64, make_device=gpu)
    got = logits_in_pieces(backend, 0, data.ids, [len(data.prompt), *[1] * len(data.greedy)])
    assert np.abs(got - data.logits).max() <= 2e-3 * np.abs(data.logits).max()
    assert greedy(backend, 1, data.prompt, len(data.greedy)) == data.greedy.tolist()
    backend.device.close()


def test_depths_and_device_loops_give_the_same_bytes_over_a_thousand_schedules() -> None:
    backend = nano()
    rng = np.random.default_rng(11)
    schedules = int(os.environ.get("GLM53_TEST_SCHEDULES", "1000"))
    for number in range(schedules):
        churn = Churn.random(rng, backend.layers.config.vocab_size, turns=int(rng.integers(2, 7)), longest=24)
        plain = churn.play(backend, 0, 0, slots=3)
        for mode in ((1, 0), (4, 0), (1, 16)):
            assert same_turns(plain, churn.play(backend, *mode, slots=3)), (number, mode)


def test_logits_of_the_shipped_model() -> None:
    reference = reference_of(shipped_model(), np.float32)
    ids = np.random.default_rng(3).integers(0, 900, 300)
    state = reference.new_state()
    expected = reference.forward(ids, state)
    backend = nano()
    scale = np.abs(expected).max()
    decode = logits_in_pieces(backend, 0, ids, [280] + [1] * 20)
    print("largest error / largest logit: decode", np.abs(decode - expected)[280:].max() / scale, "prefill", np.abs(decode - expected)[:280].max() / scale)
    assert np.abs(decode - expected).max() <= 2e-3 * scale


def test_tasks_of_the_shipped_model() -> None:
    backend, tokenizer = nano(), Tokenizer(shipped_model())
    data = Path(__file__).parent.parent / "data"
    lines = [json.loads(line) for line in (data / "nano_tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = [t for t in lines if t["reference_correct"]]
    stops = backend.layers.config.eos_token_ids
    wrong = []
    for start in range(0, len(tasks), 16):
        group = tasks[start : start + 16]
        answers: dict[int, list[int]] = {}
        loop = decode_loop(backend.decoder, 1)
        for slot, task in enumerate(group):
            ids = np.array(tokenizer.encode(task["prompt"].encode()))
            answers[slot] = [prefill(backend, slot, ids)]
            if answers[slot][0] not in stops:
                loop.start(RowPlan(slot, answers[slot][0], len(ids), 400, 4096 - len(ids), stops))
        for commit in run(loop):
            if commit.token is not None and commit.end != End.STOP:
                answers[commit.slot].append(commit.token)
        for slot, task in enumerate(group):
            said = tokenizer.decode([t for t in answers[slot] if t not in stops]).decode(errors="replace")
            if said != task["expected"]:
                wrong.append((task["id"], task["margin"], said[:60], task["expected"][:60]))
    print(f"{len(tasks) - len(wrong)} of {len(tasks)} answers as the reference gives them; others (margin of the reference's closest call):", wrong)
    assert len(wrong) <= 0.01 * len(tasks)


def test_compute_sanitizer_is_clean_on_a_short_run() -> None:
    import shutil

    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).parent / "short_run.py"
    # Not the calls that fail: the bindings look for functions of newer drivers.
    command = [tool, "--report-api-errors", "no", "--error-exitcode", "7", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_experts_in_host_memory_answer_the_same(tmp_path: Path) -> None:
    """The command as a person runs it, with all experts on the device, with half of them and with none."""

    def generate(**more: str) -> tuple[str, str]:
        environ = {**os.environ, "COLI_USAGE": str(tmp_path / "usage"), **more}
        command = [sys.executable, "-m", "glm53serve", "generate", "--backend", "cuda", "--max-tokens", "40", "--prompt", "345 + 67 = "]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environ)
        return done.stdout, done.stderr

    wanted, said = generate()
    assert wanted and "host memory" not in said, said
    nothing, refused = generate(GLM53_VRAM_GB="0")
    takes = re.search(r"takes ([\d.]+) GB of the device", refused)
    assert not nothing and takes, refused
    print(refused)
    config, mixtures = nano().layers.config, nano().layers._mixtures
    experts = sum(m.expert_bytes * len(m.on_device) for m in mixtures)
    count = sum(len(m.on_device) for m in mixtures)
    for some in (0, experts // 2):
        allowed = float(takes.group(1)) * 1e9 + 1e6 + (MARGIN + 128 * config.vocab_size + some if some else 0)
        got, said = generate(GLM53_VRAM_GB=f"{allowed / 1e9:.6f}")
        left = re.search(r"(\d+) of (\d+) routed experts", said)
        print(said)
        assert got == wanted and left and int(left[2]) == count
        assert int(left[1]) < count if some else int(left[1]) == count


LOST = """
from glm53serve.cuda.runtime import Pointer
from glm53serve.engine.seam import DeviceLost
from glm53serve.load import load, shipped_model
from glm53serve.settings import Settings

engine = load(shipped_model(), Settings.from_environ({}), slots=2, specials_stop=True, backend="cuda").engine
backend, slot = engine.backends[0], engine.slots[0]
engine.forward_prefill(slot, [1, 2, 3], guard=True)
device = backend.device
device.launch("embed", (1, 1), 512, [Pointer(4096), backend.tables.ids, backend.model.embedding, backend.model.embedding_kind, engine.config.hidden_size])
calls = (
    lambda: engine.forward_prefill(slot, [4, 5], guard=True), lambda: engine.forward_step([(slot, 4)]), lambda: backend.reset_slot(1),
    lambda: backend.snapshot(0), lambda: backend.save(0), lambda: engine.expert_uses(slot),
)
for number, call in enumerate(calls):
    try:
        call()
    except DeviceLost:
        continue
    raise SystemExit(f"call {number} did not say that the device is lost")
print("LOST")
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def test_a_device_that_failed_is_told_as_lost_by_everything() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "LOST", done.stdout + done.stderr[-3000:]
