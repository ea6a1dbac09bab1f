"""What a model directory is, in words: layers, formats, sizes, and the memory it takes. Reads headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

from glm53serve.model import layout
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.config import DENSE, DSA, FULL, KDA, SPARSE, ModelConfig
from glm53serve.model.quant import stored_bytes
from glm53serve.model.stored import StoredMatrix
from glm53serve.model.weights import MatrixFormat

# bits a weight of what requantise() leaves alone
_FORMAT_BITS: dict[MatrixFormat, int] = {"f32": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def describe(directory: Path | str) -> str:
    """A few lines about a model directory. Raises ConfigError or CheckpointError as `open_checkpoint` does."""
    checkpoint = open_checkpoint(directory)
    dense = [stored for _, stored in checkpoint.dense_matrices()]
    lines = [
        ("model", str(directory)),
        *_network(checkpoint.config),
        ("parameters", _parameters(checkpoint, dense)),
        ("files", _files(checkpoint)),
        ("dense", f"{size(checkpoint.dense_bytes)}: {_formats(dense)}, and small tensors"),
    ]
    if checkpoint.config.sparse_layers:
        lines.append(("experts", f"{size(checkpoint.expert_bytes)}: {_formats(_routed(checkpoint))}"))
    lines += [("", ""), ("memory", "GLM53_BITS  dense matrices  with all experts")]
    for bits in (4, 8, 16, 32):
        needed = dense_ram(dense, bits) + checkpoint.small_bytes()
        lines.append(("", f"{bits:>10}  {size(needed):>14}  {size(needed + checkpoint.expert_bytes):>16}"))
    fixed, per_token = slot_bytes(checkpoint.config)
    lines.append(("a slot", f"{size(fixed)} and {size(per_token)} a token ({size(fixed + 8192 * per_token)} for 8192 tokens)"))
    lines += [("", "")] * bool(checkpoint.notes) + [("note", note) for note in checkpoint.notes]
    return "\n".join(f"{label:<11}{text}".rstrip() for label, text in lines)


def size(nbytes: float) -> str:
    """A byte count in decimal units with three digits: 950 B, 13.9 MB, 166 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    digits = 0 if unit == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {unit}"


def dense_ram(matrices: Iterable[StoredMatrix], bits: int) -> int:
    """Bytes of matrices loaded at GLM53_BITS = bits, as `requantise` decides (narrower int8 and int4 stay what they are)."""
    total = 0
    for m in matrices:
        stays = m.format in ("int4", "int8") and bits < 32 and _FORMAT_BITS[m.format] <= bits
        total += m.nbytes if stays else stored_bytes(m.rows, m.cols, bits)
    return total


def slot_bytes(c: ModelConfig) -> tuple[int, int]:
    """Float32 state of one conversation: (KDA states and convolution windows, DSA rows and pool keys a token) in bytes (model spec 11)."""
    kda = c.layer_kinds.count(KDA)
    full = sum(kind == DSA and c.indexer_kinds[i] == FULL for i, kind in enumerate(c.layer_kinds))
    state = kda * (c.kda_heads * c.kda_head_dim**2 + (c.conv_width - 1) * 3 * c.kda_width)
    row = c.layer_kinds.count(DSA) * c.kv_lora_rank + full * c.index_head_dim / c.index_kpool
    return 4 * state, round(4 * row)


def _network(c: ModelConfig) -> list[tuple[str, str]]:
    kinds, ffns = Counter(c.layer_kinds), Counter(c.mlp_kinds)
    lines = [
        ("layers", f"{c.num_layers}: {kinds[KDA]} KDA, {kinds[DSA]} DSA; feed-forward: {ffns[DENSE]} dense, {ffns[SPARSE]} with experts"),
        ("widths", f"hidden {c.hidden_size}, {c.hc_mult} residual streams, vocabulary {c.vocab_size}, dense FFN {c.intermediate_size}"),
        ("KDA", f"{c.kda_heads} heads of {c.kda_head_dim}, convolution {c.conv_width}, gate {_gate(c)}"),
        ("DSA", f"{c.num_heads} heads, latent {c.kv_lora_rank}, {c.index_topk} tokens chosen in pools of {c.index_kpool}"),
    ]
    if c.sparse_layers:
        groups = f" in {c.n_group} groups ({c.topk_group} kept)" if c.n_group > 1 else ""
        chosen = f"{c.n_routed_experts} of width {c.moe_intermediate_size}{groups}, {c.num_experts_per_tok} a token, {c.n_shared_experts} shared"
        lines.append(("routing", chosen))
    return lines


def _gate(c: ModelConfig) -> str:
    return "unbounded" if c.gate_lower_bound is None else f"bounded by {c.gate_lower_bound:g}"


def _parameters(checkpoint: Checkpoint, dense: list[StoredMatrix]) -> str:
    c = checkpoint.config
    fixed = sum(m.rows * m.cols for m in dense) + checkpoint.small_bytes() // 4
    expert = sum(prod(need.shape) for _, need in layout.ffn_needs(c.hidden_size, c.moe_intermediate_size, ""))
    routed = len(c.sparse_layers) * c.n_routed_experts * expert
    return f"{fixed + routed:,}" + (f", {routed:,} of them in {len(c.sparse_layers) * c.n_routed_experts:,} routed experts" if routed else "")


def _files(checkpoint: Checkpoint) -> str:
    total = checkpoint.dense_bytes + checkpoint.expert_bytes + checkpoint.mtp_bytes + checkpoint.vision_bytes
    count = len(checkpoint.files)
    return f"{size(total)} of tensors in {count} {'file' if count == 1 else 'files'}"


def _routed(checkpoint: Checkpoint) -> list[StoredMatrix]:
    return [
        stored
        for layer in checkpoint.config.sparse_layers
        for expert in range(checkpoint.config.n_routed_experts)
        for stored in checkpoint.stored_expert(layer, expert)
    ]


def _formats(matrices: Iterable[StoredMatrix]) -> str:
    """Matrices a format, most bytes first: `bf16 1.2 GB, fp8 300 MB`."""
    totals: Counter[str] = Counter()
    for matrix in matrices:
        totals[matrix.format] += matrix.nbytes
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in totals.most_common())
