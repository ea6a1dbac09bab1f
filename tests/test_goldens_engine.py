"""The engine on the CPU against the oracle: every golden model, every way of cutting the prompt, slots side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53serve.cpu.head import CpuHead
from glm53serve.cpu.layers import CpuLayers
from glm53serve.engine.engine import Engine
from glm53serve.model.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parent / "data" / "golden"
MODELS = sorted(d.name for d in GOLDEN.iterdir() if (d / "config.json").is_file())
TOLERANCE = 1e-4


def engine_of(name: str, slots: int = 1, bits: int = 32) -> Engine:
    """An engine over a golden model's files."""
    checkpoint = open_checkpoint(GOLDEN / name)
    config = checkpoint.config
    layers = CpuLayers(config, range(config.num_layers), checkpoint.layer, checkpoint, slots, bits)
    head = CpuHead(config, checkpoint.embedding(), checkpoint.final_norm(), checkpoint.lm_head(), bits)
    return Engine(config, [layers], head, slots, 512, 2048)


def golden(name: str) -> dict[str, NDArray[np.float64]]:
    """prompt_ids, greedy_ids and the float64 logits of every row of prompt + greedy."""
    return dict(np.load(GOLDEN / name / "golden.npz"))


def prefill(engine: Engine, slot: int, ids: list[int], chunk: int) -> NDArray[np.float32]:
    """Logits of every row of `ids`, in chunks."""
    parts = [engine.forward_prefill(engine.slots[slot], ids[i : i + chunk], all_rows=True).rows for i in range(0, len(ids), chunk)]
    return np.concatenate([p for p in parts if p is not None])


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 10**6])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_at_every_chunk_size(name: str, chunk: int) -> None:
    data = golden(name)
    ids = [*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist()]
    rows = prefill(engine_of(name), 0, ids, chunk)
    assert np.abs(rows - data["logits_f64"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_greedy_goes_on_as_the_oracle(name: str) -> None:
    data = golden(name)
    engine = engine_of(name)
    prompt = data["prompt_ids"].tolist()
    logits = prefill(engine, 0, prompt, 64)[-1]
    said = []
    for wanted in data["logits_f64"][len(prompt) :]:
        said.append(int(logits.argmax()))
        logits = engine.forward_step([(engine.slots[0], said[-1])])[0][0]
        assert np.abs(logits - wanted).max() <= TOLERANCE
    assert said == data["greedy_ids"].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_two_slots_do_not_touch_each_other(name: str) -> None:
    """Prompts cut into chunks that alternate between two slots, then token by token in one batch, in both orders."""
    data = golden(name)
    ids = [*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist()]
    other = ids[::-1]
    engine = engine_of(name, slots=2)
    one, two = engine.slots
    half = len(ids) - 12
    for start in range(0, half, 17):
        engine.forward_prefill(one, ids[start : min(half, start + 17)])
        engine.forward_prefill(two, other[start : min(half, start + 17)])
    alone = prefill(engine_of(name), 0, other, 64)
    for n in range(half, len(ids)):
        rows = [(one, ids[n]), (two, other[n])]
        logits = engine.forward_step(rows if n % 2 else rows[::-1])[0]
        first, second = (logits if n % 2 else logits[::-1])
        assert np.abs(first - data["logits_f64"][n]).max() <= TOLERANCE
        assert np.abs(second - alone[n]).max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_begun_again_after_a_restore(name: str) -> None:
    """Half the prompt, a chunk that is thrown away, and the rest: the rows are the oracle's."""
    data = golden(name)
    ids = [*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist()]
    engine = engine_of(name)
    slot = engine.slots[0]
    for cut in (29, 30, 31, 32, 33):
        engine.empty(slot)
        engine.forward_prefill(slot, ids[:cut])
        asks = iter(range(10**6))
        with pytest.raises(Exception, match="halted"):
            engine.forward_prefill(slot, ids[::-1][:60], lambda asks=asks: next(asks) >= 7, guard=True)
        assert slot.filled == cut and slot.history == ids[:cut]
        rows = engine.forward_prefill(slot, ids[cut:], all_rows=True).rows
        assert rows is not None and np.abs(rows - data["logits_f64"][cut:]).max() <= TOLERANCE
