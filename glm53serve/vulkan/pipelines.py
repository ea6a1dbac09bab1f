"""Compute pipelines, shader modules and descriptor sets of a device, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glm53serve.vulkan import modules
from glm53serve.vulkan.binding import check, new

if TYPE_CHECKING:
    from glm53serve.vulkan.device import Buffer, Device

BINDINGS = 8
PUSH_BYTES = 64
SETS_A_POOL = 512


class Pipelines:
    """One layout for all kernels: set 0 the halt word and the parameters, set 1 eight storage buffers, 64 bytes of push constants."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pipelines: dict[tuple[str, tuple[tuple[int, int], ...]], Any] = {}
        self._modules: dict[str, Any] = {}
        self._pools: list[Any] = []
        self._sets_left = 0
        self._sets: dict[tuple[tuple[int, int, int], ...], Any] = {}
        self._make_layouts()

    def pipeline(self, name: str, constants: dict[int, int] | None = None) -> Any:
        """A compute pipeline of a module with specialisation constants (id -> 32-bit value; id 0, the halt check, is set here)."""
        values = {0: int(self.device.halt_word), **(constants or {})}
        key = (name, tuple(sorted(values.items())))
        if key not in self._pipelines:
            self._pipelines[key] = self._make_pipeline(name, values)
        return self._pipelines[key]

    def _make_pipeline(self, name: str, values: dict[int, int]) -> Any:
        ffi, lib, vk = self.device.ffi, self.device.lib, self.device.vk
        data = ffi.new("uint32_t[]", list(values.values()))
        entries = ffi.new("VkSpecializationMapEntry[]", len(values))
        for i, number in enumerate(values):
            entries[i].constantID, entries[i].offset, entries[i].size = number, 4 * i, 4
        special = ffi.new("VkSpecializationInfo*")
        special.mapEntryCount, special.pMapEntries, special.dataSize, special.pData = len(values), entries, 4 * len(values), data
        entry_point = ffi.new("char[]", b"main")
        info = new(ffi, "VkComputePipelineCreateInfo", vk.VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO, layout=self.layout)
        stage = info.stage
        stage.sType = vk.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        stage.stage, stage.module, stage.pName, stage.pSpecializationInfo = vk.VK_SHADER_STAGE_COMPUTE_BIT, self._module(name), entry_point, special
        out = ffi.new("VkPipeline*")
        check(lib.vkCreateComputePipelines(self.device.handle, ffi.NULL, 1, info, ffi.NULL, out), f"pipeline {name}")
        return out[0]

    def _module(self, name: str) -> Any:
        if name not in self._modules:
            ffi, vk = self.device.ffi, self.device.vk
            code = modules.load(name)
            words = ffi.new("uint32_t[]", len(code) // 4)
            ffi.memmove(words, code, len(code))
            info = new(ffi, "VkShaderModuleCreateInfo", vk.VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, codeSize=len(code), pCode=words)
            out = ffi.new("VkShaderModule*")
            check(self.device.lib.vkCreateShaderModule(self.device.handle, info, ffi.NULL, out), f"module {name}")
            self._modules[name] = out[0]
        return self._modules[name]

    def bind(self, buffers: list[Buffer], layout: Any = None) -> Any:
        """A descriptor set (as a one-element array) of a kernel's buffers, unused bindings filled up; made once per combination."""
        filled = buffers + [self.device.dummy] * (BINDINGS - len(buffers)) if layout is None else buffers
        key = tuple((int(self.device.ffi.cast("uintptr_t", b.handle)), b.offset, b.nbytes) for b in filled)
        if key not in self._sets:
            self._sets[key] = self._make_set(filled, self.kernel_layout if layout is None else layout)
        return self._sets[key]

    def _make_set(self, buffers: list[Buffer], layout: Any) -> Any:
        ffi, lib, vk = self.device.ffi, self.device.lib, self.device.vk
        if self._sets_left == 0:
            size = ffi.new("VkDescriptorPoolSize*")
            size.type, size.descriptorCount = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, SETS_A_POOL * BINDINGS
            pool_info = new(
                ffi, "VkDescriptorPoolCreateInfo", vk.VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO, maxSets=SETS_A_POOL, poolSizeCount=1, pPoolSizes=size
            )
            pool = ffi.new("VkDescriptorPool*")
            check(lib.vkCreateDescriptorPool(self.device.handle, pool_info, ffi.NULL, pool), "vkCreateDescriptorPool")
            self._pools.append(pool[0])
            self._sets_left = SETS_A_POOL
        layouts = ffi.new("VkDescriptorSetLayout[1]", [layout])
        ask = new(
            ffi,
            "VkDescriptorSetAllocateInfo",
            vk.VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
            descriptorPool=self._pools[-1],
            descriptorSetCount=1,
            pSetLayouts=layouts,
        )
        made = ffi.new("VkDescriptorSet[1]")
        check(lib.vkAllocateDescriptorSets(self.device.handle, ask, made), "vkAllocateDescriptorSets")
        self._sets_left -= 1
        ranges = ffi.new("VkDescriptorBufferInfo[]", len(buffers))
        writes = ffi.new("VkWriteDescriptorSet[]", len(buffers))
        for i, buffer in enumerate(buffers):
            ranges[i].buffer, ranges[i].offset, ranges[i].range = buffer.handle, buffer.offset, buffer.nbytes
            writes[i].sType = vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
            writes[i].dstSet, writes[i].dstBinding, writes[i].descriptorCount = made[0], i, 1
            writes[i].descriptorType, writes[i].pBufferInfo = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, ranges + i
        lib.vkUpdateDescriptorSets(self.device.handle, len(buffers), writes, 0, ffi.NULL)
        return made

    def _make_layouts(self) -> None:
        self.common_layout, self.kernel_layout = self._set_layout(2), self._set_layout(BINDINGS)
        ffi, vk = self.device.ffi, self.device.vk
        both = ffi.new("VkDescriptorSetLayout[2]", [self.common_layout, self.kernel_layout])
        push = ffi.new("VkPushConstantRange*")
        push.stageFlags, push.size = vk.VK_SHADER_STAGE_COMPUTE_BIT, PUSH_BYTES
        info = new(
            ffi,
            "VkPipelineLayoutCreateInfo",
            vk.VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
            setLayoutCount=2,
            pSetLayouts=both,
            pushConstantRangeCount=1,
            pPushConstantRanges=push,
        )
        out = ffi.new("VkPipelineLayout*")
        check(self.device.lib.vkCreatePipelineLayout(self.device.handle, info, ffi.NULL, out), "vkCreatePipelineLayout")
        self.layout = out[0]

    def _set_layout(self, count: int) -> Any:
        ffi, vk = self.device.ffi, self.device.vk
        slots = ffi.new("VkDescriptorSetLayoutBinding[]", count)
        for i in range(count):
            slots[i].binding, slots[i].descriptorCount = i, 1
            slots[i].descriptorType, slots[i].stageFlags = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, vk.VK_SHADER_STAGE_COMPUTE_BIT
        info = new(
            ffi, "VkDescriptorSetLayoutCreateInfo", vk.VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, bindingCount=count, pBindings=slots
        )
        out = ffi.new("VkDescriptorSetLayout*")
        check(self.device.lib.vkCreateDescriptorSetLayout(self.device.handle, info, ffi.NULL, out), "vkCreateDescriptorSetLayout")
        return out[0]

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        lib, handle, null = self.device.lib, self.device.handle, self.device.ffi.NULL
        for destroy, things in (
            (lib.vkDestroyPipeline, list(self._pipelines.values())),
            (lib.vkDestroyShaderModule, list(self._modules.values())),
            (lib.vkDestroyDescriptorPool, self._pools),
            (lib.vkDestroyPipelineLayout, [self.layout]),
            (lib.vkDestroyDescriptorSetLayout, [self.common_layout, self.kernel_layout]),
        ):
            for thing in things:
                destroy(handle, thing, null)
