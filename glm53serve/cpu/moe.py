"""The feed-forward half of a layer on the CPU: dense, or routed experts plus the shared one (model spec 6)."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.linear import Linear, multiply
from glm53serve.engine.seam import Halt, Halted, Meter
from glm53serve.experts.supply import supply_of
from glm53serve.model import reference_math as m
from glm53serve.model.config import ModelConfig
from glm53serve.model.weights import ExpertSource, FfnWeights, MoeWeights

F32 = NDArray[np.float32]


def feed_forward(x: F32, w: FfnWeights, limit: float) -> F32:
    """Clamped SwiGLU over matrices as stored: rows x [rows, H] -> [rows, H]."""
    return multiply(m.clamped_swiglu(multiply(x, w.gate), multiply(x, w.up), limit), w.down)


class DenseFfn:
    """A dense feed-forward (or a shared expert), gate and up merged."""

    def __init__(self, config: ModelConfig, w: FfnWeights, bits: int) -> None:
        self.limit = config.swiglu_limit
        self.gate_up = Linear([w.gate, w.up], bits)
        self.down = Linear([w.down], bits)

    def __call__(self, x: F32) -> F32:
        """Rows x [rows, H] -> y [rows, H]."""
        gate, up = self.gate_up.split(x)
        return self.down(m.clamped_swiglu(gate, up, self.limit))


class MoeLayer:
    """The experts of one layer: choose, fetch one by one, add up in ascending order of the expert."""

    def __init__(self, config: ModelConfig, index: int, w: MoeWeights, experts: ExpertSource, meter: Meter, bits: int) -> None:
        self.config = config
        self.index = index
        self.router = w.router
        self.bias = w.bias
        self.shared = DenseFfn(config, w.shared, bits) if w.shared is not None else None
        self.experts = supply_of(experts, config.n_routed_experts)
        self.meter = meter

    def route(self, x: F32) -> tuple[NDArray[np.int64], F32]:
        """Experts [rows, k], ascending, and weights [rows, k] of normalised rows x [rows, H]; a row's choice does not depend on the others."""
        c = self.config
        chosen = np.empty((len(x), c.num_experts_per_tok), np.int64)
        weights = np.empty((len(x), c.num_experts_per_tok), np.float32)
        for row in range(len(x)):
            one = slice(row, row + 1)
            chosen[one], weights[one] = m.route(
                x[one],
                self.router,
                self.bias,
                c.num_experts_per_tok,
                c.n_group,
                c.topk_group,
                c.norm_topk_prob,
                c.routed_scaling_factor,
            )
        return chosen, weights

    def __call__(self, x: F32, chosen: NDArray[np.int64], weights: F32, halt: Halt) -> F32:
        """Sum of each row's experts and the shared one -> y [rows, H]. Each expert is fetched once. Raises Halted between experts."""
        y = np.zeros_like(x)
        experts, counts = np.unique(chosen, return_counts=True)
        with self.experts.need(self.index, experts, counts, len(x), halt, True) as need:
            try:
                for ready in chain.from_iterable(need):
                    if ready.expert != experts[0] and halt():
                        raise Halted(self.index)
                    rows, slots = np.nonzero(chosen == ready.expert)
                    y[rows] += weights[rows, slots][:, None] * feed_forward(x[rows], ready.weights, self.config.swiglu_limit)
            finally:
                self.meter.uses += need.wanted
                self.meter.found += need.found
                self.meter.disk += need.blocked
        return y if self.shared is None else y + self.shared(x)
