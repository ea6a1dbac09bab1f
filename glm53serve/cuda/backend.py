"""From a checkpoint to a CUDA backend: memory plan, weights, state, work memory, recorded decode steps, all before serving begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.decode import Decoder
from glm53serve.cuda.layers import CudaHead, CudaLayers, make_head
from glm53serve.cuda.model import DeviceModel, defines, is_exact
from glm53serve.cuda.runtime import Device
from glm53serve.cuda.upload import Uploader, formats_of
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import F32Array, FfnWeights, LayerWeights, Matrix

MARGIN = 1 << 29
"""Device bytes left free beside everything planned: the driver's, and graphs."""

Note = Callable[[str], None]
MakeDevice = Callable[[Mapping[str, int]], Device]


class Weights(Protocol):
    """What is loaded from: a checkpoint, or a model in memory."""

    config: ModelConfig

    def layer(self, index: int) -> LayerWeights:
        """Weights of a layer but its routed experts."""
        ...

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """Weights of a routed expert."""
        ...

    def embedding(self) -> Matrix:
        """Embedding table."""
        ...

    def final_norm(self) -> F32Array:
        """Final norm."""
        ...

    def lm_head(self) -> Matrix:
        """Head."""
        ...


@dataclass(slots=True)
class CudaBackend:
    """A model on a GPU: its layers, its ends, and the decode sessions over them."""

    device: Device
    layers: CudaLayers
    head: CudaHead
    decoder: Decoder

    @property
    def notes(self) -> list[str]:
        """What a person should know about where things are."""
        tiers = self.layers.tiers()
        left = int((tiers == 1).sum())
        return [f"CUDA on {self.device.name}" + (f", {left} of {tiers.size} experts in host memory" if left else "")]


def cupy_device(sizes: Mapping[str, int]) -> Device:
    """The first GPU, with kernels compiled for these sizes. Raises CudaUnavailable."""
    from glm53serve.cuda.cupy_runtime import CupyDevice

    return CupyDevice(sizes)


def load_backend(
    weights: Weights,
    slots: int,
    capacity: int,
    chunk: int,
    bits: int = 0,
    vram_bytes: int = 0,
    heat: NDArray[np.generic] | None = None,
    note: Note = lambda _line: None,
    make_device: MakeDevice = cupy_device,
    looping: bool = False,
    exact: bool | None = None,
) -> CudaBackend:
    """Load a whole model: `slots` slots of `capacity` positions, prompt passes of up to `chunk` rows.

    vram_bytes: device memory it may take, 0 = what is free; routed experts that do not fit stay in pinned host memory, the least used (`heat`) first.
    `looping`: record device loops too (for `decode_loop(decoder, depth, loop_bound)`). `exact`: whether prompts run on bf16 pairs (see `is_exact`, the
    default). Raises CudaUnavailable, MemoryError (when less than the experts does not fit), ValueError (unsupported sizes).
    """
    c = weights.config
    formats = formats_of(c, weights.layer, weights, bits, (weights.lm_head(),))
    exact = is_exact(c) or "f32" in formats if exact is None else exact
    device = make_device(defines(c, formats, exact))
    try:
        free = device.free_bytes()
        uploader = Uploader(device, c, bits)
        model = DeviceModel(c, [uploader.layer(weights.layer(i), weights) for i in range(c.num_layers)])
        uploader.ends(model, weights.embedding(), weights.final_norm(), weights.lm_head())
        layers = CudaLayers(device, model, slots, capacity, chunk, exact)
        for slot in range(slots):
            layers.open_slot(slot, capacity)
        head = make_head(layers)
        used = free - device.free_bytes()
        allowed = min(free, vram_bytes) if vram_bytes else free
        spare = allowed - used - MARGIN - 4 * 32 * c.vocab_size
        if vram_bytes and allowed < used:
            raise MemoryError(f"all but the routed experts takes {used / 1e9:.1f} GB of the device, allowed are {allowed / 1e9:.1f}")
        uploader.place_experts(model.layers, weights, max(0, spare), heat)
        layers.warm_up()
        decoder = Decoder(layers, note, loops=looping)
        return CudaBackend(device, layers, head, decoder)
    except BaseException:
        device.close()
        raise
