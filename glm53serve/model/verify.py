"""How far a converted model is from its source, by kind of tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import layout
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.errors import ModelError
from glm53serve.model.quant import BLOCK, dequantise_rows
from glm53serve.model.weights import Matrix


@dataclass(slots=True)
class KindError:
    """How far tensors of one kind are from their source: root of the mean square error over that of the source, and the worst element's error."""

    tensors: int = 0
    error: float = 0.0
    power: float = 0.0
    worst: float = 0.0

    @property
    def relative(self) -> float:
        """Relative root mean square error."""
        return (self.error / self.power) ** 0.5 if self.power else 0.0


def verify(source: Path, target: Path, experts_a_layer: int = 2, seed: int = 0) -> dict[str, KindError]:
    """Compare a converted model with its source, by kind of tensor: every dense matrix and small tensor, some experts of each layer.

    Of a matrix at most eight blocks of 128 rows are compared. Raises ModelError when the two are not the same network.
    """
    a, b = open_checkpoint(source, mapped=False), open_checkpoint(target, mapped=False)
    if a.config != b.config:
        raise ModelError(f"{target}: its config is not that of {source}: not a conversion of it")
    rng = np.random.default_rng(seed)
    kinds: dict[str, KindError] = {}

    def compare(name: str, left: Matrix, right: Matrix) -> None:
        kind = kinds.setdefault(name, KindError())
        kind.tensors += 1
        blocks = range(0, left.rows, BLOCK)
        for first in [blocks[i] for i in sorted(rng.permutation(len(blocks))[:8])]:
            _accumulate(kind, dequantise_rows(left, first, min(first + BLOCK, left.rows)), dequantise_rows(right, first, min(first + BLOCK, left.rows)))

    ours, others = dict(a.dense_matrices()), dict(b.dense_matrices())
    if a.has_head != b.has_head:
        for matrices in (ours, others):
            matrices.setdefault("lm_head.weight", matrices["embed_tokens.weight"])
    for name, stored in ours.items():
        compare(_kind(name), a.matrix(stored), b.matrix(others[name]))
    for layer in range(a.config.num_layers):
        small = dict(_small_tensors(b, layer))
        for name, values in _small_tensors(a, layer):
            kind = kinds.setdefault("small tensors", KindError())
            kind.tensors += 1
            _accumulate(kind, values, small[name])
    for layer in a.config.sparse_layers:
        for expert in rng.permutation(a.config.n_routed_experts)[:experts_a_layer].tolist():
            for role, left, right in zip(("gate", "up", "down"), a.stored_expert(layer, expert), b.stored_expert(layer, expert), strict=True):
                compare(f"experts.{role}", a.matrix(left), b.matrix(right))
    return kinds


def _small_tensors(checkpoint: Checkpoint, layer: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and values (flat) of what is no matrix; convolutions stored as one are three."""
    for name, need in layout.layer_needs(checkpoint.config, layer, checkpoint.tensors):
        if need.matrix:
            continue
        values = checkpoint.small(name, need).reshape(-1)
        if name.endswith(".conv1d.weight"):
            for which, part in zip("qkv", np.split(values, 3), strict=True):
                yield name.replace(".conv1d.", f".{which}_conv1d."), part
        else:
            yield name, values


def _accumulate(kind: KindError, want: NDArray[np.float32], got: NDArray[np.float32]) -> None:
    difference = want.astype(np.float64) - got
    kind.error += float(np.sum(difference**2))
    kind.power += float(np.sum(want.astype(np.float64) ** 2))
    kind.worst = max(kind.worst, float(np.abs(difference).max(initial=0.0)))


def _kind(name: str) -> str:
    """The part of a tensor's name that says what it is."""
    parts = [part for part in name.split(".") if not part.isdecimal() and part not in ("layers", "weight")]
    return ".".join(parts)
