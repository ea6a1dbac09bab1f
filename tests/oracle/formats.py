"""The stored formats of model spec 9: from random float weights to what lies on disk, and back to the float32 values it stands for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

FP8_BLOCK = 128
INT4_GROUP = 64
FP8_NAMES = re.compile(
    r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa)\.weight$"
    r"|mlp\.(gate_proj|up_proj|down_proj)\.weight$"
    r"|mlp\.(shared_experts|experts\.\d+)\.\w+_proj\.weight$"
)
F32_NAMES = re.compile(r"hc_\w+_(base|scale)$|dt_bias$|A_log$|e_score_correction_bias$")
F32_NAMES_INT4 = re.compile(F32_NAMES.pattern + r"|hc_\w+_fn$|index_kpool_compress_ape$|norm\.weight$|\.bias$")
EXPERT_NAMES = re.compile(r"mlp\.experts\.\d+\.\w+_proj\.weight$")


def short_scale(scale: torch.Tensor) -> torch.Tensor:
    """Float32 scales cut to 20 significant bits, so that level times scale is exact in float32 and in float64 alike."""
    bits = scale.float().contiguous().view(torch.int32)
    return (bits & ~0xF).view(torch.float32)


def to_fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bytes [O, I] and scales [ceil(O/128), ceil(I/128)] of a matrix; the last block of a ragged edge has its own scale."""
    rows, cols = w.shape
    scale = torch.empty(-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    stored = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
            scale[i, j] = short_scale(w[block].abs().max() / 448)
            stored[block] = (w[block] / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scale


def e4m3_values() -> torch.Tensor:
    """The 256 float32 values of e4m3 bytes, by the definition in model spec 9 (0x7F and 0xFF are NaN)."""
    byte = torch.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).double()
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7).double())
    size[(byte & 127) == 127] = float("nan")
    return torch.where(byte >= 128, -size, size).float()


def from_fp8(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 matrix of e4m3 bytes [O, I] and scales: element (o, i) takes scale (o div 128, i div 128)."""
    rows, cols = stored.shape
    grown = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    return e4m3_values()[stored.view(torch.uint8).long()] * grown


def to_int4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat nibbles [O x ceil(I/2)] and flat scales [O x ceil(I/64)] of a matrix [O, I]; the last group of a row may be short."""
    rows, cols = w.shape
    groups = -(-cols // INT4_GROUP)
    padded = torch.nn.functional.pad(w, (0, groups * INT4_GROUP - cols)).view(rows, groups, INT4_GROUP)
    scale = short_scale((padded.abs().amax(-1) / 7).clamp(min=1e-8))
    level = (padded / scale[..., None]).round().clamp(-8, 7).view(rows, -1)[:, : cols + cols % 2]
    nibble = (level + 8).to(torch.uint8)
    return (nibble[:, 0::2] | (nibble[:, 1::2] << 4)).flatten(), scale.flatten()


def from_int4(stored: torch.Tensor, scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Float32 matrix [rows, cols] of flat nibbles and scales."""
    packed = stored.view(rows, -1)
    nibble = torch.stack((packed & 15, packed >> 4), -1).view(rows, -1)[:, :cols]
    return (nibble.float() - 8) * scale.view(rows, -1).repeat_interleave(INT4_GROUP, 1)[:, :cols]


def store(weights: Tensors, kind: str, dsa_layers: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """Stored tensors of a checkpoint of `kind` (f32, bf16, fp8, int4), and the float32 values each weight then has."""
    stored: Tensors = {}
    exact: Tensors = {}
    for name, w in weights.items():
        dsa_output = any(name.endswith(f"layers.{i}.self_attn.o_proj.weight") for i in dsa_layers)
        if kind == "fp8" and (dsa_output or FP8_NAMES.search(name)):
            stored[name], stored[name + "_scale_inv"] = to_fp8(w)
            exact[name] = from_fp8(stored[name], stored[name + "_scale_inv"])
        elif kind == "int4" and EXPERT_NAMES.search(name):
            stored[name], stored[name + ".qs"] = to_int4(w)
            exact[name] = from_int4(stored[name], stored[name + ".qs"], *w.shape)
        else:
            f32 = kind == "f32" or bool((F32_NAMES_INT4 if kind == "int4" else F32_NAMES).search(name))
            stored[name] = w.clone() if f32 else w.to(torch.bfloat16)
            exact[name] = stored[name].float()
    return stored, exact


def write_checkpoint(folder: Path, stored: Tensors, shards: int) -> None:
    """Safetensors files, cut into `shards` runs of names with an index file when there is more than one."""
    names = list(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: stored[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
