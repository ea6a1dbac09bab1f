"""Random models of any size, for tests and for measuring: real bytes on disk, written shard by shard in bounded memory.

Weights are drawn uniformly with the spread a trained network's pre-norm layers need (activations of order one everywhere), so numbers stay finite,
logits spread over a few units and KDA states fade over ten to thousands of tokens. Quantised weights are drawn as stored: random levels and
scales, with the same spread; they are no quantised copy of the bf16 model of that seed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import layout
from glm53serve.model.config import DSA, SPARSE, ModelConfig
from glm53serve.model.config_file import parse_config
from glm53serve.model.errors import ModelError
from glm53serve.model.layout import Need
from glm53serve.model.quant import E4M3_MAX, f32_to_e4m3
from glm53serve.model.shapes import shape_config
from glm53serve.model.shards import Entry, Unit, write_model
from glm53serve.model.stored import MATRIX_FORMATS, data_cols, scale_name, scale_shape

Format = Literal["bf16", "fp8", "int4"]
BLOCK_VALUES = 1 << 20
SQRT3 = sqrt(3.0)
# standard deviation of the stored levels; int4 has -7..7 with 0 twice, since a uniform -8..7 would have a mean
_LEVEL_SPREAD = {"U8": sqrt(sum(2 * level * level for level in range(1, 8)) / 16), "F8_E4M3": float(E4M3_MAX) / SQRT3}
# stored as F32 in the published files (model spec 2)
_F32_ENDINGS = ("_base", "_scale", "dt_bias", "A_log", "e_score_correction_bias")
_FP8_ATTENTION = ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")
# uniform ranges of tensors that are not matrices, by the end of the name; the first that fits
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("norm.weight", 0.75, 1.25),
    ("norm.bias", -0.1, 0.1),
    ("conv1d.weight", -0.9, 0.9),
    ("dt_bias", -6.0, -1.0),
    ("A_log", 0.0, 0.7),
    ("e_score_correction_bias", -0.05, 0.05),
    ("index_kpool_compress_ape", -1.0, 1.0),
    ("_base", -1.0, 1.0),
    ("_scale", 0.5, 1.0),
)


def synth(directory: Path | str, shape: str, layers: int | None = None, experts: int | None = None, fmt: Format | str = "bf16", seed: int = 0) -> None:
    """Write a random model of shape nano, tiny, mid or flash into a new or empty directory.

    fmt: bf16 (matrices BF16), fp8 (e4m3 where the published file has it), int4 (routed experts int4, the rest BF16); small tensors as in those
    files. The tokenizer has one token a byte, ids from 256 on have no text; the last id ends an answer, and the head never favours it.
    There is no chat template and no MTP block. Raises ModelError on a bad argument, an occupied directory, or a disk that is too small.
    """
    if fmt not in get_args(Format):
        raise ModelError(f"format is {fmt!r}, must be one of {', '.join(get_args(Format))}", "unsupported")
    if seed < 0:
        raise ModelError(f"seed is {seed}, must not be negative", "unsupported")
    raw = shape_config(shape, layers, experts, fp8=fmt == "fp8")
    config = parse_config(raw)
    raw["dtype"] = "bfloat16"
    generation = {"eos_token_id": list(config.eos_token_ids), "do_sample": False}
    texts = {
        "config.json": json.dumps(raw, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "tokenizer.json": json.dumps(byte_tokenizer(), ensure_ascii=False) + "\n",
    }
    units, draws = plan(config, fmt)
    write_model(Path(directory), units, lambda entry: draw_blocks(entry, draws[entry.name], seed), texts)


@dataclass(frozen=True, slots=True)
class Draw:
    """How a tensor's values are drawn: uniformly from low..high (bytes of quantised levels from their own table), then `zeros` trailing zeros."""

    low: float = 0.0
    high: float = 0.0
    zeros: int = 0


def plan(config: ModelConfig, fmt: str) -> tuple[list[Unit], dict[str, Draw]]:
    """All tensors in the order of the network, an expert's pieces (gate, up, down, each with its scales) as one unit; how each is drawn."""
    units: list[Unit] = []
    draws: dict[str, Draw] = {}

    def add(name: str, need: Need, stored: str) -> tuple[Entry, ...]:
        entries = _entries(name, need, stored, fmt)
        draws.update(zip((e.name for e in entries), _draws(name, need, stored), strict=False))
        return entries

    for name, need in layout.end_needs(config, head=True):
        units.append(Unit(add(name, need, "BF16")))
    for layer in range(config.num_layers):
        for name, need in layout.layer_needs(config, layer, ()):
            fp8 = fmt == "fp8" and (".mlp." in name or (config.layer_kinds[layer] == DSA and name.endswith(_FP8_ATTENTION)))
            units.append(Unit(add(name, need, "F8_E4M3" if fp8 else "BF16")))
        if config.mlp_kinds[layer] == SPARSE:
            stored = {"bf16": "BF16", "fp8": "F8_E4M3", "int4": "U8"}[fmt]
            pieces = [add(name, need, stored) for name, need in layout.routed_needs(config, layer, ())]
            units += [Unit((*pieces[i], *pieces[i + 1], *pieces[i + 2]), expert=True) for i in range(0, len(pieces), 3)]
    return units, draws


def _entries(name: str, need: Need, stored: str, fmt: str) -> tuple[Entry, ...]:
    """The tensor, and its scale tensor when a matrix is stored in a quantised format."""
    disk = layout.disk_name(name)
    if not need.matrix:
        f32 = name.endswith(layout.CONTAINER_F32 if fmt == "int4" else _F32_ENDINGS)
        return (Entry(disk, "F32" if f32 else "BF16", need.shape),)
    kind = MATRIX_FORMATS[stored]
    rows, cols = need.shape
    scales, scale = scale_name(disk, kind), scale_shape(kind, rows, cols)
    if scales is None or scale is None:
        return (Entry(disk, stored, need.shape),)
    if kind == "fp8":
        return Entry(disk, stored, need.shape), Entry(scales, "F32", scale)
    # the container's arrays are flat
    return Entry(disk, stored, (rows * data_cols(kind, cols),)), Entry(scales, "F32", (prod(scale),))


def _draws(name: str, need: Need, stored: str) -> tuple[Draw, ...]:
    """How a tensor and its scales are drawn. A matrix has the spread 1 / sqrt(columns), which keeps a product's rows at order one."""
    for ending, low, high in _RANGES:
        if name.endswith(ending):
            return (Draw(low, high),)
    spread = 1.0 / sqrt(need.shape[-1])
    if need.matrix and stored in _LEVEL_SPREAD:
        middle = spread / _LEVEL_SPREAD[stored]
        return Draw(), Draw(0.8 * middle, 1.2 * middle)
    if name == "embed_tokens.weight":
        spread = 1.0
    if name != "lm_head.weight":
        return (Draw(-spread * SQRT3, spread * SQRT3),)
    # the end id's logit is 0, far below the best of any row, so greedy answers have the length asked for
    return (Draw(-2.5 * spread * SQRT3, 2.5 * spread * SQRT3, zeros=need.shape[1]),)


def draw_blocks(entry: Entry, how: Draw, seed: int) -> Iterator[NDArray[Any]]:
    """An entry's bytes block by block; they depend on the seed and the name alone."""
    bits = np.random.SFC64([seed, zlib.crc32(entry.name.encode())])
    total = prod(entry.shape)
    table = _byte_table(entry.dtype)
    for first in range(0, total, BLOCK_VALUES):
        count = min(BLOCK_VALUES, total - first)
        if table is not None:
            yield table[bits.random_raw(-(-count // 8)).view(np.uint8)[:count]]
            continue
        values = bits.random_raw(-(-count // 4)).view(np.uint16)[:count].astype(np.float32)
        values *= np.float32((how.high - how.low) / 65535)
        values += np.float32(how.low)
        values[max(0, total - how.zeros - first) :] = 0.0
        if entry.dtype == "F32":
            yield values
        else:
            # finite numbers only, so adding half is the whole rounding and saves passes over the data
            pattern = values.view(np.uint32)
            pattern += np.uint32(0x8000)
            pattern >>= np.uint32(16)
            yield pattern.astype(np.uint16)


@cache
def _byte_table(dtype: str) -> NDArray[np.uint8] | None:
    """What a random byte is stored as, for formats of a byte or less."""
    byte = np.arange(256)
    if dtype == "U8":
        nibbles = np.where(byte & 15, byte & 15, 8) | np.where(byte >> 4, byte >> 4, 8) << 4
        return np.asarray(nibbles, np.uint8)
    if dtype == "F8_E4M3":
        return f32_to_e4m3(((byte - 127.5) / 127.5).astype(np.float32) * E4M3_MAX)
    return None


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json with one token for each byte, id = byte value; no merges, no special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
        "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": plain,
        "post_processor": None, "decoder": plain, "model": model,
    }  # fmt: skip
