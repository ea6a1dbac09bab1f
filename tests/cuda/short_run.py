"""A short run of everything the backend does, for compute-sanitizer."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from checks import backend_of, greedy, logits_in_pieces, wide_model  # noqa: E402
from tinymodel import random_ids, tiny_model  # noqa: E402

from glm53serve.cuda.cupy_runtime import CupyDevice  # noqa: E402
from glm53serve.model.config import DSA, KDA  # noqa: E402

model = tiny_model(seed=1, weight_format="bf16", expert_format="int4")
backend = backend_of(model, CupyDevice, looping=True)
ids = random_ids(model.config, 40)
logits_in_pieces(backend, 0, ids, [30, 1, 9])
print(greedy(backend, 1, ids, 8))
backend.device.close()
wide = wide_model("heads of the real model", (KDA, DSA))
backend = backend_of(wide, CupyDevice, capacity=200, chunk=160, exact=False)
logits_in_pieces(backend, 0, random_ids(wide.config, 180), [150, 30])
