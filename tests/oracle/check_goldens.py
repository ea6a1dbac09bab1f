"""Check the committed golden data against the library again, from the files alone, and measure how much single mistakes would show.

python check_goldens.py             reload every golden from its files, compare logits, formats and gaps
python check_goldens.py mistakes    largest logit change of one-place mistakes put into the modelling file, per golden
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from formats import e4m3_values, from_fp8, from_int4
from library import Oracle, widened_module, wrapper_config
from mistakes import MISTAKES
from models import GOLDENS, PREFIX, tensor_shapes
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


def load_exact(folder: Path, kind: str, prefix: str, config: dict) -> dict[str, torch.Tensor]:
    """Float32 values of all tensors of a golden's files, under the names with the full prefix."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        shards = {f: load_file(folder / f) for f in set(weight_map.values())}
        stored = {name: shards[file][name] for name, file in weight_map.items()}
        assert sum(len(s) for s in shards.values()) == len(stored)
    else:
        stored = load_file(folder / "model.safetensors")
    if prefix != PREFIX:
        stored = {PREFIX + k.removeprefix(prefix) if k.startswith(prefix) else k: v for k, v in stored.items()}
    text = wrapper_config(config).text_config
    text.tie_word_embeddings = config["tie_word_embeddings"]
    exact = {}
    for name, shape in tensor_shapes(text).items():
        t = stored.pop(name)
        if t.dtype == torch.float8_e4m3fn:
            scale = stored.pop(name + "_scale_inv")
            assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
            assert torch.equal(e4m3_values()[t.view(torch.uint8).long()], t.float()), "the e4m3 table disagrees with torch"
            t = from_fp8(t, scale)
        elif t.dtype == torch.uint8:
            t = from_int4(t, stored.pop(name + ".qs"), *shape)
        assert tuple(t.shape) == shape, (name, t.shape, shape)
        exact[name] = t.float()
    assert not stored, sorted(stored)
    return exact


def main() -> None:
    """Compare every golden with a fresh run from its files, or print the table of mistakes."""
    torch.set_num_threads(1)
    mistakes = sys.argv[1:] == ["mistakes"]
    wide = widened_module()
    models = []
    for golden in GOLDENS:
        folder = GOLDEN / golden.name
        config = json.loads((folder / "config.json").read_text())
        data = dict(np.load(folder / "golden.npz"))
        ids = [*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist()]
        exact = load_exact(folder, golden.kind, golden.prefix, config)
        oracle = Oracle(config, exact, wide)
        logits, gaps = oracle.logits64(ids)
        off64, off32 = np.abs(logits - data["logits_f64"]).max(), np.abs(oracle.logits32(ids) - data["logits_f64"]).max()
        print(f"{golden.name}: float64 {off64:.1e}, float32 {off32:.1e}, index gap {gaps.index:.1e}, expert gap {gaps.expert:.1e}", flush=True)
        assert off64 < 1e-11 and off32 < 4e-5
        models.append((golden.name, config, oracle, ids, data))
    if not mistakes:
        return
    print("| mistake | " + " | ".join(name for name, *_ in models) + " |")
    print("|---|" + "---|" * len(models))
    for number, (what, old, new) in enumerate(MISTAKES):
        broken = widened_module(f"mistake{number}", ((old, new),))
        cells = []
        for _, _, oracle, ids, data in models:
            text = broken.Glm5NextTextModel(oracle.config.text_config).double().eval()
            text.load_state_dict(oracle.text.state_dict())
            with torch.no_grad():
                logits = torch.nn.functional.linear(text(torch.tensor([ids]), use_cache=False).last_hidden_state, oracle.head64)[0].numpy()
            cells.append(f"{np.abs(logits - data['logits_f64']).max():.1e}")
        print(f"| {what} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
