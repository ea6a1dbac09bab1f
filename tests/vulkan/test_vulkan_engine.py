"""The chain inside an engine: a partial chain with the CPU behind it, halts on both sides of the border, and a lost device."""

from __future__ import annotations

import numpy as np
import pytest
from chain_runner import Countdown, chain, relative
from conftest import open_device
from tinymodel import TinyModel, random_ids, tiny_model

from glm53serve.cpu.head import CpuHead
from glm53serve.cpu.layers import CpuLayers
from glm53serve.engine.engine import Engine
from glm53serve.engine.seam import DeviceLost, Halted, Layers
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.faults import VulkanFaults

HELD = 3


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(seed=13)


def cpu(model: TinyModel, layers: range) -> CpuLayers:
    return CpuLayers(model.config, layers, model.layer, model, 2, 32)


def engine(model: TinyModel, device: Device) -> Engine:
    c = model.config
    backends: list[Layers] = [chain(device, model, layers=HELD), cpu(model, range(HELD, c.num_layers))]
    head = CpuHead(c, model.embedding, model.final_norm, model.lm_head, 32)
    return Engine(c, backends, head, 2, 300, 64, replace=lambda: ([cpu(model, range(c.num_layers))], head))


def test_a_partial_chain_halts_on_either_side_and_retries_as_new(device: Device, model: TinyModel) -> None:
    made, fresh = engine(model, device), engine(model, device)
    ids = random_ids(model.config, 40, seed=1).tolist()
    reference = model.reference(np.float64)
    want = reference.forward(ids, reference.new_state())
    fresh.forward_prefill(fresh.slots[0], ids[:10])
    answer = fresh.forward_prefill(fresh.slots[0], ids[10:]).logits
    made.forward_prefill(made.slots[0], ids[:10])
    seen = set()
    for at in range(1, 40):
        try:
            result = made.forward_prefill(made.slots[0], ids[10:], Countdown(at), guard=True)
        except Halted as halted:
            seen.add((halted.layer, halted.on_device))
            assert made.slots[0].filled == 10
            continue
        break
    assert np.array_equal(result.logits, answer) and relative(answer, want[-1]) <= 1e-4
    assert any(on_device for _, on_device in seen) and (HELD, False) in seen


def test_a_lost_device_leaves_an_engine_on_the_cpu(shared_device: Device, model: TinyModel) -> None:
    faults = VulkanFaults()
    device = open_device(faults=faults)
    made = engine(model, device)
    ids = random_ids(model.config, 20, seed=2).tolist()
    made.forward_prefill(made.slots[0], ids[:10])
    faults.lost_at_frame = faults.frames + 1
    with pytest.raises(DeviceLost):
        made.forward_prefill(made.slots[0], ids[10:], guard=True)
    made.fail_over()
    assert made.slots[0].filled == 0
    reference = model.reference(np.float64)
    got = made.forward_prefill(made.slots[0], ids).logits
    assert relative(got, reference.forward(ids, reference.new_state())[-1]) <= 1e-4
    instance = device.instance
    device.close()
    assert instance.messages == []
