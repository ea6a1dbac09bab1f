"""The kernels that only prompts of wide models use, each on the emulated device beside the formula it computes."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from emulated_device import EmulatedDevice, compiler  # noqa: E402

from glm53serve.cuda.runtime import Buffer, Returned  # noqa: E402
from glm53serve.model.quant import bf16_to_f32, f32_to_bf16  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
HEADS, LATENT, KDA_D, HC, CONV = 5, 192, 48, 4, 4
Floats = NDArray[np.float64]


@lru_cache
def device() -> EmulatedDevice:
    """An emulated device for odd sizes: three groups of latent channels, fewer heads than a block takes, 48 channels a KDA head."""
    sizes = {"HIDDEN": 132, "SITE_BLOCKS": 2, "HC": HC, "KDA_D": KDA_D, "CONV": CONV, "LATENT": LATENT, "HEADS": HEADS}
    return EmulatedDevice({**sizes, "MAX_ROWS": 16, "FORMATS": 2, "EXACT": 0})


def put(values: NDArray[np.generic]) -> Buffer:
    """An array on the device."""
    room = device().alloc(values.nbytes + 1024)
    device().upload(room.at(), values)
    return room


def get(room: Buffer, shape: tuple[int, ...], kind: type = np.float32) -> NDArray[np.generic]:
    """An array from the device."""
    out = np.empty(shape, kind)
    device().download(room.at(), out)
    return out


def in_product_order(width: int) -> NDArray[np.int64]:
    """Where each column lies in a row of activations of a wide model."""
    at = np.arange(width)
    return (at & ~31) | ((at & 4) << 2) | ((at & 2) << 2) | ((at >> 2) & 6) | (at & 1)


def test_kda_in_chunks_is_the_recurrence() -> None:
    rng = np.random.default_rng(4)
    heads, spans = 5, [(1, 0, 37), (0, 37, 3), (2, 40, 48)]
    rows, p = 88, heads * KDA_D
    raw, z, beta = rng.standard_normal((rows, 3 * p)), 3 * rng.standard_normal((rows, p)), rng.standard_normal((rows, heads))
    taps, dt_bias, a_log = rng.standard_normal((3 * p, CONV)), rng.standard_normal(p), rng.uniform(-1, 1.5, heads)
    s_size, w_size = heads * KDA_D * KDA_D, (CONV - 1) * 3 * p
    stride = s_size + w_size
    state = rng.standard_normal((3, stride))
    slot, first = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for s, begin, count in spans:
        slot[begin : begin + count], first[begin : begin + count] = s, begin
    rooms = {name: put(np.full((rows, p), np.nan, np.float32)) for name in ("q", "k", "v", "decay", "o")}
    rooms |= {name: put(np.full((rows, heads), np.nan, np.float32)) for name in ("beta", "qk")}
    on = [put(v.astype(np.float32)) for v in (raw, beta, z, taps, dt_bias, a_log, state)]
    tables = [put(v) for v in (slot, first, np.array(spans, np.int32), np.ones(rows, np.int32))]
    wide = [ctypes.c_int64(v) for v in (stride, 0, s_size)]
    prepared = [rooms[name] for name in ("q", "k", "v", "decay", "beta")]
    device().launch(
        "kda_prepare_prompt", (heads, 1), 128,
        [on[0], 3 * p, on[1], heads, on[2], rows, heads, tables[0], tables[1], on[6], wide[0], wide[2], on[3], on[4], on[5], -5.0, *prepared, rooms["qk"]],
    )  # fmt: skip
    chunk = 4 * 2 * 16 * (KDA_D + 8) * 2 + 2 * 2 * 16 * 24 * 2 + 4 * (KDA_D + 16 * 17 + 16)
    device().launch("kda_chunks", (1, heads, len(spans)), 384, [*prepared, on[0], 3 * p, tables[2], tables[3], on[6], *wide, rooms["o"]], 3 * chunk)
    got_o, got_state = get(rooms["o"], (rows, heads, KDA_D)), get(on[6], (3, stride))
    for s, begin, count in spans:
        matrix, window = state[s, :s_size].reshape(heads, KDA_D, KDA_D).copy(), state[s, s_size:].reshape(CONV - 1, 3 * p).copy()
        for row in range(begin, begin + count):
            window = np.concatenate([window, raw[row][None]])
            c = (window * taps.T).sum(0)
            q, k, v = (c / (1 + np.exp(-c))).reshape(3, heads, KDA_D)
            window = window[1:]
            q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(KDA_D)
            k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
            gate = -5.0 / (1 + np.exp(-np.exp(a_log)[:, None] * (z[row] + dt_bias).reshape(heads, KDA_D)))
            matrix *= np.exp(gate)[:, :, None]
            u = (v - np.einsum("hkv,hk->hv", matrix, k)) / (1 + np.exp(-beta[row]))[:, None]
            matrix += k[:, :, None] * u[:, None, :]
            assert np.abs(got_o[row] - np.einsum("hkv,hk->hv", matrix, q)).max() <= 3e-5 * np.abs(matrix).max(), row
        assert np.abs(got_state[s, :s_size] - matrix.reshape(-1)).max() <= 3e-5 * np.abs(matrix).max()
        assert np.array_equal(got_state[s, s_size:], window.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("mixture", [False, True])
def test_a_prompts_sites_mix_and_project(mixture: bool) -> None:
    rng = np.random.default_rng(5)
    rows, h, top_k, outs = 70, 132, 3, (2 + HC) * HC
    x, fn = rng.standard_normal((rows, HC, h)), rng.standard_normal((outs, HC * h))
    y, coefficients = rng.standard_normal((rows, h)), rng.standard_normal((rows, HC + HC * HC))
    pairs, ids, weights = rng.standard_normal((rows * top_k, h)), rng.integers(-1, 4, rows * top_k).astype(np.int32), rng.standard_normal(rows * top_k)
    on = [put(v.astype(np.float32)) for v in (x, coefficients, fn, y, pairs, weights)]
    given, chunks = put(ids), -(-h // 128)
    partial = put(np.full((rows, chunks, outs + 1), np.nan, np.float32))
    result = Returned(on[3].address, on[4].address, given.address, on[5].address, top_k) if mixture else Returned(y=on[3].address)
    device().launch("site_open_prompt", (chunks, -(-rows // 64)), 256, [on[0], rows, h, 1, on[1], result, on[2], partial])
    returned = y + ((weights * (ids >= 0))[:, None] * pairs).reshape(rows, top_k, h).sum(1) * mixture
    mixed = coefficients[:, :HC, None] * returned[:, None] + np.einsum("tjk,tjc->tkc", coefficients[:, HC:].reshape(rows, HC, HC), x)
    flat = mixed.reshape(rows, -1)
    got = get(partial, (rows, chunks, outs + 1)).sum(1)
    assert np.abs(get(on[0], x.shape) - mixed).max() <= 1e-5 * np.abs(mixed).max()
    assert np.abs(got[:, outs] - (flat * flat).sum(1)).max() <= 1e-5 * (flat * flat).sum(1).max()
    assert np.abs(got[:, :outs] - flat @ fn.T).max() <= 3e-5 * np.linalg.norm(flat, axis=1).max() * np.linalg.norm(fn, axis=1).max()


def test_a_prompts_rows_attend_what_was_selected() -> None:
    rng = np.random.default_rng(6)
    rows, r, ld, most, capacity = 4, 184, 256, 150, 300
    query, latents = (bf16_to_f32(f32_to_bf16(rng.standard_normal(shape).astype(np.float32))) for shape in ((rows, HEADS, r), (2, capacity, r)))
    padded = np.zeros((rows, HEADS, ld), np.float32)
    padded[:, :, :r] = query
    counts, slot = np.array([1, 64, 65, 150], np.int32), np.array([0, 1, 0, 1], np.int32)
    selected = np.full((rows, most), 10**6, np.int32)
    for row, count in enumerate(counts):
        selected[row, :count] = np.sort(rng.choice(capacity, count, replace=False))
    stored = [put(f32_to_bf16(latents[i])) for i in range(2)]
    out = put(np.full((rows, HEADS, ld), 0x7FC0, np.uint16))
    tables = [put(v) for v in (slot, np.array([b.address for b in stored], np.uint64), selected, counts)]
    one_row = 2 * HEADS * ld
    arguments = [put(f32_to_bf16(padded)).at(one_row), ld, 0.3, tables[0], tables[1], r, tables[2], most, tables[3], 1, out.at(one_row), ld]
    device().launch("attend_prompt", (rows - 1, 1), 256, arguments, 1024 + 3 * 128 * LATENT + 2 * 64 * 72)
    got = bf16_to_f32(get(out, (rows, HEADS, ld), np.uint16))[:, :, in_product_order(ld)]
    assert np.isnan(got[0]).all(), "the row before the group is not touched"
    for row in range(1, rows):
        here = latents[slot[row], selected[row, : counts[row]]].astype(np.float64)
        scores = 0.3 * query[row] @ here.T
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = weights @ here / weights.sum(1, keepdims=True)
        assert np.abs(got[row, :, :r] - expected).max() <= 1e-2 * np.abs(expected).max(), row


def test_a_prompts_sites_balance_and_collapse() -> None:
    rng = np.random.default_rng(7)
    rows, h, chunks, ld, outs, eps, hc_eps, rounds = 35, 132, 2, 256, (2 + HC) * HC, 1e-5, 1e-6, 20
    x, partial, norm = rng.standard_normal((rows, HC, h)), rng.standard_normal((rows, chunks, outs + 1)), rng.standard_normal(h)
    partial[:, :, outs] = rng.uniform(200, 400, (rows, chunks))
    base, scale = rng.standard_normal(outs), rng.standard_normal(3)
    on = [put(v.astype(np.float32)) for v in (x, partial, base, scale, norm)]
    coefficients, pre = put(np.full((rows, HC + HC * HC), np.nan, np.float32)), put(np.full((rows, HC), np.nan, np.float32))
    out = put(np.zeros((rows, ld), np.uint16))
    device().launch("site_balance_prompt", (2,), 256, [rows, h, chunks, on[1], on[2], on[3], eps, hc_eps, rounds, coefficients, pre])
    device().launch("site_close_prompt", (rows,), 256, [on[0], h, pre, on[4], eps, out, ld], 4 * h)
    y = partial.sum(1)
    logits = y[:, :outs] / np.sqrt(y[:, outs:] / (HC * h) + eps) * np.repeat(scale, [HC, HC, HC * HC]) + base
    weights, post = 1 / (1 + np.exp(-logits[:, :HC])) + hc_eps, 2 / (1 + np.exp(-logits[:, HC : 2 * HC]))
    mix = logits[:, 2 * HC :].reshape(rows, HC, HC)
    mix = np.exp(mix - mix.max(2, keepdims=True))
    mix = mix / mix.sum(2, keepdims=True) + hc_eps
    for turn in range(rounds):
        if turn:
            mix = mix / (mix.sum(2, keepdims=True) + hc_eps)
        mix = mix / (mix.sum(1, keepdims=True) + hc_eps)
    assert np.abs(get(coefficients, (rows, HC + HC * HC)) - np.concatenate([post, mix.reshape(rows, -1)], axis=1)).max() <= 2e-5
    collapsed = np.einsum("tj,tjc->tc", weights, x)
    expected = norm * collapsed / np.sqrt((collapsed * collapsed).mean(1, keepdims=True) + eps)
    got = bf16_to_f32(get(out, (rows, ld), np.uint16))[:, in_product_order(ld)[:h]]
    assert np.abs(got - expected).max() <= 5e-3 * np.abs(expected).max()
