"""One whole layer on the device: which kernels, over which buffers, in which order (model spec 3 to 6)."""

from __future__ import annotations

from dataclasses import dataclass

from glm53serve.model import quant
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import ExpertSource, KdaWeights, LayerWeights, MoeWeights
from glm53serve.vulkan.attention import DsaLayer, KdaLayer
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.ffn import DenseFfn, MoeFfn
from glm53serve.vulkan.hyper import HcSite
from glm53serve.vulkan.linear import Stage
from glm53serve.vulkan.pack import Narrow
from glm53serve.vulkan.scratch import Scratch, Sizes
from glm53serve.vulkan.state import DsaState, KdaState


@dataclass(slots=True)
class ChainLayer:
    """One whole layer on the device."""

    index: int
    config: ModelConfig
    hc_attn: HcSite
    hc_ffn: HcSite
    attention: KdaLayer | DsaLayer
    ffn: DenseFfn | MoeFfn

    def stages(self, device: Device, s: Scratch, bucket: int, spans: int) -> list[Stage]:
        """From streams to streams in `x` for up to `bucket` rows of up to `spans` spans."""
        stages = self.hc_attn.before(s, bucket) + self.attention.stages(s, bucket, spans) + self.hc_attn.after(device, s, bucket)
        stages += self.hc_ffn.before(s, bucket)
        if isinstance(self.ffn, DenseFfn):
            return stages + self.ffn.stages(s, bucket) + self.hc_ffn.after(device, s, bucket)
        stages += self.ffn.stages(device, s, bucket)
        return stages + self.hc_ffn.after(device, s, bucket, self.ffn.shared is not None, self.config.num_experts_per_tok)


def narrowed(bits: int) -> Narrow:
    """Dense matrices at `bits` a weight (see `quant.requantise`), 0 as stored."""
    return (lambda matrix: quant.requantise(matrix, bits)) if bits else (lambda matrix: matrix)


def load_layer(
    device: Device, sizes: Sizes, w: LayerWeights, place: int, state: KdaState | DsaState, experts: ExpertSource, uses: Buffer, bits: int
) -> ChainLayer:
    """Put a layer's weights on the device. `place` is its number among the sparse layers held. Raises OutOfDeviceMemory."""
    narrow = narrowed(bits)
    attention: KdaLayer | DsaLayer
    if isinstance(w.attention, KdaWeights):
        assert isinstance(state, KdaState)
        attention = KdaLayer(device, sizes, w.attention, state, narrow)
    else:
        assert isinstance(state, DsaState)
        attention = DsaLayer(device, sizes, w.index, w.attention, state, narrow)
    ffn: DenseFfn | MoeFfn
    if isinstance(w.ffn, MoeWeights):
        ffn = MoeFfn(device, sizes, w.index, place, w.ffn, experts, uses, narrow)
    else:
        ffn = DenseFfn(device, sizes, w.ffn, narrow)
    sites = HcSite(device, sizes, w.hc_attn, w.input_norm), HcSite(device, sizes, w.hc_ffn, w.post_norm)
    return ChainLayer(w.index, sizes.config, *sites, attention, ffn)

