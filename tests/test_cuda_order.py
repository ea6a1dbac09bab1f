"""CUDA promises little about what has run before what. On the emulated device, access by access: no kernel relies on more.

Kernels of a recorded decode step begin before those ahead of them have ended, and blocks of a launch run in any order.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from checks import backend_of, greedy, logits_in_pieces, wide_model  # noqa: E402
from tinymodel import random_ids, tiny_model  # noqa: E402
from watched_device import Kind, OrderFault, WatchedDevice  # noqa: E402

from glm53serve.cuda.backend import CudaBackend  # noqa: E402
from glm53serve.cuda.runtime import BUCKETS  # noqa: E402
from glm53serve.engine.step_device import RowPlan  # noqa: E402
from glm53serve.model.config import DENSE, DSA, FULL, KDA, SHARED, SPARSE  # noqa: E402
from glm53serve.model.weights import MatrixFormat  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux to build the watched kernels")
SHALLOW: dict[str, Any] = {
    "num_layers": 4, "layer_kinds": (KDA, DSA, DSA, KDA), "mlp_kinds": (DENSE, SPARSE, SPARSE, SPARSE), "indexer_kinds": (FULL, FULL, SHARED, FULL),
}  # fmt: skip
PRODUCTS = {"gemv_4", "gemv_8", "gemv_16"}
STEP = {
    *PRODUCTS, "step_begin", "embed", "site", "kda_step", "dsa_prepare", "dsa_scores_few", "dsa_select", "attend_few", "attend_few_shared", "attend_join",
    "route_few", "final_norm", "logit_peaks", "sample", "commit", "loop_condition",
}  # fmt: skip
"""Kernels of a recorded step."""
READING_OLDER = {"attend_few", "attend_few_shared", "attend_join", "dsa_scores_few", "site"}
"""Those that read before their wait what a kernel of the same step has written."""
OWN_BUCKETS = {"attend_few": 2, "gemv_8": 8, "gemv_16": 16}
"""The batch bucket of kernels that one of four rows has not."""
Make = Callable[[Mapping[str, int]], WatchedDevice]


def watched(sizes: Mapping[str, int]) -> WatchedDevice:
    """A watched device; one library for all formats."""
    return WatchedDevice({**sizes, "FORMATS": 31})


def backend_for(dense: MatrixFormat, experts: MatrixFormat, make: Make = watched, **more: Any) -> CudaBackend:
    """A backend with room for sixteen rows, whose device loops are recorded, too."""
    model = tiny_model(seed=1, weight_format=dense, expert_format=experts, **{**SHALLOW, **more})
    return backend_of(model, make, slots=16, capacity=64, chunk=32, looping=True)


@lru_cache
def base() -> CudaBackend:
    """The backend of those tests that leave it as it is."""
    return backend_for("bf16", "int4")


def watching(backend: CudaBackend) -> WatchedDevice:
    """The device of a backend."""
    assert isinstance(backend.device, WatchedDevice)
    return backend.device


def decode(backend: CudaBackend, bucket: int, steps: int, loop: bool = False) -> None:
    """Steps of rows at all places of a pool, with few pools and many, some of them sampled; a padding row where there are several."""
    rows = []
    for r in range(max(1, bucket - 1)):
        heat = 0.9 if r % 3 == 1 else 0.0
        plan = RowPlan(r, 7 + r, (26, 3, 37, 20, 41)[r % 5] + r, 64, 64, (), heat, 0.8 if r % 2 else 1.0, seed=r)
        rows.append((plan, r + 1))
    backend.decoder.upload(bucket, rows)
    backend.decoder.launch(bucket, steps, loop)


def decode_everything(backend: CudaBackend, steps: int) -> None:
    """Steps of every bucket, and of a loop."""
    for bucket in BUCKETS:
        decode(backend, bucket, steps)
    decode(backend, 2, steps, loop=True)


def collected(backend: CudaBackend, act: Callable[[], None]) -> set[tuple[str, Kind]]:
    """The faults of what `act` runs."""
    device = watching(backend)
    device.collecting = True
    device.faults.clear()
    try:
        act()
        return set(device.faults)
    finally:
        device.collecting = False
        device.faults.clear()


@pytest.mark.parametrize(
    ("dense", "experts"),
    [("bf16", "int4"), ("int8", "f32"), pytest.param("fp8", "int8", marks=pytest.mark.long), pytest.param("int4", "fp8", marks=pytest.mark.long)],
)
def test_recorded_steps_rely_on_no_more_than_there_is(dense: MatrixFormat, experts: MatrixFormat) -> None:
    backend = base() if (dense, experts) == ("bf16", "int4") else backend_for(dense, experts)
    decode_everything(backend, 3)
    device = watching(backend)
    assert device.early | device.late == STEP
    assert device.early > READING_OLDER and device.late > PRODUCTS, "which kernels let the next one start before they have waited is seen"


def test_watched_kernels_compute_what_the_reference_does() -> None:
    model = tiny_model(seed=1, weight_format="bf16", expert_format="int4", **SHALLOW)
    ids = random_ids(model.config, 25)
    assert greedy(base(), 2, ids, 8) == model.reference(np.float32).greedy(ids, 8)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        {"index_topk": 160, "index_kpool": 2, "n_routed_experts": 32, "num_experts_per_tok": 12, "n_group": 4, "topk_group": 2},
        {"kv_lora_rank": 23, "num_heads": 20, "kda_head_dim": 36, "conv_width": 3, "n_shared_experts": 0, "hidden_size": 130},
        {"hc_mult": 1, "hidden_size": 2100, "vocab_size": 40, "gate_lower_bound": None},
    ],
    ids=["many experts, a selection in parts", "odd sizes", "one wide stream"],
)
def test_other_shapes_rely_on_no_more_either(shape: dict[str, Any]) -> None:
    backend = backend_for("bf16", "int4", **shape)
    decode_everything(backend, 3)
    greedy(backend, 3, random_ids(backend.layers.config, 30), 4)


@pytest.mark.long
def test_blocks_of_wide_prompts_do_not_meet() -> None:
    model = wide_model("small", (KDA, DSA, KDA))
    backend = backend_of(model, WatchedDevice, slots=1, exact=False)
    logits_in_pieces(backend, 0, random_ids(model.config, 150), [70, 1, 3, 60, 16])
    assert {"gemm", "kda_chunks", "attend_prompt", "site_open_prompt"} <= watching(backend).launches.keys()


@pytest.mark.parametrize("kernel", sorted(STEP))
def test_a_kernel_that_does_not_wait_is_found(kernel: str) -> None:
    backend = base()
    device = watching(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "deaf", {kernel})
        with pytest.raises(OrderFault, match=f"^{kernel}, "):
            decode(backend, 4, 1)
            decode(backend, OWN_BUCKETS.get(kernel, 4), 1, loop=True)
        found = collected(backend, lambda: decode(backend, OWN_BUCKETS.get(kernel, 4), 2, loop=True))
    first_of_all = {"step_begin", "embed"}  # they read nothing that this step has written
    only_reads = {"loop_condition"}
    expected = {(kernel, Kind.NO_WAIT)}
    expected |= set() if kernel in first_of_all else {(kernel, Kind.EARLY_READ)}
    expected |= set() if kernel in only_reads else {(kernel, Kind.EARLY_WRITE)}
    assert {fault for fault in found if fault[0] == kernel} == expected


@pytest.mark.parametrize(("kernel", "bucket"), [("gemv_4", 2), ("gemv_4", 4), ("gemv_8", 8), ("gemv_16", 16)])
def test_a_kernel_that_lets_the_next_one_start_too_early_is_found(kernel: str, bucket: int) -> None:
    """Products must not: what follows them reads, before its wait, what is older than they are."""
    backend = base()
    device = watching(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "hasty", {kernel})
        found = collected(backend, lambda: decode(backend, bucket, 1))
    not_there = "attend_few_shared" if bucket == OWN_BUCKETS["attend_few"] else "attend_few"
    assert found == {(reader, Kind.EARLY_READ) for reader in READING_OLDER - {not_there}}
    decode(backend, bucket, 1)


ATTEND = ("attend_few", "attend_few_shared")
MISTAKES: dict[str, tuple[str, str, set[tuple[str, Kind]]]] = {
    "a read ahead of the wait": (
        "    WAIT_BEFORE();\n    float zz = 0.0f, out_gate = 0.0f;\n",
        "    const float early = gate[(long)row * P + head * KDA_D];\n    WAIT_BEFORE();\n    float zz = early > 1e30f ? early : 0.0f, out_gate = 0.0f;\n",
        {("kda_step", Kind.EARLY_READ)},
    ),
    "a write ahead of the wait": (
        "    WAIT_BEFORE();\n    const int per = (V + SCANS - 1) / SCANS",
        "    if (threadIdx.x == 0) at[blockIdx.y * SCANS + blockIdx.x] = 0;\n    WAIT_BEFORE();\n    const int per = (V + SCANS - 1) / SCANS",
        {("logit_peaks", Kind.EARLY_WRITE)},
    ),
    "an asynchronous copy ahead of the wait": (
        "    fetch(begin);\n    WAIT_BEFORE();\n",
        "    fetch(begin);\n    copy16_async(q, q_high + (long)row * HEADS * ldq, true);\n    WAIT_BEFORE();\n",
        {(kernel, Kind.EARLY_READ) for kernel in ATTEND},
    ),
    "blocks that end without a wait": (
        "    if (begin >= end) {\n        WAIT_BEFORE();\n        return;\n    }\n",
        "    if (begin >= end) return;\n",
        {(kernel, Kind.NO_WAIT) for kernel in ATTEND},
    ),
    "a copy of the copy engine ahead of the wait": (
        "    if (!jobs.job[0].table) prime(-1, 0);\n    WAIT_BEFORE();\n",
        "    if (!jobs.job[0].table) {\n        prime(-1, 0);\n        __syncthreads();\n"
        "        u64* arrived = &gates.x_full[0];\n"
        "        if (threadIdx.x == 0) { barrier_expect(arrived, 16); bulk_copy(room.x, jobs.job[0].x_high, 16, arrived); }\n"
        "        barrier_wait(arrived, 0);\n        __syncthreads();\n        if (threadIdx.x == 0) barrier_arrive(arrived);\n    }\n    WAIT_BEFORE();\n",
        {(product, Kind.EARLY_READ) for product in PRODUCTS},
    ),
    "blocks that write the same": (
        "if (threadIdx.x < FEW_POOLS && tile + (int)threadIdx.x < pools) {",
        "if (threadIdx.x == 0) scores[(long)row * lds] = 0.0f;\n        if (threadIdx.x && threadIdx.x < FEW_POOLS && tile + (int)threadIdx.x < pools) {",
        {("dsa_scores_few", Kind.WRITE_OTHERS)},
    ),
    "a block that reads what another one writes": (
        "        if (threadIdx.x == 0) chosen[r] = id;\n        return;\n",
        "        if (threadIdx.x == 0) chosen[r] = id + (chosen[0] < 0) + (chosen[gridDim.x - 1] < 0);\n        return;\n",
        {("sample", Kind.READ_OTHERS), ("sample", Kind.OVERWRITE)},
    ),
}  # fmt: skip
"""What is changed in the kernels' text, and what is found then."""


def test_mistakes_in_the_kernels_are_found() -> None:
    def with_mistakes(text: str) -> str:
        for right, wrong, _ in MISTAKES.values():
            assert text.count(right) == 1, right
            text = text.replace(right, wrong)
        return text

    def make(sizes: Mapping[str, int]) -> WatchedDevice:
        device = WatchedDevice({**sizes, "FORMATS": 31}, edit=with_mistakes)
        device.collecting = True
        return device

    backend = backend_for("bf16", "int4", make)
    found = collected(backend, lambda: decode_everything(backend, 3))
    assert found == set().union(*(faults for _, _, faults in MISTAKES.values()))
