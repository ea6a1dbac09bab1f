"""Numerical traps (model spec 10): the reference broken in one place must miss the goldens, by about as much as that trap is known to cost.

Most traps change tokens. Some move logits by less than 1e-4, which no text shows: only comparing values in float64 finds those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from goldens import golden, golden_reference
from pytest import MonkeyPatch

from glm53serve.model import reference as network
from glm53serve.model import reference_math as m
from glm53serve.model.reference import ReferenceModel
from glm53serve.model.reference_math import Array, IntArray
from glm53serve.model.weights import Matrix

Break = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Trap:
    """A wrong choice, how to make it, the size of the largest logit change it causes, within a factor of `spread`, and where it shows.

    Most traps change a few experts or pools and then cost a few units whatever the model; those that only move values vary more.
    """

    wrong: str
    make: Break
    change: float
    golden: str = "nested-f32"
    chunk: int = 4096
    spread: float = 8


def swap(name: str, wrong: Callable[..., Any]) -> Break:
    """Replace a function of the formulas by wrong(right one, *arguments)."""
    right = getattr(m, name)
    return lambda patch: patch.setattr(m, name, lambda *args: wrong(right, *args))


def swap_method(name: str, wrong: Callable[..., Any]) -> Break:
    """Replace a method of the network by wrong(right one, self, *arguments)."""
    right = getattr(ReferenceModel, name)
    return lambda patch: patch.setattr(ReferenceModel, name, lambda *args: wrong(right, *args))


def constant(name: str, value: float) -> Break:
    """Replace a constant of the formulas."""
    return lambda patch: patch.setattr(m, name, value)


def softmax_over_first_index(right: Any, logits: Array, eps: float, iterations: int) -> Array:
    with MonkeyPatch.context() as patch:
        patch.setattr(m, "softmax", lambda x, axis, plain=m.softmax: plain(x, -2))
        return right(logits, eps, iterations)


def collapse_without_pre_eps(right: Any, streams: Array, fn: Array, base: Array, scale: Array, norm_eps: float, hc_eps: float, n: int) -> Any:
    post, mix, x = right(streams, fn, base, scale, norm_eps, hc_eps, n)
    return post, mix, x - hc_eps * streams.sum(axis=1)


def collapse_with_half_post(right: Any, *args: Any) -> Any:
    post, mix, x = right(*args)
    return post / 2, mix, x


def late_dt_bias(right: Any, low_rank: Array, dt_bias: Array, a_log: Array, bound: float) -> Array:
    return right(low_rank + dt_bias / np.repeat(np.exp(a_log), len(dt_bias) // len(a_log)), 0 * dt_bias, a_log, bound)


def decay_after_update(right: Any, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    out = np.empty_like(v)
    for t in range(len(q)):
        rows = slice(t, t + 1)
        _, state = right(q[rows], k[rows], v[rows], 0 * g[rows], beta[rows], state)
        state = state * np.exp(g[t])[:, :, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def state_in_bf16(right: Any, *args: Array) -> tuple[Array, Array]:
    *rows, state = args
    outs = []
    for t in range(len(rows[0])):
        out, state = right(*(x[t : t + 1] for x in rows), state)
        bits = state.astype(np.float32).view(np.uint32)
        state = ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(out.dtype)
        outs.append(out)
    return np.concatenate(outs), state


def qkv_without_silu(right: Any, *args: Any) -> Any:
    with MonkeyPatch.context() as patch:
        patch.setattr(m, "silu", lambda x: x)
        return right(*args)


def qkv_with_plain_v(right: Any, conv_q: Array, conv_k: Array, conv_v: Array, heads: int) -> Any:
    q, k, v = right(conv_q, conv_k, conv_v, heads)
    return q, k, conv_v.reshape(v.shape)


def qkv_with_unscaled_q(right: Any, *args: Any) -> Any:
    q, k, v = right(*args)
    return q * q.shape[-1] ** 0.5, k, v


def silu_gate(right: Any, o: Array, gate: Array, weight: Array, eps: float) -> Array:
    return right(o, gate, weight, eps) * gate


def pools_over_channels(right: Any, k: Array, e: Array, ape: Array) -> Array:
    shape = (-1, *ape.shape)
    return np.einsum("pjc,pjc->pc", m.softmax(e.reshape(shape) + ape, -1), k.reshape(shape))


def scores_without_relu(right: Any, qi: Array, weights: Array, keys: Array) -> Array:
    return np.einsum("th,thc,pc->tp", weights, qi, keys)


def tail_dropped(right: Any, pools: IntArray, position: int, kp: int) -> IntArray:
    tokens = right(pools, position, kp)
    return tokens[: len(pools) * kp] if len(pools) else tokens


def index_query_before_norm(right: Any, self: ReferenceModel, x: Array, qr: Array, w: Any, *args: Any) -> Any:
    return right(self, x, self._times(x, w.q_a), w, *args)


def raw_rows_lost(right: Any, *args: Any) -> Any:
    state, choices = right(*args)
    return replace(state, raw_k=0 * state.raw_k, raw_e=0 * state.raw_e), choices


def biased_weights(right: Any, x: Array, router: Array, bias: Array, *args: Any) -> Any:
    experts, _ = right(x, router, bias, *args)
    weights = np.take_along_axis(m.sigmoid(x @ router.T) + bias, experts, axis=1)
    return experts, args[-1] * weights / weights.sum(axis=1, keepdims=True)


def shared_expert_scaled(right: Any, self: ReferenceModel, x: Array, index: int, w: Any) -> Any:
    y, experts, weights = right(self, x, index, w)
    return y + (self.config.routed_scaling_factor - 1) * self.ffn(x, w.shared), experts, weights


def groups_by_best_expert(right: Any, biased: Array, count: int, n_group: int, topk_group: int) -> IntArray:
    groups = biased.reshape(n_group, -1)
    kept = m.best(groups.max(axis=1), topk_group)
    masked = np.full_like(groups, -np.inf)
    masked[kept] = groups[kept]
    return m.best(masked.ravel(), count)


def rotated(right: Any, q: Array, latents: Array, kv_b: Array, selection: list[IntArray]) -> Array:
    """Half-split rotation of queries and latent rows by position (full prefill only: row t is position t)."""

    def turn(x: Array) -> Array:
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        angle = angle.reshape(len(x), *[1] * (x.ndim - 2), half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    return right(turn(q), turn(latents), kv_b, selection)


def matrices(wrong: Callable[[Matrix], Matrix]) -> Break:
    """Every stored matrix passes through `wrong` before it is read."""
    right = network.dequantise
    return lambda patch: patch.setattr(network, "dequantise", lambda w: right(wrong(w)))


def divided_scale(w: Matrix) -> Matrix:
    return replace(w, scale=1 / w.scale) if w.format == "fp8" else w


def high_nibble_first(w: Matrix) -> Matrix:
    return replace(w, data=w.data >> 4 | w.data << 4) if w.format == "int4" else w


TRAPS = (
    Trap("streams mixed without transposing", swap("hc_expand", lambda f, x, post, mix, y: f(x, post, mix.swapaxes(1, 2), y)), 2.2),
    Trap("softmax of the stream mix over the first index", swap("sinkhorn", softmax_over_first_index), 1e-3, spread=20),
    Trap("one Sinkhorn round", swap("sinkhorn", lambda f, logits, eps, _: f(logits, eps, 1)), 2.1),
    Trap("hyper-connection norm with hc_eps", swap("hc_collapse", lambda f, *a: f(*a[:4], a[5], *a[5:])), 2.2e-5),
    Trap("post without its factor 2", swap("hc_collapse", collapse_with_half_post), 4),
    Trap("pre without hc_eps", swap("hc_collapse", collapse_without_pre_eps), 6.4e-6),
    Trap("streams summed at the end", swap("final_hidden", lambda f, x, *a: f(x * x.shape[1], *a)), 4.9e-6),
    Trap("softplus gate where a bound is given", swap("kda_log_decay", lambda f, z, dt, a, _: f(z, dt, a, None)), 5),
    Trap("gate clamped at the bound", swap("kda_log_decay", lambda f, z, dt, a, bound: np.maximum(f(z, dt, a, None), bound)), 5),
    Trap("dt_bias after the speed", swap("kda_log_decay", late_dt_bias), 4.4),
    Trap("A_log negated", swap("kda_log_decay", lambda f, z, dt, a, bound: f(z, dt, -a, bound)), 5.2),
    Trap("l2 eps as a floor", swap("l2", lambda f, x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), m.L2_EPS)), 1.9e-6),
    Trap("l2 eps 1e-5", constant("L2_EPS", 1e-5), 3.2e-5),
    Trap("query not scaled", swap("kda_qkv", qkv_with_unscaled_q), 2.6),
    Trap("decay after the update", swap("kda_recurrent", decay_after_update), 4.3),
    Trap("KDA state kept in bf16", swap("kda_recurrent", state_in_bf16), 0.2, spread=20),
    Trap("output gate with SiLU", swap("kda_gated_norm", silu_gate), 5),
    Trap("no SiLU after the convolution", swap("kda_qkv", qkv_without_silu), 5.3),
    Trap("SiLU on q and k only", swap("kda_qkv", qkv_with_plain_v), 4.8),
    Trap("taps reversed", swap("short_conv", lambda f, raw, window, taps: f(raw, window, taps[:, ::-1])), 5.4),
    Trap("window lost between chunks", swap("next_window", lambda f, raw, window: 0 * window), 4.9, chunk=7),
    Trap("pools as plain means", swap("pool_keys", lambda f, k, e, ape: f(k, 0 * e, 0 * ape)), 3.1),
    Trap("pools without ape", swap("pool_keys", lambda f, k, e, ape: f(k, e, 0 * ape)), 2.2),
    Trap("pool softmax over channels", swap("pool_keys", pools_over_channels), 3),
    Trap("raw rows of the incomplete pool lost between chunks", swap_method("select", raw_rows_lost), 2.5, chunk=7),
    Trap("index keys by RMS norm", swap("index_key", lambda f, x, w, b: m.rms(x, w, m.INDEX_NORM_EPS) + b), 2.6),
    Trap("index scores without ReLU", swap("index_scores", scores_without_relu), 2.9),
    Trap("tail of the incomplete pool dropped", swap("selected_tokens", tail_dropped), 3.3),
    Trap("index query before the latent norm", swap_method("select", index_query_before_norm), 2.1),
    Trap("no selection", swap("select_pools", lambda f, scores, t, topk, kp: np.arange((t + 1) // kp)), 2.5),
    Trap("router weights from biased scores", swap("route", biased_weights), 2.6),
    Trap("router bias ignored", swap("route", lambda f, x, router, bias, *a: f(x, router, 0 * bias, *a)), 3.4),
    Trap("no routed scaling", swap("route", lambda f, *a: f(*a[:-1], 1.0)), 3.1),
    Trap("weights not normalised", swap("route", lambda f, *a: f(*a[:6], False, a[7])), 4.1),
    Trap("shared expert scaled", swap_method("moe", shared_expert_scaled), 3.6),
    Trap("no clamp", swap("clamped_swiglu", lambda f, gate, up, limit: m.silu(gate) * up), 3.9),
    Trap("gate clamped on both sides", swap("clamped_swiglu", lambda f, gate, up, limit: f(np.maximum(gate, -limit), up, limit)), 1.8),
    Trap(
        "clamp after SiLU",
        swap("clamped_swiglu", lambda f, gate, up, limit: np.minimum(m.silu(gate), limit) * np.clip(up, -limit, limit)),
        2.9,
    ),
    Trap("rms_norm_eps 1e-6", swap("rms", lambda f, x, w, eps: f(x, w, 1e-6)), 2.4),
    Trap(
        "attention scale of the latent rank", swap("latent_attention", lambda f, q, lat, kv, sel: f(q * (q.shape[2] / lat.shape[1]) ** 0.5, lat, kv, sel)), 1.7
    ),
    Trap("rotary positions", swap("latent_attention", rotated), 3),
    Trap("groups by their best expert", swap("choose_experts", groups_by_best_expert), 3, "grouped-bf16"),
    Trap("groups ignored", swap("choose_experts", lambda f, biased, count, *_: f(biased, count, 1, 1)), 3, "grouped-bf16"),
    Trap("weights normalised against the config", swap("route", lambda f, *a: f(*a[:6], True, a[7])), 3, "grouped-bf16"),
    Trap("bounded gate where none is given", swap("kda_log_decay", lambda f, z, dt, a, _: f(z, dt, a, -5.0)), 9, "flat-bf16"),
    Trap("fp8 scales divided", matrices(divided_scale), 5, "ragged-fp8"),
    Trap("high nibble first", matrices(high_nibble_first), 5, "container-int4"),
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.wrong)
def test_trap_shows_against_the_golden(trap: Trap, monkeypatch: MonkeyPatch) -> None:
    change = miss(trap, monkeypatch)
    assert trap.change / trap.spread < change < trap.change * trap.spread


def miss(trap: Trap, monkeypatch: MonkeyPatch) -> float:
    """Largest float64 logit difference from the golden with the trap in place."""
    data = golden(trap.golden)
    kept = golden_reference(trap.golden, np.float64)
    monkeypatch.setattr(kept, "_dense", {})
    trap.make(monkeypatch)
    state = kept.new_state()
    parts = [kept.forward(data.ids[start : start + trap.chunk], state) for start in range(0, len(data.ids), trap.chunk)]
    return float(np.abs(np.concatenate(parts) - data.logits).max())


def test_row_first_sinkhorn_is_harmless(monkeypatch: MonkeyPatch) -> None:
    """Rows of a softmax already sum to one, so starting with a row step changes nothing that can be seen."""

    def rows_first(right: Any, logits: Array, eps: float, iterations: int) -> Array:
        mix = m.softmax(logits, -1) + eps
        for _ in range(iterations):
            mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
            mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
        return mix

    assert miss(Trap("", swap("sinkhorn", rows_first), 0), monkeypatch) < 1e-10
