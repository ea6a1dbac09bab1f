"""What must hold on a device: run on a GPU by the tests in this folder, and on the emulated device by tests/test_cuda_emulated.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinymodel import TinyModel, tiny_model

from glm53serve.cuda.backend import CudaBackend, MakeDevice, load_backend
from glm53serve.cuda.decode import decode_loop
from glm53serve.engine.decode_loop import Commit, DecodeLoop
from glm53serve.engine.seam import Batch, Span, never
from glm53serve.engine.step_device import End, RowPlan
from glm53serve.model.config import DENSE, FULL, SPARSE, ModelConfig
from glm53serve.model.quant import bf16_to_f32, dequantise, f32_to_bf16
from glm53serve.model.weights import F32Array, FfnWeights, LayerWeights, Matrix, MatrixFormat, MoeWeights


@dataclass
class InMemory:
    """A tiny model in the shape `load_backend` reads."""

    model: TinyModel

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def layer(self, index: int) -> LayerWeights:
        return self.model.layer(index)

    def expert(self, layer: int, expert: int) -> FfnWeights:
        return self.model.expert(layer, expert)

    def embedding(self) -> Matrix:
        return self.model.embedding

    def final_norm(self) -> F32Array:
        return self.model.final_norm

    def lm_head(self) -> Matrix:
        return self.model.lm_head


def without_f32(model: TinyModel) -> TinyModel:
    """The same model with its head and routers rounded to bf16, as published models have them."""

    def rounded(values: F32Array) -> F32Array:
        return bf16_to_f32(f32_to_bf16(values))

    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, router=rounded(layer.ffn.router))) if isinstance(layer.ffn, MoeWeights) else layer for layer in model.layers
    )
    head = model.lm_head
    return replace(model, layers=layers, lm_head=Matrix("bf16", head.rows, head.cols, f32_to_bf16(dequantise(head))))


def backend_of(model: TinyModel, make_device: MakeDevice, slots: int = 4, capacity: int = 160, chunk: int = 64, **more: Any) -> CudaBackend:
    """A backend over a tiny model."""
    return load_backend(InMemory(model), slots, capacity, chunk, make_device=make_device, **more)


def logits_in_pieces(backend: CudaBackend, slot: int, ids: NDArray[np.int64], pieces: Sequence[int]) -> NDArray[np.float32]:
    """Logits of every row of a sequence fed in pieces of these sizes through the seam, from an empty slot."""
    backend.layers.reset_slot(slot)
    out, at = [], 0
    for count in pieces:
        streams = backend.head.embed(ids[at : at + count])
        out.append(backend.head.logits(backend.layers.forward(streams, Batch((Span(slot, at, count),)), never)))
        at += count
    assert at == len(ids)
    return np.concatenate(out)


def prefill(backend: CudaBackend, slot: int, ids: NDArray[np.int64]) -> int:
    """Compute a prompt in an empty slot, streams staying on the device; the most likely next token."""
    backend.layers.reset_slot(slot)
    rows = backend.layers.forward_ids(ids, Batch((Span(slot, 0, len(ids)),)), never)
    return int(np.argmax(backend.head.device_logits(1, rows - 1)[0]))


def greedy(backend: CudaBackend, slot: int, ids: NDArray[np.int64], count: int, depth: int = 1) -> list[int]:
    """The `count` most likely tokens after a prompt, by the decode session."""
    first = prefill(backend, slot, ids)
    loop = decode_loop(backend.decoder, depth)
    loop.start(RowPlan(slot, first, len(ids), count - 1, backend.layers.capacity - len(ids)))
    return [first, *[c.token for c in run(loop) if c.token is not None]]


def run(loop: DecodeLoop) -> list[Commit]:
    """Turns until no row is left."""
    commits: list[Commit] = []
    while loop.live_slots or loop.outstanding:
        commits += loop.turn()
    return commits


WIDE_SHAPES: dict[str, dict[str, Any]] = {
    "small": {"qk_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "q_lora_rank": 64, "hidden_size": 96, "kda_head_dim": 32},
    "heads of the real model": {
        "hidden_size": 256, "num_heads": 64, "qk_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 512, "kda_heads": 3, "kda_head_dim": 128,
        "index_topk": 64, "index_head_dim": 32,
    },
    "odd": {
        "hidden_size": 320, "num_heads": 40, "qk_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 192, "kda_heads": 9, "kda_head_dim": 48,
        "index_topk": 96,
    },
}  # fmt: skip
"""Overrides of TINY in whose sizes the prompt kernels of wide models can be run."""


def wide_model(name: str, kinds: tuple[str, ...], expert_format: MatrixFormat = "int4") -> TinyModel:
    """A model of one of these shapes with as many layers as kinds, the last one sparse."""
    count = len(kinds)
    mlps, indexers = (DENSE,) * (count - 1) + (SPARSE,), (FULL,) * count
    shape = {**WIDE_SHAPES[name], "num_layers": count, "layer_kinds": kinds, "mlp_kinds": mlps, "indexer_kinds": indexers}
    return without_f32(tiny_model(seed=3, weight_format="bf16", expert_format=expert_format, **shape))


@dataclass
class Churn:
    """A random schedule of admissions, stops and cancels, the same for every mode it is run in.

    Cancels are aimed at a number of tokens: the row is cancelled once that many were delivered, so what a row gave must be a prefix
    of what it gives alone, at least that long.
    """

    prompts: list[NDArray[np.int64]]
    limits: list[int]
    cancel_after: list[int | None]
    sampling: list[tuple[float, float, int]]
    stop_ids: tuple[int, ...]

    @staticmethod
    def random(rng: np.random.Generator, vocabulary: int, turns: int, longest: int) -> Churn:
        """`turns` turns with prompts of up to `longest` tokens."""
        prompts = [rng.integers(0, vocabulary, int(rng.integers(1, longest + 1))) for _ in range(turns)]
        cancels = [int(rng.integers(1, 6)) if rng.random() < 0.3 else None for _ in range(turns)]
        sampling = [(0.0, 1.0, 0) if rng.random() < 0.6 else (0.8, float(rng.choice([0.5, 0.9, 1.0])), int(rng.integers(1 << 40))) for _ in range(turns)]
        return Churn(prompts, [int(rng.integers(1, 12)) for _ in range(turns)], cancels, sampling, tuple(int(i) for i in rng.integers(0, vocabulary, 2)))

    def play(self, backend: CudaBackend, depth: int, loop_bound: int, slots: int) -> list[tuple[list[int], End]]:
        """Run it; tokens and end of every turn."""
        loop = decode_loop(backend.decoder, depth, loop_bound)
        waiting = list(range(len(self.prompts)))
        free = list(range(slots))
        holder: dict[int, int] = {}
        tokens: dict[int, list[int]] = {}
        ends: dict[int, End] = {}

        def take(commits: list[Commit]) -> None:
            for c in commits:
                turn = holder[c.slot]
                if c.token is not None:
                    tokens[turn].append(c.token)
                assert c.filled == len(self.prompts[turn]) + len(tokens[turn]) - (1 if c.token is not None else 0)
                if c.end != End.LIVE:
                    ends[turn] = c.end
                elif self.cancel_after[turn] == len(tokens[turn]) - 1:
                    loop.cancel(c.slot)
            free.extend(loop.take_released())

        while waiting or loop.live_slots or loop.outstanding or len(free) < slots:
            while waiting and free and not loop.outstanding:
                turn, slot = waiting.pop(0), free.pop(0)
                first = prefill(backend, slot, self.prompts[turn])
                holder[slot], tokens[turn] = turn, [first]
                heat, top_p, seed = self.sampling[turn]
                room = backend.layers.capacity - len(self.prompts[turn])
                loop.start(RowPlan(slot, first, len(self.prompts[turn]), self.limits[turn], room, self.stop_ids, heat, top_p, seed, counter=1))
            take(loop.turn(admission=bool(waiting and free)))
        return [(tokens[t], ends[t]) for t in range(len(self.prompts))]


def same_turns(some: list[tuple[list[int], End]], other: list[tuple[list[int], End]]) -> bool:
    """Equal turn by turn; of a cancelled turn the common part (where the cancel fell depends on the mode)."""
    for (a, end_a), (b, end_b) in zip(some, other, strict=True):
        if End.CANCELLED in (end_a, end_b):
            n = min(len(a), len(b))
            if a[:n] != b[:n]:
                return False
        elif (a, end_a) != (b, end_b):
            return False
    return True
