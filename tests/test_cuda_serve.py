"""What the engine makes of a backend that holds everything, on the emulated device: from ids to logits, cancels, where experts go, a lost device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from checks import backend_of  # noqa: E402
from emulated_device import EmulatedDevice, compiler  # noqa: E402
from goldens import Golden, golden  # noqa: E402
from tinymodel import random_ids, tiny_model  # noqa: E402

from glm53serve import backends, load  # noqa: E402
from glm53serve.backends import BackendUnavailable  # noqa: E402
from glm53serve.cuda import backend as backend_module  # noqa: E402
from glm53serve.cuda import cupy_runtime  # noqa: E402
from glm53serve.cuda.backend import CudaBackend  # noqa: E402
from glm53serve.cuda.compiling import CudaUnsupported, refusal  # noqa: E402
from glm53serve.cuda.decode import Decoder  # noqa: E402
from glm53serve.cuda.runtime import Device  # noqa: E402
from glm53serve.engine.engine import Engine  # noqa: E402
from glm53serve.engine.faults import Faults  # noqa: E402
from glm53serve.engine.seam import Halted  # noqa: E402
from glm53serve.experts.usage import render  # noqa: E402
from glm53serve.model.checkpoint import open_checkpoint  # noqa: E402
from glm53serve.settings import Settings  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
CAPACITY = 160


@lru_cache
def base() -> CudaBackend:
    """A backend over the base tiny model, in passes of at most 64 rows."""
    return backend_of(tiny_model(seed=1), EmulatedDevice)


def engine_over(backend: CudaBackend, whole: bool) -> Engine:
    """An engine over the backend, its slots empty: from ids to logits on the device, or through the streams."""
    config = backend.layers.config
    return Engine(config, [backend.layers], backend.head, 2, CAPACITY, 64, pins=1, network=backend.head if whole else None)


def crossed(backend: CudaBackend, what: Callable[[], Any]) -> int:
    """Bytes that went between host and device during a call."""
    before = backend.device.crossed  # type: ignore[attr-defined]
    what()
    return int(backend.device.crossed - before)  # type: ignore[attr-defined]


def state(backend: CudaBackend, slot: int) -> bytes:
    """Everything of a slot that a pass changes in place."""
    return backend.layers.save(slot).tobytes()


def walk(backend: CudaBackend, whole: bool) -> list[bytes]:
    """A conversation: chunks (one longer than a pass), scored rows, a checkpoint gone back to, steps of two slots. Every logit and state on the way."""
    engine = engine_over(backend, whole)
    one, two = engine.slots
    ids = random_ids(backend.layers.config, 90).tolist()
    seen: list[bytes] = []

    def note(logits: np.ndarray) -> None:
        seen.extend([logits.tobytes(), state(backend, 0), state(backend, 1)])

    note(engine.forward_prefill(one, ids[:21], guard=True).logits)
    engine.checkpoint(one, "pin")
    scored = engine.forward_prefill(one, ids[21:40], guard=True, all_rows=True)
    assert scored.rows is not None and scored.rows.shape == (19, backend.layers.config.vocab_size) and np.array_equal(scored.rows[-1], scored.logits)
    note(scored.rows)
    whole_batch = engine.forward_prefill(two, ids[:70], all_rows=True)
    assert whole_batch.rows is not None
    note(whole_batch.rows)
    prompt = ids[:21] + ids[60:90]
    reuse = engine.plan(one, prompt)
    assert reuse.word == "pin" and reuse.reused == 21
    engine.begin(one, prompt, reuse)
    note(engine.forward_prefill(one, prompt[21:], guard=True).logits)
    for token in (3, 5):
        logits, cost = engine.forward_step([(two, token), (one, token + 1)])
        note(logits)
        assert cost.head > 0 and cost.attention > 0 and cost.experts > 0
    engine.check_integrity()
    return seen


def test_from_ids_to_logits_gives_the_bits_of_the_way_through_streams() -> None:
    backend = base()
    assert walk(backend, whole=True) == walk(backend, whole=False)


def test_streams_do_not_cross() -> None:
    """A chunk's traffic is the row tables and one row of logits, not rows x hc_mult x H floats four times (embedded, in, out, in to the head)."""
    backend = base()
    c = backend.layers.config
    ids = random_ids(c, 60).tolist()
    streams = 4 * len(ids) * c.hc_mult * c.hidden_size
    through, direct = (engine_over(backend, whole) for whole in (False, True))
    assert crossed(backend, lambda: through.forward_prefill(through.slots[0], ids)) > 3 * streams
    tables = backend.layers.tables._host.nbytes
    assert crossed(backend, lambda: direct.forward_prefill(direct.slots[0], ids)) == tables + 4 + 4 * c.vocab_size
    assert crossed(backend, lambda: direct.forward_step([(direct.slots[0], 1)])) == tables + 4 + 4 * c.vocab_size


def test_a_cancel_is_the_same_on_both_ways() -> None:
    backend = base()
    ids = random_ids(backend.layers.config, 44).tolist()
    outcomes = []
    for whole in (True, False):
        engine = engine_over(backend, whole)
        slot = engine.slots[0]
        engine.forward_prefill(slot, ids[:20])
        before = state(backend, 0)
        seen: list[Any] = []
        for at in (1, 2, 7, 10**6):
            left = at

            def halt() -> bool:
                nonlocal left
                left -= 1
                return left == 0

            if at < 10**6:
                with pytest.raises(Halted) as halted:
                    engine.forward_prefill(slot, ids[20:], halt, guard=True)
                assert halted.value.on_device and slot.filled == 20 and state(backend, 0) == before
                seen.append(halted.value.layer)
            else:
                result = engine.forward_prefill(slot, ids[20:], halt, guard=True)
                seen += [at - left, result.logits.tobytes(), state(backend, 0)]
                assert at - left >= 2 * len(backend.layers.layers) - 1
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def test_a_fault_inside_a_chunk_leaves_no_trace_and_a_wrong_id_is_refused() -> None:
    backend = base()
    ids = random_ids(backend.layers.config, 30).tolist()
    engine = engine_over(backend, whole=True)
    slot = engine.slots[1]
    engine.forward_prefill(slot, ids[:10])
    before = state(backend, 1)
    engine.faults = Faults("layer:3")
    with pytest.raises(RuntimeError, match="injected fault: layer"):
        engine.forward_prefill(slot, ids[10:], guard=True)
    assert state(backend, 1) == before and slot.filled == 10
    engine.faults = Faults()
    with pytest.raises(ValueError, match="the vocabulary has"):
        engine.forward_prefill(slot, [1, backend.layers.config.vocab_size], guard=True)
    assert state(backend, 1) == before


def test_one_backend_must_hold_everything() -> None:
    backend = base()
    layers = backend.layers

    class Half:
        def __init__(self, held: range) -> None:
            self.layers = held

    halves: list[Any] = [Half(range(2)), Half(range(2, len(layers.layers)))]
    with pytest.raises(ValueError, match="one backend must hold everything"):
        Engine(layers.config, halves, backend.head, 1, CAPACITY, 64, network=backend.head)


# -- the way from settings to the device


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Engine, list[str]]]:
    """Loads the container-int4 golden on the emulated device as the commands would: an engine, and the lines said. `gb`: GLM53_VRAM_GB."""
    found = backends.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: True if name == "cupy" else found(name))
    monkeypatch.setattr(cupy_runtime, "CupyDevice", EmulatedDevice)

    def make(gb: float | None = None) -> tuple[Engine, list[str]]:
        environ = {"GLM53_MAXT": "256", "GLM53_PREFILL_CHUNK": "64", "COLI_USAGE": str(tmp_path / "usage"), "OMP_NUM_THREADS": "1", "GLM53_BITS": "16"}
        if gb is not None:
            environ["GLM53_VRAM_GB"] = f"{gb:.9f}"
        notes: list[str] = []
        checkpoint = open_checkpoint(chosen().directory)
        engine, _, _ = load._engine(checkpoint, Settings.from_environ(environ), 2, "cuda", 0, Faults(), notes.append, None)
        return engine, notes

    return make


def chosen() -> Golden:
    return golden("container-int4")


@pytest.fixture
def room_for(on_cuda: Callable[..., tuple[Engine, list[str]]], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], float]:
    """GLM53_VRAM_GB with which so many experts fit the device."""
    left: list[int] = []

    class Watched(Decoder):
        def __init__(self, layers: Any, *rest: Any, **more: Any) -> None:
            left.append(layers.device.free_bytes())
            super().__init__(layers, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "Decoder", Watched)
        engine, notes = on_cuda()
    assert notes == [] and (engine.tiers() == 2).all() and engine.network is not None and engine.ahead is not None
    each = next(m.expert_bytes for m in engine.backends[0]._mixtures)  # type: ignore[attr-defined]
    fixed = (1 << 40) - left[0] - engine.tiers().size * each + backend_module.MARGIN + 128 * engine.config.vocab_size
    return lambda count: (fixed + count * each + each // 2) / 1e9


def test_experts_beyond_the_cap_go_to_the_host_coldest_first(
    on_cuda: Callable[..., tuple[Engine, list[str]]], room_for: Callable[[int], float], tmp_path: Path
) -> None:
    usage = tmp_path / "usage"
    data = chosen()
    mixtures, experts = 2, 5

    engine, notes = on_cuda(room_for(6))  # no history: the first experts of every layer
    assert engine.tiers().tolist() == [[2, 2, 2, 1, 1]] * mixtures
    assert len(notes) == 1 and "4 of 10 routed experts" in notes[0] and "last ones of every layer (no usage history)" in notes[0]
    got = np.array(engine.forward_prefill(engine.slots[0], data.prompt.tolist(), all_rows=True).rows)
    assert np.abs(got - data.logits[: len(got)]).max() <= 2e-3 * np.abs(data.logits).max()

    uses = np.array([[5, 90, 1, 40, 8], [70, 0, 3, 60, 50]], np.uint64)
    usage.write_text(render(uses))
    engine, notes = on_cuda(room_for(5))
    assert engine.tiers().tolist() == [[1, 2, 1, 2, 1], [2, 1, 1, 2, 2]]
    assert len(notes) == 1 and "5 of 10 routed experts" in notes[0] and "least used of the usage history" in notes[0]
    again = engine.forward_prefill(engine.slots[0], data.prompt.tolist(), all_rows=True).rows
    assert np.array_equal(got, again), "where an expert lies changes no bit"

    usage.write_text(render(np.ones((mixtures, experts + 1), np.uint64)))  # another model's
    engine, notes = on_cuda(room_for(4))
    assert engine.tiers().tolist() == [[2, 2, 1, 1, 1]] * mixtures
    assert len(notes) == 2 and "line 2 is 'model 2 6', expected 'model 2 5'" in notes[0] and "no usage history" in notes[1]
    assert usage.exists(), "a history that is not ours is only left alone"


def test_a_cap_below_what_must_be_there_is_refused(on_cuda: Callable[..., tuple[Engine, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    for gb in (0.0, 0.00001):
        with pytest.raises(BackendUnavailable, match=r"all but the routed experts takes .* allowed are"):
            on_cuda(gb)
    monkeypatch.setattr(backend_module, "available_bytes", lambda: 10)
    with pytest.raises(BackendUnavailable, match=r"10 routed experts do not fit the device, and their .* host memory either"):
        on_cuda(0.1)


@pytest.mark.usefixtures("compiled_kernels")
def test_an_engine_goes_on_without_its_device(on_cuda: Callable[..., tuple[Engine, list[str]]]) -> None:
    data = chosen()
    engine, _ = on_cuda()
    engine.forward_prefill(engine.slots[0], data.prompt.tolist())
    engine.backends[0].device.close()  # type: ignore[attr-defined]
    engine.fail_over()
    assert engine.network is None and engine.ahead is None and engine.slots[0].filled == 0
    rows = engine.forward_prefill(engine.slots[0], data.prompt.tolist(), all_rows=True).rows
    assert rows is not None and np.abs(rows - data.logits[: len(rows)]).max() <= 2e-3 * np.abs(data.logits).max()


@pytest.mark.usefixtures("compiled_kernels")
def test_a_gpu_that_cannot_run_the_kernels_is_said_by_auto_and_ends_a_wish_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    found = backends.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: {"cupy": True, "vulkan": None}.get(name, found(name)))

    def old(_sizes: Mapping[str, int]) -> Device:
        raise CudaUnsupported(refusal("NVIDIA A100", 8, 0))

    monkeypatch.setattr(cupy_runtime, "CupyDevice", old)
    checkpoint = open_checkpoint(chosen().directory)
    settings = Settings.from_environ({"OMP_NUM_THREADS": "1"})
    notes: list[str] = []
    engine, _, _ = load._engine(checkpoint, settings, 1, "auto", 0, Faults(), notes.append, None)
    assert engine.network is None
    assert f"CUDA: {refusal('NVIDIA A100', 8, 0)}; going on without" in notes
    with pytest.raises(BackendUnavailable, match=r"the kernels need 9\.0"):
        load._engine(checkpoint, settings, 1, "cuda", 0, Faults(), notes.append, None)
