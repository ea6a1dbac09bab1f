"""transformers (float32, CPU) behind the line protocol of bench/peers_worker.py: `python bench/peers_transformers.py MODEL THREADS`.

Runs under a Python that has torch and transformers; nothing of this project is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration


def load(directory: str) -> Any:
    """The model in float32; every text tensor must come from the files."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = Glm5NextForConditionalGeneration.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    absent = [name for name in info["missing_keys"] if "visual" not in name]
    if absent or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{directory}: missing {absent}, unexpected {info['unexpected_keys']}, mismatched {info['mismatched_keys']}")
    return model.eval()


def measure(model: Any, prompt: int, ids: list[int]) -> dict[str, Any]:
    """Seconds of a prompt and of the single steps after it, and the best token after each."""
    began = perf_counter()
    out = model(input_ids=torch.tensor([ids[:prompt]]), use_cache=True, logits_to_keep=1)
    best = [int(out.logits[0, -1].argmax())]
    first = perf_counter() - began
    steps = []
    for token in ids[prompt:]:
        began = perf_counter()
        out = model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True, logits_to_keep=1)
        best.append(int(out.logits[0, -1].argmax()))
        steps.append(perf_counter() - began)
    return {"prefill": first, "steps": steps, "best": best}


def main() -> None:
    """Load the model, say so, answer requests until standard input ends."""
    torch.set_num_threads(int(sys.argv[2]))
    model = load(sys.argv[1])
    about = f"transformers {transformers.__version__}, torch {torch.__version__}, attention {model.config._attn_implementation}"
    print(json.dumps({"ready": f"{about}, experts {model.config._experts_implementation}"}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            verb, argument, *words = line.split()
            ids = [int(word) for word in words]
            if verb == "measure":
                answer = measure(model, int(argument), ids)
            else:
                rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                Path(argument).write_bytes(rows.contiguous().numpy().tobytes())
                answer = {"rows": len(rows)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
