"""Cancelling inside a chunk: at every border, from another thread, late, and what the slot is afterwards."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from chain_runner import EVERY_STAGE, Countdown, Runner, chain
from tinymodel import TinyModel, random_ids, tiny_model

from glm53serve.engine.seam import Halted, never
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.layers import VulkanLayers

PRIMED, CHUNK = 6, 28


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(seed=8, num_layers=3, layer_kinds=("kda", "dsa", "kda"), mlp_kinds=("dense", "sparse", "sparse"), indexer_kinds=("full",) * 3)


def primed(device: Device, model: TinyModel, **options: object) -> Runner:
    runner = Runner(model.reference(np.float32), chain(device, model, **options))
    runner.streams(random_ids(model.config, PRIMED), 0)
    return runner


def chunk(model: TinyModel) -> np.ndarray:
    return random_ids(model.config, CHUNK, seed=5)


def fresh_answer(device: Device, model: TinyModel, **options: object) -> np.ndarray:
    return primed(device, model, **options).streams(chunk(model), PRIMED)


def test_a_cancel_at_every_segment_border_leaves_no_trace(device: Device) -> None:
    """Every stage is a segment here. After each halt and restore the state has the bits it had, and retries give a fresh engine's."""
    small = tiny_model(seed=8, num_layers=2, layer_kinds=("kda", "dsa"), mlp_kinds=("dense", "sparse"), indexer_kinds=("full",) * 2)
    ids = random_ids(small.config, 11, seed=5)
    want = primed(device, small, rate=EVERY_STAGE, rows=8).streams(ids, PRIMED)
    runner = primed(device, small, rate=EVERY_STAGE, rows=8)
    runner.layers.snapshot(0)
    kept = runner.layers.save(0).data
    asked = Countdown(10**9)
    assert np.array_equal(runner.streams(ids, PRIMED, halt=asked), want)
    runner.layers.restore(0)
    assert asked.asked > 40, "two row groups of some twenty-five segments"
    layers = []
    for border in range(1, asked.asked + 1):
        with pytest.raises(Halted) as halted:
            runner.streams(ids, PRIMED, halt=Countdown(border))
        assert halted.value.on_device
        layers.append(halted.value.layer)
        runner.layers.restore(0)
        assert np.array_equal(runner.layers.save(0).data, kept), border
        if border % 15 == 0:
            assert np.array_equal(runner.streams(ids, PRIMED), want), border
            runner.layers.restore(0)
    assert set(layers) == {0, 1}
    assert np.array_equal(runner.streams(ids, PRIMED), want)


def test_a_finished_chunk_can_be_taken_back_too(device: Device, model: TinyModel) -> None:
    """What a partial chain needs when the layers behind it halt, and later passes before the restore change nothing."""
    want = fresh_answer(device, model)
    runner = primed(device, model)
    runner.layers.snapshot(0)
    for _ in range(2):
        runner.streams(chunk(model), PRIMED)
        runner.streams(random_ids(model.config, 3, seed=9), PRIMED + CHUNK)
        runner.layers.restore(0)
    assert np.array_equal(runner.streams(chunk(model), PRIMED), want)


def test_snapshots_of_an_empty_slot_and_of_another_slot(device: Device, model: TinyModel) -> None:
    runner = Runner(model.reference(np.float32), chain(device, model))
    first = runner.streams(chunk(model), 0)
    runner.layers.snapshot(1)
    runner.streams(chunk(model), 0, slot=1)
    runner.layers.restore(1)
    assert np.array_equal(runner.streams(chunk(model), 0, slot=1), first)
    runner.layers.snapshot(0)
    runner.streams(chunk(model)[:5], CHUNK, slot=0)
    runner.layers.reset_slot(0)
    assert np.array_equal(runner.streams(chunk(model), 0), first)
    with pytest.raises(ValueError, match="no snapshot"):
        runner.layers.restore(1)
    runner.layers.restore(0)


def test_without_the_restore_the_answer_differs(device: Device, model: TinyModel) -> None:
    """The page a halted pass leaves is not the one it began with; only the snapshot keeps that."""
    want = fresh_answer(device, model)
    runner = primed(device, model)
    runner.layers.snapshot(0)
    runner.streams(chunk(model), PRIMED)
    assert not np.array_equal(runner.streams(chunk(model), PRIMED), want)


def test_checkpoints(device: Device, model: TinyModel) -> None:
    runner = primed(device, model)
    empty, saved = chain(device, model).save(0), runner.layers.save(0)
    want = runner.streams(chunk(model), PRIMED)
    assert saved.nbytes == 2 * 4 * (3 * 16 * 16 + 3 * 3 * 48) and empty.nbytes == 0
    runner.layers.load(0, saved)
    assert np.array_equal(runner.streams(chunk(model), PRIMED), want)
    runner.layers.snapshot(0)
    runner.layers.load(0, saved)
    assert np.array_equal(runner.streams(chunk(model), PRIMED), want)
    runner.layers.load(0, empty)
    assert np.array_equal(runner.streams(chunk(model), 0), Runner(model.reference(np.float32), chain(device, model)).streams(chunk(model), 0))


def interrupt_when_running(layers: VulkanLayers, said: threading.Event, delay: float) -> threading.Thread:
    def act() -> None:
        time.sleep(delay)
        said.set()
        layers.interrupt()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("delay", [0.002, 0.01, 0.03])
def test_another_thread_ends_a_pass(device: Device, model: TinyModel, delay: float) -> None:
    """One segment a row group, so only the halt word and the wake-up can be this quick; the retry is a fresh engine's."""
    runner = primed(device, model, rows=128)
    ids = random_ids(model.config, 290, seed=3)
    runner.layers.snapshot(0)
    want = runner.streams(ids, PRIMED)
    runner.layers.restore(0)
    said = threading.Event()
    thread = interrupt_when_running(runner.layers, said, delay)
    with pytest.raises(Halted) as halted:
        while True:
            runner.streams(ids, PRIMED, halt=said.is_set)
            runner.layers.restore(0)
    thread.join()
    assert halted.value.on_device
    runner.layers.restore(0)
    assert np.array_equal(runner.streams(ids, PRIMED), want)


def test_a_late_cancel_does_not_touch_the_next_pass(device: Device, model: TinyModel) -> None:
    """Interrupts while nothing runs, while a decode step runs and while a pass runs whose own halt says no change nothing."""
    want = fresh_answer(device, model)
    runner = primed(device, model)
    runner.layers.interrupt()
    runner.layers.snapshot(0)
    assert np.array_equal(runner.streams(chunk(model), PRIMED, halt=never), want)
    for halt in (never, lambda: False):
        runner.layers.restore(0)
        stop = threading.Event()

        def pester(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                runner.layers.interrupt()
                time.sleep(0.001)

        thread = threading.Thread(target=pester)
        thread.start()
        try:
            assert np.array_equal(runner.streams(chunk(model), PRIMED, halt=halt), want)
        finally:
            stop.set()
            thread.join()


def test_the_first_layer_always_begins(device: Device, model: TinyModel) -> None:
    """A halt that says yes from the start ends the pass after work was submitted, not before."""
    runner = primed(device, model, rate=EVERY_STAGE)
    submitted = runner.layers._queue.submitted
    with pytest.raises(Halted):
        runner.streams(chunk(model), PRIMED, halt=lambda: True)
    assert 1 <= runner.layers._queue.submitted - submitted <= 2


def test_work_queued_behind_the_halt_word_is_not_done(device: Device, model: TinyModel) -> None:
    """The word is read by the kernels themselves: a whole row group submitted after it was set leaves the streams as they are."""
    runner = primed(device, model, rows=64)
    ids = random_ids(model.config, 64, seed=3)
    runner.streams(ids, PRIMED)
    queue, word, x = runner.layers._queue, runner.layers._gate.word.view(np.uint32), runner.layers._scratch["x"]
    graph = runner.layers.recordings.graphs[64, 1]
    before = device.get(x)
    for value, same in ((1, True), (0, False)):
        word[0] = value
        for segment in graph.segments:
            number = queue.submit([segment.commands])
        queue.wait(number)
        assert np.array_equal(device.get(x), before) == same
