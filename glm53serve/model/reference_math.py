"""The network's formulas in plain NumPy, one function per section of the model spec.

Every function takes arrays of one float dtype and answers in it; float32 and float64 both work. Nothing here knows about weights on
disk, layers or slots: `reference.py` wires these into the network, and the kernels of the backends are compared with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]

L2_EPS = 1e-6
INDEX_NORM_EPS = 1e-6


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1, small) / (1 + small)
    return result


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Array, axis: int) -> Array:
    """exp(x) over its sum along `axis`."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    result: Array = e / e.sum(axis=axis, keepdims=True)
    return result


def rms(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last axis (model spec, notation)."""
    result: Array = weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))
    return result


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Layer norm with bias over the last axis, population variance (model spec, notation)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    result: Array = weight * centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) + bias
    return result


def l2(x: Array) -> Array:
    """x over its Euclidean length, eps inside the root (model spec, notation)."""
    result: Array = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS)
    return result


def best(values: Array, count: int) -> IntArray:
    """Indices, ascending, of the `count` largest of values [n]; of equal ones the lower index first (model spec 5.3, 6)."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


# --- model spec 3: hyper-connections ---------------------------------------------------------------------------------------------


def sinkhorn(logits: Array, eps: float, iterations: int) -> Array:
    """Stream mixing matrices from logits [..., n, n]: row softmax, then column and row steps, a column step last (model spec 3)."""
    mix: Array = softmax(logits, axis=-1) + eps
    mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
        mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    return mix


def hc_collapse(streams: Array, fn: Array, base: Array, scale: Array, norm_eps: float, hc_eps: float, iterations: int) -> tuple[Array, Array, Array]:
    """Streams [T, n, H] -> post [T, n], mix [T, n, n] and the sub-layer's input x [T, H] (model spec 3).

    fn [(2+n)n, nH], base [(2+n)n], scale [3].
    """
    tokens, n, _ = streams.shape
    flat = streams.reshape(tokens, -1)
    flat = flat / np.sqrt(np.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    y = flat @ fn.T
    pre = sigmoid(y[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * sigmoid(y[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = sinkhorn((y[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(tokens, n, n), hc_eps, iterations)
    return post, mix, np.einsum("tj,tjh->th", pre, streams)


def hc_expand(streams: Array, post: Array, mix: Array, y: Array) -> Array:
    """The sub-layer's output y [T, H] put back into the streams [T, n, H]; mix is used transposed (model spec 3)."""
    result: Array = post[:, :, None] * y[:, None, :] + np.einsum("tjk,tjh->tkh", mix, streams)
    return result


# --- model spec 4: KDA -----------------------------------------------------------------------------------------------------------


def short_conv(raw: Array, window: Array, taps: Array) -> Array:
    """Causal depthwise convolution, no activation (model spec 4.1). raw [T, P], window [K-1, P] (raw rows before), taps [P, K] -> [T, P]."""
    rows = np.concatenate([window, raw])
    out = np.zeros_like(raw)
    for j in range(taps.shape[1]):
        out += rows[j : j + len(raw)] * taps[:, j]
    return out


def next_window(raw: Array, window: Array) -> Array:
    """The last K-1 raw rows after this call; a call shorter than that keeps old rows (model spec 4.5)."""
    rows = np.concatenate([window, raw])
    return rows[len(rows) - len(window) :]


def kda_qkv(conv_q: Array, conv_k: Array, conv_v: Array, heads: int) -> tuple[Array, Array, Array]:
    """Convolved rows [T, P] -> q, k, v [T, h, d]: SiLU on all, q and k to unit length, q over sqrt(d) (model spec 4.1)."""
    q, k, v = (silu(c).reshape(len(c), heads, -1) for c in (conv_q, conv_k, conv_v))
    return l2(q) * q.shape[-1] ** -0.5, l2(k), v


def kda_log_decay(low_rank: Array, dt_bias: Array, a_log: Array, lower_bound: float | None) -> Array:
    """Log decay per key channel g [T, h, d], never positive (model spec 4.1). low_rank [T, P] = (x f_a^T) f_b^T, dt_bias [P], a_log [h]."""
    z = (low_rank + dt_bias).reshape(len(low_rank), len(a_log), -1)
    speed = np.exp(a_log)[:, None]
    if lower_bound is not None:
        return lower_bound * sigmoid(speed * z)
    return -speed * np.where(z > 20, z, np.log1p(np.exp(np.minimum(z, 20))))


def kda_recurrent(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The delta rule token by token (model spec 4.2). q, k, v, g [T, h, d], beta [T, h], state [h, d_k, d_v] -> o [T, h, d], state."""
    out = np.empty_like(v)
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def kda_chunk(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One chunk of the same rule as matrices, subtracting before every exponential (model spec 4.4). Shapes as `kda_recurrent`."""
    q, k, v, g = (x.swapaxes(0, 1) for x in (q, k, v, g))
    b = beta.T[:, :, None]
    size = q.shape[1]
    total = np.cumsum(g, axis=1)
    earlier = np.tril(np.ones((size, size), dtype=bool))
    gap = np.where(earlier[:, :, None], total[:, :, None] - total[:, None, :], -np.inf)
    decay = np.exp(gap)
    lower = np.tril(b * np.einsum("hic,hjc,hijc->hij", k, k, decay), -1)
    u = b * (v - (k * np.exp(total)) @ state)
    for i in range(1, size):
        u[:, i] -= np.einsum("hj,hjv->hv", lower[:, i, :i], u[:, :i])
    out = (q * np.exp(total)) @ state + np.einsum("hic,hjc,hijc->hij", q, k, decay) @ u
    last = total[:, -1:, :]
    state = np.exp(last).swapaxes(1, 2) * state + (k * np.exp(last - total)).swapaxes(1, 2) @ u
    return out.swapaxes(0, 1), state


def kda_chunked(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, chunk: int = 64) -> tuple[Array, Array]:
    """`kda_chunk` over runs of at most `chunk` tokens (model spec 4.4): equal to `kda_recurrent` up to rounding."""
    outs = [np.empty_like(v[:0])]
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        out, state = kda_chunk(q[part], k[part], v[part], g[part], beta[part], state)
        outs.append(out)
    return np.concatenate(outs), state


def kda_gated_norm(o: Array, gate: Array, weight: Array, eps: float) -> Array:
    """Output norm per head times the sigmoid gate (model spec 4.3). o [T, h, d], gate [T, P] before the sigmoid, weight [d] -> [T, P]."""
    return rms(o, weight, eps).reshape(gate.shape) * sigmoid(gate)


# --- model spec 5: latent attention over indexed pools ---------------------------------------------------------------------------


def index_key(projected: Array, weight: Array, bias: Array) -> Array:
    """Index keys k [T, di] from x wk^T: a layer norm with bias (model spec 5.2)."""
    return layer_norm(projected, weight, bias, INDEX_NORM_EPS)


def pool_keys(k: Array, e: Array, ape: Array) -> Array:
    """Keys of complete pools (model spec 5.2). k, e [n * kp, di], ape [kp, di] -> [n, di]: a softmax over the pool for each channel."""
    kp, width = ape.shape
    k, e = k.reshape(-1, kp, width), e.reshape(-1, kp, width)
    result: Array = np.einsum("pjc,pjc->pc", softmax(e + ape, axis=1), k)
    return result


def index_scores(qi: Array, weights: Array, keys: Array) -> Array:
    """Scores [T, n_p] of pool keys [n_p, di] for index queries qi [T, hi, di]; weights [T, hi] = x weights_proj^T (model spec 5.3)."""
    heads, width = qi.shape[1:]
    dots = np.maximum(np.einsum("thc,pc->thp", qi, keys) * width**-0.5, 0)
    result: Array = np.einsum("th,thp->tp", weights * heads**-0.5, dots)
    return result


def select_pools(scores: Array, position: int, index_topk: int, kp: int) -> IntArray:
    """Pools, ascending, that the query at `position` attends; scores [>= n_p] (model spec 5.3)."""
    complete = (position + 1) // kp
    return best(scores[:complete], index_topk // kp)


def selected_tokens(pools: IntArray, position: int, kp: int) -> IntArray:
    """Tokens of the pools and of the incomplete pool that holds `position`, ascending (model spec 5.3)."""
    tail = np.arange((position + 1) // kp * kp, position + 1)
    return np.concatenate([(pools[:, None] * kp + np.arange(kp)).ravel(), tail])


def latent_attention(q: Array, latents: Array, kv_b: Array, selection: list[IntArray]) -> Array:
    """Attention over selected latent rows, absorbed form (model spec 5.1).

    q [T, nh, dn], latents [n, r], kv_b [nh, dn + dv, r] (keys first), selection[t] = token indices of row t -> o [T, nh, dv].
    """
    dn = q.shape[2]
    absorbed = np.einsum("thd,hdr->thr", q, kv_b[:, :dn]) * dn**-0.5
    mixed = np.empty_like(absorbed)
    for t, tokens in enumerate(selection):
        rows = latents[tokens]
        mixed[t] = softmax(absorbed[t] @ rows.T, axis=-1) @ rows
    result: Array = np.einsum("thr,hvr->thv", mixed, kv_b[:, dn:])
    return result


# --- model spec 6: feed-forward --------------------------------------------------------------------------------------------------


def clamped_swiglu(gate: Array, up: Array, limit: float) -> Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) (model spec, notation)."""
    result: Array = silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
    return result


def ffn(x: Array, gate: Array, up: Array, down: Array, limit: float) -> Array:
    """Clamped SwiGLU feed-forward of rows x [T, H] (model spec 6)."""
    return clamped_swiglu(x @ gate.T, x @ up.T, limit) @ down.T


def choose_experts(biased: Array, count: int, n_group: int, topk_group: int) -> IntArray:
    """The `count` experts, ascending, of one token by biased scores [E], from its best groups only (model spec 6)."""
    if n_group > 1:
        groups = biased.reshape(n_group, -1)
        kept = best(np.sort(groups, axis=1)[:, -2:].sum(axis=1), topk_group)
        masked = np.full_like(groups, -np.inf)
        masked[kept] = groups[kept]
        biased = masked.ravel()
    return best(biased, count)


def route(x: Array, router: Array, bias: Array, count: int, n_group: int, topk_group: int, normalise: bool, scaling: float) -> tuple[IntArray, Array]:
    """Experts [T, k], ascending, and their weights [T, k] for rows x [T, H]; router [E, H], bias [E] (model spec 6)."""
    scores = sigmoid(x @ router.T)
    experts = np.stack([choose_experts(row, count, n_group, topk_group) for row in scores + bias])
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return experts, weights * scaling


# --- model spec 7.1: the end of the network --------------------------------------------------------------------------------------


def final_hidden(streams: Array, norm: Array, eps: float) -> Array:
    """Mean of the streams [T, n, H], then the final norm -> [T, H] (model spec 3, 7.1)."""
    return rms(streams.mean(axis=1), norm, eps)
