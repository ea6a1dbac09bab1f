"""What can go wrong with a Vulkan device."""

from __future__ import annotations


class VulkanUnavailable(Exception):
    """No loader, driver, fitting device or feature; the message is one line naming the reason. The caller takes the CPU."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OutOfDeviceMemory(Exception):
    """An allocation was refused; fewer layers or slots, or a smaller capacity, may fit."""
