"""Regenerate tests/data/golden from the transformers library. See README.md here; `make test` does not need this.

python make_goldens.py [NAME ...]        names of models.GOLDENS, or `nano`; all when none is given
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from formats import Tensors, store, write_checkpoint
from library import Gaps, Oracle, greedy_gap, widened_module, wrapper_config
from models import GOLDENS, PREFIX, Golden, draw_model

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "data" / "golden"
NANO = ROOT.parent / "glm53serve" / "data" / "glm53-nano"
torch.set_num_threads(1)
WIDE = widened_module()

MIN_CUT = 1e-4
MIN_GREEDY = 2e-3
MAX_ROUNDING = 3e-5  # of the library's float32 against float64; rougher models leave no room under a tolerance of 1e-4


def gap_arrays(gaps: Gaps, greedy: float, diff: float) -> dict[str, np.ndarray]:
    """The measured margins as npz entries."""
    named = {"index": gaps.index, "expert": gaps.expert, "group": gaps.group, "greedy": greedy}
    return {
        **{f"min_{k}_gap": np.float64(v) for k, v in named.items()},
        "dropping_rows": np.int64(gaps.dropping),
        "dsa_rows": np.int64(gaps.rows),
        "f32_max_diff": np.float64(diff),
    }


def attempt(golden: Golden, seed: int) -> tuple[Tensors, dict[str, np.ndarray]] | str:
    """Stored tensors and golden arrays of one seed, or why the seed will not do."""
    text = wrapper_config(golden.config).text_config
    text.tie_word_embeddings = golden.config["tie_word_embeddings"]
    dsa = tuple(i for i, kind in enumerate(text.layer_types) if kind != "linear_attention")
    stored, exact = store(draw_model(text, seed, golden.gain), golden.kind, dsa)
    oracle = Oracle(golden.config, exact, WIDE)
    eos = golden.config.get("text_config", golden.config)["eos_token_id"]
    ids = torch.randint(0, min(eos), (golden.prompt,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    first, gaps = oracle.logits64(ids)
    if min(gaps.index, gaps.expert, gaps.group) < MIN_CUT:
        return f"prompt gaps {gaps}"
    greedy = oracle.greedy32(ids, golden.greedy)
    full, gaps = oracle.logits64(ids + greedy)
    rows = full[golden.prompt - 1 : -1]
    if min(gaps.index, gaps.expert, gaps.group) < MIN_CUT or greedy_gap(rows) < MIN_GREEDY:
        return f"gaps {gaps} greedy {greedy_gap(rows)}"
    if set(greedy) & set(eos) or len(set(greedy)) < 6 or list(rows.argmax(-1)) != greedy:
        return f"continuation {greedy}"
    narrow = oracle.logits32(ids + greedy)
    diff = float(np.abs(full - narrow).max())
    if diff > MAX_ROUNDING:
        return f"float32 is off by {diff}"
    assert np.abs(full[: golden.prompt] - first).max() < 1e-11, "the model is not causal"
    assert greedy == list(narrow[golden.prompt - 1 : -1].argmax(-1))
    arrays = {
        "prompt_ids": np.array(ids, np.int64),
        "greedy_ids": np.array(greedy, np.int64),
        "rows": np.arange(len(full), dtype=np.int64),
        "logits_f64": full,
        "logits_f32": narrow,
        "seed": np.int64(seed),
        **gap_arrays(gaps, greedy_gap(rows), diff),
    }
    return stored, arrays


def make(golden: Golden) -> None:
    """Search a seed with comfortable gaps and write the golden's folder."""
    for seed in range(1, 400):
        found = attempt(golden, 1000 * seed + 7)
        if not isinstance(found, str):
            break
        print(f"{golden.name} seed {1000 * seed + 7}: {found}", flush=True)
    else:
        raise SystemExit(f"{golden.name}: no seed with comfortable gaps")
    stored, arrays = found
    folder = OUT / golden.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2) + "\n")
    write_checkpoint(folder, {golden.prefix + k.removeprefix(PREFIX) if k.startswith(PREFIX) else k: v for k, v in stored.items()}, golden.shards)
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    summary = {k: v.item() for k, v in arrays.items() if v.ndim == 0}
    print(f"{golden.name}: {size} bytes, logits within {np.abs(arrays['logits_f64']).max():.2f}, {summary}", flush=True)


def main() -> None:
    """Write the goldens named on the command line."""
    known = {g.name: g for g in GOLDENS}
    names = sys.argv[1:] or [*known, "nano"]
    for name in names:
        start = time.time()
        if name == "nano":
            from nano import make_nano

            make_nano(NANO, ROOT / "data", OUT / "nano", WIDE)
        elif name in known:
            make(known[name])
        else:
            raise SystemExit(f"{name}: not a golden; there are {', '.join([*known, 'nano'])}")
        print(f"{name}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
