"""A logical device: one compute queue, memory, buffers and moving data."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from glm53serve.engine.seam import DeviceLost
from glm53serve.vulkan.binding import check, new
from glm53serve.vulkan.devices import COOPERATIVE_MATRIX, DEVICE_LOCAL, HOST_CACHED, HOST_COHERENT, HOST_VISIBLE, DeviceInfo, list_devices, pick
from glm53serve.vulkan.errors import OutOfDeviceMemory
from glm53serve.vulkan.faults import VulkanFaults
from glm53serve.vulkan.instance import Instance
from glm53serve.vulkan.pipelines import Pipelines

STORAGE_USAGE = 0x20 | 1 | 2
SLAB = 32 << 20
STAGE_COMPUTE, STAGE_TRANSFER, STAGE_HOST = 0x800, 0x1000, 0x4000
SHADER_READ, SHADER_WRITE, TRANSFER_READ, TRANSFER_WRITE, HOST_READ, HOST_WRITE = 0x20, 0x40, 0x800, 0x1000, 0x2000, 0x4000
STAGING = 32 << 20


@dataclass(frozen=True, slots=True)
class Buffer:
    """A range of a VkBuffer. `mapped` is a writable uint8 view of the very bytes where the host sees them, else None."""

    handle: Any
    offset: int
    nbytes: int
    mapped: NDArray[np.uint8] | None = None

    def view(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """The mapped bytes as an array."""
        assert self.mapped is not None
        return self.mapped.view(dtype)

    def part(self, offset: int, nbytes: int) -> Buffer:
        """A range inside this one."""
        return Buffer(self.handle, self.offset + offset, nbytes, None if self.mapped is None else self.mapped[offset : offset + nbytes])


@dataclass(slots=True)
class _Slab:
    handle: Any
    size: int
    used: int = 0


P = ParamSpec("P")
T = TypeVar("T")


def _alone(method: Callable[Concatenate[Device, P], T]) -> Callable[Concatenate[Device, P], T]:
    """Queue, command pool and staging memory belong to one thread at a time."""

    @functools.wraps(method)
    def locked(self: Device, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[Device, P], T]", locked)


class Device:
    """Opens a device and keeps everything made from it until `close`.

    wanted, allow_cpu: see `devices.pick`. validate: the Khronos layer with synchronisation validation, `instance.messages` must stay empty.
    halt_word: kernels look at the halt word first (off only in tests that measure what it is worth). matrix_units: use cooperative matrices
    where the device has them.
    Raises VulkanUnavailable.
    """

    def __init__(
        self,
        wanted: str = "",
        allow_cpu: bool = False,
        validate: bool = False,
        faults: VulkanFaults | None = None,
        halt_word: bool = True,
        matrix_units: bool = True,
    ) -> None:
        self.instance = Instance(validate)
        self.ffi, self.lib, self.vk = self.instance.ffi, self.instance.lib, self.instance.vk
        self.faults = faults or VulkanFaults()
        self.halt_word = halt_word
        try:
            self.info: DeviceInfo = pick(list_devices(self.instance), wanted, allow_cpu)
            self.matrix_units = matrix_units and self.info.matrix_units
            self.handle = self._create()
        except Exception:
            self.instance.close()
            raise
        self.lost = False
        self.lock = threading.RLock()
        self.allocated = self.faults.allocated = 0
        self._memories: list[Any] = []
        self._buffers: list[Any] = []
        self._slab: _Slab | None = None
        self._semaphores: list[Any] = []
        out = self.ffi.new("VkQueue*")
        self.lib.vkGetDeviceQueue(self.handle, self.info.queue_family, 0, out)
        self.queue = out[0]
        self.pipelines = Pipelines(self)
        self.pipeline, self.bind = self.pipelines.pipeline, self.pipelines.bind
        self.layout, self.common_layout = self.pipelines.layout, self.pipelines.common_layout
        self.command_pool = self._command_pool()
        self._staging: Buffer | None = None
        try:
            self.dummy = self.local(256)
            self.zero([self.dummy])
        except BaseException:
            self.close()
            raise

    # --- memory ------------------------------------------------------------------------------------------------------------------

    def local(self, nbytes: int) -> Buffer:
        """Device memory; small ranges share allocations. Not zeroed. Raises OutOfDeviceMemory."""
        nbytes = max(64, nbytes)
        if nbytes > self.info.binding_limit:
            raise OutOfDeviceMemory(f"a range of {nbytes} bytes is more than the device binds ({self.info.binding_limit})")
        if nbytes > SLAB // 4:
            self.allocated += nbytes
            return Buffer(self._allocate(nbytes, DEVICE_LOCAL, 0)[0], 0, nbytes)
        slab, align = self._slab, self.info.offset_alignment
        if slab is None or -(-slab.used // align) * align + nbytes > slab.size:
            slab = self._slab = _Slab(self._allocate(SLAB, DEVICE_LOCAL, 0)[0], SLAB)
            self.allocated += SLAB
        offset = -(-slab.used // align) * align
        slab.used = offset + nbytes
        return Buffer(slab.handle, offset, nbytes)

    def host(self, nbytes: int, cached: bool = False) -> Buffer:
        """Host memory that the device sees, mapped for good and zeroed; `cached` for ranges that the host reads."""
        wanted = HOST_VISIBLE | HOST_COHERENT
        handle, memory = self._allocate(nbytes, wanted | (HOST_CACHED if cached else 0), wanted)
        out = self.ffi.new("void**")
        check(self.lib.vkMapMemory(self.handle, memory, 0, nbytes, 0, out), "vkMapMemory")
        mapped = np.frombuffer(self.ffi.buffer(out[0], nbytes), np.uint8)
        mapped[:] = 0
        return Buffer(handle, 0, nbytes, mapped)

    def _allocate(self, nbytes: int, wanted: int, fallback: int) -> tuple[Any, Any]:
        ffi, lib, vk = self.ffi, self.lib, self.vk
        self.faults.allocate(nbytes)
        info = new(ffi, "VkBufferCreateInfo", vk.VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, size=nbytes, usage=STORAGE_USAGE)
        out = ffi.new("VkBuffer*")
        check(lib.vkCreateBuffer(self.handle, info, ffi.NULL, out), "vkCreateBuffer")
        buffer = out[0]
        needs = ffi.new("VkMemoryRequirements*")
        lib.vkGetBufferMemoryRequirements(self.handle, buffer, needs)
        ask = new(ffi, "VkMemoryAllocateInfo", vk.VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, allocationSize=needs.size)
        memory = ffi.new("VkDeviceMemory*")
        try:
            ask.memoryTypeIndex = self._memory_type(int(needs.memoryTypeBits), wanted, fallback)
            check(lib.vkAllocateMemory(self.handle, ask, ffi.NULL, memory), f"allocation of {nbytes} bytes")
        except OutOfDeviceMemory:
            lib.vkDestroyBuffer(self.handle, buffer, ffi.NULL)
            raise
        self._buffers.append(buffer)
        self._memories.append(memory[0])
        check(lib.vkBindBufferMemory(self.handle, buffer, memory[0], 0), "vkBindBufferMemory")
        return buffer, memory[0]

    def _memory_type(self, allowed: int, wanted: int, fallback: int) -> int:
        """A type with all wanted flags, host memory not in device memory if there is a choice."""
        types = self.info.memory_types
        for flags in (wanted, fallback):
            fitting = [i for i, (have, _heap) in enumerate(types) if allowed >> i & 1 and have & flags == flags]
            if wanted & HOST_VISIBLE:
                fitting.sort(key=lambda i: bool(types[i][0] & DEVICE_LOCAL))
            if fitting:
                return fitting[0]
        raise OutOfDeviceMemory("no fitting memory type")

    # --- moving data -------------------------------------------------------------------------------------------------------------

    @_alone
    def put(self, target: Buffer, *parts: NDArray[Any]) -> None:
        """Copy arrays, one after another, into a device range through a staging buffer. Blocks until they are there."""
        staging = self._stage()
        assert staging.mapped is not None
        at = filled = 0
        for part in parts:
            raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            done = 0
            while done < raw.nbytes:
                count = min(raw.nbytes - done, STAGING - filled)
                staging.mapped[filled : filled + count] = raw[done : done + count]
                filled, done = filled + count, done + count
                if filled == STAGING:
                    self.copy_now([(staging.part(0, filled), target.part(at, filled))])
                    at, filled = at + filled, 0
        if filled:
            self.copy_now([(staging.part(0, filled), target.part(at, filled))])

    @_alone
    def get(self, source: Buffer, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """A copy of a device range."""
        staging, out = self._stage(), np.empty(source.nbytes, np.uint8)
        assert staging.mapped is not None
        for at in range(0, source.nbytes, STAGING):
            count = min(STAGING, source.nbytes - at)
            self.copy_now([(source.part(at, count), staging.part(0, count))])
            out[at : at + count] = staging.mapped[:count]
        return out.view(dtype)

    def _stage(self) -> Buffer:
        if self._staging is None:
            self._staging = self.host(STAGING, cached=True)
        return self._staging

    @_alone
    def copy_now(self, pairs: list[tuple[Buffer, Buffer]]) -> None:
        """Copy ranges (source, target of the same size) and wait."""
        from glm53serve.vulkan.commands import Commands

        commands = Commands(self)
        commands.begin()
        commands.barrier(STAGE_COMPUTE | STAGE_TRANSFER, STAGE_TRANSFER, SHADER_WRITE | TRANSFER_WRITE, TRANSFER_READ | TRANSFER_WRITE)
        for source, target in pairs:
            commands.copy(source, target)
        commands.barrier(STAGE_TRANSFER, STAGE_COMPUTE | STAGE_HOST, TRANSFER_WRITE, SHADER_READ | SHADER_WRITE | HOST_READ)
        commands.run()

    @_alone
    def zero(self, buffers: list[Buffer]) -> None:
        """Fill device ranges with zeros and wait."""
        from glm53serve.vulkan.commands import Commands

        commands = Commands(self)
        commands.begin()
        for buffer in buffers:
            commands.fill(buffer)
        commands.barrier(STAGE_TRANSFER, STAGE_COMPUTE | STAGE_TRANSFER, TRANSFER_WRITE, SHADER_READ | SHADER_WRITE | TRANSFER_READ | TRANSFER_WRITE)
        commands.run()

    # --- the queue ---------------------------------------------------------------------------------------------------------------

    def timeline(self) -> Any:
        """A timeline semaphore at 0."""
        ffi, vk = self.ffi, self.vk
        kind = new(
            ffi, "VkSemaphoreTypeCreateInfo", vk.VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO, semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0
        )
        info = new(ffi, "VkSemaphoreCreateInfo", vk.VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, pNext=kind)
        out = ffi.new("VkSemaphore*")
        check(self.lib.vkCreateSemaphore(self.handle, info, ffi.NULL, out), "vkCreateSemaphore")
        self._semaphores.append(out[0])
        return out[0]

    @_alone
    def submit(self, info: Any) -> None:
        """Hand a prepared VkSubmitInfo to the queue. A lost device stays lost. Raises DeviceLost."""
        if self.lost:
            raise DeviceLost(f"{self.info.name} was lost")
        try:
            self.faults.submit()
            check(self.lib.vkQueueSubmit(self.queue, 1, info, self.ffi.NULL), "vkQueueSubmit")
        except DeviceLost:
            self.lost = True
            raise

    @_alone
    def idle(self) -> None:
        """Wait until the device has nothing to do."""
        code = self.lib.vkDeviceWaitIdle(self.handle)
        if code != 0:
            self.lost = True
            check(code, "vkDeviceWaitIdle")

    def close(self) -> None:
        """Destroy everything. Safe on a lost device."""
        if self.handle is None:
            return
        ffi, lib, handle = self.ffi, self.lib, self.handle
        lib.vkDeviceWaitIdle(handle)
        self.pipelines.close()
        for destroy, things in (
            (lib.vkDestroySemaphore, self._semaphores),
            (lib.vkDestroyCommandPool, [self.command_pool]),
            (lib.vkDestroyBuffer, self._buffers),
            (lib.vkFreeMemory, self._memories),
        ):
            for thing in things:
                destroy(handle, thing, ffi.NULL)
        lib.vkDestroyDevice(handle, ffi.NULL)
        self.handle = None
        self.instance.close()

    def _create(self) -> Any:
        ffi, lib, vk = self.ffi, self.lib, self.vk
        priority = ffi.new("float[1]", [1.0])
        queue = new(
            ffi,
            "VkDeviceQueueCreateInfo",
            vk.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
            queueFamilyIndex=self.info.queue_family,
            queueCount=1,
            pQueuePriorities=priority,
        )
        features = new(ffi, "VkPhysicalDeviceVulkan12Features", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, timelineSemaphore=1)
        info = new(ffi, "VkDeviceCreateInfo", vk.VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, pNext=features, queueCreateInfoCount=1, pQueueCreateInfos=queue)
        units = new(
            ffi,
            "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR,
            cooperativeMatrix=1,
        )
        extension = ffi.new("char[]", COOPERATIVE_MATRIX.encode())
        extensions = ffi.new("char*[1]", [extension])
        if self.matrix_units:
            features.shaderFloat16 = features.vulkanMemoryModel = 1
            features.pNext = units
            info.enabledExtensionCount, info.ppEnabledExtensionNames = 1, extensions
        out = ffi.new("VkDevice*")
        check(lib.vkCreateDevice(self.info.handle, info, ffi.NULL, out), "vkCreateDevice")
        return out[0]

    def _command_pool(self) -> Any:
        ffi, vk = self.ffi, self.vk
        info = new(ffi, "VkCommandPoolCreateInfo", vk.VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, queueFamilyIndex=self.info.queue_family)
        out = ffi.new("VkCommandPool*")
        check(self.lib.vkCreateCommandPool(self.handle, info, ffi.NULL, out), "vkCreateCommandPool")
        return out[0]
