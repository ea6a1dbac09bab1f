"""Recording command buffers through raw calls: a few microseconds a dispatch, and only once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glm53serve.vulkan.binding import check, new
from glm53serve.vulkan.device import SHADER_READ, SHADER_WRITE, STAGE_COMPUTE, Buffer

if TYPE_CHECKING:
    from glm53serve.vulkan.device import Device

COMPUTE_BIND_POINT = 1
SIMULTANEOUS_USE = 4
WAIT_FOREVER_NS = 600 * 10**9
"""No submission may take this long; a device that does not answer is treated as lost."""


class Commands:
    """One command buffer. `begin`, record, `end`; then it may be submitted any number of times."""

    def __init__(self, device: Device) -> None:
        self.device = device
        ffi, lib, vk = device.ffi, device.lib, device.vk
        ask = new(
            ffi,
            "VkCommandBufferAllocateInfo",
            vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
            commandPool=device.command_pool,
            commandBufferCount=1,
        )
        out = ffi.new("VkCommandBuffer[1]")
        check(lib.vkAllocateCommandBuffers(device.handle, ask, out), "vkAllocateCommandBuffers")
        self.array = out
        self.handle = out[0]
        self._memory_barrier = new(ffi, "VkMemoryBarrier", vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER)
        self._region = ffi.new("VkBufferCopy*")
        self._pipeline: Any = None

    def begin(self, common: Any = None) -> None:
        """Start recording; `common` is the set-0 descriptor array kernels need."""
        device = self.device
        info = new(device.ffi, "VkCommandBufferBeginInfo", device.vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO, flags=SIMULTANEOUS_USE)
        check(device.lib.vkBeginCommandBuffer(self.handle, info), "vkBeginCommandBuffer")
        if common is not None:
            device.lib.vkCmdBindDescriptorSets(self.handle, COMPUTE_BIND_POINT, device.layout, 0, 1, common, 0, device.ffi.NULL)

    def dispatch(self, pipeline: Any, bound: Any, push: bytes, groups: tuple[int, int, int]) -> None:
        """One kernel."""
        lib, ffi, handle, layout = self.device.lib, self.device.ffi, self.handle, self.device.layout
        if pipeline is not self._pipeline:
            lib.vkCmdBindPipeline(handle, COMPUTE_BIND_POINT, pipeline)
            self._pipeline = pipeline
        lib.vkCmdBindDescriptorSets(handle, COMPUTE_BIND_POINT, layout, 1, 1, bound, 0, ffi.NULL)
        if push:
            lib.vkCmdPushConstants(handle, layout, 0x20, 0, len(push), ffi.from_buffer(push))
        lib.vkCmdDispatch(handle, *groups)

    def kernel_barrier(self) -> None:
        """What kernels before wrote is read by kernels after."""
        self.barrier(STAGE_COMPUTE, STAGE_COMPUTE, SHADER_WRITE, SHADER_READ | SHADER_WRITE)

    def barrier(self, before: int, after: int, wrote: int, touches: int) -> None:
        """A global memory barrier between pipeline stages."""
        memory, null = self._memory_barrier, self.device.ffi.NULL
        memory.srcAccessMask, memory.dstAccessMask = wrote, touches
        self.device.lib.vkCmdPipelineBarrier(self.handle, before, after, 0, 1, memory, 0, null, 0, null)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy a range onto one of the same size."""
        region = self._region
        region.srcOffset, region.dstOffset, region.size = source.offset, target.offset, min(source.nbytes, target.nbytes)
        self.device.lib.vkCmdCopyBuffer(self.handle, source.handle, target.handle, 1, region)

    def fill(self, target: Buffer) -> None:
        """Zeros."""
        self.device.lib.vkCmdFillBuffer(self.handle, target.handle, target.offset, -(-target.nbytes // 4) * 4, 0)

    def end(self) -> None:
        """Finish recording."""
        check(self.device.lib.vkEndCommandBuffer(self.handle), "vkEndCommandBuffer")

    def run(self) -> None:
        """End, submit once, wait until the device is idle, and free the buffer."""
        device = self.device
        self.end()
        info = new(device.ffi, "VkSubmitInfo", device.vk.VK_STRUCTURE_TYPE_SUBMIT_INFO, commandBufferCount=1, pCommandBuffers=self.array)
        device.submit(info)
        device.idle()
        self.free()

    def free(self) -> None:
        """Give the buffer back; the device must be done with it."""
        self.device.lib.vkFreeCommandBuffers(self.device.handle, self.device.command_pool, 1, self.array)
