"""Work memory of a pass: allocated once for the largest number of rows, never moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm53serve.cuda.packing import COLUMN_PAD
from glm53serve.cuda.runtime import MAX_ROWS, Buffer, Device, Pointer
from glm53serve.model.config import DSA, KDA, SPARSE, ModelConfig

SLACK = 1024
DECODE_SPLIT = 64
"""Selected tokens one block attends in a pass of few rows."""
PROMPT_COLUMNS = 128
"""Columns of every stream that a block of a prompt's mHC site projects."""
GROUP_ROWS = 512
"""Rows that attend together in a pass of many rows; between groups the pass may stop."""


def padded(width: int) -> int:
    """A row of activations up to whole granules of every format."""
    return -(-width // COLUMN_PAD) * COLUMN_PAD


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Activations as bf16 pairs: high and low [rows][ld], zero beyond the width; without low, high parts in product order (see common.cuh)."""

    high: Buffer
    low: Buffer | None
    ld: int


@dataclass(slots=True)
class Scratch:
    """Everything a pass of up to `rows` rows writes on its way. Shapes beside each name in `__post_init__`; T = rows."""

    device: Device
    config: ModelConfig
    rows: int
    max_pools: int
    head_width: int
    split: dict[str, SplitRows] = field(init=False, default_factory=dict)
    plain: dict[str, Buffer] = field(init=False, default_factory=dict)
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        c, t = self.config, self.rows
        n, h = c.hc_mult, c.hidden_size
        self._floats("streams", t * n * h)
        self._floats("partial", t * self.chunks * ((2 + n) * n + 1))
        self._floats("coefficients", t * (n + n * n))
        self._floats("pre", t * n)
        self._pairs("x", t, h)
        self._floats("y", t * h)
        if KDA in c.layer_kinds:
            p, heads = c.kda_width, c.kda_heads
            self._floats("raw", t * 3 * p)
            for name in ("z", "gate", "q", "k", "v", "decay", "o"):
                self._floats(name, t * p)
            for name in ("beta_raw", "beta", "qk"):
                self._floats(name, t * heads)
            self._pairs("f_a", t, c.kda_head_dim)
            self._pairs("g_a", t, c.kda_head_dim)
            self._pairs("a", t, p)
        if DSA in c.layer_kinds:
            group = self.group
            self._floats("q_latent", t * c.q_lora_rank)
            self._floats("kv", t * c.kv_lora_rank)
            self._floats("key", t * c.index_head_dim)
            self._floats("index_gate", t * c.index_head_dim)
            self._floats("index_weights", t * c.index_n_heads)
            self._floats("index_query", t * c.index_n_heads * c.index_head_dim)
            self._pairs("qr", t, c.q_lora_rank)
            self._pairs("heads_q", t, c.num_heads * self.head_width)
            self._pairs("absorbed", group * c.num_heads, c.kv_lora_rank)
            self._pairs("attended", group * c.num_heads, c.kv_lora_rank)
            self._pairs("heads_o", t, c.num_heads * c.v_head_dim)
            self._floats("scores", group * self.max_pools)
            self._floats("selected", t * self.selection)
            self._floats("selected_count", t)
            latent = -(-c.kv_lora_rank // 64) * 64
            self._floats("splits", min(t, MAX_ROWS) * self.splits * c.num_heads * (latent + 4))
        if SPARSE in c.mlp_kinds:
            pairs = t * c.num_experts_per_tok
            self._floats("router", t * c.n_routed_experts)
            for name in ("ids", "weights", "list"):
                self._floats(name, pairs)
            self._floats("groups", 4 * (pairs + 2))
            self._pairs("expert_h", pairs, c.moe_intermediate_size)
            self._floats("pair_y", pairs * max(h, padded(h) // 2))  # before the results of pairs, their inputs: bf16 rows of x
            self._pairs("shared_h", t, max(1, c.n_shared_experts) * c.moe_intermediate_size)
        if c.mlp_kinds.count(SPARSE) < c.num_layers:
            self._pairs("dense_h", t, c.intermediate_size)
        self._floats("counts", max(1, len(c.sparse_layers)) * c.n_routed_experts)

    @property
    def chunks(self) -> int:
        """Column blocks of an mHC site of a prompt."""
        return -(-self.config.hidden_size // PROMPT_COLUMNS)

    @property
    def group(self) -> int:
        """Rows that attend together."""
        return min(self.rows, GROUP_ROWS)

    @property
    def selection(self) -> int:
        """Most tokens a row attends, and a few more to keep rows apart."""
        return self.config.index_topk + self.config.index_kpool

    @property
    def splits(self) -> int:
        """Blocks that share one row's selection in a pass of few rows."""
        return -(-self.selection // DECODE_SPLIT)

    def _alloc(self, nbytes: int) -> Buffer:
        self.nbytes += nbytes + SLACK
        return self.device.alloc(nbytes + SLACK)

    def _floats(self, name: str, count: int) -> None:
        self.plain[name] = self._alloc(4 * count)

    def _pairs(self, name: str, rows: int, width: int) -> None:
        ld = padded(width)
        self.split[name] = SplitRows(self._alloc(2 * rows * ld), self._alloc(2 * rows * ld), ld)

    def row(self, name: str, row: int, width: int) -> Pointer:
        """Address of a row of a plain array of 4-byte values."""
        return self.plain[name].at(4 * row * width)
