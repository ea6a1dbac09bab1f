"""How long a CANCEL inside a prompt chunk waits, and what being able to cancel costs.

    python bench/cancel.py [--model DIR] [--points 300] [--tokens 1000] [--seed N]

Without --model a random `mid` model is made once in --scratch. Prints the distribution of the time from writing CANCEL to reading ERROR, at
random points of one chunk, against the mean layer time of that chunk (forward time of PROF / layers); then the snapshot and the armed hook as a
share of the chunk. Exit code 1 when p50 > 0.5 or max > 1.0 layer times (+ 10 ms), or the cost is over 0.5 %.
"""

from __future__ import annotations

import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: it has names that packages have, too

from bench.options import Parser, whole  # noqa: E402
from harness.client import Client  # noqa: E402
from harness.engine_process import own_variables  # noqa: E402
from harness.ledger import Turn  # noqa: E402
from harness.notes import HaltLine  # noqa: E402
from harness.rig import Rig  # noqa: E402

PRIMED = 10
SLACK = 0.010


@dataclass(slots=True)
class Latencies:
    """Seconds from CANCEL to ERROR of every cancel that landed inside the chunk, and the chunk's own time, measured around them."""

    waited: list[float]
    chunks: list[float]
    layers: int
    missed: int

    @property
    def layer(self) -> float:
        """Mean seconds a layer takes in the chunk."""
        return statistics.median(self.chunks) / self.layers


def scratch_model(shape: str, scratch: Path) -> Path:
    """A random model of that shape, made when it is not there yet."""
    directory = scratch / f"glm53-{shape}"
    if not (directory / "config.json").exists():
        print(f"making a random {shape} model in {directory} ...", flush=True)
        subprocess.run([str(Path(sys.executable).parent / "glm53serve"), "synth", "--shape", shape, str(directory)], check=True)
    return directory


def quantile(values: list[float], share: float) -> float:
    """The value below which that share lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def prime(client: Client, prompt: bytes, slot: int) -> None:
    """Fill the slot with exactly this prompt."""
    client.answer(prompt, slot, 1)


def time_chunk(client: Client, ten: bytes, long: bytes) -> float:
    """Forward seconds of the uncancelled chunk, on a slot of its own."""
    prime(client, ten, 1)
    prof = client.answer(long, 1, 1).prof
    assert prof is not None
    return prof.forward_time


def measure(rig: Rig, tokens: int, points: int, rng: random.Random) -> Latencies:
    """Cancel at `points` random points inside the chunk."""
    ten, long = rig.digits(PRIMED, 1), rig.digits(tokens, 1)
    with rig.start(2, GLM53_PREFILL_CHUNK=str(2 * tokens), GLM53_CHECKPOINT_GB="0") as client:
        time_chunk(client, ten, long)
        found = Latencies([], [time_chunk(client, ten, long)], 1, 0)
        prime(client, ten, 0)
        while len(found.waited) < points:
            if len(found.waited) % 50 == 25:
                found.chunks.append(time_chunk(client, ten, long))
            turn, halt = cancel_at(client, long, rng.uniform(0.02, 0.95) * statistics.median(found.chunks))
            if halt is None:
                found.missed += 1
                if found.missed > points:
                    raise SystemExit(f"{found.missed} of {found.missed + len(found.waited)} cancels did not land inside the chunk")
                prime(client, ten, 0)
                continue
            assert turn.cancelled_at is not None
            found.layers = halt.layers
            found.waited.append(turn.ended_at - turn.cancelled_at)
            if len(found.waited) % 50 == 0:
                print(f"  {len(found.waited)} of {points} ...", flush=True)
        found.chunks.append(time_chunk(client, ten, long))
    return found


def cancel_at(client: Client, prompt: bytes, after: float) -> tuple[Turn, HaltLine | None]:
    """Submit on slot 0 and cancel `after` seconds behind the ACCEPT. Returns the turn and its HALT, None when the chunk was not halted inside."""
    notes = len(client.notes)
    turn = client.submit(prompt, 0, 1)
    client.wait_accept(turn)
    assert turn.accept is not None
    time.sleep(max(0.0, turn.accept.at + after - time.monotonic()))
    client.cancel(turn)
    turn.wait()
    if turn.outcome != "CANCELLED":
        return turn, None
    client.cancel_line(turn)
    return turn, next((note for note in client.notes[notes:] if isinstance(note, HaltLine)), None)


def cost_of_being_ready(model: Path, tokens: int, repeats: int = 5) -> tuple[float, float, int, float]:
    """In this process: (seconds of a snapshot, seconds of one question to the hook, questions in the chunk, seconds of the chunk)."""
    from glm53serve.load import load
    from glm53serve.settings import Settings

    settings = Settings.from_environ({**own_variables(), "GLM53_CHECKPOINT_GB": "0", "GLM53_PREFILL_CHUNK": str(2 * tokens)})
    loaded = load(model, settings, slots=1, specials_stop=False)
    engine, slot = loaded.engine, loaded.engine.slots[0]
    ids = [id for id in range(1, 200) if id not in loaded.stop_ids]
    chunk = (ids * (tokens // len(ids) + 1))[:tokens]
    asked = 0

    class Flags:
        cancelled = False
        stopping = False

    flags = Flags()

    def counting() -> bool:
        nonlocal asked
        asked += 1
        return False

    def hook() -> bool:
        return flags.cancelled or flags.stopping

    chunks, snapshots = [], []
    for _ in range(repeats):
        engine.empty(slot)
        engine.forward_prefill(slot, chunk[:PRIMED], guard=True)
        asked = 0
        began = time.perf_counter()
        engine.forward_prefill(slot, chunk, halt=counting, guard=True)
        chunks.append(time.perf_counter() - began)
        for backend in engine.backends:
            began = time.perf_counter()
            backend.snapshot(slot.index)
            snapshots.append(time.perf_counter() - began)
    per_question = min(_timed(hook) for _ in range(5))
    engine.close()
    return statistics.median(snapshots) * len(engine.backends), per_question, asked, statistics.median(chunks)


def _timed(hook: object, count: int = 20_000) -> float:
    assert callable(hook)
    began = time.perf_counter()
    for _ in range(count):
        hook()
    return (time.perf_counter() - began) / count


def main() -> int:
    """Measure and report."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="mid", help="shape of the random model made when there is no --model (default mid)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--engine", default=str(Path(sys.executable).parent / "glm53"))
    parser.add_argument("--points", type=whole(1), default=300, help="cancels that land inside the chunk (default 300)")
    parser.add_argument("--tokens", type=whole(PRIMED + 1, 8000), default=1000, help="tokens of the chunk (default 1000)")
    parser.add_argument("--seed", type=whole(0), default=1)
    args = parser.parse_args()
    model = args.model or scratch_model(args.shape, args.scratch)
    rig = Rig(shlex.split(args.engine), model, own_variables())
    try:
        found = measure(rig, args.tokens, args.points, random.Random(args.seed))
    finally:
        rig.close()
    layer = found.layer
    print(f"chunk of {args.tokens} tokens: {1000 * statistics.median(found.chunks):.1f} ms in {found.layers} layers, mean layer {1000 * layer:.2f} ms")
    print(f"CANCEL to ERROR at {len(found.waited)} random points inside the chunk ({found.missed} fell outside):")
    worst = max(found.waited)
    middle = quantile(found.waited, 0.5)
    for name, value in (("p50", middle), ("p90", quantile(found.waited, 0.9)), ("p99", quantile(found.waited, 0.99)), ("max", worst)):
        print(f"  {name} {1000 * value:8.2f} ms  {value / layer:6.3f} of the mean layer time")
    snapshot, question, asked, chunk = cost_of_being_ready(model, args.tokens)
    cost = (snapshot + asked * question) / chunk
    print(
        f"snapshot {1000 * snapshot:.3f} ms, {asked} questions of {1e9 * question:.0f} ns, chunk {1000 * chunk:.1f} ms: {100 * cost:.3f} % of the chunk"
    )
    good = middle <= 0.5 * layer and worst <= layer + SLACK and cost <= 0.005
    print("PASS" if good else "FAIL", "(p50 <= 0.5 layers, max <= 1.0 layers + 10 ms, cost <= 0.5 %)")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
