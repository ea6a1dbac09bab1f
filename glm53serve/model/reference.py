"""The text network in plain NumPy, any float dtype: the specification that runs. Readability beats speed.

The formulas are in `reference_math`; here they meet weights and state. A sequence's state goes in and comes out of every call, so a
prompt may be cut anywhere and sequences may be interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from glm53serve.model import reference_math as m
from glm53serve.model.config import FULL, KDA, ModelConfig
from glm53serve.model.quant import dequantise
from glm53serve.model.reference_math import Array, IntArray
from glm53serve.model.weights import DsaWeights, ExpertSource, FfnWeights, HyperConnection, KdaWeights, LayerWeights, Matrix, MoeWeights


@dataclass(frozen=True, slots=True)
class KdaState:
    """Of one KDA layer (model spec 4.5): s [h, d, d] and window [K-1, 3P], the last raw rows of q, k, v side by side."""

    s: Array
    window: Array


@dataclass(frozen=True, slots=True)
class DsaState:
    """Of one DSA layer (model spec 5.6): latents [n, r], pool_keys [n // kp, di], raw_k and raw_e [n % kp, di] of the incomplete pool."""

    latents: Array
    pool_keys: Array
    raw_k: Array
    raw_e: Array


LayerState = KdaState | DsaState


@dataclass(slots=True)
class State:
    """One sequence: its number of tokens so far and a state for each layer."""

    length: int
    layers: list[LayerState]


@dataclass(frozen=True, slots=True)
class Choices:
    """What one layer chose for its rows; None where it had nothing to choose.

    tokens[t] = positions attended (DSA), pools[t] = pools selected and scores[t] = scores of its candidates (full indexer),
    experts [T, k] and weights [T, k] (MoE).
    """

    tokens: list[IntArray] | None = None
    pools: list[IntArray] | None = None
    scores: list[Array] | None = None
    experts: IntArray | None = None
    weights: Array | None = None


class ReferenceModel:
    """The network over a checkpoint's weights.

    layer(i) gives the weights of layer i, experts the routed ones. Arrays are widened to `dtype` when first used and kept.
    Token ids outside the vocabulary raise ValueError.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: Callable[[int], LayerWeights],
        experts: ExpertSource,
        embedding: Matrix,
        final_norm: NDArray[np.float32],
        lm_head: Matrix,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.layers = [layer(i) for i in range(config.num_layers)]
        self.final_norm = final_norm
        self.embedding = embedding
        self.lm_head = lm_head
        self.experts = experts
        self._fetched: dict[tuple[int, int], FfnWeights] = {}
        self._dense: dict[int, tuple[Matrix, Array]] = {}

    # --- state -------------------------------------------------------------------------------------------------------------------

    def new_state(self) -> State:
        """The state of an empty sequence."""
        return State(0, [self.new_layer_state(i) for i in range(self.config.num_layers)])

    def new_layer_state(self, index: int) -> LayerState:
        """The state of one layer before the first token (model spec 4.5, 5.6)."""
        c = self.config

        def zeros(*shape: int) -> Array:
            return np.zeros(shape, self.dtype)

        if c.layer_kinds[index] == KDA:
            return KdaState(zeros(c.kda_heads, c.kda_head_dim, c.kda_head_dim), zeros(c.conv_width - 1, 3 * c.kda_width))
        keys = zeros(0, c.index_head_dim)
        return DsaState(zeros(0, c.kv_lora_rank), keys, keys, keys)

    # --- the network -------------------------------------------------------------------------------------------------------------

    def forward(self, ids: ArrayLike, state: State) -> Array:
        """Logits [T, V] of the next tokens `ids` of a sequence; `state` is advanced by them (model spec 0)."""
        return self.forward_recording(ids, state)[0]

    def forward_recording(self, ids: ArrayLike, state: State) -> tuple[Array, list[Choices]]:
        """`forward`, and what every layer chose."""
        streams = self.embed(ids)
        choices: list[Choices] = []
        for index in range(self.config.num_layers):
            above = choices[-1].tokens if choices else None
            streams, state.layers[index], made = self.layer_forward(index, streams, state.layers[index], state.length, above)
            choices.append(made)
        state.length += len(streams)
        return self.logits(streams), choices

    def greedy(self, ids: ArrayLike, count: int) -> list[int]:
        """The `count` most likely tokens after a prompt, one at a time; of equal logits the lowest id (model spec 7.1)."""
        state = self.new_state()
        tokens = [int(np.argmax(self.forward(ids, state)[-1]))]
        while len(tokens) < count:
            tokens.append(int(np.argmax(self.forward([tokens[-1]], state)[-1])))
        return tokens

    def embed(self, ids: ArrayLike) -> Array:
        """Streams [T, n, H] of token ids: every stream is the embedding row (model spec 0)."""
        rows = np.asarray(ids, dtype=np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.config.vocab_size:
            raise ValueError(f"token ids {rows.min()}..{rows.max()}: the vocabulary has 0..{self.config.vocab_size - 1}")
        return np.repeat(self._plain(self.embedding)[rows][:, None, :], self.config.hc_mult, axis=1)

    def logits(self, streams: Array) -> Array:
        """Logits [T, V] of the last layer's streams [T, n, H] (model spec 7.1)."""
        return m.final_hidden(streams, self._vector(self.final_norm), self.config.rms_norm_eps) @ self._plain(self.lm_head).T

    def layer_forward(
        self, index: int, streams: Array, state: LayerState, start: int, above: list[IntArray] | None = None
    ) -> tuple[Array, LayerState, Choices]:
        """One layer over rows at positions start, start + 1, ...: streams [T, n, H] -> streams, its next state, its choices.

        `above` = Choices.tokens of layer index - 1 for the same rows, read by a shared indexer layer (model spec 5.4).
        """
        w, eps = self.layers[index], self.config.rms_norm_eps
        post, mix, x = self._collapse(streams, w.hc_attn)
        x = m.rms(x, self._vector(w.input_norm), eps)
        after: LayerState
        if isinstance(w.attention, KdaWeights):
            assert isinstance(state, KdaState)
            y, after = self.kda(x, w.attention, state)
            choices = Choices()
        else:
            assert isinstance(state, DsaState)
            y, after, choices = self.dsa(x, w.attention, state, start, above if self.config.indexer_kinds[index] != FULL else None)
        streams = m.hc_expand(streams, post, mix, y)

        post, mix, x = self._collapse(streams, w.hc_ffn)
        x = m.rms(x, self._vector(w.post_norm), eps)
        if isinstance(w.ffn, MoeWeights):
            y, experts, weights = self.moe(x, index, w.ffn)
            choices = replace(choices, experts=experts, weights=weights)
        else:
            y = self.ffn(x, w.ffn)
        return m.hc_expand(streams, post, mix, y), after, choices

    def _collapse(self, streams: Array, site: HyperConnection) -> tuple[Array, Array, Array]:
        c = self.config
        parts = (self._vector(site.fn), self._vector(site.base), self._vector(site.scale))
        return m.hc_collapse(streams, *parts, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)

    def kda(self, x: Array, w: KdaWeights, state: KdaState) -> tuple[Array, KdaState]:
        """KDA attention of normalised rows x [T, H] -> y [T, H] and the next state (model spec 4)."""
        c = self.config
        raw = np.concatenate([self._times(x, p) for p in (w.q_proj, w.k_proj, w.v_proj)], axis=1)
        taps = np.concatenate([self._vector(t) for t in (w.q_conv, w.k_conv, w.v_conv)])
        conv_q, conv_k, conv_v = np.split(m.short_conv(raw, state.window, taps), 3, axis=1)
        q, k, v = m.kda_qkv(conv_q, conv_k, conv_v, c.kda_heads)
        low_rank = self._times(self._times(x, w.f_a), w.f_b)
        g = m.kda_log_decay(low_rank, self._vector(w.dt_bias), self._vector(w.a_log).ravel(), c.gate_lower_bound)
        beta = m.sigmoid(self._times(x, w.b_proj))
        o, s = m.kda_recurrent(q, k, v, g, beta, state.s)
        gate = self._times(self._times(x, w.g_a), w.g_b)
        a = m.kda_gated_norm(o, gate, self._vector(w.o_norm), c.rms_norm_eps)
        return self._times(a, w.o_proj), KdaState(s, m.next_window(raw, state.window))

    def dsa(self, x: Array, w: DsaWeights, state: DsaState, start: int, shared: list[IntArray] | None = None) -> tuple[Array, DsaState, Choices]:
        """Latent attention of normalised rows x [T, H] over selected rows -> y [T, H], the next state, the selection (model spec 5).

        `shared`: the selection to use instead of an own one. Raises ValueError when there is neither that nor an indexer.
        """
        c = self.config
        qr = m.rms(self._times(x, w.q_a), self._vector(w.q_a_norm), c.rms_norm_eps)
        q = self._times(qr, w.q_b).reshape(len(x), c.num_heads, c.qk_head_dim)
        rows = m.rms(self._times(x, w.kv_a), self._vector(w.kv_a_norm), c.rms_norm_eps)
        state = replace(state, latents=np.concatenate([state.latents, rows]))
        if shared is not None:
            choices = Choices(tokens=shared)
        else:
            state, choices = self.select(x, qr, w, state, start)
        kv_b = self._plain(w.kv_b).reshape(c.num_heads, c.qk_head_dim + c.v_head_dim, c.kv_lora_rank)
        assert choices.tokens is not None
        o = m.latent_attention(q, state.latents, kv_b, choices.tokens)
        return self._times(o.reshape(len(x), -1), w.o_proj), state, choices

    def select(self, x: Array, qr: Array, w: DsaWeights, state: DsaState, start: int) -> tuple[DsaState, Choices]:
        """The indexer: pool keys of pools completed by rows x, and the tokens each row attends (model spec 5.2, 5.3)."""
        c, i, kp = self.config, w.indexer, self.config.index_kpool
        if i is None:
            raise ValueError("a DSA layer without an indexer needs the selection of the layer before it")
        key = m.index_key(self._times(x, i.wk), self._vector(i.k_norm_weight), self._vector(i.k_norm_bias))
        k = np.concatenate([state.raw_k, key])
        e = np.concatenate([state.raw_e, self._times(x, i.gate)])
        done = len(k) // kp * kp
        keys = np.concatenate([state.pool_keys, m.pool_keys(k[:done], e[:done], self._vector(i.ape))])
        qi = self._times(qr, i.wq_b).reshape(len(x), c.index_n_heads, c.index_head_dim)
        scores = m.index_scores(qi, self._times(x, i.weights_proj), keys)
        positions = range(start, start + len(x))
        pools = [m.select_pools(row, t, c.index_topk, kp) for row, t in zip(scores, positions, strict=True)]
        tokens = [m.selected_tokens(row, t, kp) for row, t in zip(pools, positions, strict=True)]
        candidates = [row[: (t + 1) // kp] for row, t in zip(scores, positions, strict=True)]
        return replace(state, pool_keys=keys, raw_k=k[done:], raw_e=e[done:]), Choices(tokens, pools, candidates)

    def ffn(self, x: Array, w: FfnWeights) -> Array:
        """A dense feed-forward, shared or routed expert (model spec 6)."""
        return m.ffn(x, self._plain(w.gate), self._plain(w.up), self._plain(w.down), self.config.swiglu_limit)

    def moe(self, x: Array, index: int, w: MoeWeights) -> tuple[Array, IntArray, Array]:
        """Routed experts of layer `index` plus the shared one: y [T, H], the experts chosen [T, k] and their weights (model spec 6)."""
        c = self.config
        experts, weights = m.route(
            x,
            self._vector(w.router),
            self._vector(w.bias),
            c.num_experts_per_tok,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )
        y = np.zeros_like(x)
        for expert in np.unique(experts):
            rows, slots = np.nonzero(experts == expert)
            y[rows] += weights[rows, slots][:, None] * self.ffn(x[rows], self._expert(index, int(expert)))
        return (y if w.shared is None else y + self.ffn(x, w.shared)), experts, weights

    # --- weights -----------------------------------------------------------------------------------------------------------------

    def _times(self, x: Array, w: Matrix) -> Array:
        return x @ self._plain(w).T

    def _vector(self, stored: NDArray[np.float32]) -> Array:
        return stored.astype(self.dtype)

    def _plain(self, w: Matrix) -> Array:
        if id(w) not in self._dense:
            self._dense[id(w)] = (w, dequantise(w).astype(self.dtype))
        return self._dense[id(w)][1]

    def _expert(self, layer: int, expert: int) -> FfnWeights:
        if (layer, expert) not in self._fetched:
            self._fetched[layer, expert] = self.experts.expert(layer, expert)
        return self._fetched[layer, expert]
