"""Whole models on the CPU: prompt and decode speed, how long a start takes, and what the parts cost apart and in turn.

    python -m bench.models [--quick]

Decode is held to the time it takes to read, at the bandwidth measured in the same run, every weight byte a token needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from bench.kernels import matrix_rate, read_bandwidth
from bench.options import Parser
from glm53serve.cpu import warm
from glm53serve.cpu.threads import physical_cores
from glm53serve.load import Loaded, load, shipped_model
from glm53serve.model.config import SPARSE
from glm53serve.model.info import dense_ram
from glm53serve.model.synth import synth
from glm53serve.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PROMPT_ROWS = 512
Row = tuple[str, str, str]


def main() -> int:
    """Print one table."""
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="the mid shape only, few tokens")
    args = parser.parse_args()
    warm.ensure_compiled(print)
    seconds = 0.3 if args.quick else 1.0
    bandwidth = read_bandwidth(physical_cores(), seconds)
    rows: list[Row] = [
        ("read bandwidth", f"{bandwidth / 1e9:.1f} GB/s", f"{physical_cores()} threads, load average {os.getloadavg()[0]:.1f}"),
        ("float32 matrix product", f"{matrix_rate(seconds):.0f} GFLOP/s", "NumPy's BLAS, all its threads"),
        *starts(1 if args.quick else 3),
    ]
    shapes = [("mid", None, None)] if args.quick else [("mid", None, None), ("flash", 4, 16)]
    with tempfile.TemporaryDirectory(prefix="glm53-bench-") as scratch:
        for shape, layers, experts in shapes:
            directory = Path(scratch) / shape
            synth(directory, shape, layers=layers, experts=experts, fmt="int4")
            name = shape if layers is None else f"{shape}, {layers} layers, {experts} experts"
            rows += speeds(name, directory, bandwidth, 8 if args.quick else 48, PROMPT_ROWS if args.quick or shape == "mid" else 256)
    width = [max(len(row[i]) for row in rows) for i in range(2)]
    for what, figure, held in rows:
        print(f"{what:<{width[0]}}  {figure:>{width[1]}}  {held}".rstrip())
    return 0


def speeds(name: str, directory: Path, bandwidth: float, tokens: int, prompt_rows: int) -> list[Row]:
    """Prompt and decode speed of a model with int4 experts and dense matrices at 4 bits, all in memory."""
    loaded = load(directory, Settings.from_environ({"GLM53_BITS": "4", "GLM53_CHECKPOINT_GB": "0"}), slots=1, specials_stop=False)
    engine, slot = loaded.engine, loaded.engine.slots[0]
    prompt = np.random.default_rng(3).integers(0, loaded.checkpoint.config.vocab_size, prompt_rows).tolist()
    prefill = []
    for _ in range(4):
        engine.empty(slot)
        began = time.perf_counter()
        engine.forward_prefill(slot, prompt)
        prefill.append(time.perf_counter() - began)
    steps = []
    for token in range(tokens + 3):
        began = time.perf_counter()
        engine.forward_step([(slot, token)])
        steps.append(time.perf_counter() - began)
    step = median(steps[3:])
    needed = bytes_a_token(loaded)
    engine.close()
    return [
        (f"{name}: prompt of {prompt_rows}", f"{prompt_rows / median(prefill[1:]):.0f} tok/s", ""),
        (f"{name}: decode at {prompt_rows}", f"{1 / step:.1f} tok/s", f"{needed / step / bandwidth:.0%} of reading {needed / 1e6:.0f} MB a token"),
    ]


def bytes_a_token(loaded: Loaded) -> float:
    """Weight bytes that decoding one token reads: everything dense but the embedding table, and the experts it chooses."""
    checkpoint, config = loaded.checkpoint, loaded.checkpoint.config
    dense = dense_ram((m for name, m in checkpoint.dense_matrices() if "embed_tokens" not in name), loaded.bits) + checkpoint.small_bytes()
    sparse = sum(kind == SPARSE for kind in config.mlp_kinds)
    one = checkpoint.expert_bytes / max(1, sparse * config.n_routed_experts)
    return dense + sparse * config.num_experts_per_tok * one


def starts(repeats: int) -> list[Row]:
    """From exec to READY with the shipped model and compiled kernels, and the import of the command line alone."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "SERVE": "1", "SERVE_BATCH": "1", "SNAP": str(shipped_model())}
    ready = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        engine = subprocess.Popen(
            [sys.executable, "-c", "import sys; from glm53serve.cli import main_drop_in; sys.exit(main_drop_in(['0']))"],
            env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert engine.stdout is not None and engine.stdin is not None
        engine.stdout.readline()
        ready.append(time.perf_counter() - began)
        engine.stdin.close()
        engine.stdout.read()
        engine.wait()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import glm53serve.cli"], check=True, cwd=ROOT)
    imports = time.perf_counter() - began
    return [
        ("exec to READY, shipped model", f"{min(ready):.2f} s", "compiled kernels cached; target < 1.5 s"),
        ("start and import of the command line", f"{imports:.2f} s", "target < 0.4 s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
