"""The Vulkan backend: the first layers of the network, whole, on any Vulkan 1.2 device."""
