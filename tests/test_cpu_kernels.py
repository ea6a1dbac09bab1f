"""Compiled kernels against the plain formulas, over shapes, formats, alignments and thread counts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinymodel import as_matrix

from glm53serve.cpu.packing import INT4_Q16, pack
from glm53serve.cpu.program import Cell, Form, Program, zeros
from glm53serve.model import reference_math as m
from glm53serve.model.quant import dequantise
from glm53serve.model.weights import Matrix, MatrixFormat

F32 = NDArray[np.float32]
FORMATS: tuple[MatrixFormat, ...] = ("f32", "bf16", "fp8", "int8", "int4")
some = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def multiply(x: F32, w: Matrix, levels: bool = False, threads: int = 2) -> F32:
    """x @ W.T by the kernels; levels: int4 weights meet 16-bit activations."""
    from glm53serve.cpu.kernels import rows
    from glm53serve.cpu.kernels.fields import Arguments
    from glm53serve.cpu.kernels.team import shared_team

    packed = pack(w, levels)
    form = Form(len(x), packed.groups * 64, {packed.kind})
    form.natural[:, : x.shape[1]] = x
    count, y = Cell(), zeros(len(x), w.rows + 5)
    count.set(len(x))
    program = Program(threads)
    program.by_row(rows.shape.address, Arguments(rows.SHAPE_FIELDS, count=count.at, form=form.at))
    program.matmul([packed], form, count, y)
    program.run(shared_team(threads), len(x))
    assert not y[:, w.rows :].any()
    return y[:, : w.rows]


def misaligned(w: Matrix, shift: int) -> Matrix:
    """The same matrix at an odd address, as in a memory map."""
    raw = np.zeros(w.data.nbytes + 64, np.uint8)
    raw[shift : shift + w.data.nbytes] = w.data.reshape(-1).view(np.uint8)
    return Matrix(w.format, w.rows, w.cols, raw[shift : shift + w.data.nbytes].view(w.data.dtype).reshape(w.data.shape), w.scale)


@some
@given(seeds, st.sampled_from(FORMATS), st.booleans(), st.integers(1, 21), st.integers(1, 75), st.integers(1, 200), st.integers(0, 7))
def test_products_equal_those_of_the_dequantised_matrix(seed: int, stored: MatrixFormat, levels: bool, rows: int, outs: int, cols: int, shift: int) -> None:
    rng = np.random.default_rng(seed)
    w = misaligned(as_matrix(rng.standard_normal((outs, cols)), stored), shift if stored in ("fp8", "int8", "int4") else 0)
    x = rng.standard_normal((rows, cols)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (rows, 1)).astype(np.float32)
    want = x.astype(np.float64) @ dequantise(w).astype(np.float64).T
    bound = np.abs(x.astype(np.float64)) @ np.abs(dequantise(w).astype(np.float64)).T
    error = 3e-5 if levels and stored == "int4" else 2e-6
    got = multiply(x, w, levels)
    largest = np.abs(x).max(axis=1, keepdims=True) * np.abs(dequantise(w)).sum(axis=1)
    assert (np.abs(got - want) <= error * (largest if levels and stored == "int4" else bound) + 1e-30).all()


@some
@given(seeds, st.sampled_from(FORMATS), st.booleans(), st.integers(2, 40), st.integers(1, 75), st.integers(1, 200))
def test_a_row_does_not_depend_on_the_others_nor_on_threads(seed: int, stored: MatrixFormat, levels: bool, rows: int, outs: int, cols: int) -> None:
    rng = np.random.default_rng(seed)
    w = as_matrix(rng.standard_normal((outs, cols)), stored)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    together = multiply(x, w, levels)
    for row in range(0, rows, 3):
        np.testing.assert_array_equal(multiply(x[row : row + 1], w, levels, threads=1)[0], together[row])
    np.testing.assert_array_equal(multiply(x, w, levels, threads=3), together)


def test_every_e4m3_byte_has_its_value() -> None:
    """Every byte once in the first column of 256 rows; the scale of the second block differs."""
    data = np.zeros((256, 64), np.uint8)
    data[:, 0] = np.arange(256)
    w = Matrix("fp8", 256, 64, data, np.array([[1.0], [0.5]], np.float32))
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 1
    np.testing.assert_array_equal(multiply(x, w)[0], dequantise(w)[:, 0])


def test_large_levels_do_not_overflow() -> None:
    """All nibbles and all activations at their extremes, both signs: the exact int32 sums are at their largest."""
    for nibble in (0x00, 0xFF):
        w = Matrix("int4", 16, 128, np.full((16, 64), nibble, np.uint8), np.ones((16, 2), np.float32))
        for sign in (-1, 1):
            for rows in (1, 9):
                x = np.full((rows, 128), sign * 32512.0, np.float32)
                x[:, 1::2] = sign * 32384.0  # low byte -128
                want = x.astype(np.float64) @ dequantise(w).astype(np.float64).T
                assert np.abs(multiply(x, w, True) - want).max() <= 1e-6 * np.abs(want).max()


@some
@given(seeds, st.integers(1, 5), st.integers(1, 25), st.floats(0.1, 20))
def test_sinkhorn_equals_the_reference(seed: int, n: int, iterations: int, spread: float) -> None:
    from glm53serve.cpu.kernels.fields import address
    from glm53serve.cpu.kernels.rows import sinkhorn

    logits = (spread * np.random.default_rng(seed).standard_normal((n, n))).astype(np.float32)
    want = m.sinkhorn(logits.astype(np.float64), 1e-6, iterations)
    sinkhorn(address(logits), n, np.float32(1e-6), iterations)
    assert np.abs(logits - want).max() <= 1e-5


@some
@given(seeds, st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_the_best_pools_are_exact_and_ties_go_to_the_lower_index(seed: int, count: int, budget: int, tied: bool) -> None:
    from glm53serve.cpu.kernels.dsa import best_pools
    from glm53serve.cpu.kernels.fields import address

    budget = min(budget, count)
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(count).astype(np.float32) * np.float32(1e-3)
    if tied:
        scores = np.maximum(np.round(scores * 1000), 0).astype(np.float32)
        scores[rng.random(count) < 0.2] = -0.0
    chosen = np.zeros(budget, np.int32)
    best_pools(address(scores), count, budget, address(chosen))
    np.testing.assert_array_equal(chosen, m.best(scores, budget))


@some
@given(seeds, st.integers(1, 9), st.integers(1, 3), st.integers(1, 40))
def test_index_scores_order_as_the_reference(seed: int, heads: int, groups: int, count: int) -> None:
    from glm53serve.cpu.kernels.dsa import index_scores
    from glm53serve.cpu.kernels.fields import address

    rng = np.random.default_rng(seed)
    width = 64 * groups
    query, weights, keys = (rng.standard_normal(s).astype(np.float32) for s in ((heads, width), (heads,), (count, width)))
    out = np.zeros(count + 4, np.float32)
    index_scores(address(query), heads, 4 * width, address(weights), address(keys), count, address(out))
    want = m.index_scores(query[None].astype(np.float64), weights[None].astype(np.float64), keys.astype(np.float64))[0]
    assert np.abs(out[:count] * (width * heads) ** -0.5 - want).max() <= 1e-5


@some
@given(seeds, st.integers(1, 9), st.integers(1, 3), st.integers(1, 90))
def test_attention_over_scattered_rows_equals_the_reference(seed: int, heads: int, groups: int, tokens: int) -> None:
    from glm53serve.cpu.kernels.dsa import attend_heads
    from glm53serve.cpu.kernels.fields import address

    rng = np.random.default_rng(seed)
    width = 64 * groups
    query = rng.standard_normal((heads, width)).astype(np.float32)
    latents = rng.standard_normal((2 * tokens, width)).astype(np.float32)
    picked = np.sort(rng.permutation(2 * tokens)[:tokens])
    table = np.append(address(latents) + picked * latents.strides[0], [address(latents)] * 4).astype(np.int64)
    stride = 4 * (tokens + 40)
    scores, out = np.zeros(heads * stride, np.float32), np.zeros((heads, width), np.float32)
    attend_heads(address(query), address(table), tokens, heads, 4 * width, address(scores), np.float32(0.1), address(out), stride)
    rows = latents[picked].astype(np.float64)
    want = m.softmax(0.1 * query.astype(np.float64) @ rows.T, -1) @ rows
    assert np.abs(out - want).max() <= 2e-5


@some
@given(seeds, st.integers(1, 150), st.integers(1, 3), st.sampled_from([0.1, 5.0]))
def test_the_recurrence_equals_the_reference_and_may_be_cut(seed: int, count: int, groups: int, decay: float) -> None:
    from glm53serve.cpu.kernels.fields import address
    from glm53serve.cpu.kernels.kda import recurrence
    from glm53serve.cpu.kernels.target import LANES

    rng = np.random.default_rng(seed)
    width = 64 * groups
    q, k, v = rng.standard_normal((3, count, 1, width))
    q, k, g, beta = m.l2(q) * width**-0.5, m.l2(k), -decay * rng.random((count, 1, width)), rng.random((count, 1))
    start = rng.standard_normal((1, width, width))
    want, want_state = m.kda_recurrent(q, k, v, g, beta, start)
    e = np.exp(g)
    coefficients = np.stack([e, k, e * k, e * q], axis=-1).astype(np.float32)
    qk, b, values = ((a).astype(np.float32).copy() for a in ((q * k).sum(-1), beta, v))

    def run(cuts: list[int]) -> tuple[F32, F32]:
        state, o = start.astype(np.float32), np.zeros((count, width), np.float32)
        for first, last in zip([0, *cuts], [*cuts, count], strict=True):
            for j in range(0, width, 4 * LANES):
                at = [address(a[first:]) for a in (coefficients, values, o, b, qk)]
                recurrence(address(state) + 4 * j, at[0], at[1] + 4 * j, at[2] + 4 * j, at[3], at[4], last - first, width, 4 * width)
        return o, state

    o, state = run([])
    assert np.abs(o - want[:, 0]).max() <= 1e-4 and np.abs(state - want_state).max() <= 1e-4
    for cut in (1, count // 2):
        if 0 < cut < count:
            np.testing.assert_array_equal(run([cut])[0], o)


def test_exp_is_within_two_units_and_sigmoid_saturates() -> None:
    from numba import njit

    from glm53serve.cpu.kernels import simd as s
    from glm53serve.cpu.kernels.fields import address
    from glm53serve.cpu.kernels.target import VECTOR_BYTES

    @njit
    def run(x: int, e: int, g: int, size: int) -> None:
        for i in range(0, size, VECTOR_BYTES):
            s.st(e + i, s.vexp(s.ld(x + i)))
            s.st(g + i, s.sigmoid(s.ld(x + i)))

    x = np.concatenate([np.linspace(-86, 87, 1 << 16), [0.0, -200.0, 200.0, -np.inf] * 4]).astype(np.float32)
    e, g = np.empty_like(x), np.empty_like(x)
    run(address(x), address(e), address(g), x.nbytes)
    exact = np.exp(x[:-16].astype(np.float64))
    assert np.abs(e[:-16] / exact - 1).max() <= 2.5e-7
    assert np.abs(g - 1 / (1 + np.exp(-np.maximum(x.astype(np.float64), -700)))).max() <= 2e-7
    assert e[-15] == 0 and e[-13] == 0 and g[-13] <= 2e-38 and g[-14] == 1


def route(logits: F32, bias: F32, k: int, groups: int, kept: int, normalise: bool) -> tuple[NDArray[np.int64], F32]:
    from glm53serve.cpu.kernels import router
    from glm53serve.cpu.kernels.fields import Arguments, address
    from glm53serve.cpu.kernels.team import shared_team

    count, zero = Cell(), Cell()
    count.set(len(logits))
    experts = logits.shape[1]
    chosen, weights, work = zeros(len(logits), k, dtype=np.int64), zeros(len(logits), k), zeros(len(logits), 2 * experts + groups)
    program = Program(2)
    fields: dict[str, Any] = {"count": count.at, "out_at": zero.at, "logits": address(logits), "logit_stride": logits.strides[0], "bias": address(bias)}
    fields |= {"experts": experts, "k": k, "groups": groups, "kept": kept, "normalise": int(normalise), "scaling": 2.5}
    fields |= {"chosen": address(chosen), "weights": address(weights), "work": address(work)}
    program.by_row(router.route.address, Arguments(router.ROUTE_FIELDS, **fields))
    program.run(shared_team(2), len(logits))
    return chosen, weights


@some
@given(seeds, st.integers(1, 9), st.sampled_from([(8, 1, 1), (12, 3, 2), (288, 1, 1), (16, 4, 1)]), st.integers(1, 4), st.booleans(), st.booleans())
def test_routing_equals_the_reference_with_ties(seed: int, count: int, shape: tuple[int, int, int], k: int, normalise: bool, tied: bool) -> None:
    experts, groups, kept = shape
    rng = np.random.default_rng(seed)
    logits, bias = rng.standard_normal((count, experts)).astype(np.float32), rng.standard_normal(experts).astype(np.float32)
    if tied:
        logits, bias = np.round(logits).astype(np.float32), np.zeros(experts, np.float32)
    chosen, weights = route(logits, bias, k, groups, kept, normalise)
    want, want_weights = m.route(logits, np.eye(experts, dtype=np.float32), bias, k, groups, kept, normalise, 2.5)
    np.testing.assert_array_equal(chosen, want)
    assert np.abs(weights - want_weights).max() <= 1e-5


@pytest.mark.parametrize("shape", [(8, 1, 1), (12, 3, 2)])
def test_a_row_of_numbers_that_are_none_still_names_experts_that_there_are(shape: tuple[int, int, int]) -> None:
    experts, groups, kept = shape
    rng = np.random.default_rng(1)
    logits, bias = rng.standard_normal((4, experts)).astype(np.float32), rng.standard_normal(experts).astype(np.float32)
    want, want_weights = route(logits, bias, 3, groups, kept, True)
    logits[0], logits[2, ::2] = np.nan, np.nan
    chosen, weights = route(logits, bias, 3, groups, kept, True)
    assert ((chosen >= 0) & (chosen < experts)).all() and (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(chosen[1::2], want[1::2])
    np.testing.assert_array_equal(weights[1::2], want_weights[1::2])


def test_more_threads_than_cores_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    w, x = as_matrix(rng.standard_normal((700, 256)), "int4"), rng.standard_normal((3, 256)).astype(np.float32)
    want = multiply(x, w, True, threads=1)
    for _ in range(50):
        np.testing.assert_array_equal(multiply(x, w, True, threads=7), want)


PORTABLE = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from glm53serve.cpu.kernels import target
assert (target.HAS_AVX2, target.HAS_VNNI, target.LANES) == ({avx2}, False, 8), target.FEATURES
import test_cpu_kernels as t
from tinymodel import as_matrix
rng = np.random.default_rng(1)
w, x = as_matrix(rng.standard_normal((33, 192)), "int4"), rng.standard_normal((11, 192)).astype(np.float32)
sys.stdout.buffer.write(t.multiply(x, w, True).tobytes())
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="pretends to be an older x86-64 processor")
@pytest.mark.parametrize(("features", "avx2"), [("+avx,+fma", False), ("+avx2,+fma", True)])
def test_older_processors_give_the_same_integer_products(features: str, avx2: bool, tmp_path: Path) -> None:
    """The kernels compiled without VNNI, and without any integer vector instruction: slower, the same bits."""
    environ = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    code = PORTABLE.format(tests=str(Path(__file__).parent), avx2=avx2)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr.decode()
    rng = np.random.default_rng(1)
    w, x = as_matrix(rng.standard_normal((33, 192)), "int4"), rng.standard_normal((11, 192)).astype(np.float32)
    assert pack(w, True).kind == INT4_Q16
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32).reshape(11, 33), multiply(x, w, True))
