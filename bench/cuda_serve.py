"""A prompt chunk as the engine computes it against the pipeline alone, on the GPU: `python -m bench.cuda_serve [--layers 8] [--rows 4096]`.

Prints milliseconds a chunk of the pipeline from ids (no logits), of `Engine.forward_prefill` from ids to logits on the device, and of the same through
host streams, as it is when several backends share the layers; and whether the logits are equal.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.cuda_bed import Bed, flash, say
from glm53serve.engine.engine import Engine


def served(bed: Bed, whole: bool, rows: int, repeat: int) -> tuple[float, np.ndarray]:
    """Best seconds of one guarded chunk in an empty slot, and its logits."""
    engine = Engine(bed.config, [bed.layers], bed.head, bed.layers.slots, bed.layers.capacity, rows, network=bed.head if whole else None)
    ids = np.random.default_rng(0).integers(0, bed.config.vocab_size, rows).tolist()
    best = 1e9
    for _ in range(repeat + 1):
        engine.empty(engine.slots[0])
        bed.device.synchronize()
        start = time.perf_counter()
        logits = engine.forward_prefill(engine.slots[0], ids, guard=True).logits
        best = min(best, time.perf_counter() - start)
    return best, logits


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    bed = Bed(flash(options.layers, options.experts), "int8", "int4", 1, options.rows + 1024, options.rows, loops=False)
    rows = options.rows
    alone = min(bed.prefill(0, rows) for _ in range(options.repeat + 1))
    direct, logits = served(bed, True, rows, options.repeat)
    through, other = served(bed, False, rows, options.repeat)
    say(
        f"a chunk of {rows} tokens over {options.layers} layers: pipeline alone {alone * 1e3:.1f} ms; served from ids to logits {direct * 1e3:.1f} ms "
        f"({rows / direct:.0f} tok/s); served through host streams {through * 1e3:.1f} ms ({rows / through:.0f} tok/s); "
        f"logits equal: {np.array_equal(logits, other)}"
    )
    bed.close()


if __name__ == "__main__":
    main()
