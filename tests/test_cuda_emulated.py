"""The CUDA backend on a CPU: its kernels compiled by g++ (tests/cuda/emulator), against the reference and the goldens."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from checks import Churn, backend_of, greedy, logits_in_pieces, prefill, run, same_turns, without_f32  # noqa: E402
from emulated_device import EmulatedDevice, compiler  # noqa: E402
from goldens import golden  # noqa: E402
from tinymodel import FEATURES, as_matrix, random_ids, tiny_model  # noqa: E402

from glm53serve.cuda import upload  # noqa: E402
from glm53serve.cuda.backend import CudaBackend, load_backend  # noqa: E402
from glm53serve.cuda.decode import decode_loop  # noqa: E402
from glm53serve.cuda.model import defines  # noqa: E402
from glm53serve.cuda.packing import pack, pack_pair, unpack  # noqa: E402
from glm53serve.cuda.products import product, run_products  # noqa: E402
from glm53serve.cuda.runtime import MAX_ROWS, HostBuffer  # noqa: E402
from glm53serve.cuda.scratch import SplitRows, padded  # noqa: E402
from glm53serve.cuda.upload import Uploader  # noqa: E402
from glm53serve.engine.sampling import Sampling, nucleus, uniform  # noqa: E402
from glm53serve.engine.seam import Batch, Halted, Span, never  # noqa: E402
from glm53serve.engine.step_device import RowPlan  # noqa: E402
from glm53serve.model.checkpoint import open_checkpoint  # noqa: E402
from glm53serve.model.config import DENSE, DSA, FULL, KDA, SPARSE  # noqa: E402
from glm53serve.model.quant import bf16_to_f32, dequantise, f32_to_bf16  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")


@lru_cache
def base() -> CudaBackend:
    """A backend over the base tiny model, shared by the tests that only read it."""
    return backend_of(tiny_model(seed=1), EmulatedDevice, looping=True)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("rows", "cols"), [(16, 256), (48, 64), (23, 130), (129, 300)])
def test_packing_loses_nothing(fmt: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * cols)
    matrix = as_matrix(rng.standard_normal((rows, cols)), fmt)  # type: ignore[arg-type]
    assert np.array_equal(unpack(pack(matrix)), dequantise(matrix))
    up = as_matrix(rng.standard_normal((rows, cols)), fmt)  # type: ignore[arg-type]
    both = unpack_pair(pack_pair(matrix, up))
    assert np.array_equal(both[0][:rows], dequantise(matrix)) and np.array_equal(both[1][:rows], dequantise(up))


def unpack_pair(packed):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    whole = unpack(replace(packed, rows=packed.tiles * 16))
    halves = whole.reshape(-1, 2, 8, packed.cols)
    return halves[:, 0].reshape(-1, packed.cols), halves[:, 1].reshape(-1, packed.cols)


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_against_the_reference(name: str) -> None:
    model = tiny_model(seed=1, weight_format="bf16", **FEATURES[name])
    backend = backend_of(model, EmulatedDevice)
    ids = random_ids(model.config, 52)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    bound = 5e-4 * np.abs(expected).max()
    for pieces in ([40] + [1] * 12, [7, 23, 1, 9, 12]):
        assert np.abs(logits_in_pieces(backend, 0, ids, pieces) - expected).max() <= bound
    assert not np.array_equal(logits_in_pieces(backend, 1, ids[::-1].copy(), [52]), expected)


@pytest.mark.long
@pytest.mark.parametrize("fmt", ["fp8", "int8", "int4"])
def test_every_weight_format_against_the_reference(fmt: str) -> None:
    model = tiny_model(seed=1, weight_format=fmt)  # type: ignore[arg-type]
    backend = backend_of(model, EmulatedDevice)
    ids = random_ids(model.config, 40)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    assert np.abs(logits_in_pieces(backend, 0, ids, [30, 10]) - expected).max() <= 5e-4 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.parametrize("fmt", ["f32", "bf16", "fp8", "int8", "int4"])
def test_skinny_products_of_wide_matrices(fmt: str) -> None:
    """More columns than fit in shared memory at once, more rounds than one; a row's bits are the same in any company."""
    rng = np.random.default_rng(7)
    config, rows, cols = tiny_model(seed=1).config, 100, 2400
    device = EmulatedDevice(defines(config, {"f32", "bf16", "fp8", "int8", "int4"}))
    stored = as_matrix(rng.standard_normal((rows, cols)), fmt)  # type: ignore[arg-type]
    matrix = Uploader(device, config).matrix(stored)
    values = rng.standard_normal((MAX_ROWS, cols)).astype(np.float32)
    high = f32_to_bf16(values)
    low = f32_to_bf16(values - bf16_to_f32(high))
    ld = padded(cols)
    x = SplitRows(device.alloc(2 * MAX_ROWS * ld), device.alloc(2 * MAX_ROWS * ld), ld)
    for part, to in ((high, x.high), (low, x.low)):
        assert to is not None
        device.upload(to.at(), np.pad(part, ((0, 0), (0, ld - cols))))
    y = device.alloc(4 * MAX_ROWS * rows)
    expected = (bf16_to_f32(high).astype(np.float64) + bf16_to_f32(low)) @ dequantise(stored).T.astype(np.float64)
    seen = np.full((MAX_ROWS, rows), np.nan, np.float32)
    for count in (16, 8, 4, 1):
        got = np.full((count, rows), np.nan, np.float32)
        device.upload(y.at(), got)
        run_products(device, count, [product(matrix, x, y, rows)], 64)
        device.download(y.at(), got)
        assert np.abs(got - expected[:count]).max() <= 2e-5 * np.abs(expected).max()
        assert count == 16 or np.array_equal(got, seen[:count])
        seen[:count] = got


WIDE = {"qk_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "q_lora_rank": 64, "hidden_size": 96, "kda_head_dim": 32}
"""Sizes the prompt kernels of wide models take."""


@pytest.mark.long
@pytest.mark.parametrize(("fmt", "expert"), [("bf16", "int4"), ("bf16", "int8"), ("bf16", "fp8")])
def test_prompts_of_wide_models_agree_to_the_precision_of_bf16(fmt: str, expert: str) -> None:
    kinds = {"num_layers": 2, "layer_kinds": (KDA, DSA), "mlp_kinds": (DENSE, SPARSE), "indexer_kinds": (FULL, FULL)}
    model = without_f32(tiny_model(seed=3, weight_format=fmt, expert_format=expert, **WIDE, **kinds))  # type: ignore[arg-type]
    backend = backend_of(model, EmulatedDevice, exact=False)
    ids = random_ids(model.config, 60)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    got = logits_in_pieces(backend, 0, ids, [57, 3])
    error = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(error) <= 1e-2 and error[:10].max() <= 2e-2
    assert error[:57].max() > 1e-4, "the prompt ran on bf16 pairs"


def test_long_prompts_take_the_long_kernel_and_give_the_same_logits() -> None:
    kinds = {"num_layers": 1, "layer_kinds": (DSA,), "mlp_kinds": (SPARSE,), "indexer_kinds": (FULL,)}
    model = without_f32(tiny_model(seed=3, weight_format="bf16", **WIDE, **kinds))  # type: ignore[arg-type]
    backend = backend_of(model, EmulatedDevice, slots=1, capacity=600, chunk=520, exact=False)
    ids = random_ids(model.config, 515)
    whole, cut = logits_in_pieces(backend, 0, ids, [515]), logits_in_pieces(backend, 0, ids, [300, 215])
    assert backend.device.launches["gemm_long"] > 0  # type: ignore[attr-defined]
    assert np.abs(whole - cut).max() <= 1e-4 * np.abs(cut).max()


@pytest.mark.parametrize("name", ["grouped-bf16", "ragged-fp8", "container-int4"])
def test_goldens(name: str) -> None:
    data = golden(name)
    checkpoint = open_checkpoint(data.directory)
    backend = load_backend(checkpoint, 2, 256, 64, make_device=EmulatedDevice)
    cut = len(data.prompt)
    got = logits_in_pieces(backend, 0, data.ids, [cut, *[1] * len(data.greedy)])
    scale = np.abs(data.logits).max()
    assert np.abs(got - data.logits).max() <= 2e-3 * scale
    assert greedy(backend, 1, data.prompt, len(data.greedy)) == data.greedy.tolist()


def test_rows_of_different_slots_in_one_pass_have_the_same_bits_as_alone() -> None:
    backend = base()
    ids = random_ids(backend.layers.config, 30)
    alone = []
    for slot, count in enumerate((9, 14, 20)):
        logits_in_pieces(backend, slot, ids[:count], [count])
        streams = backend.head.embed(ids[count : count + 1])
        alone.append(backend.head.logits(backend.layers.forward(streams, Batch((Span(slot, count, 1),)), never))[0])
        logits_in_pieces(backend, slot, ids[:count], [count])
    batch = Batch(tuple(Span(slot, count, 1) for slot, count in enumerate((9, 14, 20))))
    streams = backend.head.embed(ids[[9, 14, 20]])
    assert np.array_equal(backend.head.logits(backend.layers.forward(streams, batch, never)), np.array(alone))


def test_a_halted_chunk_leaves_no_trace() -> None:
    backend = base()
    layers, ids = backend.layers, random_ids(backend.layers.config, 38)
    whole = logits_in_pieces(backend, 0, ids, [20, 18])
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return False

    logits_in_pieces(backend, 0, ids[:20], [20])
    layers.forward(backend.head.embed(ids[20:]), Batch((Span(0, 20, 18),)), count)
    assert asked >= 2 * len(layers.layers) - 1
    for stop in (1, 2, asked // 2, asked):
        logits_in_pieces(backend, 0, ids[:20], [20])
        layers.snapshot(0)
        left = stop

        def halt() -> bool:
            nonlocal left
            left -= 1
            return left == 0

        with pytest.raises(Halted) as stopped:
            layers.forward(backend.head.embed(ids[20:]), Batch((Span(0, 20, 18),)), halt)
        assert stopped.value.on_device and stopped.value.layer in layers.layers
        layers.restore(0)
        again = backend.head.logits(layers.forward(backend.head.embed(ids[20:]), Batch((Span(0, 20, 18),)), never))
        assert np.array_equal(again, whole[20:])


def test_a_saved_state_comes_back() -> None:
    backend = base()
    ids = random_ids(backend.layers.config, 40)
    whole = logits_in_pieces(backend, 0, ids, [25, 15])
    logits_in_pieces(backend, 0, ids[:25], [25])
    copy = backend.layers.save(0)
    backend.layers.forward(backend.head.embed(ids[:9]), Batch((Span(0, 25, 9),)), never)
    backend.layers.load(0, copy)
    again = backend.head.logits(backend.layers.forward(backend.head.embed(ids[25:]), Batch((Span(0, 25, 15),)), never))
    assert np.array_equal(again, whole[25:])


def test_depths_and_device_loops_give_the_same_bytes_under_churn() -> None:
    backend = base()
    rng = np.random.default_rng(5)
    churn = Churn.random(rng, backend.layers.config.vocab_size, turns=5, longest=10)
    results = {mode: churn.play(backend, *mode, slots=3) for mode in ((0, 0), (1, 0), (4, 0), (1, 16))}
    for mode, result in results.items():
        assert same_turns(results[0, 0], result), mode


def test_greedy_decode_equals_the_reference_token_for_token() -> None:
    model = tiny_model(seed=1)
    ids = random_ids(model.config, 25)
    assert greedy(base(), 2, ids, 30) == model.reference(np.float32).greedy(ids, 30)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_ended_row_leaves_its_logits(depth: int) -> None:
    """What followed the last fed token is kept when a row ends, while another row goes on and overwrites the step's own logits."""
    backend = base()
    ids = random_ids(backend.layers.config, 21)
    loop = decode_loop(backend.decoder, depth)
    for slot, limit in ((0, 3), (1, 9)):
        loop.start(RowPlan(slot, prefill(backend, slot, ids[: 20 + slot]), 20 + slot, limit, 100))
    tokens = [loop._arriving[0].plan.token, *(c.token for c in run(loop) if c.slot == 0 and c.token is not None)]
    kept = backend.decoder.last_logits(0)
    backend.layers.reset_slot(2)
    fed = np.concatenate([ids[:20], np.array(tokens[:3], np.int64)])
    assert np.allclose(kept, logits_in_pieces(backend, 2, fed, [20, 1, 1, 1])[-1], atol=2e-4)
    assert int(kept.argmax()) == tokens[3]


def test_experts_in_host_memory_decode_the_same_tokens() -> None:
    model = tiny_model(seed=1, expert_format="int4")
    ids = random_ids(model.config, 20)
    all_there = backend_of(model, EmulatedDevice)
    some_left = load_backend_with_budget(model, 0.5, all_there)
    tiers = some_left.layers.tiers()
    assert 0 < (tiers == 1).sum() < tiers.size and (all_there.layers.tiers() == 2).all()
    assert np.array_equal(logits_in_pieces(all_there, 0, ids, [20]), logits_in_pieces(some_left, 0, ids, [20]))
    assert greedy(all_there, 1, ids, 12) == greedy(some_left, 1, ids, 12)


@pytest.mark.parametrize("slab", [256, 1 << 12, 1 << 20])
def test_pinned_pieces_lie_apart_in_few_allocations(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    """Each allocation is a call of the driver: tens of thousands of experts must not take one for every array."""
    monkeypatch.setattr(upload, "SLAB_BYTES", slab)
    device = base().device
    sizes = [1, 0, 255, 256, 257, 5000, 3, 4096]
    made: list[HostBuffer] = []

    class Counting:
        def host(self, nbytes: int) -> HostBuffer:
            made.append(device.host(nbytes))
            return made[-1]

    total = sum(upload.pinned_room(n) for n in sizes)
    slabs = upload.PinnedSlabs(Counting(), total)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    places = [int(slabs.put(a)) for a in arrays]
    for place, array in zip(places, arrays, strict=True):
        assert place % 256 == 0
        assert bytes((ctypes.c_uint8 * len(array)).from_address(place)) == array.tobytes()
        assert any(m.address <= place and place + len(array) <= m.address + len(m.bytes) for m in made)
    assert len(set(places)) == len(places)
    assert slabs.wanted == 0 and len(made) == {256: 8, 1 << 12: 4, 1 << 20: 1}[slab]


def load_backend_with_budget(model, share: float, first: CudaBackend) -> CudaBackend:  # type: ignore[no-untyped-def]
    """A backend whose budget holds about that share of the experts, the hottest ones first."""
    from checks import InMemory

    from glm53serve.cuda import backend as module

    heat = np.random.default_rng(0).integers(0, 100, (len(model.config.sparse_layers), model.config.n_routed_experts))
    mixture = next(layer.ffn for layer in first.layers.model.layers if hasattr(layer.ffn, "expert_bytes"))
    experts = heat.size * mixture.expert_bytes
    used = (1 << 40) - first.device.free_bytes()
    margin = module.MARGIN + 4 * 32 * model.config.vocab_size
    decoder = first.decoder.logits_room.nbytes
    wanted = int(used - experts * (1 - share) + margin - decoder)
    loaded = load_backend(InMemory(model), 4, 160, 64, vram_bytes=wanted, history=lambda: heat, make_device=EmulatedDevice)
    tiers = loaded.layers.tiers()
    assert heat[tiers == 2].min() >= heat[tiers == 1].max() - 1
    return loaded


def test_expert_uses_are_counted_by_slot() -> None:
    backend = base()
    config = backend.layers.config
    ids = random_ids(config, 20)
    for slot in (0, 1):
        backend.layers.clear_uses(slot)
    prefill(backend, 1, ids)
    assert not backend.layers.expert_uses(0).any()
    assert backend.layers.expert_uses(1).sum() == 20 * config.num_experts_per_tok * len(config.sparse_layers)
    backend.layers.clear_uses(1)
    assert not backend.layers.expert_uses(1).any()


@pytest.mark.parametrize(("heat", "top_p"), [(0.7, 1.0), (1.3, 0.9), (0.5, 0.3), (2.0, 0.999)])
def test_device_sampling_draws_what_the_distribution_says(heat: float, top_p: float) -> None:
    backend = base()
    decoder, config = backend.decoder, backend.layers.config
    ids = random_ids(config, 12)
    first = prefill(backend, 0, ids)
    seeds = range(6)
    logits = None
    for seed in seeds:
        prefill(backend, 0, ids)
        loop = decode_loop(decoder, 0)
        loop.start(RowPlan(0, first, len(ids), 1, 100, temperature=heat, top_p=top_p, seed=seed, counter=3))
        token = loop.turn()[0].token
        logits = decoder.logits(0)
        assert token == expected_draw(logits, Sampling(heat, top_p, seed), 3)


def expected_draw(logits: np.ndarray, sampling: Sampling, counter: int) -> int:
    """The draw in falling order of weight, ties by lower id, in float64."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    everything = sampling.top_p <= 0 or sampling.top_p >= 1
    ids = np.argsort(-weights, kind="stable") if everything else nucleus(weights, sampling.top_p * float(weights.sum()))
    cumulative = np.cumsum(weights[ids])
    return int(ids[np.searchsorted(cumulative, uniform(sampling.seed, counter) * cumulative[-1], side="right")])


def test_a_failed_recording_is_told_once_and_steps_are_launched_plainly() -> None:
    class NoGraphs(EmulatedDevice):
        def record(self, body):  # type: ignore[no-untyped-def]
            raise RuntimeError("capture is not supported here")

    notes: list[str] = []
    model = tiny_model(seed=1)
    backend = backend_of(model, NoGraphs, note=notes.append)
    assert not backend.decoder.captured and len(notes) == 1 and "capture is not supported" in notes[0]
    ids = random_ids(model.config, 10)
    assert greedy(backend, 0, ids, 8) == model.reference(np.float32).greedy(ids, 8)


def test_serving_allocates_nothing() -> None:
    backend = base()
    left = backend.device.free_bytes()
    greedy(backend, 3, random_ids(backend.layers.config, 30), 10)
    assert backend.device.free_bytes() == left


@pytest.mark.parametrize(("name", "value"), [("index_head_dim", 18), ("index_topk", 65536), ("n_routed_experts", 1056), ("kv_lora_rank", 516)])
def test_sizes_the_kernels_cannot_take_are_refused_by_name(name: str, value: int) -> None:
    config = replace(tiny_model().config, **{name: value})
    with pytest.raises(ValueError, match=f"{name}={value}"):
        defines(config, {"bf16"})
