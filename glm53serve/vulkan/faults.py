"""Failures on demand, for tests: drivers that overcommit cannot be made to fail, and a device cannot be lost at will."""

from __future__ import annotations

from dataclasses import dataclass

from glm53serve.engine.seam import DeviceLost
from glm53serve.vulkan.errors import OutOfDeviceMemory


@dataclass(slots=True)
class VulkanFaults:
    """out_of_memory_after: bytes of device memory after which allocations are refused; lost_at_frame: number of the submission that loses the device."""

    out_of_memory_after: int | None = None
    lost_at_frame: int | None = None
    allocated: int = 0
    frames: int = 0

    def allocate(self, nbytes: int) -> None:
        """Before an allocation. Raises OutOfDeviceMemory."""
        self.allocated += nbytes
        if self.out_of_memory_after is not None and self.allocated > self.out_of_memory_after:
            raise OutOfDeviceMemory(f"allocation of {nbytes} bytes refused (injected after {self.out_of_memory_after})")

    def submit(self) -> None:
        """Before a submission. Raises DeviceLost."""
        self.frames += 1
        if self.lost_at_frame is not None and self.frames >= self.lost_at_frame:
            raise DeviceLost(f"device lost at submission {self.frames} (injected)")
