"""What a case has at hand: engines to start, fresh answers to compare with, prompts of exact lengths."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.client import Client
from harness.engine_process import DEFAULT_TIMEOUT
from harness.frames import Score
from harness.ledger import Turn

TOLERANCE = 2e-4
TRIES = 6
"""How often a case tries what it can only do in time while the machine does not stand still. An engine that does it wrong does so each time."""

Status = Literal["PASS", "FAIL", "SKIP"]


class Failed(Exception):
    """The engine did something else than the case wants; the message says what."""


class Skipped(Exception):
    """The case cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case. `reason` is one short line."""

    name: str
    status: Status
    reason: str
    seconds: float

    def line(self) -> str:
        """The line the harness prints."""
        return f"{self.status} {self.name:<16} {self.reason} ({self.seconds:.1f} s)"


Case = Callable[["Rig"], str]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under its function's name. It returns a short line on success and raises Failed or Skipped otherwise."""
    CASES[function.__name__] = function
    return function


def expect(what: str, got: object, want: object) -> None:
    """Raise Failed unless the two are equal."""
    if got != want:
        raise Failed(f"{what}: {_short(got)}, expected {_short(want)}")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 160 else f"{text[:100]}...({len(text)} characters)"


def ended(turn: Turn, outcome: str) -> Turn:
    """Wait for a turn; raise Failed unless it ended with `outcome` (`DONE` or an error code with its detail)."""
    turn.wait()
    expect(f"turn {turn.id} ended with", turn.outcome, outcome)
    return turn


class Rig:
    """The engine under test. `env` goes to every engine that is started; `tolerance` is how far two log probabilities may lie apart.

    `chain`: the prompt's layers are expected to run on a device chain. `patience`: seconds the engine has for any one answer.
    """

    def __init__(
        self,
        engine: Sequence[str],
        model: str | Path,
        env: Mapping[str, str] | None = None,
        *,
        chain: bool = False,
        tolerance: float = TOLERANCE,
        patience: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.engine = list(engine)
        self.model = Path(model)
        self.env = dict(env or {})
        self.chain = chain
        self.tolerance = tolerance
        self.patience = patience
        self._scratch = tempfile.TemporaryDirectory(prefix="glm53-harness-")
        self._oracle: Client | None = None
        self._oracle_slot = 0
        self._fresh: dict[tuple[bytes, int, int], Turn] = {}
        self._ruler: Client | None = None
        self._counts: dict[bytes, int] = {}
        self._runner: bytes | None = None

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The variables of an engine of this rig: usage history in a scratch file, the rig's own, and `extra`."""
        return {"COLI_USAGE": str(Path(self._scratch.name) / "usage"), **self.env, **extra}

    def start(self, slots: int = 1, *, keep: bool = False, cap: str = "0", **extra: str) -> Client:
        """Start an engine and wait for its handshake. Raises Failed when it cannot load the model."""
        client = Client([*self.engine], self.model, slots=slots, env=self.environment(extra), keep=keep, cap=cap, patience=self.patience)
        if client.ledger.load_fail is not None:
            fail = client.ledger.load_fail
            client.close()
            raise Failed(f"the engine does not load {self.model}: {fail.line.decode(errors='replace')[:200]}")
        return client

    def fresh(self, prompt: bytes, max_tokens: int = 8, logprobs: int = 4) -> Turn:
        """The answer of a slot never used before, in an engine no turn was ever cancelled in. Kept, so asking twice costs nothing."""
        key = (prompt, max_tokens, logprobs)
        if key not in self._fresh:
            if self._oracle is None or self._oracle_slot == 16:
                self._drop_oracle()
                self._oracle, self._oracle_slot = self.start(16, GLM53_CHECKPOINT_GB="0"), 0
            turn = self._oracle.answer(prompt, self._oracle_slot, max_tokens, logprobs=logprobs)
            word = self._oracle.reuse(turn).word
            expect("the first turn of an unused slot", word, "cold")
            self._oracle_slot += 1
            self._fresh[key] = turn
        return self._fresh[key]

    def count(self, text: bytes) -> int:
        """How many tokens a text has, as ACCEPT or CONTEXT_EXCEEDED tells it."""
        if text not in self._counts:
            if self._ruler is None:
                self._ruler = self.start(1, GLM53_MAXT="64", GLM53_CHECKPOINT_GB="0")
            turn = self._ruler.submit(text, max_tokens=1).wait()
            if turn.error is not None and turn.error.code == "CONTEXT_EXCEEDED":
                self._counts[text] = int(turn.error.detail.split()[0].partition("=")[2])
            elif turn.done is not None:
                self._counts[text] = turn.done.prompt_tokens
            else:
                raise Failed(f"a text of {len(text)} bytes could not be counted: {turn.outcome}")
        return self._counts[text]

    def digits(self, tokens: int, seed: int = 0) -> bytes:
        """A text of random digits with exactly that many tokens; two texts of one seed begin alike."""
        rng = random.Random(seed)
        text = bytes(rng.choice(b"0123456789") for _ in range(3 * tokens + 3))
        low, high = tokens, 3 * tokens
        if self.count(text[:low]) == tokens:
            return text[:low]
        while low < high:
            middle = (low + high) // 2
            if self.count(text[:middle]) < tokens:
                low = middle + 1
            else:
                high = middle
        for length in range(max(1, low - 3), low + 4):
            if self.count(text[:length]) == tokens:
                return text[:length]
        raise Skipped(f"no digit text of exactly {tokens} tokens was found")

    def runner(self, least: int = 24) -> bytes:
        """A prompt whose greedy answer is at least that long."""
        if self._runner is None:
            story = b"[gMASK]<sop><|user|>Tell me a story about a %s.<|assistant|></think>"
            texts = [story % animal for animal in (b"fox", b"dog", b"bird")] + [b"Once upon a time", self.digits(12, 7), b"The quick brown fox"]
            best = max(texts, key=lambda text: len(self.fresh(text, 160, 1).tokens))
            self._runner = best
        if len(self.fresh(self._runner, 160, 1).tokens) < least:
            raise Skipped(f"no prompt was found whose greedy answer has {least} tokens")
        return self._runner

    def same(self, got: Turn, want: Turn) -> str:
        """Raise Failed unless both turns say the same: text, and every score both have. Returns how much was compared."""
        shared = min(len(got.tokens), len(want.tokens))
        if got.text != want.text:
            raise Failed(f"turn {got.id} answers {_short(got.text)}, a fresh engine {_short(want.text)}")
        pairs = [(f"token {i}", got.tokens[i].score, want.tokens[i].score) for i in range(shared)]
        expected = {frame.pos: frame for frame in want.echo}
        for frame in got.echo:
            other = expected.get(frame.pos)
            if other is None:
                continue
            expect(f"the text of position {frame.pos}", frame.payload, other.payload)
            if frame.score.best and other.score.best:
                pairs.append((f"position {frame.pos}", frame.score, other.score))
        worst = 0.0
        for where, mine, fresh in pairs:
            if mine is not None and fresh is not None:
                off = _distance(mine, fresh)
                worst = max(worst, off)
                if off > self.tolerance:
                    raise Failed(f"turn {got.id}, {where}: log probabilities differ by {off:.6f} from a fresh engine")
        return f"{shared} tokens and {len(pairs) - shared} prompt scores equal a fresh engine's within {worst:.6f}"

    def _drop_oracle(self) -> None:
        if self._oracle is not None:
            self._oracle.close()
            self._oracle = None

    def close(self) -> None:
        """End the rig's own engines."""
        self._drop_oracle()
        if self._ruler is not None:
            self._ruler.close()
            self._ruler = None
        with contextlib.suppress(OSError):
            self._scratch.cleanup()


def _distance(a: Score, b: Score) -> float:
    ranks = [abs(x[1] - y[1]) for x, y in zip(a.best, b.best, strict=False)]
    return max([abs(a.logprob - b.logprob), *ranks])
