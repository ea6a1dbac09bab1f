"""A model's weights in device memory: matrices in fragment order, small tensors in float32, routed experts behind a table of addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.packing import GRANULE_BYTES, TILE
from glm53serve.cuda.runtime import FORMAT_CODES, FORMAT_NAMES, MAX_ROWS, Buffer
from glm53serve.model.config import DSA, KDA, ModelConfig

EXACT_BELOW = 1024
"""Models narrower than this run prompts on bf16 pairs as well: it costs nothing there, and they amplify rounding most."""


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """One matrix, or `heads` equal ones back to back, on the device; `rows` counts outputs (of a gate|up pair: its width)."""

    format: int
    rows: int
    cols: int
    tiles: int
    granules: int
    data: Buffer
    scale: Buffer | None
    heads: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales, padding included."""
        return self.data.nbytes + (self.scale.nbytes if self.scale else 0)


@dataclass(frozen=True, slots=True)
class Site:
    """mHC parameters of one half layer."""

    fn: Buffer
    base: Buffer
    scale: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class KdaOnDevice:
    """A KDA layer's attention half; the projections that read the layer input are separate matrices of one launch."""

    projections: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix]
    beta: DeviceMatrix
    f_a: DeviceMatrix
    f_b: DeviceMatrix
    g_a: DeviceMatrix
    g_b: DeviceMatrix
    out: DeviceMatrix
    taps: Buffer
    dt_bias: Buffer
    a_log: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class IndexerOnDevice:
    """The indexer of a full DSA layer."""

    query: DeviceMatrix
    key: DeviceMatrix
    gate: DeviceMatrix
    weights: DeviceMatrix
    norm: Buffer
    bias: Buffer
    ape: Buffer


@dataclass(frozen=True, slots=True)
class DsaOnDevice:
    """A DSA layer's attention half; `absorb` is Wk transposed and `value` Wv, one matrix a head."""

    q_a: DeviceMatrix
    q_b: DeviceMatrix
    kv_a: DeviceMatrix
    absorb: DeviceMatrix
    value: DeviceMatrix
    out: DeviceMatrix
    q_norm: Buffer
    kv_norm: Buffer
    indexer: IndexerOnDevice | None


@dataclass(frozen=True, slots=True)
class FfnOnDevice:
    """A dense feed-forward or shared expert."""

    gate_up: DeviceMatrix
    down: DeviceMatrix


@dataclass(frozen=True, slots=True)
class MoeOnDevice:
    """Router, shared expert and the experts' address table uint64 [E][4]: gate|up data, scale, down data, scale.

    `gate_up` and `down` give the shapes all experts share and have no data. `on_device[e]` is false for experts left in pinned host memory.
    """

    router: DeviceMatrix
    bias: Buffer
    shared: FfnOnDevice | None
    table: Buffer
    gate_up: DeviceMatrix
    down: DeviceMatrix
    on_device: NDArray[np.bool_]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales and padding included."""
        return sum(weight_bytes(m) + 4 * scale_floats(m) for m in (self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer."""

    index: int
    attention_site: Site
    ffn_site: Site
    attention: KdaOnDevice | DsaOnDevice
    ffn: FfnOnDevice | MoeOnDevice


@dataclass(slots=True)
class DeviceModel:
    """All layers held, and the two ends of the network when the device holds them. `embedding_kind` 0 float32, 1 bf16."""

    config: ModelConfig
    layers: list[DeviceLayer] = field(default_factory=list)
    embedding: Buffer | None = None
    embedding_kind: int = 0
    final_norm: Buffer | None = None
    head: DeviceMatrix | None = None


def check_supported(config: ModelConfig) -> None:
    """Raise ValueError naming the first size the kernels cannot take."""
    limits = (
        ("hc_mult", config.hc_mult, 1 <= config.hc_mult <= 4, "1 to 4"),
        ("linear_head_dim", config.kda_head_dim, config.kda_head_dim % 4 == 0 and config.kda_head_dim <= 256, "a multiple of 4, at most 256"),
        ("kv_lora_rank", config.kv_lora_rank, config.kv_lora_rank <= 512, "at most 512"),
        ("index_head_dim", config.index_head_dim, config.index_head_dim % 4 == 0 and config.index_head_dim <= 256, "a multiple of 4, at most 256"),
        ("num_experts_per_tok", config.num_experts_per_tok, config.num_experts_per_tok <= 32, "at most 32"),
        ("n_routed_experts", config.n_routed_experts, config.n_routed_experts <= 1024, "at most 1024"),
        ("index_topk", config.index_topk, config.index_topk + config.index_kpool <= 65536, "at most 65536 with index_kpool"),
        ("hidden_size", config.hidden_size, config.hidden_size <= 16384, "at most 16384"),
    )
    for name, value, fits, allowed in limits:
        if not fits:
            raise ValueError(f"{name}={value}: the CUDA backend takes {allowed}")


def is_exact(config: ModelConfig) -> bool:
    """Prompts run on bf16 pairs: narrow models, and those whose sizes the wide kernels do not take."""
    odd = head_width(config) % 32 or config.kv_lora_rank % 8
    return config.hidden_size < EXACT_BELOW or (DSA in config.layer_kinds and bool(odd))


def defines(config: ModelConfig, formats: set[str], exact: bool | None = None) -> dict[str, int]:
    """Compile-time sizes of the kernels for a model (the list at the top of kernels/common.cuh). `exact`: see `is_exact`, which is the default."""
    check_supported(config)
    has_kda, has_dsa = KDA in config.layer_kinds, DSA in config.layer_kinds
    return {
        "HIDDEN": config.hidden_size,
        "SITE_BLOCKS": site_blocks(config.hidden_size),
        "HC": config.hc_mult,
        "KDA_D": config.kda_head_dim if has_kda else 16,
        "CONV": config.conv_width if has_kda else 4,
        "LATENT": -(-config.kv_lora_rank // 64) * 64 if has_dsa else 64,
        "HEADS": config.num_heads if has_dsa else 16,
        "MAX_ROWS": MAX_ROWS,
        "FORMATS": sum(1 << FORMAT_CODES[f] for f in formats | {"bf16"}),
        "EXACT": int(is_exact(config) if exact is None else exact),
    }


def site_blocks(hidden_size: int) -> int:
    """Blocks that share a row of a site: as many as a cluster has room for, of at least 64 columns; two at least, for one alone cannot send to itself."""
    return max([n for n in (2, 4, 8, 16) if hidden_size >= 64 * n], default=2)


def head_width(config: ModelConfig) -> int:
    """Query values a head takes in memory: qk_head_dim up to a multiple of 8."""
    return -(-config.qk_head_dim // 8) * 8


def weight_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of data a product with this matrix reads when every tile is read once, scales not counted."""
    return matrix.heads * matrix.tiles * matrix.granules * GRANULE_BYTES


def scale_floats(matrix: DeviceMatrix) -> int:
    """Floats of scale beside them."""
    granules = matrix.tiles * matrix.granules
    each = {"int4": granules * 64, "fp8": granules * 2, "int8": matrix.tiles * TILE}
    return matrix.heads * each.get(FORMAT_NAMES[matrix.format], 0)


def flops_per_row(matrix: DeviceMatrix, pair: bool = False) -> int:
    """Useful floating-point operations of a product with one row."""
    return 2 * matrix.heads * matrix.rows * matrix.cols * (2 if pair else 1)
