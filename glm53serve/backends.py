"""Which backend runs which layers: what was asked for, what this machine has, and the one line said when the two differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.decode_loop import DecodeLoop
from glm53serve.engine.engine import Note
from glm53serve.engine.seam import Head, Layers, Network
from glm53serve.model.checkpoint import Checkpoint
from glm53serve.model.errors import ModelError
from glm53serve.settings import Settings

CpuLayersOf = Callable[[range], Layers]
Progress = Callable[[int], None]
History = Callable[[], NDArray[np.uint64] | None]
"""Uses of each routed expert in earlier runs [sparse layers, experts], read when asked for; None when there are none."""


class BackendUnavailable(ModelError):
    """A backend that was asked for by name cannot run here; one line says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unsupported")


@dataclass(slots=True)
class Chosen:
    """Backends that cover all layers in order; where one device holds the ends too: `head`, `network` (all of it), `ahead` (it decodes by itself)."""

    backends: list[Layers]
    head: Head | None = None
    ahead: DecodeLoop | None = None
    network: Network | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the backends are built from. `cpu` makes CPU layers for a range; `bits` is the format of dense matrices."""

    checkpoint: Checkpoint
    settings: Settings
    slots: int
    bits: int
    cpu: CpuLayersOf
    note: Note
    progress: Progress | None = None
    history: History = lambda: None

    @property
    def everything(self) -> range:
        """All layers of the model."""
        return range(self.checkpoint.config.num_layers)


def choose(name: str, request: Request) -> Chosen:
    """The backends for `name` (auto, cpu, cuda, vulkan).

    auto takes what is there (Vulkan first when COLI_VULKAN is set, else CUDA, else a Vulkan GPU) and falls back to the CPU, saying so only
    where something was there or wished for. A named backend that is not to be had raises BackendUnavailable.
    """
    if name == "cuda":
        return _cuda(request)
    if name == "vulkan":
        return _vulkan(request)
    if name == "auto":
        wished = request.settings.vulkan
        order = (_vulkan, _cuda) if wished else (_cuda, _vulkan)
        for build in order:
            try:
                return build(request)
            except BackendUnavailable as reason:
                if (build is _vulkan and wished) or not isinstance(reason, NothingThere):
                    request.note(f"{reason}; going on without")
    return Chosen([request.cpu(request.everything)])


class NothingThere(BackendUnavailable):
    """No package or no device of that kind: nothing worth a word unless it was asked for."""


def _cuda(request: Request) -> Chosen:
    if find_spec("cupy") is None:
        raise NothingThere("CUDA: the package cupy is not installed (install glm53serve[cuda])")
    from glm53serve.cuda.backend import load_backend
    from glm53serve.cuda.compiling import CudaUnavailable, CudaUnsupported
    from glm53serve.cuda.decode import decode_loop

    settings = request.settings
    vram = int(settings.vram_gb * 1e9) if settings.vram_gb >= 0 else None
    try:
        backend = load_backend(
            request.checkpoint,
            request.slots,
            settings.maxt,
            settings.prefill_chunk,
            request.bits,
            vram_bytes=vram,
            history=request.history,
            note=request.note,
            progress=request.progress,
        )
    except (CudaUnsupported, MemoryError, ValueError) as error:
        raise BackendUnavailable(f"CUDA: {error}") from error
    except CudaUnavailable as error:
        raise NothingThere(f"CUDA: {error}") from error
    return Chosen([backend.layers], backend.head, decode_loop(backend.decoder), backend.head)


def _vulkan(request: Request) -> Chosen:
    settings = request.settings
    if not settings.vk_chain:
        raise NothingThere("Vulkan: COLI_VK_CHAIN=0 turns it off")
    if find_spec("vulkan") is None:
        raise NothingThere("Vulkan: the package vulkan is not installed (install glm53serve[vulkan])")
    from glm53serve.vulkan.chain import open_chain
    from glm53serve.vulkan.errors import VulkanUnavailable

    checkpoint = request.checkpoint
    try:
        chain = open_chain(checkpoint.config, checkpoint.layer, checkpoint, settings, request.slots, request.bits, progress=request.progress)
    except VulkanUnavailable as error:
        raise NothingThere(f"Vulkan: {error}") from error
    backends: list[Layers] = [chain]
    if settings.vk_chain == 2:
        from glm53serve.cpu.layers import CpuLayers
        from glm53serve.vulkan.prompts import PromptLayers

        host = request.cpu(chain.layers)
        assert isinstance(host, CpuLayers)
        backends = [PromptLayers(chain, host)]
    if chain.layers.stop < request.everything.stop:
        backends.append(request.cpu(range(chain.layers.stop, request.everything.stop)))
    return Chosen(backends)
