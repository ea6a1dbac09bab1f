"""Submitting recorded command buffers with increasing numbers, waiting for them, and being woken by a cancel."""

from __future__ import annotations

import threading

from glm53serve.engine.seam import DeviceLost
from glm53serve.vulkan.binding import SUCCESS, TIMEOUT, check, new
from glm53serve.vulkan.commands import WAIT_FOREVER_NS, Commands
from glm53serve.vulkan.device import Device

WAIT_ANY = 1


class Queue:
    """Two timeline semaphores: `work` counts submissions, `cancel` counts wake-ups. One thread submits and waits; `wake` may come from any."""

    def __init__(self, device: Device, most_buffers: int = 8) -> None:
        self.device = device
        ffi, vk = device.ffi, device.vk
        self.submitted = 0
        self._wakes = 0
        self._lock = threading.Lock()
        self._work, self._cancel = device.timeline(), device.timeline()
        self._signal_values = ffi.new("uint64_t[1]")
        self._signals = ffi.new("VkSemaphore[1]", [self._work])
        self._handles = ffi.new("VkCommandBuffer[]", most_buffers)
        self._timeline = new(
            ffi,
            "VkTimelineSemaphoreSubmitInfo",
            vk.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._signal_values,
        )
        self._submit = new(
            ffi,
            "VkSubmitInfo",
            vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
            pNext=self._timeline,
            pCommandBuffers=self._handles,
            signalSemaphoreCount=1,
            pSignalSemaphores=self._signals,
        )
        self._wait_values = ffi.new("uint64_t[2]")
        self._wait_semaphores = ffi.new("VkSemaphore[2]", [self._work, self._cancel])
        self._wait = new(
            ffi,
            "VkSemaphoreWaitInfo",
            vk.VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
            flags=WAIT_ANY,
            pSemaphores=self._wait_semaphores,
            pValues=self._wait_values,
        )
        self._wake = new(ffi, "VkSemaphoreSignalInfo", vk.VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO, semaphore=self._cancel)

    def submit(self, buffers: list[Commands]) -> int:
        """Queue command buffers; returns the number to wait for. Raises DeviceLost."""
        for i, commands in enumerate(buffers):
            self._handles[i] = commands.handle
        self._submit.commandBufferCount = len(buffers)
        self._signal_values[0] = self.submitted + 1
        self.device.submit(self._submit)
        self.submitted += 1
        return self.submitted

    def wakes(self) -> int:
        """How often `wake` was called."""
        return self._wakes

    def wake(self) -> None:
        """End a running `wait` in another thread, or the next one that asks about wake-ups from before this."""
        with self._lock:
            self._wakes += 1
            self._wake.value = self._wakes
            check(self.device.lib.vkSignalSemaphore(self.device.handle, self._wake), "vkSignalSemaphore")

    def wait(self, number: int, wakes: int | None = None) -> bool:
        """Wait for submission `number`; with `wakes` also for wake-up number wakes + 1. True when the work is done. Raises DeviceLost."""
        self._wait.semaphoreCount = 1 if wakes is None else 2
        self._wait_values[0] = number
        self._wait_values[1] = 0 if wakes is None else wakes + 1
        code = self.device.lib.vkWaitSemaphores(self.device.handle, self._wait, WAIT_FOREVER_NS)
        if code == TIMEOUT:
            self.device.lost = True
            raise DeviceLost(f"{self.device.info.name} did not answer in {WAIT_FOREVER_NS // 10**9} s")
        if code != SUCCESS:
            self.device.lost = code == -4 or self.device.lost
            check(code, "vkWaitSemaphores")
        return wakes is None or self.done() >= number

    def done(self) -> int:
        """Number of the last finished submission."""
        value = self.device.ffi.new("uint64_t*")
        code = self.device.lib.vkGetSemaphoreCounterValue(self.device.handle, self._work, value)
        if code != SUCCESS:
            self.device.lost = code == -4 or self.device.lost
            check(code, "vkGetSemaphoreCounterValue")
        return int(value[0])
