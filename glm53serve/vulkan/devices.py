"""Which Vulkan devices there are, what they can do, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glm53serve.vulkan.binding import check, new
from glm53serve.vulkan.errors import VulkanUnavailable
from glm53serve.vulkan.instance import Instance

KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
BEST_FIRST = ("discrete", "integrated", "virtual", "other", "cpu")
BUFFERS_A_KERNEL = 10
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8
COMPUTE, GRAPHICS = 2, 1
COOPERATIVE_MATRIX = "VK_KHR_cooperative_matrix"
FLOAT16, FLOAT32, SUBGROUP_SCOPE = 0, 1, 3
MEMORY_BUDGET = "VK_EXT_memory_budget"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A physical device. Sizes in bytes; `free` is what the driver says may still be allocated of device memory, or the whole heap where it does
    not say; `binding_limit` is the largest range that can be allocated and bound. `problem` says why the backend cannot use it, None when it can."""

    index: int
    name: str
    kind: str
    api: tuple[int, int, int]
    memory: int
    free: int
    binding_limit: int
    offset_alignment: int
    shared_memory: int
    subgroup: int
    queue_family: int
    extensions: frozenset[str]
    features: tuple[str, ...]
    problem: str | None
    handle: Any = field(repr=False, compare=False)
    matrix_units: bool = False
    """Cooperative matrices of the one shape the kernels use: float16 16 x 16 x 16 into float32, subgroups of 32."""
    memory_types: tuple[tuple[int, int], ...] = ()
    """(property flags, heap) of each memory type."""

    def describe(self) -> list[str]:
        """Lines for a report."""
        version = ".".join(map(str, self.api))
        lines = [
            f"{self.index}: {self.name} ({self.kind}, Vulkan {version})",
            f"   memory {self.memory / 1e9:.1f} GB, free {self.free / 1e9:.1f} GB; storage range {self.binding_limit / 1e9:.2f} GB; "
            f"shared memory {self.shared_memory // 1024} KiB; subgroup {self.subgroup}",
            f"   features: {', '.join(self.features) or 'none'}",
        ]
        if self.problem:
            lines.append(f"   not usable: {self.problem}")
        return lines


def list_devices(instance: Instance | None = None) -> list[DeviceInfo]:
    """Every physical device. Raises VulkanUnavailable where there is no package, loader or driver."""
    if instance is not None:
        return [_look(instance, i, handle) for i, handle in enumerate(instance.physical_devices())]
    own = Instance()
    try:
        return list_devices(own)
    finally:
        own.close()


def pick(devices: list[DeviceInfo], wanted: str = "", allow_cpu: bool = False) -> DeviceInfo:
    """The device that COLI_VK_DEVICE names by index or part of its name, else the best usable one.

    A device of type CPU (a software driver) is only taken with `allow_cpu`. Raises VulkanUnavailable with the reason.
    """
    if not devices:
        raise VulkanUnavailable("there is no Vulkan device")
    found = devices
    if wanted:
        found = [d for d in devices if (str(d.index) == wanted if wanted.isdigit() else wanted.lower() in d.name.lower())]
        if not found:
            raise VulkanUnavailable(f"COLI_VK_DEVICE={wanted!r} names none of: " + ", ".join(f"{d.index} {d.name}" for d in devices))
    usable = [d for d in found if d.problem is None]
    if not usable:
        raise VulkanUnavailable(f"{found[0].name}: {found[0].problem}")
    allowed = [d for d in usable if allow_cpu or d.kind != "cpu"]
    if not allowed:
        raise VulkanUnavailable(f"{usable[0].name} is a software driver; COLI_VULKAN=1 allows it")
    return min(allowed, key=lambda d: (BEST_FIRST.index(d.kind), d.index))


def _look(instance: Instance, index: int, handle: Any) -> DeviceInfo:
    ffi, lib, vk = instance.ffi, instance.lib, instance.vk
    subgroup = new(ffi, "VkPhysicalDeviceSubgroupProperties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES)
    limits3 = new(ffi, "VkPhysicalDeviceMaintenance3Properties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES, pNext=subgroup)
    properties = new(ffi, "VkPhysicalDeviceProperties2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, pNext=limits3)
    lib.vkGetPhysicalDeviceProperties2(handle, properties)
    plain, limits = properties.properties, properties.properties.limits
    api = (plain.apiVersion >> 22, plain.apiVersion >> 12 & 1023, plain.apiVersion & 4095)
    extensions = _extensions(instance, handle)
    memory, free, types = _memory(instance, handle, MEMORY_BUDGET in extensions)
    family = _queue_family(instance, handle)
    timeline, features = (False, ()) if api < (1, 2, 0) else _features(instance, handle, extensions)
    units = bool("cooperative matrix" in features and subgroup.subgroupSize == 32 and limits.maxComputeSharedMemorySize >= 32768)
    problem = None
    if api < (1, 2, 0):
        problem = f"Vulkan {api[0]}.{api[1]}, 1.2 is needed"
    elif not timeline:
        problem = "no timeline semaphores"
    elif family < 0:
        problem = "no compute queue"
    elif limits.maxPerStageDescriptorStorageBuffers < BUFFERS_A_KERNEL or limits.maxComputeWorkGroupInvocations < 256:
        problem = f"kernels need {BUFFERS_A_KERNEL} storage buffers and 256 invocations"
    return DeviceInfo(
        index=index,
        name=ffi.string(plain.deviceName).decode(errors="replace"),
        kind=KINDS.get(plain.deviceType, "other"),
        api=api,
        memory=memory,
        free=free,
        binding_limit=min(int(limits.maxStorageBufferRange), int(limits3.maxMemoryAllocationSize)),
        offset_alignment=max(16, int(limits.minStorageBufferOffsetAlignment)),
        shared_memory=int(limits.maxComputeSharedMemorySize),
        subgroup=int(subgroup.subgroupSize),
        queue_family=family,
        extensions=extensions,
        features=features,
        problem=problem,
        handle=handle,
        matrix_units=units and _has_units_shape(instance, handle),
        memory_types=types,
    )


def _extensions(instance: Instance, handle: Any) -> frozenset[str]:
    ffi, lib = instance.ffi, instance.lib
    count = ffi.new("uint32_t*")
    check(lib.vkEnumerateDeviceExtensionProperties(handle, ffi.NULL, count, ffi.NULL), "device extensions")
    out = ffi.new("VkExtensionProperties[]", max(1, count[0]))
    check(lib.vkEnumerateDeviceExtensionProperties(handle, ffi.NULL, count, out), "device extensions")
    return frozenset(ffi.string(out[i].extensionName).decode() for i in range(count[0]))


def _memory(instance: Instance, handle: Any, has_budget: bool) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    ffi, lib, vk = instance.ffi, instance.lib, instance.vk
    budget = new(ffi, "VkPhysicalDeviceMemoryBudgetPropertiesEXT", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT)
    found = new(ffi, "VkPhysicalDeviceMemoryProperties2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2)
    if has_budget:
        found.pNext = budget
    lib.vkGetPhysicalDeviceMemoryProperties2(handle, found)
    m = found.memoryProperties
    local = [i for i in range(m.memoryHeapCount) if m.memoryHeaps[i].flags & 1] or list(range(m.memoryHeapCount))
    heap = max(local, key=lambda i: int(m.memoryHeaps[i].size))
    size = int(m.memoryHeaps[heap].size)
    free = max(0, min(size, int(budget.heapBudget[heap]) - int(budget.heapUsage[heap]))) if has_budget else size
    return size, free, tuple((int(m.memoryTypes[i].propertyFlags), int(m.memoryTypes[i].heapIndex)) for i in range(m.memoryTypeCount))


def _queue_family(instance: Instance, handle: Any) -> int:
    ffi, lib = instance.ffi, instance.lib
    count = ffi.new("uint32_t*")
    lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, ffi.NULL)
    out = ffi.new("VkQueueFamilyProperties[]", max(1, count[0]))
    lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, out)
    compute = [i for i in range(count[0]) if out[i].queueFlags & COMPUTE]
    alone = [i for i in compute if not out[i].queueFlags & GRAPHICS]
    return (alone or compute or [-1])[0]


def _features(instance: Instance, handle: Any, extensions: frozenset[str]) -> tuple[bool, tuple[str, ...]]:
    ffi, lib, vk = instance.ffi, instance.lib, instance.vk
    v12 = new(ffi, "VkPhysicalDeviceVulkan12Features", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES)
    v11 = new(ffi, "VkPhysicalDeviceVulkan11Features", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, pNext=v12)
    units = new(ffi, "VkPhysicalDeviceCooperativeMatrixFeaturesKHR", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR)
    if COOPERATIVE_MATRIX in extensions:
        v12.pNext = units
    all_features = new(ffi, "VkPhysicalDeviceFeatures2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, pNext=v11)
    lib.vkGetPhysicalDeviceFeatures2(handle, all_features)
    there = {
        "timeline semaphores": v12.timelineSemaphore,
        "8-bit storage": v12.storageBuffer8BitAccess,
        "16-bit storage": v11.storageBuffer16BitAccess,
        "float16": v12.shaderFloat16,
        "int8": v12.shaderInt8,
        "buffer device address": v12.bufferDeviceAddress,
        "integer dot product": "VK_KHR_shader_integer_dot_product" in extensions,
        "cooperative matrix": COOPERATIVE_MATRIX in extensions and units.cooperativeMatrix and v12.vulkanMemoryModel and v12.shaderFloat16,
    }
    return bool(v12.timelineSemaphore), tuple(name for name, have in there.items() if have)


def _has_units_shape(instance: Instance, handle: Any) -> bool:
    ffi, vk = instance.ffi, instance.vk
    found = instance.lib.vkGetInstanceProcAddr(instance.handle, ffi.new("char[]", b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"))
    if found == ffi.NULL:
        return False
    ask = ffi.cast("PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", found)
    count = ffi.new("uint32_t*")
    check(ask(handle, count, ffi.NULL), "cooperative matrix properties")
    out = ffi.new("VkCooperativeMatrixPropertiesKHR[]", max(1, count[0]))
    for i in range(count[0]):
        out[i].sType = vk.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    check(ask(handle, count, out), "cooperative matrix properties")
    return any(
        (p.MSize, p.NSize, p.KSize) == (16, 16, 16)
        and (p.AType, p.BType, p.CType, p.ResultType) == (FLOAT16, FLOAT16, FLOAT32, FLOAT32)
        and p.scope == SUBGROUP_SCOPE
        for p in list(out)[: count[0]]
    )
