"""Sections of `bench.cuda`: a prompt chunk against the machine's GEMM rate, and what its rounding does to the logits."""

from __future__ import annotations

import numpy as np

from bench.cuda_bed import Bed, say
from bench.cuda_measure import table
from glm53serve.cuda.model import KdaOnDevice, MoeOnDevice, flops_per_row
from glm53serve.engine.seam import Batch, Span, never


def bench_prefill(bed: Bed, rows: int) -> None:
    """A chunk of `rows` tokens against the machine's GEMM rate."""
    bed.prefill(0, rows)
    seconds = min(bed.prefill(0, rows, seed) for seed in range(2))
    c = bed.config
    flops = 0
    for layer in bed.model.layers:
        part = layer.ffn
        if isinstance(part, MoeOnDevice):
            flops += c.num_experts_per_tok * (flops_per_row(part.gate_up, pair=True) + flops_per_row(part.down)) + flops_per_row(part.router)
            if part.shared:
                flops += flops_per_row(part.shared.gate_up, pair=True) + flops_per_row(part.shared.down)
        else:
            flops += flops_per_row(part.gate_up, pair=True) + flops_per_row(part.down)
        names = [value for name in layer.attention.__slots__ for value in (lambda v: v if isinstance(v, tuple) else (v,))(getattr(layer.attention, name))]
        flops += sum(flops_per_row(m) for m in names if hasattr(m, "granules"))
        if getattr(layer.attention, "indexer", None):
            flops += sum(flops_per_row(getattr(layer.attention.indexer, n)) for n in ("query", "key", "gate", "weights"))
        if isinstance(layer.attention, KdaOnDevice):
            flops += 7 * c.kda_heads * c.kda_head_dim**2
        else:
            mean = np.minimum(np.arange(rows) + 1, c.index_topk + 1).mean()
            flops += int(4 * mean * c.num_heads * c.kv_lora_rank)
    rate = flops * rows / seconds / 1e12
    say(
        f"prefill, {rows} tokens: {seconds * 1e3:.1f} ms = {rows / seconds:.0f} tok/s over {c.num_layers} layers, {rate:.0f} TFLOP/s useful = "
        f"{100 * rate / bed.gemm:.1f} % of the GEMM rate"
    )
    ids = np.random.default_rng(0).integers(0, c.vocab_size, rows)
    bed.layers.reset_slot(0)

    def go() -> None:
        arrays = bed.layers.tables.fill([Span(0, 0, rows)], ids)
        bed.layers.pipeline.embed(rows, bed.layers.tables.ids)
        bed.layers.pipeline.zero_counts()
        bed.layers.pipeline.layers(rows, arrays, 1)

    table("one chunk, kernel by kernel", bed.device.profile(go))


def bench_check(bed: Bed) -> None:
    """The last logits after a prompt of 256 tokens: all rows at once (bf16) against 16 at a time (bf16 pairs)."""
    ids = np.random.default_rng(5).integers(0, bed.config.vocab_size, 256)
    results = []
    for size in (256, 16):
        bed.layers.reset_slot(0)
        for start in range(0, 256, size):
            bed.layers.forward_ids(ids[start : start + size], Batch((Span(0, start, size),)), never)
        results.append(bed.head.device_logits(1, size - 1)[0])
    error = np.abs(results[0] - results[1]).max() / np.abs(results[1]).max()
    say(f"last row's logits after 256 tokens, one bf16 chunk against chunks of 16 on bf16 pairs: largest difference / largest logit {error:.2e}")
