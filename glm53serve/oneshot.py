"""One prompt, one answer, no daemon: what `generate` and the one-shot form of `glm53` run. Arms no halt hook, allocates no snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.sampling import Sampling, choose
from glm53serve.load import Loaded


class PromptError(ValueError):
    """The prompt cannot be computed: empty, too long, or with ids outside the vocabulary."""


def check_prompt(loaded: Loaded, ids: Sequence[int]) -> None:
    """Raise PromptError when the ids do not fit the model or a slot."""
    vocabulary, capacity = loaded.checkpoint.config.vocab_size, loaded.engine.capacity
    if not ids:
        raise PromptError("the prompt is empty")
    wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong}: must be from 0 to {vocabulary - 1}")
    if len(ids) >= capacity:
        raise PromptError(f"{len(ids)} prompt tokens: must be fewer than GLM53_MAXT={capacity}")


def stream(loaded: Loaded, ids: Sequence[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
    """Tokens of the answer to a prompt, until a stop id, `max_tokens` or the slot's capacity."""
    check_prompt(loaded, ids)
    engine = loaded.engine
    slot = engine.slots[0]
    engine.empty(slot)
    logits, token = _prefill(loaded, ids), -1
    for number in range(min(max_tokens, engine.capacity - len(ids))):
        if number:
            logits = engine.forward_step([(slot, token)])[0][0]
        token = choose(logits, sampling, number)
        if token in loaded.stop_ids:
            return
        yield token


def teacher_forced(loaded: Loaded, ids: Sequence[int]) -> tuple[list[int], NDArray[np.float32]]:
    """The argmax after every prompt position, and the last row of logits [V]. The slot then holds the prompt."""
    check_prompt(loaded, ids)
    loaded.engine.empty(loaded.engine.slots[0])
    best: list[int] = []
    logits = None
    for rows in _prefill_rows(loaded, ids):
        best.extend(int(i) for i in rows.argmax(axis=1))
        logits = rows[-1]
    assert logits is not None
    return best, logits


def greedy(loaded: Loaded, logits: NDArray[np.float32], count: int) -> tuple[list[int], float]:
    """Exactly `count` greedy tokens after what the slot holds (stop ids do not stop it), and the seconds the decoding took."""
    engine, slot = loaded.engine, loaded.engine.slots[0]
    if slot.filled + count > engine.capacity:
        raise PromptError(f"{slot.filled} prompt tokens and {count} new ones: must fit GLM53_MAXT={engine.capacity}")
    tokens: list[int] = []
    began = perf_counter()
    for number in range(count):
        tokens.append(int(np.argmax(logits)))
        if number + 1 < count:
            logits = engine.forward_step([(slot, tokens[-1])])[0][0]
    return tokens, perf_counter() - began


def _prefill(loaded: Loaded, ids: Sequence[int]) -> NDArray[np.float32]:
    """Compute a prompt (not empty) in the engine's chunks; the last row of logits [V]."""
    engine, slot = loaded.engine, loaded.engine.slots[0]
    for start in range(0, len(ids), engine.chunk):
        logits = engine.forward_prefill(slot, ids[start : start + engine.chunk]).logits
    return logits


def _prefill_rows(loaded: Loaded, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    engine, slot = loaded.engine, loaded.engine.slots[0]
    for start in range(0, len(ids), engine.chunk):
        rows = engine.forward_prefill(slot, ids[start : start + engine.chunk], all_rows=True).rows
        assert rows is not None
        yield rows
