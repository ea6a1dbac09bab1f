"""The kernels by which few rows choose what they attend and by which a token is chosen, each on the emulated device beside the formula it computes."""

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

from glm53serve.cuda.decode import SAMPLE_SHARED, SCANS  # noqa: E402
from glm53serve.cuda.runtime import Buffer  # noqa: E402
from glm53serve.cuda.scratch import DECODE_SPLIT  # noqa: E402
from glm53serve.model.quant import bf16_to_f32, f32_to_bf16  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
HEADS, LATENT, HC = 20, 320, 2
Array = NDArray[np.generic]


@lru_cache
def device() -> EmulatedDevice:
    """An emulated device for odd sizes: a group of heads that is not full, a latent of more than one part in `attend_join`."""
    sizes = {"HIDDEN": 64, "SITE_BLOCKS": 2, "HC": HC, "KDA_D": 32, "CONV": 4, "LATENT": LATENT, "HEADS": HEADS}
    return EmulatedDevice({**sizes, "MAX_ROWS": 16, "FORMATS": 2, "EXACT": 1})


def put(values: Array) -> Buffer:
    """An array on the device."""
    room = device().alloc(values.nbytes + 1024)
    device().upload(room.at(), values)
    return room


def floats(values: Array) -> Buffer:
    """The values as float32 on the device."""
    return put(np.asarray(values, np.float32))


def ints(*values: int) -> Buffer:
    """The values as int32 on the device."""
    return put(np.array(values, np.int32))


def get(room: Buffer, shape: tuple[int, ...], kind: type = np.float32) -> Array:
    """An array from the device."""
    out = np.empty(shape, kind)
    device().download(room.at(), out)
    return out


def addresses(*rooms: Buffer) -> Buffer:
    """A table of addresses."""
    return put(np.array([room.address for room in rooms], np.uint64))


def scores_of(kind: str, count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Scores with the ties that ReLUs and equal keys make."""
    if kind == "all equal":
        return np.full(count, 0.25, np.float32)
    if kind == "mostly zero":
        return np.where(rng.random(count) < 0.9, 0, rng.standard_normal(count)).astype(np.float32)
    if kind == "few levels":
        return (rng.integers(-3, 4, count) / 8).astype(np.float32)
    if kind == "one bit apart":
        return (np.float32(1.5).view(np.uint32) + rng.integers(0, 3, count).astype(np.uint32)).view(np.float32)
    return rng.standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("kind", ["all equal", "mostly zero", "few levels", "one bit apart", "all different"])
@pytest.mark.parametrize(("threads", "counts"), [(256, (20, 21, 255, 257, 700, 1024, 1025, 4500)), (512, (20, 21, 530, 2047, 2049, 9000))])
def test_the_best_pools_are_taken_and_of_equal_ones_the_first(threads: int, counts: tuple[int, ...], kind: str) -> None:
    """Also where scores no longer fit in the registers of a block."""
    kp, keep, rng = 3, 20, np.random.default_rng(len(kind))
    lds, ld = max(counts) + 5, keep * kp + kp
    positions = [count * kp + n % kp - 1 for n, count in enumerate(counts)]
    scores = np.full((len(counts), lds), np.nan, np.float32)
    for row, count in enumerate(counts):
        scores[row, :count] = scores_of(kind, count, rng)
    rows = len(counts) + 2  # one ahead of the group, one at rest
    selected, taken = put(np.full((rows, ld), -7, np.int32)), put(np.full(rows, -7, np.int32))
    arguments = [floats(scores), ctypes.c_int64(lds), kp, keep, 1, ints(5, *positions, 5), ints(1, *[1] * len(counts), 0), selected, ld, taken]
    device().launch("dsa_select", (rows - 1,), threads, arguments)
    got, number = get(selected, (rows, ld), np.int32), get(taken, (rows,), np.int32)
    assert number[0] == -7 and (got[[0, -1]] == -7).all() and number[-1] == 0
    for row, (count, position) in enumerate(zip(counts, positions, strict=True)):
        best = np.sort(np.argsort(-scores[row, :count], kind="stable")[:keep])
        expected = [*(kp * best[:, None] + np.arange(kp)).reshape(-1), *range(count * kp, position + 1)]
        assert got[1 + row, : number[1 + row]].tolist() == expected, count


@pytest.mark.parametrize(("heads", "width"), [(5, 36), (32, 128), (40, 132)])
def test_scores_of_few_rows(heads: int, width: int) -> None:
    """The same bits however many blocks share the pools and whatever rows are beside; the tail is kept where it was not before."""
    kp, keep, rng = 4, 3, np.random.default_rng(heads)
    pools = (150, 3, 4, 41)
    positions, live, slots = [4 * n + 1 for n in pools], [1, 1, 1, 0], [1, 0, 3, 2]
    query, weights = rng.standard_normal((4, heads, width)), rng.standard_normal((4, heads + 1))
    stored, key, gate = rng.standard_normal((4, 160, width)), rng.standard_normal((4, width)), rng.standard_normal((4, width))
    stored[0, 140] = stored[0, 2]
    keys, lds, stride = [floats(one) for one in stored], 170, 8 * width + 8
    on = [floats(query), floats(weights), floats(key), floats(gate)]
    seen = []
    for rows, parts, keeping in ((4, 64, True), (4, 1, False), (1, 3, False)):
        state, scores = floats(np.full((4, stride), 7.0)), floats(np.full((4, lds), np.nan))
        tables = [ints(*slots), ints(*positions), ints(*[p + 1 for p in positions]), ints(*live)]
        given = [on[0], on[1], heads + 1, heads, width, kp, keep, on[2] if keeping else None, on[3]]
        wide = [ctypes.c_int64(n) for n in (stride, 4)]
        arguments = [*given, *tables, state, *wide, addresses(*[keys[i] for i in (1, 0, 3, 2)]), scores, ctypes.c_int64(lds)]
        device().launch("dsa_scores_few", (parts, rows), 256, arguments, 4 * 4 * 8 * width)
        got, tail = get(scores, (4, lds)), get(state, (4, stride))
        seen.append(got[0])
        expected_tail = np.full((4, stride), 7.0, np.float32)
        for row in range(3 if keeping else 0):
            member = positions[row] % kp
            for part, values in ((0, key), (kp, gate)):
                at = 4 + (part + member) * width
                expected_tail[slots[row], at : at + width] = values[row]
        assert np.array_equal(tail, expected_tail)
        for row, count in enumerate(pools):
            scored = count if live[row] and count > keep and row < rows else 0
            assert np.isnan(got[row, scored:]).all()
            dots = np.maximum(stored[row, :scored] @ query[row].T / np.sqrt(width), 0) @ weights[row, :heads] / np.sqrt(heads)
            assert np.abs(got[row, :scored] - dots).max(initial=0) <= 1e-5 * np.abs(dots).max(initial=1)
        assert got[0, 140] == got[0, 2]
    assert np.array_equal(seen[0], seen[1], equal_nan=True) and np.array_equal(seen[0], seen[2], equal_nan=True)


@pytest.mark.parametrize("kernel", ["attend_few", "attend_few_shared"])
def test_few_rows_attend_what_was_selected(kernel: str) -> None:
    """Parts beyond a row's selection are not read, and a row's bits are the same in any company."""
    rng = np.random.default_rng(6)
    r, ld, capacity = 314, 512, 5000
    counts = np.array([700, 0, 1, 64, 65, 4500, 2400], np.int32)
    rows, most, slot = len(counts), int(counts.max()), np.arange(len(counts)) % 2
    splits = -(-most // DECODE_SPLIT)
    query, latents = rng.standard_normal((rows, HEADS, r)).astype(np.float32), rng.standard_normal((2, capacity, r))
    high, low = np.zeros((rows, HEADS, ld), np.uint16), np.zeros((rows, HEADS, ld), np.uint16)
    high[:, :, :r] = f32_to_bf16(query)
    low[:, :, :r] = f32_to_bf16(query - bf16_to_f32(f32_to_bf16(query)))
    selected = np.full((rows, most), 10**6, np.int32)
    for row, count in enumerate(counts):
        selected[row, :count] = np.sort(rng.choice(capacity, count, replace=False))
    rows_at = addresses(floats(latents[0]), floats(latents[1]))

    def attend(which: list[int]) -> NDArray[np.float32]:
        partial = floats(np.full((len(which), splits, HEADS, LATENT + 4), np.nan))
        out = [put(np.full((len(which), HEADS, ld), 0x7FC0, np.uint16)) for _ in range(2)]
        taken, chosen, of = ints(*counts[which]), put(selected[which]), ints(*slot[which])
        arguments = [put(high[which]), put(low[which]), ld, 0.3, of, rows_at, r, chosen, most, taken, partial]
        shared = 2 * 96 * (LATENT + 8) + 2 * 32 * 40 + 4 * (4 * 16 * 33 + 48)
        device().launch(kernel, (-(-HEADS // 16), len(which), splits), 256, arguments, shared)
        device().launch("attend_join", (HEADS, len(which), -(-LATENT // 256)), 256, [partial, splits, taken, r, *out, ld])
        parts = [bf16_to_f32(get(o, (len(which), HEADS, ld), np.uint16)) for o in out]
        assert all(np.isnan(part[:, :, r:]).all() for part in parts)
        return (parts[0] + parts[1])[:, :, :r]

    got = attend(list(range(rows)))
    for row, count in enumerate(counts):
        here = latents[slot[row], selected[row, :count]]
        scores = 0.3 * query[row] @ here.T
        weights = np.exp(scores - scores.max(1, keepdims=True, initial=-1e9))
        expected = weights @ here / np.maximum(weights.sum(1, keepdims=True), 1e-30)
        assert np.abs(got[row] - expected).max() <= 1e-4 * np.abs(expected).max(initial=0), count
    assert np.array_equal(attend([4, 0, 6])[[1, 0, 2]], got[[0, 4, 6]])


@pytest.mark.parametrize("width", [36, 2100])
def test_a_rows_norms_and_the_pools_it_completes(width: int) -> None:
    """Rows that are spans of their own are pooled where their keys are made; a prompt's rows behind it. The keys of pools have the same bits."""
    rng, kp, positions = np.random.default_rng(width), 3, (6, 7, 8, 9)
    q_width, r = (width + 7, 23) if width > 256 else (40, width + 2048)
    q, kv, key, gate, ape = (rng.standard_normal(shape) for shape in ((4, q_width), (4, r), (4, width), (4, width), (kp, width)))
    norms = [rng.standard_normal(n) for n in (q_width, r, width, width)]
    q_norm, kv_norm, key_norm, bias = (floats(n) for n in norms)
    stride = 2 * kp * width + 4
    ld = -(-q_width // 256) * 256
    pools = []
    for alone in (True, False):
        state, latents, pool = floats(np.full((2, stride), 7.0)), floats(np.full((12, r), np.nan)), floats(np.full((4, width), np.nan))
        rows_at, pools_at = addresses(pool, latents), addresses(latents, pool)
        wide = [ctypes.c_int64(n) for n in (stride, 4)]
        for first, rows, live in ((0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (0, 1, 0)) if alone else ((0, 4, 1),):
            given = [floats(v[first : first + rows]) for v in (q, kv, key, gate)]
            out = [put(np.zeros((rows, ld), np.uint16)) for _ in range(2)]
            tables = [ints(*[1] * rows), ints(*positions[first : first + rows]), ints(*[live] * rows)]
            norm = [given[0], q_width, q_norm, *out, ld, given[1], r, kv_norm, 1e-5, given[2], width, key_norm, bias, *tables, rows_at, None]
            device().launch("dsa_prepare", (rows, 3), 256, [*norm, given[3], kp, floats(ape), state if alone else None, *wide, pools_at])
            if not alone:
                one = [given[2], given[3], width, kp, floats(ape), *tables[:2], ints(*[0] * rows), tables[2], state, *wide, pools_at]
                device().launch("dsa_pool", (rows,), 64, one)
            got = sum(bf16_to_f32(get(o, (rows, ld), np.uint16)) for o in out)
            expected = norms[0] * q / np.sqrt((q * q).mean(1, keepdims=True) + 1e-5)
            assert np.abs(got[:, :q_width] - expected[first : first + rows]).max() <= 1e-4 * np.abs(expected).max()
        expected = norms[1] * kv / np.sqrt((kv * kv).mean(1, keepdims=True) + 1e-5)
        stored = get(latents, (12, r))
        assert np.abs(stored[6:10] - expected).max() <= 1e-5 * np.abs(expected).max() and np.isnan(stored[[*range(6), 10, 11]]).all()
        normed = norms[2] * (key - key.mean(1, keepdims=True)) / np.sqrt(key.var(1, keepdims=True) + 1e-6) + norms[3]
        weights = np.exp(gate[:3] + ape)
        pooled = (weights * normed[:3]).sum(0) / weights.sum(0)
        pools.append(get(pool, (4, width)))
        assert np.abs(pools[-1][2] - pooled).max() <= 1e-5 * np.abs(normed).max() and np.isnan(pools[-1][[0, 1, 3]]).all()
        tail = get(state, (2, stride))
        assert (tail[0] == 7).all() and (tail[1, :4] == 7).all()
        if alone:
            members = tail[1, 4:].reshape(2, kp, width)
            assert np.abs(members[0] - normed[[3, 1, 2]]).max() <= 1e-5 * np.abs(normed).max()
            assert np.array_equal(members[1], gate[[3, 1, 2]].astype(np.float32))
    assert np.array_equal(*pools, equal_nan=True)


@pytest.mark.parametrize("vocabulary", [1, 31, 33, 700, 200_000])
def test_the_likeliest_token_is_chosen_and_of_equal_ones_the_first(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.integers(-4, 5, (3, vocabulary)) - 300.0).astype(np.float32)
    logits[1, -1], logits[2] = 0, -np.inf
    rows = len(logits)
    peaks, ids, chosen = floats(np.full((rows, SCANS), np.nan)), ints(*[-7] * rows * SCANS), ints(*[-7] * rows)
    device().launch("logit_peaks", (SCANS, rows), 512, [floats(logits), vocabulary, peaks, ids])
    greedy = [floats(np.zeros(rows)), floats(np.ones(rows)), put(np.zeros(rows, np.uint64)), ints(*[0] * rows)]
    device().launch("sample", (rows,), 1024, [floats(logits), vocabulary, peaks, ids, *greedy, chosen], SAMPLE_SHARED)
    assert get(chosen, (rows,), np.int32).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("width", [70, 4500])
def test_final_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, norm, ld = rng.standard_normal((3, HC, width)), rng.standard_normal(width), -(-width // 256) * 256
    for which in (None, [2, 0]):
        out = [put(np.zeros((3, ld), np.uint16)) for _ in range(2)]
        rows = which or [0, 1, 2]
        arguments = [floats(x), ints(*which) if which else None, width, floats(norm), 1e-5, *out, ld]
        device().launch("final_norm", (len(rows),), 1024, arguments, 4 * width)
        mean = x[rows].mean(1)
        expected = norm * mean / np.sqrt((mean * mean).mean(1, keepdims=True) + 1e-5)
        got = sum(bf16_to_f32(get(o, (3, ld), np.uint16)) for o in out)
        assert np.abs(got[: len(rows), :width] - expected).max() <= 1e-4 * np.abs(expected).max() and not got[:, width:].any()
