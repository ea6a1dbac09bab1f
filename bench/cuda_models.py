"""Sections of `bench.cuda` with models of their own: the shipped one, one with experts in host memory, one that transformers runs as well."""

from __future__ import annotations

import numpy as np

from bench.cuda_bed import Bed, flash, say
from bench.cuda_decode import bench_gaps
from bench.cuda_measure import BenchDevice
from glm53serve.cuda.decode import decode_loop
from glm53serve.cuda.model import MoeOnDevice
from glm53serve.engine.step_device import RowPlan


def bench_nano() -> None:
    """The shipped model: decode and gaps."""
    from glm53serve.cuda.backend import load_backend
    from glm53serve.load import shipped_model
    from glm53serve.model.checkpoint import open_checkpoint

    backend = load_backend(open_checkpoint(shipped_model()), 16, 4096, 512, make_device=BenchDevice, looping=True, note=say)
    bed = Bed.__new__(Bed)
    bed.config, bed.device = backend.layers.config, backend.device  # type: ignore[assignment]
    bed.layers, bed.head, bed.decoder = backend.layers, backend.head, backend.decoder
    for slots in (1, 16):
        for slot in range(slots):
            bed.prefill(slot, 64, slot)
        wall = bed.decode(slots, 500, 64)
        _, step = bed.gaps(400)
        say(f"shipped model, {slots} streams: step {np.median(step):.1f} us, {slots / wall:.0f} tok/s")
    bench_gaps(bed, 64, "shipped model")
    backend.device.close()


def bench_host_experts(layers: int, share: float, router_bias: float) -> None:
    """A model with a share of its experts, drawn at random, in pinned host memory: the same tokens, and the step against two bounds.

    The smaller `router_bias`, the more experts the tokens use in turn; at 0 a layer misses `share` of those it asks for.
    """
    tokens, here = [], 0.0
    for part in (0.0, share):
        bed = Bed(flash(layers, 96), "int8", "int4", 2, 2048, 512, host_share=part, loops=False, router_bias=router_bias)
        bed.prefill(0, 256)
        session = decode_loop(bed.decoder, 1)
        session.start(RowPlan(0, 17, 256, 300, 300))
        out = []
        while session.live_slots or session.outstanding:
            out += [c.token for c in session.turn()]
        tokens.append(out)
        bed.layers.clear_uses(0)
        bed.decode(1, 200, 600)
        uses, times = bed.layers.expert_uses(0), bed.gaps(190)[1]
        missed = float(uses[bed.layers.tiers() == 1].sum()) / 200
        expert = next(layer.ffn.expert_bytes for layer in bed.model.layers if isinstance(layer.ffn, MoeOnDevice))
        total = sum(bed.step_bytes(1, round(uses.sum() / 200), 600).values())
        mean, transfer = float(np.mean(times)), missed * expert / 50e3
        here = here or mean
        by_copy, by_step = max((total - missed * expert) / bed.copy / 1e3, transfer), max(here, transfer)
        line = (
            f"{layers} layers, 96 experts, router bias {router_bias}, {100 * part:.0f} % of the experts on the host: step median {np.median(times):.0f} us, "
            f"mean {mean:.0f} us, {missed / len(bed.config.sparse_layers):.2f} experts missed a layer = {transfer:.0f} us at 50 GB/s; of the bound by copy "
            f"({by_copy:.0f} us) {100 * by_copy / mean:.0f} %, of the bound by the step all on the device ({by_step:.0f} us) {100 * by_step / mean:.0f} %"
        )
        if missed:
            line += f"; {missed * expert / max(mean - here, 1e-9) / 1e3:.0f} GB/s if the misses are all the difference"
        say(line)
        bed.close()
    say("tokens with experts on the host equal those without:", tokens[0] == tokens[1], len(tokens[0]))


def bench_peers(layers: int, experts: int) -> None:
    """transformers on the same GPU and shape, bf16; it runs first, in its own process."""
    import json
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "bench.cuda_peers", str(layers), str(experts)], capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        say("transformers did not run:", done.stderr[-1500:])
        return
    theirs = json.loads(done.stdout.splitlines()[-1])
    bed = Bed(flash(layers, experts), "bf16", "bf16", 1, 5120, 4096, loops=False)
    bed.prefill(0, 4096)
    ours = min(bed.prefill(0, 4096) for _ in range(2))
    bed.decode(1, 20, 4096)
    step = bed.decode(1, 100, 4120)
    say(
        f"{layers} layers, {experts} experts, bf16, at depth 4,096: transformers prefill {4096 / theirs['prefill']:.0f} tok/s, "
        f"decode {1 / theirs['step']:.1f} tok/s; "
        f"here {4096 / ours:.0f} and {1 / step:.0f}: {theirs['prefill'] / ours:.1f} x and {theirs['step'] / step:.0f} x"
    )
    bed.close()
