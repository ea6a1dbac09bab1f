"""Choosing devices, fitting layers, failures on demand, and the committed binaries."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chain_runner import Runner, chain
from conftest import open_device
from tinymodel import TinyModel, random_ids, tiny_model

from glm53serve.engine.seam import DeviceLost
from glm53serve.settings import Settings
from glm53serve.vulkan import binding, modules
from glm53serve.vulkan.chain import fitting_rows, open_chain, whole_pairs
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.devices import DeviceInfo, list_devices, pick
from glm53serve.vulkan.errors import OutOfDeviceMemory, VulkanUnavailable
from glm53serve.vulkan.faults import VulkanFaults
from glm53serve.vulkan.graph import Graph, Rate, Segment

SOFTWARE = Settings(vulkan=True, maxt=300, vk_chain_rows=16)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(seed=9, num_layers=2, layer_kinds=("kda", "dsa"), mlp_kinds=("dense", "sparse"), indexer_kinds=("full",) * 2)


def test_committed_binaries_belong_to_their_sources() -> None:
    assert modules.differences() == []


@pytest.mark.skipif(shutil.which("glslangValidator") is None, reason="needs glslang-tools")
def test_a_fresh_build_gives_the_committed_binaries() -> None:
    assert modules.differences(rebuild=True) == []


def test_a_swapped_binary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kda.spv").write_bytes((modules.BINARIES / "route.spv").read_bytes())
    modules.manifest()
    monkeypatch.setattr(modules, "BINARIES", tmp_path)
    with pytest.raises(VulkanUnavailable, match="not the file that was built"):
        modules.load("kda")


def test_picking(shared_device: Device) -> None:
    base = shared_device.info
    cpu = replace(base, index=0, kind="cpu", name="softpipe", problem=None)
    small, big = replace(cpu, index=1, kind="integrated", name="Small GPU"), replace(cpu, index=2, kind="discrete", name="Big GPU")
    old = replace(cpu, index=3, kind="discrete", name="Old GPU", problem="no timeline semaphores")
    everything = [cpu, small, big, old]
    assert pick(everything) is big and pick(everything, "1") is small and pick(everything, "small") is small
    assert pick([cpu], allow_cpu=True) is cpu
    for wanted, devices, words in (
        ("", [cpu], "COLI_VULKAN=1"),
        ("", [], "no Vulkan device"),
        ("old", everything, "no timeline semaphores"),
        ("7", everything, "names none of"),
        ("", [old], "no timeline semaphores"),
    ):
        with pytest.raises(VulkanUnavailable, match=words):
            pick(devices, wanted)


def test_listing_describes_each_device(shared_device: Device) -> None:
    devices: list[DeviceInfo] = list_devices()
    assert shared_device.info.name in [d.name for d in devices]
    assert all(d.describe()[0].startswith(f"{d.index}: {d.name}") for d in devices)


def test_no_package_and_no_loader_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    binding.package.cache_clear()
    monkeypatch.setitem(sys.modules, "vulkan", None)
    with pytest.raises(VulkanUnavailable, match="is not installed"):
        list_devices()
    binding.package.cache_clear()


def test_open_chain_runs_as_many_layers_as_asked(shared_device: Device, model: TinyModel) -> None:
    reference = model.reference(np.float64)
    ids = random_ids(model.config, 20)
    for wanted, held in ((-1, 2), (1, 1), (9, 2)):
        layers = open_chain(model.config, model.layer, model, replace(SOFTWARE, vk_chain_layers=wanted), slots=1)
        assert layers.layers == range(held)
        runner = Runner(reference, layers)
        assert np.abs(runner.logits(runner.streams(ids)) - reference.forward(ids, reference.new_state())).max() < 1e-3
        layers.close()


def test_open_chain_says_why_there_is_none(shared_device: Device, model: TinyModel) -> None:
    def reason(settings: Settings, **options: object) -> str:
        with pytest.raises(VulkanUnavailable) as error:
            open_chain(model.config, model.layer, model, settings, slots=1, **options)  # type: ignore[arg-type]
        assert "\n" not in error.value.reason
        return error.value.reason

    assert "COLI_VK_CHAIN_LAYERS=0" in reason(replace(SOFTWARE, vk_chain_layers=0))
    assert "names none of" in reason(replace(SOFTWARE, vk_device="nosuchdevice"))
    assert "positions take" in reason(replace(SOFTWARE, maxt=1 << 24))
    assert "no layer fits" in reason(SOFTWARE, faults=VulkanFaults(out_of_memory_after=64 << 20))
    assert "injected" in reason(replace(SOFTWARE, vk_chain_layers=2), faults=VulkanFaults(out_of_memory_after=64 << 20))
    assert "lost" in reason(SOFTWARE, faults=VulkanFaults(lost_at_frame=5))


def test_row_groups_shrink_to_what_a_binding_holds(shared_device: Device, model: TinyModel) -> None:
    small = replace(shared_device.info, binding_limit=200_000)
    assert fitting_rows(small, model.config, 1024, 1, 300).rows < 1024
    with pytest.raises(OutOfDeviceMemory, match="positions take"):
        fitting_rows(small, model.config, 1, 1, 1 << 20)


def test_a_shared_layer_stays_with_its_source() -> None:
    config = tiny_model(indexer_kinds=("full",) * 5 + ("shared",)).config
    assert [whole_pairs(config, n) for n in (0, 1, 4, 5, 6)] == [0, 1, 4, 4, 6]


def test_memory_running_out_leaves_nothing_behind(shared_device: Device, model: TinyModel) -> None:
    """At whatever allocation it happens: one clean error, and validation sees every object destroyed."""
    for limit in (0, 20 << 20, 40 << 20, 70 << 20):
        faults = VulkanFaults(out_of_memory_after=limit)
        try:
            device = open_device(faults=faults)
        except OutOfDeviceMemory:
            continue
        with pytest.raises(OutOfDeviceMemory, match="injected"):
            chain(device, model)
            for _ in range(10):
                device.host(32 << 20)
        instance = device.instance
        device.close()
        assert instance.messages == []


@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_lost_device_stays_lost(shared_device: Device, model: TinyModel, after: int) -> None:
    """The pass that meets the loss and everything after it say DeviceLost; closing works."""
    faults = VulkanFaults()
    device = open_device(faults=faults)
    runner = Runner(model.reference(np.float32), chain(device, model, rows=16))
    faults.lost_at_frame = faults.frames + after
    ids = random_ids(model.config, 100)
    with pytest.raises(DeviceLost, match="injected"):
        runner.streams(ids)
    for again in (lambda: runner.streams(ids), lambda: runner.layers.save(0) and runner.layers.expert_uses(0), lambda: runner.layers.clear_uses(0)):
        with pytest.raises(DeviceLost, match="lost"):
            again()
    runner.layers.interrupt()
    instance = device.instance
    device.close()
    assert instance.messages == []


def test_segments_are_cut_again_by_what_they_took() -> None:
    segment = Segment(None, 0, 5, 0.01)  # type: ignore[arg-type]
    one, five = Graph(8, 1, [segment], Rate(100, 100)), Graph(8, 1, [segment] * 5, Rate(100, 100))
    assert one.better_rate([0.01]) is None and one.better_rate([0.001]) is None and five.better_rate([0.008] * 5) is None
    slower = one.better_rate([0.1])
    assert slower is not None and slower.flops == pytest.approx(10)
    faster = five.better_rate([0.001] * 5)
    assert faster is not None and faster.flops == pytest.approx(1000)
    assert Graph(8, 1, [segment], Rate(100, 100), recordings=4).better_rate([0.2]) is None
