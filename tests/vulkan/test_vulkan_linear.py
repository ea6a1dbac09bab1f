"""The two matrix kernels in every format against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tinymodel import as_matrix
from vulkan_bench import Bench

from glm53serve.model import quant
from glm53serve.model.reference_math import clamped_swiglu
from glm53serve.model.weights import FfnWeights, MatrixFormat
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.linear import Linear, Target, upload, upload_experts
from glm53serve.vulkan.pack import gate_up, pack, padded

FORMATS: tuple[MatrixFormat, ...] = ("f32", "bf16", "fp8", "int8", "int4")


def rows_of(count: int) -> list[tuple[int, int]]:
    return [(0, i) for i in range(count)]


def padded_rows(x: NDArray[np.float64], stride: int) -> NDArray[np.float32]:
    out = np.zeros((len(x), stride), np.float32)
    out[:, : x.shape[1]] = x
    return out


def close(got: NDArray[np.float32], want: NDArray[np.float64], limit: float = 3e-6) -> bool:
    return bool(np.abs(got - want).max() <= limit * np.abs(want).max())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17, 33, 65, 130])
def test_product_agrees_with_float64(device: Device, fmt: MatrixFormat, rows: int) -> None:
    rng = np.random.default_rng(rows)
    n, k = 70, 150
    matrix = as_matrix(rng.standard_normal((n, k)), fmt)
    x = rng.standard_normal((rows, k))
    bench = Bench(device, rows_of(rows))
    linear = upload(device, [("w", pack(matrix))])
    source, out = bench.buffer(padded_rows(x, padded(k))), bench.empty(rows, n + 2)
    bucket = 1 << (rows - 1).bit_length()
    bench.run(linear.ops(bucket, Target(source, padded(k)), Target(out, n + 2, 1)))
    got = bench.read(out, (rows, n + 2))
    want = x.astype(np.float32).astype(np.float64) @ quant.dequantise(matrix).astype(np.float64).T
    assert close(got[:, 1:-1], want)
    assert (got[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
def test_every_tile_size_gives_the_same_bits(device: Device, tile: int) -> None:
    rng = np.random.default_rng(1)
    matrix, x = as_matrix(rng.standard_normal((130, 128)), "bf16"), rng.standard_normal((129, 128))
    bench = Bench(device, rows_of(129))
    linear = upload(device, [("w", pack(matrix))])
    source = bench.buffer(x.astype(np.float32))
    results = []
    for size in (tile, 4):
        out = bench.empty(129, 130)
        bench.run(linear.ops(129, Target(source, 128), Target(out, 130), tile=size))
        results.append(bench.read(out, (129, 130)))
    assert close(results[0], x @ quant.dequantise(matrix).astype(np.float64).T)
    assert np.array_equal(results[0], results[1])


def test_parts_of_different_formats_land_at_their_offsets(device: Device) -> None:
    rng = np.random.default_rng(2)
    matrices = {name: as_matrix(rng.standard_normal((size, 64)), fmt) for name, size, fmt in (("a", 5, "bf16"), ("b", 70, "bf16"), ("c", 3, "int8"))}
    linear = upload(device, [(name, pack(m)) for name, m in matrices.items()])
    assert [p.format for p in linear.pieces] == ["bf16", "int8"] and linear.rows == 256
    for rows in (3, 20):
        x = rng.standard_normal((rows, 64))
        bench = Bench(device, rows_of(rows))
        out = bench.empty(rows, linear.rows)
        bench.run(linear.ops(rows, Target(bench.buffer(x.astype(np.float32)), 64), Target(out, linear.rows)))
        got = bench.read(out, (rows, linear.rows))
        for name, matrix in matrices.items():
            at = linear.offsets[name]
            assert close(got[:, at : at + matrix.rows], x @ quant.dequantise(matrix).astype(np.float64).T)
            assert (got[:, at + matrix.rows : at + padded(matrix.rows)] == 0).all(), "padding rows must give zeros, they are read as columns"


def test_a_matrix_is_cut_where_a_binding_ends(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    rng = np.random.default_rng(3)
    matrix, x = as_matrix(rng.standard_normal((300, 64)), "int4"), rng.standard_normal((4, 64))
    monkeypatch.setattr(device, "info", replace(device.info, binding_limit=32 * 130))
    linear = upload(device, [("w", pack(matrix))])
    assert [p.rows for p in linear.pieces] == [128, 128, 44]
    monkeypatch.undo()
    bench = Bench(device, rows_of(4))
    out = bench.empty(4, 300)
    bench.run(linear.ops(4, Target(bench.buffer(x.astype(np.float32)), 64), Target(out, 300)))
    assert close(bench.read(out, (4, 300)), x @ quant.dequantise(matrix).astype(np.float64).T)


@pytest.mark.parametrize("rows", [2, 20])
def test_heads_have_matrices_of_their_own(device: Device, rows: int) -> None:
    rng = np.random.default_rng(4)
    heads, n, k = 3, 10, 64
    w, x = rng.standard_normal((heads, n, k)).astype(np.float32), rng.standard_normal((rows, heads, k)).astype(np.float32)
    linear: Linear = upload(device, [("w", pack(as_matrix(w.reshape(-1, k))))], heads)
    bench = Bench(device, rows_of(rows))
    out = bench.empty(rows, heads * n)
    bench.run(linear.ops(rows, Target(bench.buffer(x), heads * k, 0, k), Target(out, heads * n, 0, n)))
    want = np.einsum("thk,hnk->thn", x.astype(np.float64), w.astype(np.float64))
    assert close(bench.read(out, (rows, heads, n)), want)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [2, 21])
def test_routed_experts_with_their_epilogue(device: Device, fmt: MatrixFormat, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs reach their experts through the ids (few rows) and through the sorted tiles (many), over more than one arena."""
    from dataclasses import replace

    from glm53serve.vulkan.linear import Op

    rng = np.random.default_rng(5)
    experts, topk, width, hidden, limit = 6, 2, 12, 64, 1.5
    ffns = [FfnWeights(*(as_matrix(rng.standard_normal(shape), fmt) for shape in ((width, hidden), (width, hidden), (hidden, width)))) for _ in range(experts)]
    monkeypatch.setattr(device, "info", replace(device.info, binding_limit=4 * gate_up(ffns[0]).data.nbytes + 5))
    up, down = upload_experts(device, experts, ((gate_up(f), pack(f.down)) for f in ffns))
    assert [(a.first, a.last) for a in up.arenas] == [(0, 4), (4, 6)]
    monkeypatch.undo()
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:topk] for _ in range(rows)]).astype(np.uint32)
    bench = Bench(device, rows_of(rows))
    id_buffer, table, order = bench.buffer(ids), bench.empty(4 + 4 * (rows * topk + experts)), bench.empty(rows * topk)
    act, out = bench.empty(rows * topk, 64, fill=0), bench.empty(rows * topk, hidden)
    tiles = (table, order, 1, rows * topk // 16 + experts + 1)
    sort = Op("moe_sort", {2: experts, 3: 16}, [id_buffer, table, order], np.uint32(topk).tobytes(), (1, 1, 1))
    bench.run(
        sort,
        up.ops(rows, topk, Target(bench.buffer(x), 64), Target(act, 64), topk, id_buffer, tiles, limit),
        down.ops(rows, topk, Target(act, 64), Target(out, hidden), 1, id_buffer, tiles, None),
    )
    want = np.empty((rows, topk, hidden))
    for t in range(rows):
        for j in range(topk):
            gate, to, back = (quant.dequantise(m).astype(np.float64) for m in (ffns[ids[t, j]].gate, ffns[ids[t, j]].up, ffns[ids[t, j]].down))
            want[t, j] = clamped_swiglu(x[t] @ gate.T, x[t] @ to.T, limit) @ back.T
    assert close(bench.read(out, (rows, topk, hidden)), want)
