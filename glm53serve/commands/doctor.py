"""`glm53serve doctor`: what this machine offers, and what a model would make of it, on one page."""

from __future__ import annotations

import argparse
import platform
from importlib.util import find_spec
from pathlib import Path

from glm53serve.experts.memory import available_bytes
from glm53serve.model.info import dense_ram, size
from glm53serve.settings import Settings

Lines = list[tuple[str, str]]
SAMPLE_SECONDS = 1.0


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print the page. Parts that this machine lacks are named, not errors; a bad model directory is one."""
    from glm53serve.load import shipped_model

    directory = arguments.model or shipped_model()
    lines: Lines = [*_processor(settings), *_memory(), *_devices(), ("", ""), *_model(directory, settings)]
    print("\n".join(f"{label:<12}{text}".rstrip() for label, text in lines))
    return 0


def _processor(settings: Settings) -> Lines:
    import os

    from glm53serve.cpu.threads import physical_cores

    threads = settings.threads or physical_cores()
    lines: Lines = [("processor", f"{_processor_name()}, {os.cpu_count()} logical cores, {threads} threads for the kernels")]
    if find_spec("numba") is None:
        return [*lines, ("kernels", "NumPy (the package numba is not installed: slow)")]
    try:
        from glm53serve.cpu.kernels.target import FEATURES, HAS_AVX2, HAS_FMA, HAS_VNNI, LANES
    except (ImportError, OSError) as error:
        return [*lines, ("kernels", f"NumPy (numba cannot be used: {error})")]
    named = [name for name, there in (("AVX2", HAS_AVX2), ("FMA", HAS_FMA), ("AVX-512", LANES == 16), ("VNNI", HAS_VNNI)) if there]
    named += [name for name in ("neon", "dotprod") if name in FEATURES]
    return [*lines, ("kernels", f"compiled, {LANES} float32 lanes" + (f", {' '.join(named)}" if named else ", no vector extension that they know"))]


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> Lines:
    import psutil

    total = int(psutil.virtual_memory().total)
    return [("memory", f"{size(total)}, {size(available_bytes())} available to this process")]


def _devices() -> Lines:
    return [("Vulkan", text) for text in _vulkan()] + [("CUDA", text) for text in _cuda()]


def _vulkan() -> list[str]:
    if find_spec("vulkan") is None:
        return ["the package vulkan is not installed (pip install 'glm53serve[vulkan]')"]
    from glm53serve.vulkan.devices import list_devices
    from glm53serve.vulkan.errors import VulkanUnavailable

    try:
        devices = list_devices()
    except VulkanUnavailable as error:
        return [str(error)]
    return [line for device in devices for line in device.describe()] or ["no device"]


def _cuda() -> list[str]:
    if find_spec("cupy") is None:
        return ["the package cupy is not installed (pip install 'glm53serve[cuda]')"]
    import cupy

    from glm53serve.cuda.compiling import refusal

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [f"no device ({error})"]
    lines = []
    for number in range(count):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        with cupy.cuda.Device(number):
            free, total = cupy.cuda.runtime.memGetInfo()
        name = properties["name"].decode()
        capability = properties["major"], properties["minor"]
        usable = "" if refusal(name, *capability) is None else " (the kernels need 9.0)"
        lines.append(f"{number}: {name}, compute {capability[0]}.{capability[1]}{usable}, {size(total)}, {size(free)} free")
    return lines


def _model(directory: Path, settings: Settings) -> Lines:
    from glm53serve.experts import ExpertFiles, ExpertStore, experts_in_ram, model_copies
    from glm53serve.experts.store import FEWEST
    from glm53serve.load import default_bits, later_bytes
    from glm53serve.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(directory)
    available = available_bytes()
    bits = settings.bits or default_bits(checkpoint, available)
    dense = dense_ram([stored for _, stored in checkpoint.dense_matrices()], bits) + checkpoint.small_bytes()
    why = "GLM53_BITS" if settings.bits else "chosen"
    lines: Lines = [("model", str(directory)), ("dense", f"{bits} bits ({why}), {size(dense)}")]
    if not checkpoint.config.sparse_layers:
        return lines
    files = ExpertFiles(model_copies(directory, checkpoint.files, settings.model_mirror))
    store = ExpertStore(checkpoint, files)
    try:
        later = later_bytes(checkpoint.config, settings.slots, settings, 0)
        total = len(store.places)
        held = min(max(experts_in_ram(store, 0, settings.expert_gb, later + dense), FEWEST), total)
        why = "GLM53_EXPERT_GB" if settings.expert_gb >= 0 else "measured"
        lines.append(("experts", f"{total} of {size(store.expert_bytes)}; RAM holds {held}, {size(held * store.expert_bytes)} ({why})"))
        runs = max(len(place.runs) for place in store.places.values())
        lines.append(("reads", f"{'one' if runs == 1 else f'up to {runs}'} an expert, {len(files.copies)} {_plural(len(files.copies), 'copy', 'copies')}"))
        rates = files.measure(list(store.places.values()), SAMPLE_SECONDS)
        direct = "not to be had" if rates.direct is None else f"{rates.direct / 1e9:.2f} GB/s"
        taken = "direct" if rates.prefer_direct else "buffered"
        lines.append(("disk", f"direct {direct}, through the page cache {rates.buffered / 1e9:.2f} GB/s: {taken} reads when experts do not fit"))
    finally:
        store.close()
    return lines


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
