"""Whole chains against the reference and the goldens, however the rows are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chain_runner import Runner, chain, relative
from goldens import NAMES, golden, golden_reference, reference_of
from tinymodel import FEATURES, random_ids, tiny_model

from glm53serve.engine.seam import Batch, Span, never
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.weights import MatrixFormat
from glm53serve.vulkan.device import Device

SHIPPED = Path(__file__).resolve().parents[2] / "glm53serve" / "data" / "glm53-nano"
LIMIT = 1e-4


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_agrees_with_the_reference(device: Device, name: str) -> None:
    model = tiny_model(seed=2, **FEATURES[name])
    ids = random_ids(model.config, 50)
    reference = model.reference(np.float64)
    want = reference.forward(ids, reference.new_state())
    runner = Runner(reference, chain(device, model))
    for sizes in ((50,), (1, 1, 2, 13, 33)):
        runner.layers.reset_slot(0)
        got = runner.logits(runner.pieces(ids, sizes))
        assert relative(got, want) <= LIMIT
        assert np.array_equal(got.argmax(1), want.argmax(1))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int8", "int4"])
def test_every_weight_format_agrees_with_the_reference(device: Device, fmt: MatrixFormat) -> None:
    model = tiny_model(seed=3, weight_format=fmt)
    ids = random_ids(model.config, 30)
    reference = model.reference(np.float64)
    runner = Runner(reference, chain(device, model))
    assert relative(runner.logits(runner.pieces(ids, (3, 27))), reference.forward(ids, reference.new_state())) <= LIMIT


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 128])
def test_row_group_sizes(device: Device, rows: int) -> None:
    model = tiny_model(seed=4, num_layers=2, layer_kinds=("kda", "dsa"), mlp_kinds=("dense", "sparse"), indexer_kinds=("full", "full"))
    length = 20 if rows == 1 else 131
    ids = random_ids(model.config, length)
    reference = model.reference(np.float64)
    runner = Runner(reference, chain(device, model, rows=rows))
    assert relative(runner.logits(runner.streams(ids)), reference.forward(ids, reference.new_state())) <= LIMIT


@pytest.mark.parametrize("held", [1, 2, 4])
def test_a_partial_chain_hands_its_streams_on(device: Device, held: int) -> None:
    model = tiny_model(seed=5)
    ids = random_ids(model.config, 40)
    reference = model.reference(np.float64)
    runner = Runner(reference, chain(device, model, layers=held))
    assert relative(runner.logits(runner.streams(ids)), reference.forward(ids, reference.new_state())) <= LIMIT


def test_a_chain_does_not_part_a_shared_indexer_from_its_source(device: Device) -> None:
    model = tiny_model(seed=5, **FEATURES["shared indexer"])
    with pytest.raises(ValueError, match="shared indexer"):
        chain(device, model, layers=5)


def test_slots_decode_together_as_alone(device: Device) -> None:
    """Three slots of different lengths step in one batch; each gets what it gets alone."""
    model = tiny_model(seed=6)
    reference = model.reference(np.float64)
    runner = Runner(reference, chain(device, model, slots=3))
    prompts = [random_ids(model.config, n, seed=n) for n in (5, 33, 20)]
    steps = random_ids(model.config, 12, seed=99).reshape(4, 3)
    for slot, prompt in enumerate(prompts):
        runner.streams(prompt, 0, slot)
    together = []
    for step, tokens in enumerate(steps):
        batch = Batch(tuple(Span(slot, len(prompt) + step, 1) for slot, prompt in enumerate(prompts)))
        together.append(reference.logits(runner.layers.forward(reference.embed(tokens).astype(np.float32), batch, never).astype(np.float64)))
    for slot, prompt in enumerate(prompts):
        ids = np.concatenate([prompt, steps[:, slot]])
        want = reference.forward(ids, reference.new_state())[-4:]
        assert relative(np.array(together)[:, slot], want) <= LIMIT


def test_expert_uses_count_every_row_of_a_slot(device: Device) -> None:
    model = tiny_model(seed=7)
    reference = model.reference(np.float64)
    runner = Runner(reference, chain(device, model))
    ids = random_ids(model.config, 21)
    runner.streams(ids, 0, 1)
    _, choices = reference.forward_recording(ids, reference.new_state())
    want = [np.bincount(c.experts.ravel(), minlength=8) for c in choices if c.experts is not None]
    assert np.array_equal(runner.layers.expert_uses(1), want) and not runner.layers.expert_uses(0).any()
    assert runner.layers.meter.uses == runner.layers.meter.found == np.sum(want)
    runner.layers.clear_uses(1)
    assert not runner.layers.expert_uses(1).any()
    assert (runner.layers.tiers() == 2).all() and runner.layers.tiers().shape == (5, 8)


@pytest.mark.parametrize("name", NAMES)
def test_goldens(device: Device, name: str) -> None:
    g, checkpoint = golden(name), open_checkpoint(golden(name).directory)
    runner = Runner(golden_reference(name, np.float64), chain(device, checkpoint, rows=64))
    got = runner.logits(runner.pieces(g.ids, (len(g.prompt) - 9, 9, *[1] * len(g.greedy))))
    assert relative(got, g.logits) <= LIMIT
    assert np.array_equal(got[len(g.prompt) - 1 : -1].argmax(1), g.greedy)


def test_shipped_model(device: Device) -> None:
    """The shipped model past its index budget: the reference's logits and greedy tokens."""
    checkpoint, reference = open_checkpoint(SHIPPED), reference_of(SHIPPED, np.float32)
    ids = random_ids(checkpoint.config, 90, seed=1)
    want = reference.forward(ids, reference.new_state())
    runner = Runner(reference, chain(device, checkpoint, rows=64))
    got = runner.logits(runner.pieces(ids, (80, *[1] * 10)))
    assert relative(got, want) <= LIMIT
    assert np.array_equal(got.argmax(1), want.argmax(1))
