"""Which of a directory's tensors belong to the text network, which do not, and what is missing (model spec 2, 8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from glm53serve.model import layout
from glm53serve.model.config import ModelConfig
from glm53serve.model.errors import CheckpointError
from glm53serve.model.layout import Need
from glm53serve.model.safetensors_file import TensorInfo
from glm53serve.model.stored import SCALE_SUFFIX, format_of, scale_name


def sort_out(found: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[TensorInfo], list[TensorInfo]]:
    """(text tensors by canonical name, vision tensors, tensors with no known prefix). Raises CheckpointError when two names mean one tensor."""
    text: dict[str, TensorInfo] = {}
    vision, unknown = [], []
    for name, tensor in found.items():
        if name.startswith(layout.VISION_PREFIX):
            vision.append(tensor)
            continue
        ours = layout.canonical(name)
        if ours is None:
            unknown.append(tensor)
        elif ours in text:
            raise CheckpointError(f"{name}: {tensor}, {text[ours].name} is the same weight: the config needs one of them")
        else:
            text[ours] = tensor
    return text, vision, unknown


def mtp_layers(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[int]:
    """Layer numbers of the MTP blocks of which anything is there."""
    first = config.num_layers
    allowed = range(first, first + max(config.num_nextn_predict_layers, 1))
    counted = Counter(name.split(".", 2)[1] for name in tensors if name.startswith("layers."))
    return [layer for layer in allowed if str(layer) in counted]


def check_names(tensors: Mapping[str, TensorInfo], needs: Mapping[str, Need], unknown: list[TensorInfo], trunk: int, layers: int) -> None:
    """Exactly the tensors needed are there, each quantised matrix with its scale and no other scale. Raises CheckpointError."""
    known = set(needs)
    missing: str | None = None
    for position, (name, need) in enumerate(needs.items()):
        tensor = tensors.get(name)
        scale = None
        if tensor is not None and need.matrix and (fmt := format_of(tensor)) is not None:
            scale = scale_name(name, fmt)
            if scale is not None:
                known.add(scale)
        if tensor is None and need.matrix:
            # one complaint is enough: its scales are not strays
            known.update(name + suffix for suffix in SCALE_SUFFIX.values())
        absent = name if tensor is None else scale if scale is not None and scale not in tensors else None
        if absent is not None and missing is None:
            wanted = list(need.shape) if absent == name else f"the scales of {tensor.name if tensor else name}"
            part = "" if position < trunk else f" (the MTP block, layer {layers} on, is there in part)"
            missing = f"{_disk_name(absent, tensors)}: missing, the config needs {wanted}{part}"
    stray = next((t for name, t in tensors.items() if name not in known), None)
    if stray is None and unknown:
        stray = unknown[0]
    parts = [] if stray is None else [f"{stray.name}: {stray}, the config needs no such tensor"]
    if missing is not None:
        parts.append(missing)
    if parts:
        raise CheckpointError("; ".join(parts))


def _disk_name(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The name a missing tensor would have in these files."""
    if name.startswith("lm_head."):
        return name
    names = [t.name for t in tensors.values()]
    plain = any(n.startswith("model.") for n in names) and not any(n.startswith(layout.PREFIXES[0]) for n in names)
    return layout.PREFIXES[1 if plain else 0] + name
