"""The shipped model answers its tasks: whole answers, greedy, and the logits behind them against the oracle's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53serve.engine.engine import Engine
from glm53serve.engine.sampling import Sampling
from glm53serve.load import Loaded, load, shipped_model
from glm53serve.oneshot import stream, teacher_forced
from glm53serve.settings import Settings

DATA = Path(__file__).parent / "data"
MARGIN = 0.2
LONG = 400


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the answer the model's trainers measured."""

    id: str
    prompt: str
    expected: str
    tokens: int


def tasks(name: str) -> list[Task]:
    """Tasks of a file that the reference answers with a clear margin."""
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    return [Task(r["id"], r["prompt"], r["expected"], r["prompt_tokens"]) for r in rows if r["reference_correct"] and r["margin"] >= MARGIN]


def chosen() -> list[Task]:
    """A spread of short tasks, and the first long ones of each kind of file."""
    every = tasks("nano_tasks.jsonl")
    short = [t for t in every if t.tokens <= LONG][::4]
    long = [t for t in every if t.tokens > LONG][::6]
    return short + long + tasks("nano_long_tasks.jsonl")[:3]


def shipped(bits: int) -> Loaded:
    """The shipped model at some bits."""
    return load(shipped_model(), Settings.from_environ({"GLM53_BITS": str(bits)}), slots=1, specials_stop=True)


def answer(loaded: Loaded, task: Task) -> str:
    """The greedy answer to a task."""
    ids = loaded.tokenizer.encode(task.prompt.encode())
    assert len(ids) == task.tokens
    return loaded.tokenizer.decode(list(stream(loaded, ids, 400, Sampling()))).decode()


def test_enough_tasks_are_run() -> None:
    assert len(chosen()) >= 40 and sum(t.tokens > LONG for t in chosen()) >= 10


def test_every_answer_is_right_at_32_bits() -> None:
    loaded = shipped(32)
    wrong = {t.id: said for t in chosen() if (said := answer(loaded, t)) != t.expected}
    assert not wrong


@pytest.mark.parametrize(("bits", "least"), [(16, 1.0), (8, 0.97)])
def test_answers_at_fewer_bits(bits: int, least: float) -> None:
    loaded = shipped(bits)
    some = chosen()[::2]
    wrong = {t.id: said for t in some if (said := answer(loaded, t)) != t.expected}
    assert len(some) - len(wrong) >= least * len(some), wrong


def test_four_bits_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = shipped(4)
    some = chosen()[::2]
    right = sum(answer(loaded, t) == t.expected for t in some)
    with capsys.disabled():
        print(f"\nshipped model at 4 bits: {right} of {len(some)} answers exact")
    assert right > len(some) // 2


@pytest.mark.parametrize(("prompt", "tolerance"), [("short", 1e-4), ("medium", 5e-4), ("long", 5e-4)])
def test_logits_are_the_oracles(prompt: str, tolerance: float) -> None:
    """Text hides small faults; the logits of the last prompt rows do not (the longer prompts have close calls, hence the looser bound)."""
    golden = np.load(DATA / "golden" / "nano" / "golden.npz")
    loaded = shipped(32)
    best, last = teacher_forced(loaded, golden[f"{prompt}_prompt_ids"].tolist())
    wanted = golden[f"{prompt}_logits_f64"]
    assert np.abs(last - wanted[-1]).max() <= tolerance
    assert [best[i] for i in golden[f"{prompt}_rows"]] == wanted.argmax(axis=1).tolist()


@pytest.mark.parametrize("budget", [5, 400], ids=["by its budget", "by the capacity"])
def test_an_answer_that_is_cut_takes_no_step_more_than_it_has_tokens_to_feed(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(shipped_model(), Settings.from_environ({"GLM53_MAXT": "64"}), slots=1, specials_stop=False)
    steps, original = 0, Engine.forward_step

    def counted(self: Engine, *rows: Any) -> Any:
        nonlocal steps
        steps += 1
        return original(self, *rows)

    monkeypatch.setattr(Engine, "forward_step", counted)
    ids = loaded.tokenizer.encode(b"[gMASK]<sop><|user|>Tell me a story about a fox.<|assistant|></think>")
    wanted = min(budget, 64 - len(ids))
    assert len(list(stream(loaded, ids, budget, Sampling()))) == wanted
    assert steps == wanted - 1
