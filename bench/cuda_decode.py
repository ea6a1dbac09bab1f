"""Sections of `bench.cuda`: decode steps against what their bytes allow, where their time goes, and what lies between them."""

from __future__ import annotations

import threading

import numpy as np

from bench.cuda_bed import Bed, say
from bench.cuda_measure import cost_table, percentiles
from bench.cuda_random import stored_bytes
from glm53serve.engine.step_device import RowPlan


def bench_decode(bed: Bed, context: int) -> None:
    """Decode of one stream and of several, against what the bytes allow."""
    full = 45 / bed.config.num_layers
    for slots in (1, 2, 4, 8, 16):
        if slots > bed.layers.slots:
            break
        for slot in range(slots):
            bed.prefill(slot, context if slot == 0 or context <= 512 else 512, seed=slot)
        position = context if slots == 1 else min(context, 512)
        distinct = bed.distinct_experts(slots, position)
        bed.decode(slots, 16, position + 1)
        wall = bed.decode(slots, 100, position + 20)
        gap, step = bed.gaps(100)
        parts = bed.step_bytes(slots, distinct, position + 60)
        total = sum(parts.values())
        bound = total / bed.copy / 1e9
        say(
            f"decode, {slots} streams at position {position}: step {np.median(step):.0f} us (wall {wall * 1e6:.0f}), {total / 1e9:.3f} GB a step = "
            f"{total / np.median(step) / 1e3:.0f} GB/s = {100 * bound * 1e6 / np.median(step):.1f} % of copy; "
            f"{slots / wall:.1f} tok/s here; gap {percentiles(gap)} us; distinct experts a layer {distinct / max(1, len(bed.config.sparse_layers)):.1f}"
        )
        if slots == 1:
            say("  bytes:", ", ".join(f"{name} {value / 1e6:.1f} MB" for name, value in parts.items()))
            head = stored_bytes(bed.model.head) if bed.model.head else 0
            rest = np.median(step) - head / bed.copy / 1e3
            say(f"  extrapolated (not measured) to 45 layers: {1e6 / (rest * full + head / bed.copy / 1e3):.0f} tok/s")
    for slots in (1, 8):
        if slots <= bed.layers.slots:
            position = context if slots == 1 else min(context, 512)
            step_costs(bed, slots, position)


def step_costs(bed: Bed, slots: int, position: int) -> None:
    """Where the time of a decode step goes. The commit is left out of the graphs, so every step is the same; what a kernel left out changes does not route."""
    bed.decoder.upload(slots, [(RowPlan(slot, 17 + slot, position + 200, 100, 100, seed=slot), 1 + slot) for slot in range(slots)])
    bed.decoder._step(slots)
    device, launch = bed.device, bed.device.launch

    def step() -> None:
        bed.decoder._step(slots)

    device.launch = lambda kernel, *rest: None if kernel == "commit" else launch(kernel, *rest)  # type: ignore[method-assign]
    try:
        whole, costs = device.costs(step, frozenset({"route_few"}))
    finally:
        device.launch = launch  # type: ignore[method-assign]
    cost_table(f"decode, {slots} streams", whole, costs, bed.copy)


def bench_gaps(bed: Bed, position: int, name: str) -> None:
    """Device idle between steps under host load."""
    import sys

    sys.setswitchinterval(1e-4)
    for label, depth, loop, work, threads in (
        ("plain loop (depth 0)", 0, 0, 0.0, 0), ("depth 1", 1, 0, 0.0, 0), ("depth 1, 300 us of Python a step", 1, 0, 300.0, 0),
        ("depth 1, one busy thread", 1, 0, 0.0, 1), ("adaptive depth, 300 us of Python a step", None, 0, 300.0, 0), ("device loop of 64", 1, 64, 0.0, 0),
    ):  # fmt: skip
        stop = threading.Event()

        def spin(stop: threading.Event = stop) -> None:
            count = 0
            while not stop.is_set():
                count += 1

        helpers = [threading.Thread(target=spin, daemon=True) for _ in range(threads)]
        for helper in helpers:
            helper.start()
        bed.decode(1, 20, position, depth, loop)
        wall = bed.decode(1, 300, position + 20, depth, loop, work)
        stop.set()
        gap, step = bed.gaps(300)
        say(f"gap, {name}, {label}: {percentiles(gap)} us; step {np.median(step):.1f} us, wall {wall * 1e6:.1f}")
