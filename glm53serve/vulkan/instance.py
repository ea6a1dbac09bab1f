"""The Vulkan instance, with the validation layer where tests want it."""

from __future__ import annotations

from typing import Any

from glm53serve.vulkan.binding import check, new, package
from glm53serve.vulkan.errors import VulkanUnavailable

LAYER = "VK_LAYER_KHRONOS_validation"
DEBUG_UTILS = "VK_EXT_debug_utils"
API_VERSION = (1 << 22) | (2 << 12)
SYNCHRONISATION = 4
"""VkValidationFeatureEnableEXT: synchronisation validation."""


class Instance:
    """An instance of API 1.2. With `validate` the Khronos layer checks every call, synchronisation included, and `messages` collects
    every warning and error as (severity, id, text).

    Raises VulkanUnavailable: no package, loader, driver or (when asked for) validation layer.
    """

    def __init__(self, validate: bool = False) -> None:
        self.vk = package()
        self.ffi, self.lib = self.vk.ffi, self.vk.lib
        self.messages: list[tuple[int, str, str]] = []
        ffi, lib, vk = self.ffi, self.lib, self.vk
        if validate and LAYER not in self._layers():
            raise VulkanUnavailable(f"the layer {LAYER} is not installed (apt-get install vulkan-validationlayers)")
        name = ffi.new("char[]", b"glm53serve")
        app = new(ffi, "VkApplicationInfo", vk.VK_STRUCTURE_TYPE_APPLICATION_INFO, pApplicationName=name, pEngineName=name, apiVersion=API_VERSION)
        info = new(ffi, "VkInstanceCreateInfo", vk.VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, pApplicationInfo=app)
        if validate:
            layer, extension = ffi.new("char[]", LAYER.encode()), ffi.new("char[]", DEBUG_UTILS.encode())
            layers, extensions = ffi.new("char*[1]", [layer]), ffi.new("char*[1]", [extension])
            info.enabledLayerCount, info.ppEnabledLayerNames = 1, layers
            info.enabledExtensionCount, info.ppEnabledExtensionNames = 1, extensions
            self._callback = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", self._on_message)
            self._listener = new(
                ffi,
                "VkDebugUtilsMessengerCreateInfoEXT",
                vk.VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT,
                messageSeverity=0x1000 | 0x100,
                messageType=7,
                pfnUserCallback=self._callback,
            )
            self._enabled = ffi.new("VkValidationFeatureEnableEXT[1]", [SYNCHRONISATION])
            self._features = new(
                ffi,
                "VkValidationFeaturesEXT",
                vk.VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT,
                enabledValidationFeatureCount=1,
                pEnabledValidationFeatures=self._enabled,
                pNext=self._listener,
            )
            info.pNext = self._features
        out = ffi.new("VkInstance*")
        code = lib.vkCreateInstance(info, ffi.NULL, out)
        if code in (-3, -9):
            raise VulkanUnavailable("the Vulkan loader found no driver (apt-get install mesa-vulkan-drivers, or the GPU's own driver)")
        check(code, "vkCreateInstance")
        self.handle = out[0]
        self._messenger = None
        if validate:
            made = ffi.new("VkDebugUtilsMessengerEXT*")
            check(self._function("vkCreateDebugUtilsMessengerEXT")(self.handle, self._listener, ffi.NULL, made), "messenger")
            self._messenger = made[0]

    def physical_devices(self) -> list[Any]:
        """Handles of all physical devices, in the loader's order."""
        count = self.ffi.new("uint32_t*")
        code = self.lib.vkEnumeratePhysicalDevices(self.handle, count, self.ffi.NULL)
        if code == -3:
            raise VulkanUnavailable("the Vulkan driver enumerates no device")
        check(code, "vkEnumeratePhysicalDevices")
        out = self.ffi.new("VkPhysicalDevice[]", count[0])
        check(self.lib.vkEnumeratePhysicalDevices(self.handle, count, out), "vkEnumeratePhysicalDevices")
        return list(out)[: count[0]]

    def close(self) -> None:
        """Destroy the instance; every device made from it must be gone."""
        if self._messenger is not None:
            self._function("vkDestroyDebugUtilsMessengerEXT")(self.handle, self._messenger, self.ffi.NULL)
        self.lib.vkDestroyInstance(self.handle, self.ffi.NULL)

    def _function(self, name: str) -> Any:
        found = self.lib.vkGetInstanceProcAddr(self.handle, self.ffi.new("char[]", name.encode()))
        return self.ffi.cast("PFN_" + name, found)

    def _layers(self) -> set[str]:
        count = self.ffi.new("uint32_t*")
        check(self.lib.vkEnumerateInstanceLayerProperties(count, self.ffi.NULL), "layers")
        out = self.ffi.new("VkLayerProperties[]", max(1, count[0]))
        check(self.lib.vkEnumerateInstanceLayerProperties(count, out), "layers")
        return {self.ffi.string(out[i].layerName).decode() for i in range(count[0])}

    def _on_message(self, severity: int, _types: int, data: Any, _user: Any) -> int:
        ffi = self.ffi
        name = "" if data.pMessageIdName == ffi.NULL else ffi.string(data.pMessageIdName).decode(errors="replace")
        self.messages.append((int(severity), name, ffi.string(data.pMessage).decode(errors="replace")))
        return 0
