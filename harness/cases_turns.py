"""Cases about what a slot remembers and how turns share the engine."""

from __future__ import annotations

from harness.client import Client
from harness.rig import Failed, Rig, Skipped, case, ended, expect

BLANKS = b" \t\n\r\x0b\x0c"


def prime(client: Client, prompt: bytes, slot: int = 0) -> int:
    """Fill a slot with exactly a prompt (its one answer token is not fed back). Returns the prompt's tokens."""
    turn = client.answer(prompt, slot, 1)
    assert turn.done is not None
    return turn.done.prompt_tokens


@case
def reuse(rig: Rig) -> str:
    """A prompt that goes on where the slot stands reuses it, one that does not starts over; both answer as a fresh engine."""
    first, longer, other = rig.digits(37, 10), rig.digits(90, 10), rig.digits(50, 11)
    with rig.start(1, GLM53_CHECKPOINT_GB="0") as client:
        cold = client.answer(first, max_tokens=1)
        expect("the first turn", client.reuse(cold).word, "cold")
        turn = client.answer(longer, max_tokens=8, logprobs=4)
        line = client.reuse(turn)
        expect("REUSE", (line.reused, line.prompt_tokens, line.filled_before, line.common, line.word), (37, 90, 37, 37, "extend"))
        said = rig.same(turn, rig.fresh(longer))
        expect("the first ECHO", turn.echo[0].pos, 37)
        follow = longer + turn.text + rig.digits(5, 12)
        next_turn = client.answer(follow, max_tokens=8, logprobs=4)
        rig.same(next_turn, rig.fresh(follow))
        away = client.answer(other, max_tokens=8, logprobs=4)
        expect("another prompt", (client.reuse(away).word, client.reuse(away).reused), ("diverged", 0))
        rig.same(away, rig.fresh(other))
        inside = rig.digits(20, 11)
        shorter = client.answer(inside, max_tokens=8, logprobs=4)
        expect("a prompt inside the history", (client.reuse(shorter).word, client.reuse(shorter).reused), ("shorter", 0))
        rig.same(shorter, rig.fresh(inside))
        return said


@case
def equal(rig: Rig) -> str:
    """The same prompt again is answered from the kept logits, with nothing computed for the prompt."""
    prompt = rig.digits(60, 13)
    with rig.start(1, GLM53_CHECKPOINT_GB="0") as client:
        count = prime(client, prompt)
        turn = client.answer(prompt, max_tokens=8, logprobs=4)
        line = client.reuse(turn)
        expect("REUSE", (line.reused, line.prompt_tokens, line.word), (count, count, "equal"))
        expect("ECHO frames", len(turn.echo), 0)
        assert turn.prof is not None and turn.done is not None
        fed = turn.done.emitted - turn.done.length_limited
        expect("forwards", turn.prof.forwards, max(0, fed))
        return rig.same(turn, rig.fresh(prompt))


@case
def checkpoint(rig: Rig) -> str:
    """With a checkpoint budget a prompt that leaves the history restarts from a chunk boundary they share."""
    shared, first, second = rig.digits(96, 14), rig.digits(96, 14) + rig.digits(40, 15), rig.digits(96, 14) + rig.digits(40, 16)
    with rig.start(1, GLM53_CHECKPOINT_GB="0.05", GLM53_PREFILL_CHUNK="32") as client:
        prime(client, first)
        turn = client.answer(second, max_tokens=8, logprobs=4)
        line = client.reuse(turn)
        said = rig.same(turn, rig.fresh(second))
        if line.word != "pin" or not 0 < line.reused <= rig.count(shared) or line.reused % 32:
            raise Failed(f"REUSE says {line.word} {line.reused}, expected a checkpoint at 32, 64 or 96")
        again = client.answer(first, max_tokens=8, logprobs=4)
        rig.same(again, rig.fresh(first))
        return f"restarted at {line.reused}; {said}"


@case
def rewind(rig: Rig) -> str:
    """GLM53_REWIND=1: a gateway that trims the blanks off an answer still finds the state before them."""
    prompt = rig.digits(40, 17)
    with rig.start(2, GLM53_REWIND="1", GLM53_CHECKPOINT_GB="0") as client:
        count = prime(client, prompt)
        for seed in range(1, 1500):
            probe = ended(client.submit(prompt, 0, 1, 8.0, 1, seed=seed), "DONE")
            if probe.text and not probe.text.strip(BLANKS):
                break
        else:
            raise Skipped("no sampled answer begins with a blank token")
        blank = ended(client.submit(prompt, 1, 3, 8.0, 1, seed=seed), "DONE")
        expect("the same seed on another slot", blank.tokens[0].payload, probe.text)
        follow = rig.digits(52, 17)
        turn = client.answer(follow, 1, 8, logprobs=4)
        line = client.reuse(turn)
        if len(blank.tokens) < 2:
            raise Skipped("the sampled answer ends after its blank")
        expect("REUSE", (line.word, line.reused, line.common), ("shorter", count, count))
        return f"seed {seed} gives {blank.text[:12]!r}; " + rig.same(turn, rig.fresh(follow))


@case
def pin_scores(rig: Rig) -> str:
    """Scores of branches from a pin are a cold engine's: pin P and P+A, branch P+B, then P+A+X."""
    base = rig.digits(66, 18)
    left, right = base + rig.digits(21, 19), base + rig.digits(18, 20)
    tail = left + rig.digits(15, 21)
    with rig.start(1, GLM53_CHECKPOINT_GB="0") as client:
        words = []
        for prompt, pin in ((base, 1), (left, 1), (right, 0), (tail, 0)):
            turn = client.answer(prompt, 0, 0, logprobs=1, pin=pin)
            expect("tokens of a scored prompt", len(turn.tokens), 0)
            line = client.reuse(turn)
            words.append((line.word, line.reused))
            said = rig.same(turn, rig.fresh(prompt, 0, 1))
            assert turn.accept is not None
            expect("scored positions", [frame.pos for frame in turn.echo], list(range(line.reused, turn.accept.prompt_tokens)))
            if sum(bool(frame.score.best) for frame in turn.echo) < len(turn.echo) - 1:
                raise Failed("positions after the first have no score")
        expect("REUSE words", words, [("cold", 0), ("extend", 66), ("pin", 66), ("pin", 66)])
        return said


@case
def score_only(rig: Rig) -> str:
    """max_tokens=0 with logprobs scores every position of a prompt and answers nothing."""
    prompt = rig.digits(30, 22)
    with rig.start(1) as client:
        turn = client.answer(prompt, 0, 0, logprobs=5)
        expect("positions", [frame.pos for frame in turn.echo], list(range(30)))
        expect("the echoed prompt", b"".join(frame.payload for frame in turn.echo), prompt)
        expect("positions without a predictor", [frame.pos for frame in turn.echo if not frame.score.best], [0])
        expect("tokens", len(turn.tokens), 0)
        want = rig.fresh(prompt, 1, 5)
        expect("scores", [frame.score for frame in turn.echo[1:4]], [frame.score for frame in want.echo[1:4]])
        return f"{len(turn.echo)} positions scored"


@case
def seed(rig: Rig) -> str:
    """The same seed gives the same bytes, others differ; top_p=0 is all, a tiny top_p the best token."""
    prompt = rig.digits(25, 23)
    with rig.start(4) as client:
        turns = [client.submit(prompt, slot, 12, 1.5, 1, seed=number) for slot, number in enumerate((11, 11, 12, 13))]
        texts = [ended(turn, "DONE").text for turn in turns]
        expect("two answers of one seed", texts[1], texts[0])
        if texts[2] == texts[0] and texts[3] == texts[0]:
            raise Failed("three seeds give one answer")
        narrow = ended(client.submit(prompt, 0, 8, 1.0, "1e-9", seed=5, logprobs=4), "DONE")
        return rig.same(narrow, rig.fresh(prompt))


@case
def two_slots(rig: Rig) -> str:
    """Turns in flight together say the same bytes as alone, and their decode steps are shared."""
    prompts = [rig.runner(), rig.digits(33, 24), rig.runner() + b" ", rig.digits(140, 25)]
    with rig.start(4) as client:
        with client.in_one_write():
            turns = [client.submit(prompt, slot, 40, logprobs=2) for slot, prompt in enumerate(prompts)]
        for turn in turns:
            ended(turn, "DONE")
        said = [rig.same(turn, rig.fresh(prompt, 40, 2)) for turn, prompt in zip(turns, prompts, strict=True)]
        client.finish()
        totals = [line.split() for line in client.stderr_lines if line.endswith(" rows") and " decode steps, " in line]
        expect("lines about decode steps", len(totals), 1)
        steps, rows = int(totals[0][0]), int(totals[0][3])
        # the last token of a budget is not fed back; a prompt beside decoding turns may take several forwards, so those do not tell
        fed = sum(len(turn.tokens) - turn.done.length_limited for turn in turns if turn.done is not None)
        expect("rows of all decode steps", rows, fed)
        if steps >= rows:
            raise Failed(f"{steps} decode steps for {rows} rows: no step was shared")
    return f"{steps} steps for {rows} rows; {said[0]}"


@case
def fair(rig: Rig) -> str:
    """A long prompt lets the decoding slots take a step after every chunk."""
    runner, prompt = rig.runner(), rig.digits(300, 26)
    with rig.start(2, GLM53_PREFILL_CHUNK="30") as client:
        first = client.submit(runner, 0, 160)
        client.wait_tokens(first, 1)
        second = client.submit(prompt, 1, 4, logprobs=1)
        ended(second, "DONE")
        ended(first, "DONE")
        assert second.accept is not None
        between = [frame for frame in first.tokens if second.accept.at <= frame.at <= second.tokens[0].at] if second.tokens else first.tokens
        rig.same(second, rig.fresh(prompt, 4, 1))
        expect("the decoding slot's answer", first.text, rig.fresh(runner, 160, 1).text)
        left = len([frame for frame in first.tokens if frame.at >= second.accept.at])
        if len(between) < min(8, left - 1):
            raise Failed(f"{len(between)} tokens of the decoding slot during 10 chunks, though {left} were left")
    return f"{len(between)} tokens came during 10 chunks of another slot"

