"""From a checkpoint to a CUDA backend: memory plan, weights, state, work memory, recorded decode steps, all before serving begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.decode import Decoder
from glm53serve.cuda.layers import CudaHead, CudaLayers, make_head
from glm53serve.cuda.model import DeviceModel, MoeOnDevice, defines, is_exact
from glm53serve.cuda.runtime import Device
from glm53serve.cuda.upload import Uploader, formats_of
from glm53serve.experts.memory import available_bytes
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import F32Array, FfnWeights, LayerWeights, Matrix

MARGIN = 1 << 29
"""Device bytes left free beside everything planned: the driver's, and graphs."""

Note = Callable[[str], None]
History = Callable[[], NDArray[np.uint64] | None]
"""Uses of each routed expert in earlier runs [sparse layers, experts]; None when there are none."""
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
    vram_bytes: int | None = None,
    history: History = lambda: None,
    note: Note = lambda _line: None,
    progress: Callable[[int], None] | None = None,
    make_device: MakeDevice = cupy_device,
    looping: bool = False,
    exact: bool | None = None,
) -> CudaBackend:
    """Load a whole model: `slots` slots of `capacity` positions, prompt passes of up to `chunk` rows.

    vram_bytes: device memory it may take, None = what is free. Routed experts that do not fit stay in pinned host memory, those with the fewest uses in
    `history` (asked only then; without one see `expert_order`), and `note` gets one line. `progress` is called with each layer that is there.
    `looping`: record device loops too (for `decode_loop(decoder, depth, loop_bound)`). `exact`: whether prompts run on bf16 pairs (see `is_exact`, the
    default). Raises CudaUnavailable, MemoryError (all but the routed experts does not fit the device, or the others do not fit host memory), ValueError
    (unsupported sizes).
    """
    c = weights.config
    formats = formats_of(c, weights.layer, weights, bits, (weights.lm_head(),))
    exact = is_exact(c) or "f32" in formats if exact is None else exact
    device = make_device(defines(c, formats, exact))
    try:
        free = device.free_bytes()
        uploader = Uploader(device, c, bits)
        model = DeviceModel(c)
        for i in range(c.num_layers):
            model.layers.append(uploader.layer(weights.layer(i), weights))
            if progress is not None:
                progress(i)
        uploader.ends(model, weights.embedding(), weights.final_norm(), weights.lm_head())
        layers = CudaLayers(device, model, slots, capacity, chunk, exact)
        for slot in range(slots):
            layers.open_slot(slot, capacity)
        head = make_head(layers)
        used = free - device.free_bytes()
        allowed = free if vram_bytes is None else min(free, vram_bytes)
        spare = allowed - used - MARGIN - 4 * 32 * c.vocab_size
        if allowed < used:
            raise MemoryError(f"all but the routed experts takes {used / 1e9:.3f} GB of the device, allowed are {allowed / 1e9:.3f}")
        _place_experts(uploader, model, weights, max(0, spare), history, note)
        layers.warm_up()
        decoder = Decoder(layers, note, loops=looping)
        return CudaBackend(device, layers, head, decoder)
    except BaseException:
        device.close()
        raise


def _place_experts(uploader: Uploader, model: DeviceModel, weights: Weights, spare: int, history: History, note: Note) -> None:
    """Place the routed experts within `spare` bytes of the device; say so when some stay in host memory."""
    mixtures = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeOnDevice)]
    total = sum(m.expert_bytes * len(m.on_device) for m in mixtures)
    uses = history() if total > spare else None
    known = uses is not None and bool(uses.any())
    left = uploader.choose_experts(mixtures, spare, uses if known else None)
    if left:
        count = sum(int((~m.on_device).sum()) for m in mixtures)
        if left > available_bytes():
            raise MemoryError(f"{count} routed experts do not fit the device, and their {left / 1e9:.1f} GB do not fit host memory either")
        which = "the least used of the usage history" if known else "the last ones of every layer (no usage history)"
        note(f"CUDA: {count} of {sum(len(m.on_device) for m in mixtures)} routed experts ({left / 1e9:.1f} GB) stay in host memory: {which}")
    uploader.place_experts(model.layers, weights)
