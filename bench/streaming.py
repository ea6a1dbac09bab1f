"""Experts that do not fit: decode against the disk's bound, hit rates against the best possible, cancel latency, memory.

    python -m bench.streaming [--model DIR] [--layers 6] [--experts 40] [--tokens 24] [--cancels 200] [--quick]

Without --model a random model is written to a temporary directory: layers of the published widths, the first dense, the others with experts,
and a small vocabulary (with --quick one of the shape mid). Expert reads go past the page cache, so the files' being cached from writing them
changes nothing. Every ratio is of two figures of this run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.options import Parser, whole
from glm53serve.engine.sampling import Sampling
from glm53serve.engine.seam import Halted
from glm53serve.experts import ExpertStore, Need
from glm53serve.load import Loaded, load, shipped_model
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.config_file import parse_config
from glm53serve.model.shapes import shape_config
from glm53serve.model.shards import write_model
from glm53serve.model.synth import byte_tokenizer, draw_blocks, plan, synth
from glm53serve.oneshot import stream
from glm53serve.settings import Settings

SHARE = 0.25
CHUNK_ROWS = 128
BLOCK = 4
"""Tokens between two measurements of the disk, whose rate changes from second to second."""
F32 = NDArray[np.float32]
Trace = list[tuple[int, int]]


def main() -> int:
    """Run everything and print one table."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--layers", type=whole(2, 45), default=6)
    parser.add_argument("--experts", type=whole(8, 288), default=40)
    parser.add_argument("--tokens", type=whole(BLOCK, 1024), default=24)
    parser.add_argument("--cancels", type=whole(1), default=200)
    parser.add_argument("--quick", action="store_true", help="a small model, few tokens and cancels: under a minute")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.cancels = 12, 30
    rows = hit_rates(20 if arguments.quick else 100)
    with tempfile.TemporaryDirectory(prefix="glm53-streaming-") as scratch:
        directory = arguments.model
        if directory is None:
            directory = Path(scratch) / "model"
            if arguments.quick:
                synth(directory, "mid", fmt="int4")
            else:
                real_width_model(directory, arguments.layers, arguments.experts)
        rows += streaming(directory, arguments.tokens, arguments.cancels)
    print_table(rows)
    return 0


def real_width_model(directory: Path, layers: int, experts: int) -> None:
    """A random int4 model of the published widths with a vocabulary of 4,096."""
    raw = shape_config("flash", layers, experts)
    text = raw["text_config"]
    kinds = ["dense"] + ["sparse"] * (layers - 1)
    text.update(vocab_size=4096, eos_token_id=[4095], first_k_dense_replace=1, mlp_layer_types=kinds)
    units, draws = plan(parse_config(raw), "int4")
    texts = {"config.json": json.dumps(raw), "tokenizer.json": json.dumps(byte_tokenizer(), ensure_ascii=False)}
    write_model(directory, units, lambda entry: draw_blocks(entry, draws[entry.name], 0), texts)


def print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    """What, figure, what it is held to."""
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for what, figure, held in rows:
        print(f"{what:<{widths[0]}}  {figure:>{widths[1]}}  {held}".rstrip())


# -- hit rates


@dataclass(slots=True)
class Recorder:
    """Every use of an expert in order, as (layer, expert), by wrapping a store's `need`."""

    store: ExpertStore
    uses: Trace = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    def __post_init__(self) -> None:
        original = self.store.need

        def need(layer, experts, counts, rows, halt, in_order):  # type: ignore[no-untyped-def]
            made = original(layer, experts, counts, rows, halt, in_order)
            self.uses += [(layer, int(e)) for e in experts]
            self.needs.append(made)
            return made

        self.store.need = need  # type: ignore[method-assign]

    def rate(self) -> float:
        """Share of uses found in memory."""
        return sum(need.found for need in self.needs) / max(len(self.uses), 1)


def belady(uses: Trace, room: int) -> float:
    """Hit rate of the optimal policy that may also leave a missed expert uncached."""
    following = [0] * len(uses)
    last: dict[tuple[int, int], int] = {}
    for i in range(len(uses) - 1, -1, -1):
        following[i] = last.get(uses[i], len(uses) + 1)
        last[uses[i]] = i
    held: dict[tuple[int, int], int] = {}
    hits = 0
    for use, after in zip(uses, following, strict=True):
        if use in held:
            hits += 1
            held[use] = after
        elif len(held) < room:
            held[use] = after
        else:
            farthest = max(held, key=held.__getitem__)
            if held[farthest] > after:
                del held[farthest]
                held[use] = after
    return hits / max(len(uses), 1)


def best_static(uses: Trace, room: int) -> float:
    """Hit rate of the best fixed set, chosen with hindsight, already in memory at the start."""
    return sum(count for _, count in Counter(uses).most_common(room)) / max(len(uses), 1)


def hit_rates(questions: int) -> list[tuple[str, str, str]]:
    """The shipped model answering questions at budgets of 25 % and 50 %, against replays of the same uses."""
    tasks = Path(__file__).parent.parent / "tests" / "data" / "nano_tasks.jsonl"
    prompts = [json.loads(line)["prompt"] for line in tasks.read_text().splitlines()]
    order = np.random.default_rng(0).permutation(len(prompts))[:questions]
    rows = []
    for share in (0.25, 0.5):
        checkpoint = open_checkpoint(shipped_model())
        loaded = load(shipped_model(), settings(share * checkpoint.expert_bytes), slots=1, specials_stop=True)
        store = loaded.experts
        assert store is not None
        recorder = Recorder(store)
        for i in order:
            list(stream(loaded, loaded.tokenizer.encode(prompts[i].encode()), 48, Sampling()))
        room = round(share * len(store.places))
        optimal, static, ours = belady(recorder.uses, room), best_static(recorder.uses, room), recorder.rate()
        rows.append((f"hit rate, shipped model, {share:.0%}", f"{ours:.3f}", f"best fixed set {static:.3f}, Belady {optimal:.3f} ({ours / optimal:.0%})"))
        finish(loaded)
    return rows


# -- streaming


def settings(budget: float) -> Settings:
    """Settings of a run with that many bytes for experts."""
    return Settings.from_environ({"GLM53_BITS": "4", "GLM53_EXPERT_GB": repr(budget / 1e9), "GLM53_MAXT": "2048", "GLM53_CHECKPOINT_GB": "0"})


def finish(loaded: Loaded) -> None:
    """Release a model."""
    loaded.engine.close()
    if loaded.experts is not None:
        loaded.experts.close()
    gc.collect()


def rss() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def streaming(directory: Path, tokens: int, cancels: int) -> list[tuple[str, str, str]]:
    """Decode, a prompt chunk and cancels of a model whose experts have a quarter of the memory they need."""
    budget = SHARE * open_checkpoint(directory).expert_bytes
    loaded = load(directory, settings(budget), slots=1, specials_stop=False, note=lambda line: print(line, file=sys.stderr))
    store = loaded.experts
    if store is None:
        raise SystemExit(f"{directory}: no routed experts, nothing to measure")
    # the rate and the reads must be of the disk, whatever the page cache still holds
    if not store.files.open_direct():
        raise SystemExit("this file system has no direct reads: nothing to measure")
    store.files.direct = True
    # slot, activations and whatever else is not an expert, once a chunk of the largest size of this run has been computed
    loaded.engine.forward_prefill(loaded.engine.slots[0], [65] * CHUNK_ROWS)
    loaded.engine.empty(loaded.engine.slots[0])
    before = rss() - store.buffers * store.buffer_bytes
    rows = [("experts", f"{len(store.places)} of {store.expert_bytes / 1e6:.1f} MB", f"{store.keep} kept, {store.transit} in transit")]
    rows += decode(loaded, store, tokens)
    rows += chunk(loaded, store)
    rows += latency(loaded, store, cancels)
    grown = rss() - before
    rows.append(("memory of experts", f"{store.buffers * store.buffer_bytes / budget:.3f}", "of the budget, by the store's books"))
    rows.append(("RSS grown", f"{grown / budget:.3f}", "of the budget, after the first chunk less its experts"))
    finish(loaded)
    return rows


def disk_rate(store: ExpertStore, seconds: float = 0.5) -> float:
    """Bytes a second of direct expert reads."""
    rate = store.files.measure(list(store.places.values()), seconds).direct
    assert rate is not None
    return rate


@dataclass(slots=True)
class Run:
    """Some decoded tokens and the disk's rate around them."""

    wall: float
    blocked: float
    read: int
    missed: int
    rate: float


def decode(loaded: Loaded, store: ExpertStore, tokens: int) -> list[tuple[str, str, str]]:
    """Tokens one by one, against the time that reading what was missing takes at the disk's rate; a second pass reads nothing ahead."""
    recorder = Recorder(store)
    ids = np.random.default_rng(1).integers(0, 255, 8).tolist()
    slot = loaded.engine.slots[0]
    first = loaded.engine.forward_prefill(slot, ids).logits
    runs, logits = decode_blocks(loaded, store, recorder, first, tokens, BLOCK)
    foresee = store.foresee
    store.foresee = lambda layer, experts: None  # type: ignore[method-assign]
    try:
        blind, _ = decode_blocks(loaded, store, recorder, logits, tokens, BLOCK)
    finally:
        store.foresee = foresee  # type: ignore[method-assign]
    wanted, found = sum(need.wanted for need in recorder.needs), sum(need.found for need in recorder.needs)
    optimal = belady(recorder.uses, store.keep)
    loaded.engine.empty(slot)
    wall, read, missed = (sum(getattr(run, name) for run in runs) for name in ("wall", "read", "missed"))
    tokens = BLOCK * len(runs)
    least = sum(run.missed / run.rate for run in runs)
    rates = sorted(run.rate / 1e9 for run in runs)
    shares = sorted(run.missed / run.rate / run.wall for run in runs)
    unseen = float(np.median([run.missed / run.rate / run.wall for run in blind]))
    return [
        ("disk", f"{np.median(rates):.2f} GB/s", f"direct reads, between every {BLOCK} tokens: {rates[0]:.2f} to {rates[-1]:.2f}"),
        ("streamed decode", f"{tokens / wall:.2f} tok/s", f"bound {tokens / least:.2f} tok/s by {missed / tokens / 1e6:.0f} MB missed a token"),
        ("of the bound", f"{np.median(shares):.3f}", f"median of {len(shares)}; {sum(run.blocked for run in runs) / wall:.0%} of the time waiting for reads"),
        ("of the bound, nothing read ahead", f"{unseen:.3f}", "the same without what the router says before the attention"),
        ("bytes read / bytes missed", f"{read / missed:.3f}", "1 is the least; what is more was read ahead and not used"),
        ("hit rate, random routing", f"{found / wanted:.3f}", f"Belady {optimal:.3f}, fixed {best_static(recorder.uses, store.keep):.3f}"),
    ]


def decode_blocks(loaded: Loaded, store: ExpertStore, recorder: Recorder, logits: F32, tokens: int, warm_up: int) -> tuple[list[Run], F32]:
    """`warm_up` tokens, then `tokens` in whole blocks with the disk measured before and after each."""
    engine, meter = loaded.engine, loaded.engine.backends[0].meter
    slot = engine.slots[0]
    for _ in range(warm_up):
        logits = engine.forward_step([(slot, int(np.argmax(logits)))])[0][0]
    runs = []
    rate = disk_rate(store)
    for _ in range(tokens // BLOCK):
        read, needs, blocked, began = store.bytes_read, len(recorder.needs), meter.disk, time.perf_counter()
        for _ in range(BLOCK):
            logits = engine.forward_step([(slot, int(np.argmax(logits)))])[0][0]
        wall = time.perf_counter() - began
        missed = sum(need.wanted - need.found for need in recorder.needs[needs:]) * store.expert_bytes
        before, rate = rate, disk_rate(store)
        runs.append(Run(wall, meter.disk - blocked, store.bytes_read - read, missed, (before + rate) / 2))
    return runs, logits


def chunk(loaded: Loaded, store: ExpertStore) -> list[tuple[str, str, str]]:
    """A prompt chunk that uses nearly all experts of each layer: reads a layer's expert at most once."""
    engine = loaded.engine
    slot = engine.slots[0]
    engine.empty(slot)
    held = sum(int(store.resident(layer).sum()) for layer in store.layers)
    recorder = Recorder(store)
    before, began = store.reads, time.perf_counter()
    read = store.bytes_read
    engine.forward_prefill(slot, np.random.default_rng(2).integers(0, 255, CHUNK_ROWS).tolist())
    wall = time.perf_counter() - began
    reads, distinct = store.reads - before, len(set(recorder.uses))
    engine.empty(slot)
    return [
        (f"prompt chunk of {CHUNK_ROWS} rows", f"{CHUNK_ROWS / wall:.1f} tok/s", f"{(store.bytes_read - read) / wall / 1e9:.2f} GB/s read"),
        ("reads / experts used", f"{reads} / {distinct}", f"{held} were in memory; at most one read each"),
    ]


def latency(loaded: Loaded, store: ExpertStore, count: int) -> list[tuple[str, str, str]]:
    """From what the reader's thread does for a CANCEL to the end of the chunk, at random points of chunks of 16 rows."""
    engine = loaded.engine
    slot = engine.slots[0]
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 255, 16).tolist()
    began = time.perf_counter()
    engine.forward_prefill(slot, ids)
    whole = time.perf_counter() - began
    delays = []
    while len(delays) < count:
        engine.empty(slot)
        ids = rng.integers(0, 255, 16).tolist()
        flag = threading.Event()
        at = [0.0]

        def cancel(flag: threading.Event = flag, at: list[float] = at) -> None:
            at[0] = time.perf_counter()
            flag.set()
            engine.interrupt()

        timer = threading.Timer(rng.uniform(0, whole), cancel)
        timer.start()
        try:
            engine.forward_prefill(slot, ids, flag.is_set, guard=True)
            timer.cancel()
        except Halted:
            delays.append(time.perf_counter() - at[0])
        timer.join()
    engine.empty(slot)
    one = store.buffer_bytes / disk_rate(store)
    allowed = 2 * one + 0.020
    worst, middle = max(delays) * 1e3, float(np.median(delays)) * 1e3
    return [
        (
            f"cancel under streaming, {count} points",
            f"max {worst:.1f} ms",
            f"median {middle:.2f}; allowed {allowed * 1e3:.1f} (two reads of {one * 1e3:.1f} + 20)",
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
