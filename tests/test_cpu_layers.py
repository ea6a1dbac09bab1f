"""The CPU layers and head behind the seam: equal to the reference however the rows are cut, mixed, halted and restored."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tinymodel import FEATURES, TinyModel, random_ids, tiny_model

from glm53serve.cpu import state
from glm53serve.cpu.head import CpuHead
from glm53serve.cpu.layers import CpuLayers
from glm53serve.engine.seam import Batch, Halted, Span, never
from glm53serve.model.quant import bf16_to_f32, dequantise, f32_to_bf16, requantise
from glm53serve.model.weights import Matrix, MatrixFormat

F32 = NDArray[np.float32]
LENGTH = 71


class Runner:
    """A model's CPU layers and head, driven span by span."""

    def __init__(self, model: TinyModel, bits: int = 32, slots: int = 3, capacity: int = 200, threads: int = 2) -> None:
        c = model.config
        self.notes: list[str] = []
        self.layers = CpuLayers(c, range(c.num_layers), model.layer, model, slots, bits, threads=threads, note=self.notes.append)
        self.head = CpuHead(c, model.embedding, model.final_norm, model.lm_head, bits, threads)
        for slot in range(slots):
            self.layers.open_slot(slot, capacity)

    def run(self, rows: Sequence[tuple[int, int, NDArray[np.int64]]]) -> F32:
        """Logits of (slot, start, ids) spans in one batch."""
        batch = Batch(tuple(Span(slot, start, len(ids)) for slot, start, ids in rows))
        streams = self.head.embed(np.concatenate([ids for _, _, ids in rows]))
        return self.head.logits(self.layers.forward(streams, batch, never))

    def chunks(self, ids: NDArray[np.int64], size: int, slot: int = 0) -> F32:
        """Logits of a sequence fed in chunks."""
        return np.concatenate([self.run([(slot, i, ids[i : i + size])]) for i in range(0, len(ids), size)])


def expected(model: TinyModel, ids: NDArray[np.int64]) -> F32:
    reference = model.reference(np.float64)
    return reference.forward(ids, reference.new_state()).astype(np.float32)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_and_chunk_size_equals_the_reference(feature: str) -> None:
    model = tiny_model(seed=3, **FEATURES[feature])
    ids = random_ids(model.config, LENGTH)
    want = expected(model, ids)
    for size in (1, 2, 7, 64, LENGTH):
        got = Runner(model).chunks(ids, size)
        assert np.abs(got - want).max() <= 1e-4, size


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int4"])
def test_every_weight_format_equals_the_reference_at_32_bits(weights: MatrixFormat) -> None:
    model = tiny_model(seed=5, weight_format=weights)
    ids = random_ids(model.config, LENGTH)
    assert np.abs(Runner(model).chunks(ids, LENGTH) - expected(model, ids)).max() <= 1e-4


def test_slots_decoded_together_equal_each_alone() -> None:
    model = tiny_model(seed=7)
    prompts = [random_ids(model.config, n, seed=n) for n in (33, 21, 40)]
    want = [expected(model, ids) for ids in prompts]
    runner = Runner(model)
    starts = [len(ids) - 10 for ids in prompts]
    for slot, ids in enumerate(prompts):
        runner.run([(slot, 0, ids[: starts[slot]])])
    for step in range(10):
        got = runner.run([(s, starts[s] + step, prompts[s][starts[s] + step :][:1]) for s in (2, 0, 1)])
        for row, slot in enumerate((2, 0, 1)):
            assert np.abs(got[row] - want[slot][starts[slot] + step]).max() <= 1e-4


def test_halt_anywhere_then_restore_gives_the_same_bits() -> None:
    model = tiny_model(seed=11)
    ids = random_ids(model.config, 60)
    want = Runner(model).chunks(ids, 30)
    runner = Runner(model)
    runner.run([(0, 0, ids[:30])])
    runner.layers.snapshot(0)
    asked = 0
    while True:
        budget = asked

        def halt() -> bool:
            nonlocal budget
            budget -= 1
            return budget < 0

        streams = runner.head.embed(ids[30:])
        try:
            out = runner.layers.forward(streams, Batch((Span(0, 30, 30),)), halt)
        except Halted as stop:
            assert 0 <= stop.layer < model.config.num_layers
            runner.layers.restore(0)
            asked += 1
        else:
            break
    assert asked > 2 * model.config.num_layers
    np.testing.assert_array_equal(runner.head.logits(out), want[30:])


def test_a_saved_copy_takes_a_slot_back() -> None:
    model = tiny_model(seed=13, index_kpool=4)
    ids, other = random_ids(model.config, 60), random_ids(model.config, 60, seed=8)
    want = expected(model, ids)
    runner = Runner(model)
    runner.run([(0, 0, ids[:30])])
    copy = runner.layers.save(0)
    assert copy.nbytes > 0
    runner.run([(0, 30, other[30:])])
    runner.layers.load(0, copy)
    assert np.abs(runner.run([(0, 30, ids[30:])]) - want[30:]).max() <= 1e-4


def test_a_reset_slot_starts_over() -> None:
    model = tiny_model(seed=13)
    ids = random_ids(model.config, 40)
    runner = Runner(model)
    first = runner.chunks(ids, 40)
    runner.layers.reset_slot(0)
    np.testing.assert_array_equal(runner.chunks(ids, 40), first)


def test_expert_uses_are_counted_for_each_slot() -> None:
    model = tiny_model(seed=15)
    c = model.config
    runner = Runner(model)
    runner.run([(0, 0, random_ids(c, 9))])
    runner.run([(1, 0, random_ids(c, 1)), (0, 9, random_ids(c, 1))])
    assert runner.layers.expert_uses(0).shape == (len(c.sparse_layers), c.n_routed_experts)
    assert (runner.layers.expert_uses(0).sum(axis=1) == 10 * c.num_experts_per_tok).all()
    assert (runner.layers.expert_uses(1).sum(axis=1) == c.num_experts_per_tok).all()
    runner.layers.clear_uses(0)
    assert runner.layers.expert_uses(0).sum() == 0
    assert runner.layers.tiers().shape == (len(c.sparse_layers), c.n_routed_experts)


def test_a_slot_cannot_outgrow_its_capacity() -> None:
    model = tiny_model(seed=1)
    runner = Runner(model, capacity=64)
    ids = random_ids(model.config, 65)
    runner.run([(0, 0, ids[:64])])
    with pytest.raises(ValueError, match="65 positions: the slot was opened for 64"):
        runner.run([(0, 64, ids[64:])])


def test_a_run_may_not_begin_with_a_shared_indexer() -> None:
    model = tiny_model(seed=1, **FEATURES["shared indexer"])
    with pytest.raises(ValueError, match="both must be on one backend"):
        CpuLayers(model.config, range(5, 6), model.layer, model, 1, 32)


def test_layers_split_over_two_runs_equal_one_run() -> None:
    model = tiny_model(seed=17)
    c = model.config
    ids = random_ids(c, 30)
    head = CpuHead(c, model.embedding, model.final_norm, model.lm_head, 32)
    streams = head.embed(ids)
    for layers in (range(0, 2), range(2, 6)):
        part = CpuLayers(c, layers, model.layer, model, 1, 32)
        part.open_slot(0, 40)
        streams = part.forward(streams, Batch((Span(0, 0, 30),)), never)
    assert np.abs(head.logits(streams) - expected(model, ids)).max() <= 1e-4


def test_ids_outside_the_vocabulary_are_refused() -> None:
    model = tiny_model(seed=1)
    with pytest.raises(ValueError, match=r"the vocabulary has 0\.\.95"):
        Runner(model).head.embed(np.array([3, 96]))


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_bits_do_not_depend_on_chunks_or_company(bits: int) -> None:
    """A row is the same to the last bit whatever it is computed with."""
    model = tiny_model(seed=9, weight_format="bf16", expert_format="int4")
    ids, other = random_ids(model.config, LENGTH), random_ids(model.config, LENGTH, seed=4)
    want = Runner(model, bits).chunks(ids, LENGTH)
    for size in (1, 5, 64):
        np.testing.assert_array_equal(Runner(model, bits).chunks(ids, size), want)
    mixed = Runner(model, bits)
    got = [mixed.run([(1, i, other[i : i + 1]), (0, i, ids[i : i + 1])])[1] for i in range(LENGTH)]
    np.testing.assert_array_equal(np.stack(got), want)


def test_the_number_of_threads_changes_no_bit() -> None:
    model = tiny_model(seed=19, weight_format="bf16", expert_format="int4")
    ids = random_ids(model.config, 40)
    np.testing.assert_array_equal(Runner(model, 4, threads=1).chunks(ids, 13), Runner(model, 4, threads=3).chunks(ids, 13))


@pytest.mark.parametrize("stored", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_few_bits_stay_near_the_same_weights_in_float32(stored: MatrixFormat, bits: int) -> None:
    """The error that the kernels add to the rounding of the weights: far below a thousandth of the largest logit, about one with 16-bit
    activations in a network as rough as this."""
    model = tiny_model(seed=21, weight_format=stored)
    ids = random_ids(model.config, 40)
    want = expected(rounded(model, bits), ids)
    assert np.abs(Runner(model, bits).chunks(ids, 40) - want).max() <= (3e-3 if "int4" in (stored, f"int{bits}") else 1e-4) * np.abs(want).max()


def rounded(model: TinyModel, bits: int) -> TinyModel:
    """The model with every dense matrix rounded as the CPU backend keeps it: kv_b and weights_proj at 16 bits at least, b_proj as stored."""

    def walk(part: Any) -> Any:
        changed: dict[str, Any] = {}
        for name in part.__dataclass_fields__:
            value = getattr(part, name)
            if isinstance(value, Matrix) and name != "b_proj":
                kept = requantise(value, max(bits, 16) if name in ("kv_b", "weights_proj") else bits)
                changed[name] = Matrix("f32", value.rows, value.cols, bf16(dequantise(kept)) if name == "kv_b" else dequantise(kept))
            elif hasattr(value, "__dataclass_fields__") and not isinstance(value, Matrix):
                changed[name] = walk(value)
        return replace(part, **changed)

    head = model.lm_head
    plain = Matrix("f32", head.rows, head.cols, dequantise(requantise(head, bits)))
    return replace(model, layers=tuple(walk(layer) for layer in model.layers), lm_head=plain)


def bf16(values: F32) -> F32:
    return bf16_to_f32(f32_to_bf16(values))


def test_without_compiled_kernels_numpy_computes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glm53serve.cpu.stack", None)
    monkeypatch.setitem(sys.modules, "glm53serve.cpu.output", None)
    model = tiny_model(seed=23, **FEATURES["pool 5, 1 stream"])
    ids = random_ids(model.config, 40)
    runner = Runner(model)
    assert np.abs(runner.chunks(ids, 17) - expected(model, ids)).max() <= 1e-4
    assert any("NumPy computes" in line for line in runner.notes)
    assert np.abs(Runner(model, 8).chunks(ids, 17) - expected(rounded(model, 8), ids)).max() <= 1e-3


def test_a_snapshot_without_memory_raises_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=25)
    ids = random_ids(model.config, 30)
    runner = Runner(model)
    want = runner.chunks(ids, 30)
    runner.layers.reset_slot(0)

    def full(*_args: object) -> F32:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty_like", full)
        with pytest.raises(MemoryError):
            runner.layers.snapshot(0)
    np.testing.assert_array_equal(runner.chunks(ids, 30), want)


@contextmanager
def allocation_fails(monkeypatch: pytest.MonkeyPatch, n: int) -> Iterator[list[int]]:
    """The n-th array made by NumPy's empty or zeros finds no memory. Yields a list that is filled when there was one."""
    made, failed = 0, []

    def counted(original: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == n:
            failed.append(n)
            raise MemoryError
        return original(*arguments, **options)

    with monkeypatch.context() as patch, suppress(MemoryError):
        for name in ("empty", "zeros"):
            patch.setattr(np, name, partial(counted, getattr(np, name)))
        yield failed


def test_a_pass_without_memory_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation of a pass that needs more room fails, the same pass gives the right bits when there is memory again."""
    monkeypatch.setattr(state, "_FIRST_ROWS", 4)
    model = tiny_model(seed=4)
    ids = random_ids(model.config, 40)

    def begun() -> Runner:
        runner = Runner(model, slots=1, capacity=60)
        runner.run([(0, 0, ids[:3])])
        runner.layers.snapshot(0)
        return runner

    want, n, failed = begun().run([(0, 3, ids[3:])]), 0, [0]
    while failed:
        n += 1 + n // 16
        runner = begun()
        with allocation_fails(monkeypatch, n) as failed:
            runner.run([(0, 3, ids[3:])])
        runner.layers.restore(0)
        np.testing.assert_array_equal(runner.run([(0, 3, ids[3:])]), want)
    assert n > 50


def test_logits_without_memory_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=4)
    head = Runner(model, slots=1).head
    embedded = head.embed(random_ids(model.config, 40))
    want, n, failed = head.logits(embedded), 0, [0]
    while failed:
        n += 1
        head = CpuHead(model.config, model.embedding, model.final_norm, model.lm_head, 32, 2)
        head.logits(embedded[:3])
        with allocation_fails(monkeypatch, n) as failed:
            head.logits(embedded)
        np.testing.assert_array_equal(head.logits(embedded[:3]), want[:3])
        np.testing.assert_array_equal(head.logits(embedded), want)
    assert n > 4


def test_time_is_metered() -> None:
    model = tiny_model(seed=27)
    runner = Runner(model)
    runner.run([(0, 0, random_ids(model.config, 30))])
    meter = runner.layers.meter
    assert meter.attention > 0 and meter.experts > 0
    assert 0 < meter.found == meter.uses <= len(model.config.sparse_layers) * model.config.n_routed_experts


@pytest.mark.parametrize("armed", [True, False])
def test_an_interrupt_ends_the_operation_that_runs(armed: bool) -> None:
    """From another thread, in the middle of a long pass: with a halt question it ends at once, without one nothing happens."""
    model = tiny_model(seed=3)
    runner = Runner(model, slots=1, capacity=3000)
    layers, head = runner.layers, runner.head
    ids = random_ids(model.config, 3000)
    batch = Batch((Span(0, 0, len(ids)),))
    wanted = layers.forward(head.embed(ids), batch, never)
    layers.reset_slot(0)
    stop = threading.Event()

    def interrupting() -> None:
        while not stop.wait(0.002):
            layers.interrupt()

    thread = threading.Thread(target=interrupting)
    thread.start()
    try:
        if armed:
            with pytest.raises(Halted):
                layers.forward(head.embed(ids), batch, lambda: False)
        else:
            assert np.array_equal(layers.forward(head.embed(ids), batch, never), wanted)
    finally:
        stop.set()
        thread.join()
    layers.reset_slot(0)
    assert np.array_equal(layers.forward(head.embed(ids), batch, lambda: False), wanted)
