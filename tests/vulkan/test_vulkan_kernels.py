"""Every small kernel against the reference's formulas in float64, with the corners that random models seldom meet."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from vulkan_bench import Bench

from glm53serve.model import reference_math as m
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.linear import Op
from glm53serve.vulkan.state import NONE

F64 = NDArray[np.float64]


def close(got: NDArray[np.float32], want: F64, limit: float = 5e-6) -> bool:
    return bool(np.abs(got - want).max() <= limit * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(("n", "hidden", "rounds"), [(4, 48, 20), (1, 70, 3), (3, 128, 1), (6, 20, 5)])
def test_hyper_connections(device: Device, n: int, hidden: int, rounds: int) -> None:
    rng = np.random.default_rng(n)
    rows, hp, outs = 5, -(-hidden // 64) * 64, (2 + n) * n
    x, fn = rng.standard_normal((rows, n, hidden)), rng.standard_normal((outs, n * hidden)) * (n * hidden) ** -0.5
    base, scale, weight, y = rng.standard_normal(outs), rng.uniform(0.5, 1.5, 3), rng.standard_normal(hidden), rng.standard_normal((rows, hidden))

    def wide(a: F64) -> NDArray[np.float32]:
        return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, hp - hidden)]).astype(np.float32)

    bench = Bench(device, [(0, i) for i in range(rows)])
    streams, dots, mix, xn = bench.buffer(wide(x)), bench.empty(rows, 128), bench.empty(rows, 128), bench.empty(rows, hp)
    site = np.zeros(128 + hp, np.float32)
    site[:outs], site[outs : outs + 3], site[128 : 128 + hidden] = base, scale, weight
    projection = bench.buffer(wide(fn.reshape(outs, n, hidden)))
    bench.run(
        Op("hc_dots", {2: 4}, [streams, projection, dots], struct.pack("2I", outs, n * hp), (-(-(outs + 1) // 4), rows, 1)),
        Op("hc_pre", {2: n}, [dots, bench.buffer(site), streams, xn, mix], struct.pack("3I2f", hidden, hp, rounds, 1e-5, 1e-6), (rows, 1, 1)),
        Op("hc_post", {2: n}, [streams, mix, bench.buffer(wide(y))], struct.pack("3I", hp, 1, 0), (-(-hp // 128), rows, 1)),
    )
    post, matrix, collapsed = m.hc_collapse(x, fn, base, scale, 1e-5, 1e-6, rounds)
    assert close(bench.read(xn, (rows, hp))[:, :hidden], m.rms(collapsed, weight, 1e-5))
    assert close(bench.read(streams, (rows, n, hp))[:, :, :hidden], m.hc_expand(x, post, matrix, y))


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("heads", "d", "width"), [(3, 10, 4), (2, 64, 3), (1, 128, 4), (2, 7, 2)])
def test_kda_in_pieces(device: Device, heads: int, d: int, width: int, bound: float | None) -> None:
    """Convolution, gates and recurrence over pieces 1, 2, 8 and 20 rows long, page to page and in place; the window slides through all."""
    rng = np.random.default_rng(d)
    total, p = 31, heads * d
    raw, fb, logits = rng.standard_normal((total, 3 * p)), rng.standard_normal((total, p)) * 2, rng.standard_normal((total, heads))
    taps, dt, a_log, norm = rng.standard_normal((3 * p, width)), rng.standard_normal(p), rng.uniform(-1, 1.5, heads), rng.standard_normal(d)
    gate = rng.standard_normal((total, p))
    window = np.zeros((width - 1, 3 * p))
    conv = np.split(m.short_conv(raw, window, taps), 3, axis=1)
    q, k, v = m.kda_qkv(*conv, heads)
    decay = m.kda_log_decay(fb, dt, a_log, bound)
    o, s = m.kda_recurrent(q, k, v, decay, m.sigmoid(logits), np.zeros((heads, d, d)))
    want = m.kda_gated_norm(o, gate, norm, 1e-5)

    pages = 3
    state = window_pages = None
    stride, at, page = 3 * p + heads, 0, NONE
    got = []
    for count in (1, 2, 8, 20):
        target = 1 if page == NONE else {1: 2, 2: 2}[page]
        bench = Bench(device, [(0, at + i) for i in range(count)], [(0, count, page, target)])
        if state is None or window_pages is None:
            state, window_pages = bench.empty(pages, heads, d, d), bench.empty(pages, width - 1, 3 * p)
        a = bench.buffer(np.concatenate([raw, logits], axis=1)[at : at + count].astype(np.float32))
        qkv, g, beta, out, final = (bench.empty(count, size) for size in (3 * p, p, heads, p, p))
        shape = struct.pack("10If", p, heads, d, width, stride, p, 2 * p, 3 * p, p, bound is not None, bound or 0.0)
        constants = bench.buffer(np.concatenate([dt, a_log]).astype(np.float32))
        inputs = [a, bench.buffer(fb[at : at + count].astype(np.float32)), bench.buffer(taps.astype(np.float32)), constants, window_pages, qkv, g, beta]
        bench.run(
            Op("kda_prep", {}, inputs, shape, (heads, count, 1)),
            Op("kda", {2: d}, [qkv, g, beta, state, out, a, window_pages], struct.pack("6I", p, heads, width, stride, p, 2 * p), (-(-d // 32), heads, 1)),
            Op(
                "kda_out",
                {},
                [out, bench.buffer(gate[at : at + count].astype(np.float32)), bench.buffer(norm.astype(np.float32)), final],
                struct.pack("3If", p, d, p, 1e-5),
                (heads, count, 1),
            ),
        )
        got.append(bench.read(final, (count, heads, d)))
        at, page = at + count, target
        if count == 2:
            assert (bench.read(window_pages, (pages, width - 1, 3 * p))[0] == 7).all(), "a page that nobody writes stays"
    assert close(np.concatenate(got), want.reshape(total, heads, d), 2e-5)
    assert close(bench.read(state, (pages, heads, d, d))[2], s, 2e-5)
    assert close(bench.read(window_pages, (pages, width - 1, 3 * p))[2], m.next_window(raw, window))


@pytest.mark.parametrize(("kpool", "keep"), [(1, 9), (4, 5), (5, 64)])
def test_selection_with_ties(device: Device, kpool: int, keep: int) -> None:
    """Many equal scores, zeros of both signs, negatives: the same pools as the reference, in ascending order."""
    rng = np.random.default_rng(keep)
    budget, pools = keep * kpool, 700
    positions = [budget + kpool - 1, budget + 2 * kpool + 1, 3 * budget + 1, pools * kpool - 1]
    scores = rng.integers(-3, 3, (len(positions), pools)).astype(np.float32) * 0.5
    scores[:, ::7] = -0.0
    scores[3] = rng.standard_normal(pools)
    bench = Bench(device, [(0, p) for p in positions])
    chosen = bench.buffer(np.zeros((len(positions), keep), np.uint32))
    push = struct.pack("4I", pools, kpool, budget, keep)
    bench.run(Op("dsa_topk", {}, [bench.buffer(scores), chosen], push, (len(positions), 1, 1)))
    got = bench.read(chosen, (len(positions), keep), np.uint32)
    for row, position in enumerate(positions):
        assert np.array_equal(got[row], np.sort(m.select_pools(scores[row].astype(np.float64), position, budget, kpool))), position


@pytest.mark.parametrize(("groups", "keep", "norm"), [(1, 1, True), (4, 2, True), (3, 1, False)])
def test_router_with_ties(device: Device, groups: int, keep: int, norm: bool) -> None:
    rng = np.random.default_rng(groups)
    rows, experts, topk, hidden = 9, 12, 3, 8
    x, router, bias = rng.standard_normal((rows, hidden)), rng.standard_normal((experts, hidden)), rng.standard_normal(experts) * 0.2
    router[[4, 9]], bias[[4, 9]] = router[1], bias[1]
    x[0] = 0
    bias[:] = np.where(np.arange(experts) % 2, bias, bias[0])
    logits = np.zeros((rows, 64), np.float32)
    logits[:, :experts] = (x.astype(np.float32) @ router.astype(np.float32).T).astype(np.float32)
    logits[:, [4, 9]] = logits[:, [1]]  # a library's product of equal rows may differ in the last bit
    bench = Bench(device, [(1, i) for i in range(rows)])
    ids, weights, uses = bench.buffer(np.zeros((rows, topk), np.uint32)), bench.empty(rows, topk), bench.buffer(np.zeros((2, 3, experts), np.uint32))
    push = struct.pack("6If", 64, topk, keep, norm, 3 * experts, experts, 2.5)
    bench.run(Op("route", {2: experts, 3: groups}, [bench.buffer(logits), bench.buffer(bias.astype(np.float32)), ids, weights, uses], push, (rows, 1, 1)))
    exact = logits[:, :experts].astype(np.float64)
    chosen, want = m.route(exact, np.eye(experts), bias.astype(np.float32).astype(np.float64), topk, groups, keep, norm, 2.5)
    got = bench.read(ids, (rows, topk), np.uint32)
    assert np.array_equal(np.sort(got), np.sort(chosen))
    for row in range(rows):
        assert close(bench.read(weights, (rows, topk))[row], want[row][[list(chosen[row]).index(e) for e in got[row]]])
    counts = bench.read(uses, (2, 3, experts), np.uint32)
    assert np.array_equal(counts[1, 1], np.bincount(chosen.ravel(), minlength=experts)) and counts.sum() == rows * topk


@pytest.mark.parametrize("experts", [5, 288])
def test_pairs_are_grouped_by_expert(device: Device, experts: int) -> None:
    rng = np.random.default_rng(experts)
    rows, topk, tile = 70, 3, 16
    ids = rng.integers(0, experts, (rows, topk)).astype(np.uint32)
    bench = Bench(device, [(0, i) for i in range(rows)])
    table, order = bench.empty(4 + 4 * (rows * topk + experts)), bench.buffer(np.zeros(rows * topk, np.uint32))
    bench.run(Op("moe_sort", {2: experts, 3: tile}, [bench.buffer(ids), table, order], struct.pack("I", topk), (1, 1, 1)))
    words, pairs = bench.read(table, (4 + 4 * (rows * topk + experts),), np.uint32), bench.read(order, (rows * topk,), np.uint32)
    assert np.array_equal(np.sort(pairs), np.arange(rows * topk))
    covered = 0
    for expert, first, count, _ in words[4 : 4 + 4 * words[0]].reshape(-1, 4):
        assert first == covered and 0 < count <= tile
        assert (ids.ravel()[pairs[first : first + count]] == expert).all()
        covered += count
    assert covered == rows * topk


@pytest.mark.parametrize("kpool", [1, 2, 5])
def test_pool_keys_and_scores(device: Device, kpool: int) -> None:
    rng = np.random.default_rng(kpool)
    di, dip, heads, budget = 10, 12, 11, 2 * kpool
    capacity = 40
    count = capacity // kpool * kpool
    k, e, ape = rng.standard_normal((capacity, di)), rng.standard_normal((capacity, di)), rng.standard_normal((kpool, di))
    keys = np.zeros((2, capacity, 2, dip), np.float32)
    keys[1, :, 0, :di], keys[1, :, 1, :di] = k, e
    pools = capacity // kpool
    qi, wt = np.zeros((capacity, heads, dip), np.float32), rng.standard_normal((capacity, heads)).astype(np.float32)
    qi[:, :, :di] = rng.standard_normal((capacity, heads, di))
    bench = Bench(device, [(1, i) for i in range(capacity)])
    pool_keys, scores = bench.empty(2, pools, dip, fill=0), bench.empty(capacity, pools)
    score_push = struct.pack("8I2f", heads, heads * dip, 0, heads, 0, pools, kpool, budget, di**0.5, heads**0.5)
    pool_push = struct.pack("5I", di, dip, capacity, kpool, pools)
    bench.run(
        Op("dsa_pool", {}, [bench.buffer(keys), bench.buffer(ape.astype(np.float32)), pool_keys], pool_push, (capacity, 1, 1)),
        Op("dsa_score", {2: dip}, [bench.buffer(qi), bench.buffer(wt), pool_keys, scores], score_push, (-(-pools // 64), capacity, 1)),
    )
    want_keys = m.pool_keys(k[:count], e[:count], ape)
    assert close(bench.read(pool_keys, (2, pools, dip))[1, : count // kpool, :di], want_keys)
    want = m.index_scores(qi[:, :, :di].astype(np.float64), wt.astype(np.float64), want_keys)
    got = bench.read(scores, (capacity, pools))
    for t in range(capacity):
        n = (t + 1) // kpool
        if t + 1 > budget + kpool - 1:
            assert close(got[t, :n], want[t, :n])
        else:
            assert (got[t] == 7).all(), "rows that see everything have nothing to score"


def test_latents_and_index_keys(device: Device) -> None:
    rng = np.random.default_rng(0)
    rows, q, r, di, dip, capacity, slots = 5, 20, 24, 10, 12, 16, 2
    a = rng.standard_normal((rows, 256))
    norms = rng.standard_normal(q + r + 2 * di)
    bench = Bench(device, [(1, 3 + i) for i in range(rows)])
    qr, latents, keys = bench.empty(rows, 64), bench.empty(slots, capacity, 64), bench.empty(slots, capacity, 2, dip)
    push = struct.pack("12If", 256, 64, 128, 192, q, 64, r, 64, di, dip, capacity, 1, 1e-5)
    bench.run(Op("dsa_norm", {}, [bench.buffer(a.astype(np.float32)), bench.buffer(norms.astype(np.float32)), qr, latents, keys], push, (rows, 1, 1)))
    got = bench.read(qr, (rows, 64))
    assert close(got[:, :q], m.rms(a[:, :q], norms[:q], 1e-5)) and (got[:, q:] == 0).all()
    cache = bench.read(latents, (slots, capacity, 64))
    assert close(cache[1, 3:8, :r], m.rms(a[:, 64 : 64 + r], norms[q : q + r], 1e-5)) and (cache[1, 3:8, r:] == 0).all()
    assert (cache[0] == 7).all() and (cache[1, :3] == 7).all() and (cache[1, 8:] == 7).all()
    got_keys = bench.read(keys, (slots, capacity, 2, dip))
    assert close(got_keys[1, 3:8, 0, :di], m.layer_norm(a[:, 128 : 128 + di], norms[q + r : q + r + di], norms[q + r + di :], 1e-6))
    assert close(got_keys[1, 3:8, 1, :di], a[:, 192 : 192 + di])


@pytest.mark.parametrize(("heads", "kpool", "splits"), [(3, 4, 1), (20, 1, 1), (40, 5, 1), (3, 4, 3), (20, 5, 2)])
def test_sparse_attention(device: Device, heads: int, kpool: int, splits: int) -> None:
    rng = np.random.default_rng(heads)
    rank, budget, capacity = 24, 20 * kpool, 300
    keep, tokens = 20, -(-(budget + kpool - 1) // 64) * 64
    positions = [0, 1, budget + kpool - 2, budget + kpool - 1, 250, 299]
    q, latents = np.zeros((len(positions), heads, 64), np.float32), np.zeros((2, capacity, 64), np.float32)
    q[:, :, :rank], latents[1, :, :rank] = rng.standard_normal((len(positions), heads, rank)), rng.standard_normal((capacity, rank))
    chosen = np.zeros((len(positions), keep), np.uint32)
    wanted = []
    for row, position in enumerate(positions):
        complete = (position + 1) // kpool
        pools = np.sort(rng.permutation(complete)[:keep])
        if position + 1 > budget + kpool - 1:
            chosen[row] = pools
            seen = m.selected_tokens(pools, position, kpool)
        else:
            seen = np.arange(position + 1)
        scores = q[row, :, :rank].astype(np.float64) @ latents[1, seen, :rank].astype(np.float64).T / np.sqrt(9.0)
        wanted.append(m.softmax(scores, -1) @ latents[1, seen, :rank])
    bench = Bench(device, [(1, p) for p in positions])
    count = len(positions)
    scores_buffer, mixed, parts = bench.empty(count, heads, tokens), bench.empty(count, heads, 64), bench.empty(splits, count, heads, 64)
    cache, picks = bench.buffer(latents), bench.buffer(chosen)
    tile = 1 if heads <= 16 else 2
    push = struct.pack("7If", heads, 64, tokens, capacity, kpool, budget, keep, 3.0)
    mix_push = push + struct.pack("2I", splits, len(positions))
    target = mixed if splits == 1 else parts
    stages = [
        Op("attn_scores", {2: tile}, [bench.buffer(q), scores_buffer, picks, cache], push, (tokens // 64, -(-heads // (16 * tile)), len(positions))),
        Op("attn_softmax", {}, [scores_buffer], struct.pack("4I", heads, tokens, kpool, budget), (heads, len(positions), 1)),
        Op("attn_mix", {2: tile}, [scores_buffer, target, picks, cache], mix_push, (splits, -(-heads // (16 * tile)), len(positions))),
    ]
    if splits > 1:
        stages.append(Op("attn_sum", {}, [parts, mixed], struct.pack("2I", heads * 64, splits), (-(-heads * 64 // 128), len(positions), 1)))
    bench.run(*stages)
    got = bench.read(mixed, (len(positions), heads, 64))
    for row in range(len(positions)):
        assert close(got[row, :, :rank], wanted[row]), positions[row]


def test_every_kernel_leaves_at_once_when_the_word_is_set(device: Device) -> None:
    """With the halt word set before the submission nothing is written."""
    bench = Bench(device, [(0, 0)])
    bench.halt.view(np.uint32)[0] = 1
    streams, out = bench.buffer(np.ones((1, 4, 64), np.float32)), bench.empty(1, 128)
    bench.run(Op("hc_dots", {}, [streams, streams, out], struct.pack("2I", 1, 256), (1, 1, 1)))
    assert (bench.read(out, (1, 128)) == 7).all()
    bench.halt.view(np.uint32)[0] = 0
    bench.run(Op("hc_dots", {}, [streams, streams, out], struct.pack("2I", 1, 256), (1, 1, 1)))
    assert bench.read(out, (1, 128))[0, 1] == 256
