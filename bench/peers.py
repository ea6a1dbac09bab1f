"""The same random model through this engine, llama.cpp and transformers, side by side on the same cores: `python -m bench.peers --help`.

First float32 everywhere: argmaxes after every position of a few prompts must agree. Then speed, in the form each engine is run in on
such a machine (int4 experts and 4-bit matrices, Q4_0, float32), one engine after the other in rounds, medians.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.options import Parser, whole
from bench.peers_report import LLAMA, OURS, TRANSFORMERS, Agreement, Rates, agreement, kept_argmaxes, rates, ratio_lines, speed_table
from bench.peers_setup import ALONE, HERE, Llama, Models, find_llama, find_torch
from bench.peers_worker import Measured, PeerError, Worker, allowed_cores, spread_cpus

DEPTHS = (128, 512)
CONTEXT = 1024
# prompts whose argmaxes are compared; the last one is longer than the model's index_topk, so sparse attention drops tokens
COMPARED = (40, 200, 640)
STEPS_COMPARED = 8
WEIGHTS = {OURS: "int4 experts, GLM53_BITS=4", LLAMA: "Q4_0", TRANSFORMERS: "float32"}
ROOT = Path("~/.cache/glm53serve/peers")


@dataclass(frozen=True, slots=True)
class Bench:
    """One run's choices: where models lie, which peers are there, which CPUs everyone is pinned to."""

    models: Models
    llama: Llama | None
    torch: Path | None
    cpus: Sequence[int]

    def start(self, stack: ExitStack, name: str, exact: bool) -> Worker:
        """Start an engine on float32 (`exact`) or in the form whose speed is measured; `stack` ends it."""
        threads = str(len(self.cpus))
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        command: list[str | Path]
        if name == OURS:
            model = self.models.bf16() if exact else self.models.int4()
            command = [sys.executable, *ALONE, HERE / "peers_glm53serve.py", model]
            environment |= {"GLM53_BITS": "32" if exact else "4", "GLM53_MAXT": str(CONTEXT), "GLM53_CHECKPOINT_GB": "0"}
        elif name == LLAMA:
            assert self.llama is not None and self.torch is not None
            model = self.models.gguf_f32(self.llama, self.torch) if exact else self.models.gguf_q4(self.llama, self.torch)
            command = [self.models.llama_program(self.llama), "serve", model, threads, str(CONTEXT), "f32" if exact else "f16"]
        else:
            assert self.torch is not None
            command = [self.torch, *ALONE, HERE / "peers_transformers.py", self.models.huggingface(), threads]
        log = self.models.root / f"{name}.log"
        worker = Worker(name, [str(word) for word in command], environment, self.cpus, log)
        stack.callback(worker.close)
        print(f"  {worker.about}", flush=True)
        return worker


def token_ids(seed: int, count: int, vocabulary: int) -> list[int]:
    """Random ids, the same for every engine."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


def compare(bench: Bench, names: Sequence[str], vocabulary: int) -> bool:
    """Print how all engines' float32 logits agree with the last one's, over whole prompts and over single steps. True when all do."""
    with ExitStack() as stack:
        print("\nfloat32: logits after every position, and after single steps", flush=True)
        workers = [bench.start(stack, name, exact=True) for name in names]
        scratch = bench.models.root / "logits.bin"
        holds = True
        for length in COMPARED:
            ids = token_ids(length, length, vocabulary)
            rows = [worker.logits(ids, scratch) for worker in workers]
            stepped = [worker.measure(ids, length - STEPS_COMPARED).best for worker in workers]
            for worker, logits, best in zip(workers, rows, stepped, strict=True):
                seen = agreement(logits, rows[-1])
                steps = steps_agree(best, seen, logits)
                holds &= seen.holds and steps
                if worker is not workers[-1]:
                    _print_agreement(f"{worker.name} against {workers[-1].name}, {length} ids", seen)
                if not steps:
                    print(f"  {worker.name}, {length} ids: single steps have other argmaxes than the whole prompt", flush=True)
    print("  argmaxes agree" if holds else "  ARGMAXES DIFFER", flush=True)
    return holds


def steps_agree(best: Sequence[int], seen: Agreement, logits: NDArray[np.float32]) -> bool:
    """Whether the argmaxes of decode steps are those of the last rows of the whole prompt; as many may differ as there are near ties."""
    whole = logits.argmax(axis=1)[-len(best) :]
    return int((whole != np.asarray(best)).sum()) <= seen.near_ties


def _print_agreement(what: str, seen: Agreement) -> None:
    ties = f", {seen.near_ties} near ties" if seen.near_ties else ""
    off = f"off by {seen.typical:.1e} of the largest logit in the median row, {seen.worst:.1e} in the worst"
    print(f"  {what}: same argmax in {seen.same} of {seen.rows} rows{ties}; {off}", flush=True)


def measure(bench: Bench, names: Sequence[str], rounds: int, steps: Mapping[str, int], vocabulary: int) -> dict[str, Rates]:
    """Rates of every engine, measured in turn, round after round."""
    taken: dict[str, list[dict[int, Measured]]] = {name: [] for name in names}
    ids = token_ids(0, max(DEPTHS) + max(steps.values()), vocabulary)
    with ExitStack() as stack:
        print("\nspeed", flush=True)
        workers = [bench.start(stack, name, exact=False) for name in names]
        for worker in workers:  # first touches, kernel caches
            worker.measure(ids[:20], 16)
        for number in range(rounds):
            for worker in workers:
                found = {depth: worker.measure(ids[: depth + steps[worker.name]], depth) for depth in DEPTHS}
                taken[worker.name].append(found)
                decode = ", ".join(f"{m.decode_rate:.1f} after {m.prompt}" for m in found.values())
                last = found[max(DEPTHS)]
                said = f"prefill {last.prefill_rate:.1f}, decode {decode} tok/s (other load {last.foreign:.2f})"
                print(f"  round {number + 1}: {worker.name:12} {said}", flush=True)
        accuracy(workers, ids[:200], bench.models.root / "logits.bin")
    return {name: rates(found) for name, found in taken.items()}


def accuracy(workers: Sequence[Worker], ids: Sequence[int], scratch: Path) -> None:
    """Print what the formats cost: how the measured engines' logits compare with transformers' float32, when it is there."""
    exact = next((worker for worker in workers if worker.name == TRANSFORMERS), None)
    if exact is None:
        return
    reference = exact.logits(ids, scratch)
    for worker in workers:
        if worker is not exact:
            same, error = kept_argmaxes(worker.logits(ids, scratch), reference)
            print(f"  {worker.name}, {WEIGHTS[worker.name]}: argmax as in float32 in {same:.0%} of rows, error {error:.3f} of the logits' spread", flush=True)


def own_tool(bench: Bench, rounds: int) -> str:
    """What llama.cpp's own benchmark says of the same file on the same cores, so that our driver cannot slow it down unseen."""
    assert bench.llama is not None and bench.torch is not None
    tool = bench.llama.build / "bin" / "llama-bench"
    if not tool.exists():
        return f"llama-bench: not built in {bench.llama.build}, not compared"
    depth = max(DEPTHS)
    command = [tool, "-m", bench.models.gguf_q4(bench.llama, bench.torch), "-t", len(bench.cpus), "-r", rounds, "-o", "json"]
    found = []
    for what in (["-p", depth, "-n", 0], ["-p", 0, "-n", 32, "-d", depth]):
        done = subprocess.run([str(word) for word in (*command, *what)], capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, bench.cpus))
        if done.returncode:
            raise PeerError(f"llama-bench: exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}")
        found.append(float(np.median(json.loads(done.stdout)[0]["samples_ts"])))
    return f"llama-bench on the same file: prefill {found[0]:.1f}, decode after {depth} {found[1]:.1f} tok/s"


def machine() -> str:
    """The processor's name and the system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {platform.system()}, Python {platform.python_version()}"


def main() -> int:
    """Compare, measure, print. Exit code 1 when the engines disagree in float32, 2 when something could not run."""
    parser = Parser("This engine, llama.cpp and transformers on the same random weights.")
    parser.add_argument("--work", type=Path, default=ROOT, help=f"where models and builds lie, 5 GB (default {ROOT})")
    parser.add_argument("--llama", type=Path, help="folder with the llama.cpp source and its build (default WORK/llama)")
    parser.add_argument("--torch-python", type=Path, help="a Python with torch and transformers (default WORK/torch/bin/python)")
    parser.add_argument("--shape", default="mid", help="shape of the random model (default mid, 449 M parameters)")
    parser.add_argument("--threads", type=whole(1), default=2, help="cores everyone is pinned to (default 2)")
    parser.add_argument("--rounds", type=whole(1), default=7, help="rounds of measurements (default 7)")
    steps = whole(8, CONTEXT - max(DEPTHS))
    parser.add_argument("--steps", type=steps, default=48, help="decoded tokens a measurement (default 48; transformers a quarter of them)")
    parser.add_argument("--skip-compare", action="store_true", help="measure speed only")
    args = parser.parse_args()
    work = args.work.expanduser()
    torch, llama = None, None
    try:
        torch = find_torch((args.torch_python or work / "torch" / "bin" / "python").expanduser())
    except PeerError as error:
        print(error)
    try:
        llama = find_llama((args.llama or work / "llama").expanduser())
        if torch is None:
            print("llama.cpp: its converter needs the Python with torch and transformers, left out")
    except PeerError as error:
        print(error)
    cpus = spread_cpus(allowed_cores(), args.threads)
    if len(cpus) < args.threads:
        parser.error(f"--threads {args.threads}: this process may run on {len(cpus)} CPUs")
    bench = Bench(Models(work, args.shape, lambda line: print(line, flush=True)), llama, torch, cpus)
    names = [OURS, *([LLAMA] if llama and torch else []), *([TRANSFORMERS] if torch else [])]
    print(f"{machine()}; everyone on CPUs {', '.join(map(str, cpus))}; load {os.getloadavg()[0]:.1f}", flush=True)
    steps = {OURS: args.steps, LLAMA: args.steps, TRANSFORMERS: max(4, args.steps // 4)}
    try:
        vocabulary = int(json.loads((bench.models.bf16() / "config.json").read_text())["text_config"]["vocab_size"])
        agree = args.skip_compare or len(names) < 2 or compare(bench, names, vocabulary)
        engines = measure(bench, names, args.rounds, steps, vocabulary)
        print("\n" + "\n".join(speed_table(engines, WEIGHTS)) + "\n")
        print("\n".join(ratio_lines(engines)))
        if LLAMA in engines:
            print(own_tool(bench, min(args.rounds, 3)))
    except PeerError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
