"""This engine behind the line protocol of bench/peers_worker.py: `python bench/peers_glm53serve.py MODEL`; the environment says the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from glm53serve.load import Loaded, load
from glm53serve.settings import Settings


def prefill(loaded: Loaded, ids: Sequence[int], all_rows: bool = False) -> Any:
    """Compute a prompt in an emptied slot: logits of its last row [V], or of every row [T, V]."""
    import numpy as np

    engine = loaded.engine
    slot = engine.slots[0]
    engine.empty(slot)
    chunks = [engine.forward_prefill(slot, ids[i : i + engine.chunk], all_rows=all_rows) for i in range(0, len(ids), engine.chunk)]
    return np.concatenate([chunk.rows for chunk in chunks]) if all_rows else chunks[-1].logits


def measure(loaded: Loaded, prompt: int, ids: Sequence[int]) -> dict[str, Any]:
    """Seconds of a prompt and of the single steps after it, and the best token after each."""
    began = perf_counter()
    best = [int(prefill(loaded, ids[:prompt]).argmax())]
    first = perf_counter() - began
    steps = []
    for token in ids[prompt:]:
        began = perf_counter()
        logits, _ = loaded.engine.forward_step([(loaded.engine.slots[0], token)])
        best.append(int(logits[0].argmax()))
        steps.append(perf_counter() - began)
    return {"prefill": first, "steps": steps, "best": best}


def main() -> None:
    """Load the model, say so, answer requests until standard input ends."""
    import numpy as np

    loaded = load(Path(sys.argv[1]), Settings.from_environ(), slots=1, specials_stop=False, backend="cpu")
    print(json.dumps({"ready": f"glm53serve, {loaded.bits} bits"}), flush=True)
    for line in sys.stdin:
        verb, argument, *words = line.split()
        ids = [int(word) for word in words]
        if verb == "measure":
            answer = measure(loaded, int(argument), ids)
        else:
            rows = prefill(loaded, ids, all_rows=True)
            Path(argument).write_bytes(np.ascontiguousarray(rows, np.float32).tobytes())
            answer = {"rows": len(rows)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
