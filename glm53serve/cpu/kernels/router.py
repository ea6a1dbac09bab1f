"""Kernels of the router (model spec 6): which experts a row chooses, and assignments sorted by expert. Strides are in bytes."""

from __future__ import annotations

import numpy as np
from numba import cfunc

from glm53serve.cpu.kernels import simd as s
from glm53serve.cpu.kernels.fields import offsets
from glm53serve.cpu.kernels.rows import sigmoid
from glm53serve.cpu.kernels.target import CFUNC
from glm53serve.cpu.kernels.team import KERNEL

ROUTE_FIELDS = (
    "count", "out_at", "logits", "logit_stride", "bias", "experts", "k", "groups", "kept", "normalise", "scaling", "chosen", "weights", "work",
)  # fmt: skip
"""chosen int64 [rows, k] ascending, weights float32 [rows, k]; work: float32 [rows, 2 * experts + groups] scratch."""
_R_COUNT, _R_OUT, _R_Y, _R_YS, _R_BIAS, _R_E, _R_K, _R_GROUPS, _R_KEPT, _R_NORM, _R_SCALING, _R_CHOSEN, _R_WEIGHTS, _R_WORK = offsets(ROUTE_FIELDS)
_WORST = np.finfo(np.float32).min


@cfunc(KERNEL, **CFUNC)
def route(a, chunk, chunks):
    """Experts and weights of rows from router logits; ties go to the lower index, NaN is less than any number."""
    rows, first = s.ldi(s.ldi(a + _R_COUNT)), s.ldi(s.ldi(a + _R_OUT))
    experts, k, groups = s.ldi(a + _R_E), s.ldi(a + _R_K), s.ldi(a + _R_GROUPS)
    bias = s.ldi(a + _R_BIAS)
    lowest = np.float32(-np.inf)
    for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        y = s.ldi(a + _R_Y) + row * s.ldi(a + _R_YS)
        score = s.ldi(a + _R_WORK) + row * 4 * (2 * experts + groups)
        biased, group_score = score + 4 * experts, score + 8 * experts
        for e in range(experts):
            p = sigmoid(s.ldf(y + 4 * e))
            s.stf(score + 4 * e, p)
            value = p + s.ldf(bias + 4 * e)
            if not value > lowest:  # NaN: a model that overflows still names experts that there are
                value = _WORST
            s.stf(biased + 4 * e, value)
        if groups > 1:
            size = experts // groups
            for g in range(groups):
                top, second = lowest, lowest
                for e in range(g * size, (g + 1) * size):
                    value = s.ldf(biased + 4 * e)
                    if value > top:
                        top, second = value, top
                    elif value > second:
                        second = value
                s.stf(group_score + 4 * g, top + second)
            for g in range(groups):
                mine, better = s.ldf(group_score + 4 * g), 0
                for h in range(groups):
                    other = s.ldf(group_score + 4 * h)
                    if other > mine or (other == mine and h < g):
                        better += 1
                if better >= s.ldi(a + _R_KEPT):
                    for e in range(g * size, (g + 1) * size):
                        s.stf(biased + 4 * e, lowest)
        chosen, weights = s.ldi(a + _R_CHOSEN) + (first + row) * 8 * k, s.ldi(a + _R_WEIGHTS) + (first + row) * 4 * k
        for i in range(k):
            top, at = lowest, -1
            for e in range(experts):
                value = s.ldf(biased + 4 * e)
                if value > top:
                    top, at = value, e
            s.stf(biased + 4 * at, lowest)
            j = i
            while j > 0 and s.ldi(chosen + 8 * (j - 1)) > at:
                s.sti(chosen + 8 * j, s.ldi(chosen + 8 * (j - 1)))
                j -= 1
            s.sti(chosen + 8 * j, at)
        total = np.float32(1e-20)
        for i in range(k):
            total += s.ldf(score + 4 * s.ldi(chosen + 8 * i))
        factor = s.ldf(a + _R_SCALING)
        if s.ldi(a + _R_NORM) != 0:
            factor = factor / total
        for i in range(k):
            s.stf(weights + 4 * i, s.ldf(score + 4 * s.ldi(chosen + 8 * i)) * factor)


PLAN_FIELDS = ("count", "k", "experts", "chosen", "weights", "starts", "order_rows", "order_weights")
"""Assignments sorted by expert, then row: starts int64 [experts + 1], rows int64, weights float32."""
_P_COUNT, _P_K, _P_E, _P_CHOSEN, _P_WEIGHTS, _P_STARTS, _P_ROWS, _P_OW = offsets(PLAN_FIELDS)


@cfunc(KERNEL, **CFUNC)
def plan(a, chunk, chunks):
    """Who needs which expert (one chunk only)."""
    rows, k, experts = s.ldi(s.ldi(a + _P_COUNT)), s.ldi(a + _P_K), s.ldi(a + _P_E)
    chosen, starts = s.ldi(a + _P_CHOSEN), s.ldi(a + _P_STARTS)
    for e in range(experts + 1):
        s.sti(starts + 8 * e, 0)
    for i in range(rows * k):
        cell = starts + 8 * (s.ldi(chosen + 8 * i) + 1)
        s.sti(cell, s.ldi(cell) + 1)
    for e in range(experts):
        s.sti(starts + 8 * (e + 1), s.ldi(starts + 8 * (e + 1)) + s.ldi(starts + 8 * e))
    for i in range(rows * k - 1, -1, -1):
        cell = starts + 8 * (s.ldi(chosen + 8 * i) + 1)
        at = s.ldi(cell) - 1
        s.sti(cell, at)
        s.sti(s.ldi(a + _P_ROWS) + 8 * at, i // k)
        s.stf(s.ldi(a + _P_OW) + 4 * at, s.ldf(s.ldi(a + _P_WEIGHTS) + 4 * i))
    for e in range(experts):
        s.sti(starts + 8 * e, s.ldi(starts + 8 * (e + 1)))
    s.sti(starts + 8 * experts, rows * k)
