"""The golden data under tests/data/golden: logits of small random models computed by an independent implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.reference import ReferenceModel

FOLDER = Path(__file__).parent / "data" / "golden"
NAMES = ("nested-f32", "flat-bf16", "shared-f32", "grouped-bf16", "ragged-fp8", "container-int4", "single-pool-bf16")


@dataclass(frozen=True)
class Golden:
    """One golden model: `ids` = prompt and greedy continuation, their logits [T, V] in float64 and float32 arithmetic."""

    name: str
    directory: Path
    prompt: NDArray[np.int64]
    greedy: NDArray[np.int64]
    logits: NDArray[np.float64]
    narrow_logits: NDArray[np.float32]

    @property
    def ids(self) -> NDArray[np.int64]:
        """Every token the logits belong to."""
        return np.concatenate([self.prompt, self.greedy])


@lru_cache
def golden(name: str) -> Golden:
    """The golden of that name."""
    directory = FOLDER / name
    with np.load(directory / "golden.npz") as arrays:
        assert np.array_equal(arrays["rows"], np.arange(len(arrays["logits_f64"]))), "these goldens hold every row"
        return Golden(name, directory, arrays["prompt_ids"], arrays["greedy_ids"], arrays["logits_f64"], arrays["logits_f32"])


@lru_cache
def golden_reference(name: str, dtype: DTypeLike) -> ReferenceModel:
    """The reference over a golden's checkpoint."""
    return reference_of(golden(name).directory, dtype)


def reference_of(directory: Path, dtype: DTypeLike) -> ReferenceModel:
    """The reference over a model directory."""
    c = open_checkpoint(directory)
    return ReferenceModel(c.config, c.layer, c, c.embedding(), c.final_norm(), c.lm_head(), dtype)
