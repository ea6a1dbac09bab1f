"""The reference against logits of an independent implementation, for every way to feed a sequence."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from goldens import FOLDER, NAMES, golden, golden_reference, reference_of
from numpy.typing import DTypeLike, NDArray

from glm53serve.model import reference_math as m
from glm53serve.model.config import DSA, KDA, SHARED
from glm53serve.model.reference import ReferenceModel

WIDE, NARROW = np.float64, np.float32
TOLERANCE: dict[DTypeLike, float] = {WIDE: 1e-10, NARROW: 1e-4}

every_golden = pytest.mark.parametrize("name", NAMES)
both_dtypes = pytest.mark.parametrize("dtype", [WIDE, NARROW], ids=["float64", "float32"])


def in_chunks(reference: ReferenceModel, ids: NDArray[np.int64], size: int) -> NDArray[np.floating]:
    """Logits of every row of a sequence fed `size` tokens at a time."""
    state = reference.new_state()
    return np.concatenate([reference.forward(ids[start : start + size], state) for start in range(0, len(ids), size)])


def close(got: NDArray[np.floating], expected: NDArray[np.floating], dtype: DTypeLike) -> None:
    """Same dtype as asked for, and within that dtype's tolerance of the golden."""
    assert got.dtype == dtype and got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE[dtype]


@every_golden
@both_dtypes
@pytest.mark.parametrize("size", [1, 2, 7, 64, 4096])
def test_logits_whatever_the_chunk_size(name: str, dtype: DTypeLike, size: int) -> None:
    data = golden(name)
    got = in_chunks(golden_reference(name, dtype), data.ids, size)
    close(got, data.logits, dtype)
    if dtype == NARROW:
        close(got, data.narrow_logits, dtype)


@every_golden
def test_logits_of_prefill_then_token_by_token(name: str) -> None:
    data, reference = golden(name), golden_reference(name, WIDE)
    state = reference.new_state()
    parts = [reference.forward(data.prompt, state)] + [reference.forward([token], state) for token in data.greedy]
    close(np.concatenate(parts), data.logits, WIDE)


@every_golden
@both_dtypes
def test_two_sequences_interleaved(name: str, dtype: DTypeLike) -> None:
    """The golden and its reversal, a chunk of each in turn: both as if alone."""
    data, reference = golden(name), golden_reference(name, dtype)
    other = data.ids[::-1].copy()
    alone = reference.forward(other, reference.new_state())
    states = reference.new_state(), reference.new_state()
    first, second = [], []
    for start in range(0, len(other), 13):
        first.append(reference.forward(data.ids[start : start + 13], states[0]))
        second.append(reference.forward(other[start : start + 13], states[1]))
    close(np.concatenate(first), data.logits, dtype)
    close(np.concatenate(second), alone, dtype)


@every_golden
@both_dtypes
def test_greedy_continuation(name: str, dtype: DTypeLike) -> None:
    data = golden(name)
    assert golden_reference(name, dtype).greedy(data.prompt, len(data.greedy)) == data.greedy.tolist()


@pytest.mark.parametrize("name", ["nested-f32", "flat-bf16"])
def test_chunked_kda_in_the_whole_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = golden(name)
    monkeypatch.setattr(m, "kda_recurrent", m.kda_chunked)
    for dtype in (WIDE, NARROW):
        close(in_chunks(golden_reference(name, dtype), data.ids, 4096), data.logits, dtype)


def test_goldens_cover_the_features() -> None:
    """What the goldens must exercise between them; a regenerated set that loses one of these fails here."""
    configs = [golden_reference(name, WIDE).config for name in NAMES]
    assert {c.index_kpool for c in configs} >= {1, 2, 4, 5}
    assert {c.hc_mult for c in configs} >= {1, 2, 3, 4}
    assert {c.conv_width for c in configs} >= {3, 4}
    assert {c.gate_lower_bound is None for c in configs} == {True, False}
    assert {c.norm_topk_prob for c in configs} == {True, False}
    assert any(c.n_group > 1 for c in configs) and any(SHARED in c.indexer_kinds for c in configs)
    assert all({KDA, DSA} <= set(c.layer_kinds) for c in configs)
    formats = set()
    for name, config in zip(NAMES, configs, strict=True):
        reference, data = golden_reference(name, WIDE), golden(name)
        assert len(data.ids) > 4 * config.index_topk
        attention = reference.layers[config.layer_kinds.index(DSA)].attention
        formats |= {attention.q_a.format, reference.embedding.format, reference.experts.expert(config.sparse_layers[0], 0).down.format}
    assert formats >= {"f32", "bf16", "fp8", "int4"}


@pytest.mark.parametrize("length", ["short", "medium", "long"])
def test_the_shipped_model_on_its_own_prompts(length: str) -> None:
    """The last rows of a real prompt in float64, then in float32 with the greedy answer."""
    with np.load(FOLDER / "nano" / "golden.npz") as arrays:
        prompt, greedy, rows, wide = (arrays[f"{length}_{part}"] for part in ("prompt_ids", "greedy_ids", "rows", "logits_f64"))
    reference = shipped_reference(WIDE)
    close(reference.forward(prompt, reference.new_state())[rows], wide, WIDE)
    reference = shipped_reference(NARROW)
    state = reference.new_state()
    logits = reference.forward(prompt, state)
    close(logits[rows], wide, NARROW)
    answer = [int(logits[-1].argmax())]
    while len(answer) < len(greedy):
        answer.append(int(reference.forward([answer[-1]], state)[-1].argmax()))
    assert answer == greedy.tolist()


@lru_cache
def shipped_reference(dtype: DTypeLike) -> ReferenceModel:
    """The reference over the model in the package."""
    return reference_of(Path(str(files("glm53serve") / "data" / "glm53-nano")), dtype)
