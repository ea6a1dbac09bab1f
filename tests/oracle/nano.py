"""Golden logits of the shipped model on a few prompts of its task list."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
from library import Oracle, greedy_gap
from safetensors.torch import load_file
from tokenizers import Tokenizer

LAST_ROWS = 4
GREEDY = 24
MOST = 12  # prompts tried in a class
LENGTHS = {"short": (13, 17), "medium": (201, 320), "long": (501, 640)}


def make_nano(model: Path, data: Path, out: Path, wide: ModuleType) -> None:
    """Write `out`/golden.npz: for each length class the prompt whose routing and selection are furthest from a tie."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tensors = {name: t.float() for file in sorted(model.glob("*.safetensors")) for name, t in load_file(file).items()}
    oracle = Oracle(config, tensors, wide)
    stop = tuple(config["text_config"]["eos_token_id"])
    tasks = [json.loads(line) for line in (data / "nano_tasks.jsonl").read_text().splitlines()]
    arrays: dict[str, np.ndarray] = {}
    for label, (low, high) in LENGTHS.items():
        best = -1.0
        fitting = [t for t in tasks if low <= t["prompt_tokens"] <= high and t["reference_correct"]][:MOST]
        for task in fitting:
            ids = tokenizer.encode(task["prompt"], add_special_tokens=False).ids
            assert len(ids) == task["prompt_tokens"], task["id"]
            logits, gaps = oracle.logits64(ids)
            if min(gaps.index, gaps.expert) <= best:
                continue
            best = min(gaps.index, gaps.expert)
            greedy = oracle.greedy32(ids, GREEDY, stop)
            answered, _ = oracle.logits64(ids + greedy)
            rows = answered[len(ids) - 1 : -1]
            assert list(rows.argmax(-1)) == greedy and np.abs(answered[: len(ids)] - logits).max() < 1e-9, task["id"]
            narrow = oracle.logits32(ids)
            keep = np.arange(len(ids) - LAST_ROWS, len(ids), dtype=np.int64)
            arrays.update(
                {
                    f"{label}_task": np.array(task["id"]),
                    f"{label}_prompt_ids": np.array(ids, np.int64),
                    f"{label}_greedy_ids": np.array(greedy, np.int64),
                    f"{label}_rows": keep,
                    f"{label}_logits_f64": logits[keep],
                    f"{label}_logits_f32": narrow[keep],
                    f"{label}_min_index_gap": np.float64(gaps.index),
                    f"{label}_min_expert_gap": np.float64(gaps.expert),
                    f"{label}_min_greedy_gap": np.float64(greedy_gap(rows)),
                    f"{label}_dropping_rows": np.int64(gaps.dropping),
                    f"{label}_f32_max_diff": np.float64(np.abs(logits - narrow).max()),
                }
            )
        summary = {k: v.item() for k, v in arrays.items() if k.startswith(label) and v.ndim == 0}
        print(f"nano {label}: {summary}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "golden.npz", **arrays)
