"""One validated software or real device for all tests; without Vulkan they are skipped with one line saying how to get a driver.

GLM53_TEST_VULKAN=require makes a missing driver or validation layer an error, for machines that are meant to have them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53serve.vulkan.device import Device
from glm53serve.vulkan.errors import VulkanUnavailable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REQUIRED = os.environ.get("GLM53_TEST_VULKAN") == "require"


def open_device(**options: object) -> Device:
    """The best device there is, software drivers included, under synchronisation validation where the layer is installed.

    Without matrix units, which have tests of their own: layers before mid-2023 do not know them.
    """
    try:
        return Device(allow_cpu=True, validate=True, matrix_units=False, **options)  # type: ignore[arg-type]
    except VulkanUnavailable as unavailable:
        if REQUIRED or "VK_LAYER" not in unavailable.reason:
            raise
        return Device(allow_cpu=True, matrix_units=False, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def shared_device() -> Iterator[Device]:
    """A device that lives as long as the tests: making kernels is the slow part."""
    try:
        device = open_device()
    except VulkanUnavailable as unavailable:
        if REQUIRED:
            raise
        pytest.skip(f"{unavailable.reason}; for these tests: apt-get install libvulkan1 mesa-vulkan-drivers vulkan-validationlayers")
    yield device
    instance = device.instance
    device.close()
    assert instance.messages == []


@pytest.fixture
def device(shared_device: Device) -> Iterator[Device]:
    """The shared device; the test fails on any message of the validation layer."""
    yield shared_device
    assert shared_device.instance.messages == []
