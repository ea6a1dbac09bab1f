"""Where a fault of experts in host memory lies, in one run of this file: on the emulated device, and on a GPU where there is one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "emulator"), str(HERE.parent)]

from emulated_device import EmulatedDevice, compiler  # noqa: E402
from host_experts import Products, SpoilingDevice, different, kernel_of, network, routings  # noqa: E402

from glm53serve.cuda.cupy_runtime import available  # noqa: E402
from glm53serve.cuda.layers import CudaHead  # noqa: E402
from glm53serve.cuda.runtime import Device  # noqa: E402
from glm53serve.engine.seam import Batch, Span, never  # noqa: E402
from glm53serve.load import shipped_model  # noqa: E402
from glm53serve.model.checkpoint import open_checkpoint  # noqa: E402

WARM_UP = (1, 2, 5, 8, 9, 16, 17)
"""Rows of the passes, smallest first: every product kernel, and both sides of each border between them."""
on_every_device = pytest.mark.parametrize(
    "where",
    [
        pytest.param("emulated", marks=pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux")),
        pytest.param("gpu", marks=pytest.mark.skipif(available() is None, reason="needs an NVIDIA GPU and the packages of glm53serve[cuda]")),
    ],
)


def make_device(where: str, sizes: Mapping[str, int]) -> Device:
    """The device of that name."""
    return SpoilingDevice(sizes) if where == "gpu" else EmulatedDevice(sizes)


@lru_cache
def networks(where: str) -> tuple[CudaHead, CudaHead]:
    """The shipped model with its routed experts on the device, and in host memory."""
    weights = open_checkpoint(shipped_model())
    on_device, on_host = (network(weights, lambda sizes: make_device(where, sizes), on_host) for on_host in (False, True))
    return on_device, on_host


@on_every_device
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 12, 16, 17, 100], ids=lambda rows: f"{kernel_of(rows)}-{rows}")
def test_each_product_kernel_reads_experts_of_host_memory(where: str, rows: int) -> None:
    """The same bits as from device memory, whoever of the experts is asked for and by how many rows, and however late the memory answers."""
    on_device, on_host = networks(where)
    c = on_host.layers.config
    x = np.random.default_rng(rows).standard_normal((rows, c.hidden_size)).astype(np.float32)
    sparse, repeat = (c.sparse_layers, 5) if where == "gpu" else (c.sparse_layers[:1], 1)
    for layer in sparse:
        for number, ids in enumerate(routings(rows, c.num_experts_per_tok, c.n_routed_experts)):
            wanted = Products(on_device, layer).run(x, ids)
            for _ in range(repeat):
                wrong = different(Products(on_host, layer).run(x, ids), wanted)
                assert not wrong, f"{kernel_of(rows)}, {rows} rows, layer {layer}, experts {np.unique(ids).tolist()} (choice {number}): {wrong}"


@on_every_device
def test_passes_that_touch_every_expert_in_the_order_of_a_warm_up(where: str) -> None:
    on_device, on_host = networks(where)
    c, rng = on_host.layers.config, np.random.default_rng(4)
    for head in (on_device, on_host):
        head.layers.clear_uses(0)
    for rows in WARM_UP:
        ids, logits = rng.integers(0, c.vocab_size, rows), []
        for head in (on_device, on_host):
            head.layers.reset_slot(0)
            logits.append(head.forward_ids(ids, Batch((Span(0, 0, rows),)), never, np.arange(rows)))
        wrong = np.flatnonzero((logits[0] != logits[1]).any(axis=1) | ~np.isfinite(logits[1]).all(axis=1))
        assert not len(wrong), f"a pass of {rows} rows ({kernel_of(rows)}): rows {wrong.tolist()} differ from experts in device memory"
    assert (on_host.layers.expert_uses(0) > 0).all(), "the passes must touch every expert of every layer"
