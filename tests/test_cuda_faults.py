"""What must not take the CUDA kernels off their way, on the emulated device: when copies land, and rows that are no numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from checks import backend_of, logits_in_pieces, wide_model  # noqa: E402
from emulated_device import EmulatedDevice, compiler  # noqa: E402
from tinymodel import random_ids, tiny_model  # noqa: E402

from glm53serve.engine.seam import Batch, Span, never  # noqa: E402
from glm53serve.model.config import DSA, FULL, KDA, SPARSE  # noqa: E402
from glm53serve.model.weights import Matrix, MatrixFormat  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
SHALLOW = {"num_layers": 2, "layer_kinds": (KDA, DSA), "mlp_kinds": (SPARSE, SPARSE), "indexer_kinds": (FULL, FULL)}


@pytest.mark.parametrize("experts", ["bf16", pytest.param("int4", marks=pytest.mark.long)])
def test_copies_land_early_or_late_and_change_no_bit(experts: MatrixFormat) -> None:
    """Experts so narrow that a warp's ring is never full: what it waits for must be there all the same, however long the memory takes."""
    model = tiny_model(seed=1, weight_format="bf16", expert_format=experts, **SHALLOW)
    backend = backend_of(model, EmulatedDevice)
    ids = random_ids(model.config, 51)
    reference = model.reference(np.float64)
    expected = reference.forward(ids, reference.new_state())
    seen = []
    for late in (True, False):
        backend.device.copies_late = late  # type: ignore[attr-defined]
        seen.append(logits_in_pieces(backend, 0, ids, [10, 1, 24, 3, 7, 6]))
        assert np.abs(seen[-1] - expected).max() <= 5e-4 * np.abs(expected).max(), f"copies land {'late' if late else 'early'}"
    assert np.array_equal(*seen)


def test_copies_of_wide_prompts_land_early_or_late_and_change_no_bit() -> None:
    model = wide_model("small", (KDA, DSA), "bf16")
    backend = backend_of(model, EmulatedDevice, exact=False)
    ids, seen = random_ids(model.config, 60), []
    for late in (True, False):
        backend.device.copies_late = late  # type: ignore[attr-defined]
        seen.append(logits_in_pieces(backend, 0, ids, [57, 3]))
    assert np.isfinite(seen[0]).all() and np.array_equal(*seen)


@pytest.mark.parametrize("count", [7, 20], ids=["few rows", "many rows"])
def test_a_row_that_is_no_number_leaves_the_others_alone(count: int) -> None:
    """It must not choose experts that do not exist: their addresses would be anywhere."""
    model = tiny_model(seed=1, weight_format="bf16", n_group=4, topk_group=2, **SHALLOW)
    table = np.array(model.embedding.data, np.float32).reshape(model.embedding.rows, -1)
    table[7] = np.nan
    model = replace(model, embedding=Matrix("f32", model.embedding.rows, model.embedding.cols, table))
    backend = backend_of(model, EmulatedDevice)
    ids = random_ids(model.config, count)
    ids[ids == 7] = 8
    alone = logits_in_pieces(backend, 0, ids, [count])
    sick = np.concatenate([ids, np.full(count, 7), ids[:1]])
    streams = backend.head.embed(sick)
    for slot in range(3):
        backend.layers.reset_slot(slot)
        backend.layers.clear_uses(slot)
    batch = Batch((Span(0, 0, count), Span(1, 0, count), Span(2, 0, 1)))
    got = backend.head.logits(backend.layers.forward(streams, batch, never))
    assert np.array_equal(got[:count], alone) and np.array_equal(got[-1], alone[0])
    assert np.isnan(got[count:-1]).all()
    uses = [int(backend.layers.expert_uses(slot).sum()) for slot in range(3)]
    each = model.config.num_experts_per_tok * len(model.config.sparse_layers)
    assert uses == [each * count, each * count, each]
