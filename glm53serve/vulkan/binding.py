"""The thin layer over PyPI `vulkan`: opening the loader, raw calls, result codes.

Everything goes through the package's raw `lib` and `ffi`; its wrappers look a signature up at every call, raise for every code that is
not success and mis-sign the codes added after Vulkan 1.0. Structures handed to a call are kept alive by the caller's local names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from glm53serve.engine.seam import DeviceLost
from glm53serve.vulkan.errors import OutOfDeviceMemory, VulkanUnavailable

SUCCESS, TIMEOUT = 0, 2
ERROR_DEVICE_LOST = -4
NAMES = {
    -1: "out of host memory",
    -2: "out of device memory",
    -3: "initialisation failed",
    -4: "device lost",
    -5: "memory map failed",
    -6: "layer not present",
    -7: "extension not present",
    -8: "feature not present",
    -9: "incompatible driver",
    -13: "unknown error",
    -1000069000: "descriptor pool full",
}
HOW_TO_INSTALL = "a driver and loader come with the GPU's driver package; for a software driver: apt-get install libvulkan1 mesa-vulkan-drivers"


class VulkanError(RuntimeError):
    """A call failed with a code that no caller can do anything about: a bug here or in the driver."""


@cache
def package() -> Any:
    """The `vulkan` package, which opens the loader as it is imported. Raises VulkanUnavailable with what to install."""
    try:
        import vulkan
    except ImportError as error:
        raise VulkanUnavailable("the Python package `vulkan` is not installed (pip install 'glm53serve[vulkan]')") from error
    except OSError as error:
        raise VulkanUnavailable(f"no Vulkan loader (libvulkan.so.1): {HOW_TO_INSTALL}") from error
    return vulkan


def check(code: int, what: str) -> None:
    """Raise what a result code means: OutOfDeviceMemory, seam.DeviceLost, VulkanError; nothing for success."""
    if code == SUCCESS:
        return
    said = f"{what}: {NAMES.get(code, f'VkResult {code}')}"
    if code in (-1, -2):
        raise OutOfDeviceMemory(said)
    if code == ERROR_DEVICE_LOST:
        raise DeviceLost(said)
    raise VulkanError(said)


def new(ffi: Any, kind: str, structure_type: int | None = None, **fields: Any) -> Any:
    """A zeroed structure with `sType` and fields set. The caller keeps what its pointers point to."""
    made = ffi.new(kind + "*")
    if structure_type is not None:
        made.sType = structure_type
    for name, value in fields.items():
        setattr(made, name, value)
    return made
