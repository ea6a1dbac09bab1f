"""The reference network: its formulas against brute force, its state against every way to cut a sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinymodel import FEATURES, TINY, TinyModel, as_matrix, random_ids, tiny_model

from glm53serve.model import reference_math as m
from glm53serve.model.config import DSA, KDA
from glm53serve.model.quant import dequantise
from glm53serve.model.reference import DsaState, KdaState, ReferenceModel
from glm53serve.model.weights import MatrixFormat

Rows = NDArray[np.float64]

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25)


def kda_rows(rng: np.random.Generator, count: int, heads: int, width: int, decay: float) -> tuple[Rows, ...]:
    """Plausible q, k, v, g, beta and a start state."""
    q, k, v = rng.standard_normal((3, count, heads, width))
    g = -decay * rng.random((count, heads, width))
    return m.l2(q) * width**-0.5, m.l2(k), v, g, rng.random((count, heads)), rng.standard_normal((heads, width, width))


# --- formulas --------------------------------------------------------------------------------------------------------------------


@few
@given(seeds, st.integers(1, 90), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(1, 70), st.sampled_from([0.1, 5.0, 60.0]))
def test_chunked_kda_equals_the_recurrence(seed: int, count: int, heads: int, width: int, chunk: int, decay: float) -> None:
    rows = kda_rows(np.random.default_rng(seed), count, heads, width, decay)
    expected, expected_state = m.kda_recurrent(*rows)
    got, got_state = m.kda_chunked(*rows, chunk=chunk)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got_state, expected_state, rtol=0, atol=1e-12)


def test_chunked_kda_survives_decay_that_overflows_exp_of_minus_g() -> None:
    rows = [x.astype(np.float32) for x in kda_rows(np.random.default_rng(0), 64, 2, 16, 5.0)]
    rows[3][:] = -5.0
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.exp(-np.cumsum(rows[3], axis=0))).all()
    got, _ = m.kda_chunked(*rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, m.kda_recurrent(*rows)[0], rtol=0, atol=1e-6)


def test_a_row_of_zeros_leaves_the_kda_state_alone() -> None:
    *_, state = kda_rows(np.random.default_rng(1), 1, 2, 4, 1.0)
    zero = np.zeros((3, 2, 4))
    for form in (m.kda_recurrent, m.kda_chunked):
        out, after = form(zero, zero, zero, zero, np.zeros((3, 2)), state)
        assert np.array_equal(after, state) and not out.any()


def test_kda_recurrence_by_hand() -> None:
    """One head, one channel: S' = e^g S, u = beta (v - S' k), S = S' + k u, o = S q."""
    q, k, v, g, beta, s = 0.5, 2.0, 3.0, np.log(0.25), 0.5, 4.0
    out, state = m.kda_recurrent(*(np.full((1, 1, 1), x) for x in (q, k, v, g)), np.full((1, 1), beta), np.full((1, 1, 1), s))
    assert state.item() == pytest.approx(1.0 + 2.0 * 0.5 * (3.0 - 1.0 * 2.0)) and out.item() == pytest.approx(state.item() * q)


@few
@given(seeds, st.integers(1, 12), st.integers(1, 5))
def test_short_conv_and_its_window(seed: int, count: int, taps: int) -> None:
    rng = np.random.default_rng(seed)
    raw, weights, cut = rng.standard_normal((count, 3)), rng.standard_normal((3, taps)), int(rng.integers(0, count + 1))
    expected = np.stack([np.convolve(raw[:, c], weights[c, ::-1])[:count] for c in range(3)], axis=1)
    window = np.zeros((taps - 1, 3))
    first = m.short_conv(raw[:cut], window, weights)
    second = m.short_conv(raw[cut:], m.next_window(raw[:cut], window), weights)
    np.testing.assert_allclose(np.concatenate([first, second]), expected, atol=1e-13)


def test_gates_stay_finite_and_negative_for_any_input() -> None:
    z = np.linspace(-500, 500, 101, dtype=np.float32)[:, None]
    for bound in (-5.0, None):
        with np.errstate(all="raise", under="ignore"):
            g = m.kda_log_decay(z, np.zeros(1, np.float32), np.ones(1, np.float32), bound)
        assert g.dtype == np.float32 and np.isfinite(g).all() and (g <= 0).all()
    bounded = m.kda_log_decay(z, np.zeros(1, np.float32), np.ones(1, np.float32), -5.0)
    assert bounded.min() == -5.0 and bounded.max() > -1e-30


@few
@given(seeds, st.integers(1, 5), st.integers(0, 5))
def test_pool_keys_against_loops(seed: int, kp: int, pools: int) -> None:
    rng = np.random.default_rng(seed)
    k, e, ape = rng.standard_normal((pools * kp, 4)), rng.standard_normal((pools * kp, 4)), rng.standard_normal((kp, 4))
    keys = m.pool_keys(k, e, ape)
    assert keys.shape == (pools, 4)
    for p in range(pools):
        for c in range(4):
            w = np.exp([e[p * kp + j, c] + ape[j, c] for j in range(kp)])
            assert keys[p, c] == pytest.approx(sum(w[j] * k[p * kp + j, c] for j in range(kp)) / w.sum(), abs=1e-13)


def test_index_key_is_a_layer_norm_with_its_own_eps() -> None:
    """The eps decides nothing but choices, so it is looked at where it shows: rows with a variance of its own size."""
    row = np.array([[5.001, 4.999]])
    np.testing.assert_allclose(m.index_key(row, np.array([1.0, 2.0]), np.array([0.0, 3.0])), [[0.5**0.5, 3 - 2 * 0.5**0.5]], rtol=1e-9)


def test_index_scores_against_loops() -> None:
    rng = np.random.default_rng(0)
    qi, wt, keys = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 2)), rng.standard_normal((5, 4))
    scores = m.index_scores(qi, wt, keys)
    for t in range(3):
        for p in range(5):
            expected = sum(wt[t, h] / 2**0.5 * max(qi[t, h] @ keys[p] / 2.0, 0) for h in range(2))
            assert scores[t, p] == pytest.approx(expected, abs=1e-14)


@few
@given(st.lists(st.integers(-2, 2), max_size=40), st.integers(1, 5), st.integers(1, 6), st.data())
def test_selection_against_brute_force_with_ties(levels: list[int], kp: int, kept: int, data: st.DataObject) -> None:
    """Small integer scores: ties at the cut are the rule here, lower pool first."""
    position = data.draw(st.integers(0, len(levels) * kp + kp - 1))
    complete = (position + 1) // kp
    scores = np.array(levels + [9] * kp, dtype=np.float32)
    pools = m.select_pools(scores, position, kept * kp, kp)
    ranked = sorted(range(complete), key=lambda p: (-scores[p], p))
    assert pools.tolist() == sorted(ranked[:kept])

    tokens = m.selected_tokens(pools, position, kp)
    wanted = [j for j in range(position + 1) if j // kp in set(pools.tolist()) or j // kp >= complete]
    assert tokens.tolist() == wanted
    if position + 1 <= kept * kp + kp - 1:
        assert len(tokens) == position + 1
    else:
        assert len(tokens) == kept * kp + (position + 1) % kp


def test_minus_zero_and_zero_scores_tie() -> None:
    assert m.select_pools(np.array([-0.0, 0.0, 0.0, -0.0]), 7, 4, 2).tolist() == [0, 1]


@few
@given(seeds, st.integers(1, 4), st.integers(1, 20))
def test_absorbed_attention_equals_the_expanded_form(seed: int, heads: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    dn, dv, r = 6, 5, 7
    q, latents, kv_b = rng.standard_normal((2, heads, dn)), rng.standard_normal((rows, r)), rng.standard_normal((heads, dn + dv, r))
    selection = [np.sort(rng.permutation(rows)[: rng.integers(1, rows + 1)]) for _ in range(2)]
    got = m.latent_attention(q, latents, kv_b, selection)
    for t in range(2):
        for h in range(heads):
            keys, values = latents[selection[t]] @ kv_b[h, :dn].T, latents[selection[t]] @ kv_b[h, dn:].T
            a = np.exp(keys @ q[t, h] / dn**0.5)
            np.testing.assert_allclose(got[t, h], (a / a.sum()) @ values, atol=1e-12)


@few
@given(seeds, st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), st.integers(1, 4), st.booleans())
def test_expert_choice_against_brute_force_with_ties(seed: int, grouping: tuple[int, int], count: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    n_group, topk_group = grouping
    biased = rng.standard_normal(12)
    if coarse:
        biased = np.round(biased)
    size = 12 // n_group
    strength = [sum(sorted(biased[i * size : (i + 1) * size])[-2:]) for i in range(n_group)]
    kept = sorted(range(n_group), key=lambda i: (-strength[i], i))[:topk_group]
    allowed = [e for e in range(12) if e // size in kept]
    expected = sorted(sorted(allowed, key=lambda e: (-biased[e], e))[:count])
    assert m.choose_experts(biased, count, n_group, topk_group).tolist() == expected


def test_router_weights_are_unbiased_normalised_and_scaled() -> None:
    x, router = np.array([[1.0, -1.0]]), np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    bias = np.array([0.0, 5.0, 0.0])
    experts, weights = m.route(x, router, bias, 2, 1, 1, True, 2.5)
    s = m.sigmoid(np.array([2.0, -2.0]))
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights[0], 2.5 * s / s.sum())
    _, raw = m.route(x, router, bias, 2, 1, 1, False, 2.5)
    np.testing.assert_allclose(raw[0], 2.5 * s)


@few
@given(seeds, st.integers(1, 4), st.integers(1, 20))
def test_sinkhorn_ends_on_columns(seed: int, n: int, iterations: int) -> None:
    mix = m.sinkhorn(np.random.default_rng(seed).standard_normal((2, n, n)), 1e-6, iterations)
    np.testing.assert_allclose(mix.sum(axis=-2), 1, atol=1e-5)
    assert (mix > 0).all()
    if iterations == 20:
        np.testing.assert_allclose(mix.sum(axis=-1), 1, atol=1e-2)


def test_hyper_connection_by_hand() -> None:
    """With fn = 0 the maps are those of base alone; streams are told apart by their index."""
    base = np.array([0.0, 100.0, 0.0, -100.0, 0.0, 100.0, 100.0, 0.0])
    streams = np.arange(6.0).reshape(1, 2, 3)
    post, mix, x = m.hc_collapse(streams, np.zeros((8, 6)), base, np.ones(3), 1e-5, 0.0, 1)
    np.testing.assert_allclose(post, [[1.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(mix[0], [[0.0, 1.0], [1.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(x[0], 0.5 * streams[0, 0] + streams[0, 1])
    lopsided = np.array([[[0.0, 1.0], [0.0, 0.0]]])
    np.testing.assert_allclose(m.hc_expand(streams, post, lopsided, np.ones((1, 3)))[0], [np.ones(3), streams[0, 0]], atol=1e-12)


def test_clamp_cuts_the_gate_above_only_and_comes_before_silu() -> None:
    gate, up = np.array([-9.0, 9.0, 9.0]), np.array([9.0, -9.0, 1.0])
    np.testing.assert_allclose(m.clamped_swiglu(gate, up, 2.0), [m.silu(np.array(-9.0)) * 2, m.silu(np.array(2.0)) * -2, m.silu(np.array(2.0))])


# --- the network -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FEATURES, ids=lambda name: name.split(",")[0])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(seed=5, **FEATURES[request.param])


@pytest.fixture(scope="module")
def reference(model: TinyModel) -> ReferenceModel:
    return model.reference()


def test_any_cut_gives_the_same_logits_and_state(reference: ReferenceModel) -> None:
    ids = random_ids(reference.config, 61, 1)
    whole_state = reference.new_state()
    whole = reference.forward(ids, whole_state)
    rng = np.random.default_rng(3)
    for cuts in ([], list(range(1, 61)), sorted(rng.choice(60, 9, replace=False) + 1)):
        state = reference.new_state()
        parts = [reference.forward(part, state) for part in np.split(ids, cuts)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-11)
        assert state.length == 61
        for got, expected in zip(state.layers, whole_state.layers, strict=True):
            names = ("s", "window") if isinstance(got, KdaState) else ("latents", "pool_keys", "raw_k", "raw_e")
            for name in names:
                np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=0, atol=1e-11, err_msg=name)


def test_interleaved_sequences_do_not_touch_each_other(reference: ReferenceModel) -> None:
    sequences = [random_ids(reference.config, 40, seed) for seed in (1, 2)]
    alone = [reference.forward(ids, reference.new_state()) for ids in sequences]
    states = [reference.new_state() for _ in sequences]
    parts: list[list[Rows]] = [[], []]
    for start in range(0, 40, 8):
        for ids, state, got in zip(sequences, states, parts, strict=True):
            got.append(reference.forward(ids[start : start + 8], state))
    for got, expected in zip(parts, alone, strict=True):
        np.testing.assert_allclose(np.concatenate(got), expected, rtol=0, atol=1e-11)


def test_state_holds_what_the_spec_says_and_no_more(reference: ReferenceModel) -> None:
    c = reference.config
    state = reference.new_state()
    reference.forward(random_ids(c, 23), state)
    for index, layer in enumerate(state.layers):
        if c.layer_kinds[index] == KDA:
            assert isinstance(layer, KdaState)
            assert layer.s.shape == (c.kda_heads, c.kda_head_dim, c.kda_head_dim) and layer.window.shape == (c.conv_width - 1, 3 * c.kda_width)
            continue
        assert isinstance(layer, DsaState) and layer.latents.shape == (23, c.kv_lora_rank)
        full = reference.layers[index].attention.indexer is not None
        assert len(layer.pool_keys) == (23 // c.index_kpool if full else 0)
        assert len(layer.raw_k) == len(layer.raw_e) == (23 % c.index_kpool if full else 0)


def test_rows_drop_tokens_only_beyond_the_budget(reference: ReferenceModel) -> None:
    c = reference.config
    _, choices = reference.forward_recording(random_ids(c, 60), reference.new_state())
    for kind, made in zip(c.layer_kinds, choices, strict=True):
        assert (made.tokens is not None) == (kind == DSA)
        for t, tokens in enumerate(made.tokens or ()):
            dense = t + 1 <= c.index_topk + c.index_kpool - 1
            assert len(tokens) == (t + 1 if dense else c.index_topk + (t + 1) % c.index_kpool)


def test_float32_stays_float32_and_close(model: TinyModel, reference: ReferenceModel) -> None:
    ids = random_ids(model.config, 50)
    narrow = model.reference(np.float32)
    got = narrow.forward(ids, narrow.new_state())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference.forward(ids, reference.new_state()), rtol=0, atol=1e-4)


def test_shared_layer_reads_the_selection_above() -> None:
    reference = tiny_model(seed=5, **FEATURES["shared indexer"]).reference()
    _, choices = reference.forward_recording(random_ids(TINY, 40), reference.new_state())
    assert choices[5].tokens is choices[4].tokens and choices[5].pools is None and choices[4].pools is not None
    streams = reference.embed([1, 2])
    with pytest.raises(ValueError, match="needs the selection"):
        reference.layer_forward(5, streams, reference.new_layer_state(5), 0)


def test_greedy_continues_one_token_at_a_time() -> None:
    reference = tiny_model(seed=5).reference()
    ids = random_ids(TINY, 20)
    continued = reference.greedy(ids, 6)
    again = reference.forward(np.concatenate([ids, continued]), reference.new_state()).argmax(axis=1)
    assert again[19:25].tolist() == continued


@pytest.mark.parametrize("bad", [[-1], [3, TINY.vocab_size]])
def test_ids_outside_the_vocabulary_are_refused(bad: list[int]) -> None:
    reference = tiny_model(seed=5).reference()
    with pytest.raises(ValueError, match=r"the vocabulary has 0\.\.95"):
        reference.forward(bad, reference.new_state())


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int8", "int4"])
def test_stored_formats_answer_as_their_dequantised_float32(weight_format: MatrixFormat) -> None:
    """Formats differ only in how a matrix is read; the network of the rounded values is the same one."""
    model = tiny_model(seed=5, weight_format=weight_format, hidden_size=136, num_layers=2, layer_kinds=(KDA, DSA), mlp_kinds=TINY.mlp_kinds[:2])
    plain = replace(
        model, experts={key: replace(e, **{n: as_matrix(dequantise(getattr(e, n))) for n in ("gate", "up", "down")}) for key, e in model.experts.items()}
    )
    ids = random_ids(model.config, 20)
    stored, widened = model.reference(), plain.reference()
    got = stored.forward(ids, stored.new_state())
    assert np.array_equal(got, widened.forward(ids, widened.new_state()))

    values = np.random.default_rng(0).standard_normal((150, 136)).astype(np.float32)
    off = np.abs(dequantise(as_matrix(values, weight_format)) - values).max()
    assert 0 < off < {"bf16": 0.01, "fp8": 0.15, "int8": 0.02, "int4": 0.4}[weight_format]
