"""Cancels at random points, each followed by a retry that must answer as an engine that has never seen anything else.

    python bench/soak.py [--model DIR | --shape mid] [--cancels 1000] [--seed N] [--mutation restore]

Answers are compared by the log probabilities of prompt and answer as well as by text. Memory is compared after warm-up and at the end. With
--mutation the engine runs with a fault put in on purpose, and the run succeeds when a retry tells.
"""

from __future__ import annotations

import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: it has names that packages have, too

from bench.cancel import scratch_model  # noqa: E402
from bench.options import Parser, whole  # noqa: E402
from harness.client import Client  # noqa: E402
from harness.engine_process import own_variables  # noqa: E402
from harness.ledger import Turn  # noqa: E402
from harness.notes import HaltLine  # noqa: E402
from harness.rig import Failed, Rig, Skipped  # noqa: E402

SLOTS = 3
FAMILIES = 6
LENGTHS = (31, 66, 118, 205, 330)
BUDGET = 6
WARM = 150
STORIES = tuple(f"[gMASK]<sop><|user|>Tell me a story about a {animal}.<|assistant|></think>".encode() for animal in ("fox", "dog", "bird"))


# -- faults, for the engine process


def _nothing_back(restore: Callable[..., None]) -> Callable[..., None]:
    return lambda self, slot: None


def _without(part: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A restore that leaves one part of the state as the chunk left it."""

    def mutate(restore: Callable[..., None]) -> Callable[..., None]:
        def partly(self: Any, slot: int) -> None:
            views = getattr(self._open[slot], part)
            kept = {index: view.copy() for index, view in views.items()}
            restore(self, slot)
            for index, view in kept.items():
                views[index][:] = view

        return partly

    return mutate


MUTATIONS = {"restore": _nothing_back, "windows": _without("windows"), "kda": _without("kda"), "pool-rows": _without("raw")}


def mutated_engine(name: str, arguments: list[str]) -> int:
    """Be the `glm53` executable with a fault."""
    from glm53serve.cli import main_drop_in
    from glm53serve.cpu.layers import CpuLayers

    CpuLayers.restore = MUTATIONS[name](CpuLayers.restore)  # type: ignore[method-assign]
    return main_drop_in(arguments)


# -- the run


@dataclass(slots=True)
class Tally:
    """What happened so far."""

    seen: Counter[str] = field(default_factory=Counter)
    scores: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    """Cancels and retries on the slots of one engine; fresh answers come from another one."""

    def __init__(self, client: Client, rig: Rig, rng: random.Random) -> None:
        self.client = client
        self.rig = rig
        self.rng = rng
        self.tally = Tally()
        self._families = [rng.randrange(FAMILIES) for _ in range(SLOTS)]
        self._stories = [story for story in STORIES if len(rig.fresh(story, 60, 1).tokens) >= 12]
        if not self._stories:
            raise SystemExit("no prompt of this model has an answer long enough to be cancelled")

    def cancel_in_prompt(self) -> None:
        """Cancel a digit prompt at a random point of its computing, then ask again."""
        slot = self.rng.randrange(SLOTS)
        if self.rng.random() < 0.4:
            self._families[slot] = self.rng.randrange(FAMILIES)
        length = self.rng.choice(LENGTHS)
        prompt = self.rig.digits(length, 50 + self._families[slot])
        want = self.rig.fresh(prompt, BUDGET, 2)
        assert want.prof is not None
        turn = self.client.submit(prompt, slot, BUDGET, logprobs=2)
        self.client.wait_accept(turn)
        time.sleep(self.rng.random() ** 1.5 * want.prof.forward_time)
        self._cancel_and_retry(turn, prompt, prompt, BUDGET)

    def cancel_in_answer(self) -> None:
        """Cancel a story after some tokens, then ask again, or go on from where it was cut."""
        slot = self.rng.randrange(SLOTS)
        prompt = self.rng.choice(self._stories)
        self._families[slot] = -1 - self.rng.randrange(FAMILIES)
        turn = self.client.submit(prompt, slot, 60, logprobs=1)
        self.client.wait_tokens(turn, self.rng.randrange(1, 10))
        self._cancel_and_retry(turn, prompt, None if self.rng.random() < 0.5 else prompt, BUDGET)
        self._families[slot] = self.rng.randrange(FAMILIES)

    def _cancel_and_retry(self, turn: Turn, prompt: bytes, retry: bytes | None, budget: int) -> None:
        notes = len(self.client.notes)
        self.client.cancel(turn)
        turn.wait()
        if turn.outcome != "CANCELLED":
            self.tally.seen[f"too late ({turn.outcome})"] += 1
            return
        line = self.client.cancel_line(turn)
        halted = any(isinstance(note, HaltLine) for note in self.client.notes[notes:])
        place = "while decoding" if line.emitted else "inside a chunk" if halted else "between"
        if line.emitted != len(turn.tokens) or (line.emitted and line.filled != line.prompt_tokens + line.emitted):
            self.tally.wrong.append(f"{line} after {len(turn.tokens)} DATA frames")
        again = retry if retry is not None else prompt + turn.text + b" 12"
        got = self.client.answer(again, turn.slot, budget, logprobs=2)
        word = self.client.reuse(got).word
        self.tally.seen[f"cancelled {place}"] += 1
        self.tally.seen[f"retry {word}"] += 1
        try:
            self.rig.same(got, self.rig.fresh(again, budget, 2))
        except Failed as difference:
            self.tally.wrong.append(f"cancelled {place} at {line.filled} of {line.prompt_tokens}, retry {word}: {difference}")
        self.tally.scores += len(got.tokens) + len(got.echo)

    @property
    def cancelled(self) -> int:
        """Cancels that landed."""
        return sum(count for what, count in self.tally.seen.items() if what.startswith("cancelled"))


def main() -> int:
    """Run and report."""
    if sys.argv[1:2] == ["--as-engine"]:
        return mutated_engine(sys.argv[2], sys.argv[3:])
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "glm53serve" / "data" / "glm53-nano")
    parser.add_argument("--shape", help="use a random model of this shape instead, made once in --scratch")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--engine", default=str(Path(sys.executable).parent / "glm53"))
    parser.add_argument("--cancels", type=whole(1), default=1000)
    parser.add_argument("--seed", type=whole(0), default=1)
    parser.add_argument("--mutation", choices=sorted(MUTATIONS))
    args = parser.parse_args()
    model = scratch_model(args.shape, args.scratch) if args.shape else args.model
    healthy = shlex.split(args.engine)
    engine = [sys.executable, str(Path(__file__).resolve()), "--as-engine", args.mutation] if args.mutation else healthy
    fresh, under_test = Rig(healthy, model, own_variables()), Rig(engine, model, own_variables())
    try:
        return soak(fresh, under_test, args.cancels, random.Random(args.seed), bool(args.mutation))
    except Skipped as skip:
        raise SystemExit(str(skip)) from skip
    finally:
        fresh.close()
        under_test.close()


def soak(fresh: Rig, under_test: Rig, cancels: int, rng: random.Random, mutated: bool) -> int:
    """The run itself. Returns the exit code."""
    began = time.monotonic()
    with under_test.start(SLOTS, GLM53_CHECKPOINT_GB="0", GLM53_PREFILL_CHUNK="121", GLM53_MAXT="1024") as client:
        run = Soak(client, fresh, rng)
        process = psutil.Process(client.pid)
        for slot in range(SLOTS):
            client.answer(fresh.digits(max(LENGTHS), 49), slot, BUDGET, logprobs=2)
        warm = 0
        while run.cancelled < cancels and not (mutated and run.tally.wrong):
            (run.cancel_in_prompt if rng.random() < 0.7 else run.cancel_in_answer)()
            if not warm and run.cancelled >= min(WARM, cancels // 2):
                warm = process.memory_info().rss
            if run.cancelled % 100 == 0 and run.cancelled:
                print(f"  {run.cancelled} cancels, {len(run.tally.wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
        rss = process.memory_info().rss
        client.finish()
    print(", ".join(f"{count} {what}" for what, count in sorted(run.tally.seen.items())))
    print(f"{run.cancelled} cancels and retries, {run.tally.scores} scores compared, {len(run.tally.wrong)} different from a fresh engine")
    for text in run.tally.wrong[:5]:
        print(f"  {text}")
    if mutated:
        print(f"{'PASS' if run.tally.wrong else 'FAIL'} (the fault was {'seen' if run.tally.wrong else 'not seen'} within {run.cancelled} cancels)")
        return 0 if run.tally.wrong else 1
    growth = rss / warm - 1
    print(f"memory after warm-up {warm >> 20} MiB, at the end {rss >> 20} MiB: {100 * growth:+.2f} %")
    good = not run.tally.wrong and growth <= 0.02
    print("PASS" if good else "FAIL", "(all equal, memory within 2 %)")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
