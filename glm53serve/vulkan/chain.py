"""From settings to a chain: which device, how many layers fit, and what to say when there is none."""

from __future__ import annotations

from collections.abc import Callable

from glm53serve.engine.seam import DeviceLost
from glm53serve.model.config import DSA, SHARED, SPARSE, ModelConfig
from glm53serve.model.quant import stored_bytes
from glm53serve.model.weights import ExpertSource, FfnWeights, LayerWeights
from glm53serve.settings import Settings
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.devices import DeviceInfo
from glm53serve.vulkan.errors import OutOfDeviceMemory, VulkanUnavailable
from glm53serve.vulkan.faults import VulkanFaults
from glm53serve.vulkan.layers import VulkanLayers
from glm53serve.vulkan.pack import BLOCK
from glm53serve.vulkan.scratch import Sizes, floats
from glm53serve.vulkan.state import layer_floats

RESERVE = 0.05
"""Share of free device memory left to the driver and to padding."""


def open_chain(
    config: ModelConfig,
    layer_weights: Callable[[int], LayerWeights],
    experts: ExpertSource,
    settings: Settings,
    slots: int,
    bits: int = 0,
    faults: VulkanFaults | None = None,
    validate: bool = False,
    progress: Callable[[int], None] | None = None,
) -> VulkanLayers:
    """Layers 0..N-1 on the device that the settings choose (COLI_VULKAN, COLI_VK_DEVICE, COLI_VK_CHAIN_LAYERS, COLI_VK_CHAIN_ROWS, GLM53_MAXT).

    N is as set, else what fits free device memory; a device that runs out all the same gets fewer layers. `bits` as for VulkanLayers.
    Raises VulkanUnavailable with one line naming the reason.
    """
    capacity, wanted = settings.maxt, settings.vk_chain_layers

    def device() -> Device:
        return Device(settings.vk_device, allow_cpu=settings.vulkan, validate=validate, faults=faults)

    opened = device()
    try:
        sizes = fitting_rows(opened.info, config, settings.vk_chain_rows, slots, capacity)
        needs = layer_bytes(sizes, experts, bits)
        count = whole_pairs(config, config.num_layers if wanted < 0 else min(wanted, config.num_layers))
        if wanted < 0:
            count = fitting_layers(sizes, needs, opened.info.free)
        while count > 0:
            try:
                layers = VulkanLayers(opened, config, range(count), layer_weights, experts, slots, capacity, sizes.rows, bits, progress=progress)
                layers.prepare()
                return layers
            except OutOfDeviceMemory:
                opened.close()
                if wanted >= 0:
                    raise
                count = whole_pairs(config, count * 3 // 4)
                opened = device()
    except (OutOfDeviceMemory, DeviceLost) as error:
        opened.close()
        raise VulkanUnavailable(f"{opened.info.name}: {error}") from error
    except BaseException:
        opened.close()
        raise
    opened.close()
    reason = "COLI_VK_CHAIN_LAYERS=0" if wanted == 0 else f"no layer fits: one takes {max(needs) / 1e9:.2f} GB, {opened.info.free / 1e9:.2f} GB are free"
    raise VulkanUnavailable(f"{opened.info.name}: {reason}")


def whole_pairs(config: ModelConfig, count: int) -> int:
    """The largest number of layers up to `count` that does not part a shared indexer layer from the one it reads."""
    while 0 < count < config.num_layers and config.layer_kinds[count] == DSA and config.indexer_kinds[count] == SHARED:
        count -= 1
    return count


def fitting_rows(info: DeviceInfo, config: ModelConfig, rows: int, slots: int, capacity: int) -> Sizes:
    """Sizes with row groups as large as wanted, but no intermediate buffer larger than the device binds. Raises OutOfDeviceMemory."""
    everything = range(config.num_layers)
    sizes = Sizes(config, rows, slots, capacity)
    while sizes.rows > 1 and 4 * max(floats(sizes, everything).values()) + 4096 > info.binding_limit:
        sizes = Sizes(config, sizes.rows // 2, slots, capacity)
    widest = 4 * max(max(layer_floats(sizes, i)) for i in everything)
    if widest + 4096 > info.binding_limit:
        raise OutOfDeviceMemory(f"{slots} slots of {capacity} positions take {widest / 1e9:.2f} GB a layer, the device binds {info.binding_limit / 1e9:.2f}")
    return sizes


def layer_bytes(sizes: Sizes, experts: ExpertSource, bits: int) -> list[int]:
    """Device bytes of every layer: weights, routed experts and state of all slots. Dense matrices count as `bits` (0: 16), without reading them."""
    c = sizes.config
    expert = _stored(experts.expert(c.sparse_layers[0], 0)) if c.sparse_layers else 0
    needs = []
    for index in range(c.num_layers):
        total = stored_bytes(_dense_weights(c, index), BLOCK, bits or 16) // BLOCK + 4 * sum(layer_floats(sizes, index))
        total += 4 * 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * sizes.hidden
        if c.mlp_kinds[index] == SPARSE:
            total += c.n_routed_experts * (expert + 4 * sizes.hidden)
        needs.append(total)
    return needs


def _dense_weights(c: ModelConfig, index: int) -> int:
    """Weights of a layer's matrices but the router and the routed experts."""
    h, p, d = c.hidden_size, c.kda_width, c.kda_head_dim
    if c.layer_kinds[index] == DSA:
        count = c.q_lora_rank * (h + c.num_heads * c.qk_head_dim) + c.kv_lora_rank * (h + c.num_heads * (c.qk_head_dim + c.v_head_dim))
        count += h * c.num_heads * c.v_head_dim + c.index_n_heads * (c.index_head_dim * c.q_lora_rank + h) + 2 * c.index_head_dim * h
    else:
        count = 4 * h * p + 2 * d * (h + p) + c.kda_heads * h
    width = c.n_shared_experts * c.moe_intermediate_size if c.mlp_kinds[index] == SPARSE else c.intermediate_size
    return count + 3 * h * width


def _stored(ffn: FfnWeights) -> int:
    return ffn.gate.nbytes + ffn.up.nbytes + ffn.down.nbytes


def fitting_layers(sizes: Sizes, needs: list[int], free: int) -> int:
    """How many layers fit free device memory beside the intermediate buffers."""
    config = sizes.config
    left = free * (1 - RESERVE) - 4 * sum(floats(sizes, range(config.num_layers)).values())
    count = 0
    while count < config.num_layers and needs[count] <= left:
        left -= needs[count]
        count += 1
    return whole_pairs(config, count)
