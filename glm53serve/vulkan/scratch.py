"""Sizes and intermediate buffers of a chain: one set for the largest row group, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

from glm53serve.model.config import DENSE, DSA, KDA, SPARSE, ModelConfig
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.pack import padded

SLACK = 256
"""Floats behind every buffer: a kernel may read a padded head's columns past the last row, against weights that are zero."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Padded sizes (in floats) of a model's rows on the device; `rows` is the largest row group, `capacity` the positions of a slot."""

    config: ModelConfig
    rows: int
    slots: int
    capacity: int

    @property
    def hidden(self) -> int:
        """Hp."""
        return padded(self.config.hidden_size)

    @property
    def kda(self) -> int:
        """Row stride of KDA outputs."""
        return padded(self.config.kda_width)

    @property
    def rank(self) -> int:
        """A latent's stride."""
        return padded(self.config.kv_lora_rank)

    @property
    def head(self) -> int:
        """A query head's stride."""
        return padded(self.config.qk_head_dim, 4)

    @property
    def index_dim(self) -> int:
        """An index head's, index key's and pool key's stride."""
        return padded(self.config.index_head_dim, 4)

    @property
    def keep(self) -> int:
        """Pools kept a row."""
        return self.config.index_topk // self.config.index_kpool

    @property
    def tokens(self) -> int:
        """Stride of attention weights: the most tokens a row attends to."""
        return padded(min(self.config.index_topk + self.config.index_kpool - 1, self.capacity))

    @property
    def pools(self) -> int:
        """Pools of a slot."""
        return max(1, self.capacity // self.config.index_kpool)

    @property
    def values(self) -> int:
        """Row stride of the heads' values."""
        return padded(self.config.num_heads * self.config.v_head_dim)

    @property
    def experts(self) -> int:
        """Row stride of router logits."""
        return padded(self.config.n_routed_experts)

    @property
    def expert_width(self) -> int:
        """Stride of a routed expert's activation."""
        return padded(self.config.moe_intermediate_size)

    @property
    def widest_ffn(self) -> int:
        """Stride bound of dense and shared activations."""
        c = self.config
        return padded(max(c.intermediate_size, c.n_shared_experts * c.moe_intermediate_size, 1))

    @property
    def kda_inputs(self) -> int:
        """Width of a KDA layer's first products."""
        c = self.config
        return 3 * self.kda + 2 * padded(c.kda_head_dim) + padded(c.kda_heads)

    @property
    def dsa_inputs(self) -> int:
        """Width of a DSA layer's first products."""
        c = self.config
        return padded(c.q_lora_rank) + self.rank + 2 * padded(c.index_head_dim) + padded(c.index_n_heads)

    @property
    def queries(self) -> int:
        """Width of a DSA layer's products of the query latent."""
        c = self.config
        return padded(c.num_heads * self.head) + padded(c.index_n_heads * self.index_dim)


def attention_splits(bucket: int, tokens: int) -> int:
    """Runs that a row's tokens are cut into: one row alone would keep a GPU waiting."""
    return max(1, min(8 // bucket, tokens // 128)) if bucket <= 4 else 1


def floats(sizes: Sizes, layers: range) -> dict[str, int]:
    """Floats of every intermediate buffer that `layers` need."""
    c, r = sizes.config, sizes.rows
    kinds = {c.layer_kinds[i] for i in layers}
    ffns = {c.mlp_kinds[i] for i in layers}
    a = max(sizes.kda_inputs if KDA in kinds else 0, sizes.dsa_inputs if DSA in kinds else 0)
    need = {"x": r * c.hc_mult * sizes.hidden, "dots": r * 128, "mix": r * 128, "xn": r * sizes.hidden, "y": r * sizes.hidden, "a": r * a}
    if KDA in kinds:
        need |= {"fb": r * sizes.kda, "gb": r * sizes.kda, "qkv": r * 3 * c.kda_width, "decay": r * c.kda_width, "beta": r * c.kda_heads}
        need |= {"o": r * c.kda_width, "gated": r * sizes.kda}
    if DSA in kinds:
        need |= {"qr": r * padded(c.q_lora_rank), "b": r * sizes.queries, "absorbed": r * c.num_heads * sizes.rank}
        need |= {"scores": r * sizes.pools, "chosen": r * sizes.keep, "attention": r * c.num_heads * sizes.tokens}
        need |= {"mixed": r * c.num_heads * sizes.rank, "values": r * sizes.values}
        need["parts"] = 8 * c.num_heads * sizes.rank
    if DENSE in ffns or SPARSE in ffns:
        need["act"] = r * sizes.widest_ffn
    if SPARSE in ffns:
        pairs = r * c.num_experts_per_tok
        need |= {"logits": r * sizes.experts, "ids": pairs, "weights": pairs, "order": pairs}
        need |= {"tiles": 4 + 4 * (-(-pairs // 16) + c.n_routed_experts), "eact": pairs * sizes.expert_width, "ey": pairs * sizes.hidden}
    return need


class Scratch:
    """The buffers, zeroed once, by name."""

    def __init__(self, device: Device, sizes: Sizes, layers: range) -> None:
        self._buffers = {name: device.local(4 * (count + SLACK)) for name, count in floats(sizes, layers).items()}
        device.zero(list(self._buffers.values()))

    def __getitem__(self, name: str) -> Buffer:
        return self._buffers[name]

    def get(self, name: str, otherwise: Buffer) -> Buffer:
        """A buffer that may not be needed."""
        return self._buffers.get(name, otherwise)
