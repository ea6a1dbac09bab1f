"""Prompts on the device and decode on the CPU: the state follows, whoever ran last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chain_runner import chain, relative
from tinymodel import FEATURES, TinyModel, random_ids, tiny_model

from glm53serve.cpu.layers import CpuLayers
from glm53serve.engine.seam import Batch, Halted, Span, never
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.prompts import PromptLayers


class Both:
    """A model over PromptLayers and its reference."""

    def __init__(self, device: Device, model: TinyModel) -> None:
        self.reference = model.reference(np.float64)
        c = model.config
        self.layers = PromptLayers(chain(device, model), CpuLayers(c, range(c.num_layers), model.layer, model, 2, 32))
        for slot in range(2):
            self.layers.open_slot(slot, 300)

    def run(self, ids: np.ndarray, start: int, slot: int = 0) -> np.ndarray:
        streams = self.reference.embed(ids).astype(np.float32)
        return self.reference.logits(self.layers.forward(streams, Batch((Span(slot, start, len(ids)),)), never).astype(np.float64))


@pytest.fixture(params=["base", "pool 1, 2 streams, 5 Sinkhorn rounds", "pool 5, 1 stream", "shared indexer"])
def both(device: Device, request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(device, tiny_model(seed=11, **FEATURES[request.param]))
    yield made
    made.layers.close()


def test_alternating_sides_agrees_with_the_reference(both: Both) -> None:
    """Chunks and single steps in turn, over complete and incomplete pools, past the index budget."""
    ids = random_ids(both.reference.config, 70, seed=1)
    want = both.reference.forward(ids, both.reference.new_state())
    got, at = [], 0
    for size in (1, 1, 13, 1, 1, 1, 22, 1, 2, 1, 1, 1, 1, 20, 1, 1, 1):
        got.append(both.run(ids[at : at + size], at))
        at += size
    assert relative(np.concatenate(got), want[:at]) <= 1e-4


def test_taking_back_returns_to_the_side_it_was_on(both: Both) -> None:
    ids = random_ids(both.reference.config, 60, seed=2)
    want = both.reference.forward(ids, both.reference.new_state())
    for before in ((20,), (20, 1, 1)):
        both.layers.reset_slot(0)
        at = 0
        for size in before:
            both.run(ids[at : at + size], at)
            at += size
        both.layers.snapshot(0)
        saved = both.layers.save(0)
        streams = both.reference.embed(random_ids(both.reference.config, 40, seed=9)).astype(np.float32)
        with pytest.raises(Halted):
            both.layers.forward(streams, Batch((Span(0, at, 40),)), lambda: True)
        both.layers.restore(0)
        assert relative(both.run(ids[at : at + 30], at), want[at : at + 30]) <= 1e-4
        both.run(ids[at + 30 : at + 31], at + 30)
        both.layers.load(0, saved)
        assert relative(both.run(ids[at : at + 1], at), want[at : at + 1]) <= 1e-4
        assert relative(both.run(ids[at + 1 : 60], at + 1), want[at + 1 : 60]) <= 1e-4


def test_uses_and_meters_add_up(device: Device) -> None:
    both = Both(device, tiny_model(seed=12))
    ids = random_ids(both.reference.config, 12, seed=3)
    both.run(ids[:10], 0, slot=1)
    both.run(ids[10:11], 10, slot=1)
    assert both.layers.expert_uses(1).sum() == 11 * 3 * 5 == both.layers.meter.uses
    both.layers.clear_uses(1)
    assert not both.layers.expert_uses(1).any()
    both.layers.close()
