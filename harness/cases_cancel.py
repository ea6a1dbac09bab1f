"""Cases about ending a turn early: STOP, and CANCEL before, inside and after a prompt chunk."""

from __future__ import annotations

import time

from harness.cases_turns import prime
from harness.notes import HaltLine, ReuseLine
from harness.rig import TRIES, Failed, Rig, case, ended, expect

FRACTIONS = (0.5, 0.3, 0.7, 0.15, 0.85)


@case
def stop(rig: Rig) -> str:
    """STOP of a decoding, a waiting and a prefilling turn ends with DONE; of an unknown id it is ignored."""
    runner = rig.runner()
    with rig.start(2, GLM53_PREFILL_CHUNK="25", GLM53_CHECKPOINT_GB="0") as client:
        for _ in range(TRIES):
            turn = client.submit(runner, 0, 160)
            client.wait_tokens(turn, 3)
            client.stop(turn)
            ended(turn, "DONE")
            assert turn.done is not None
            expect("the stopped text", rig.fresh(runner, 160, 1).text.startswith(turn.text), True)
            if not turn.done.length_limited and len(turn.tokens) < len(rig.fresh(runner, 160, 1).tokens):
                break
        else:
            raise Failed(f"STOP after 3 tokens, but {len(turn.tokens)} came, length_limited {turn.done.length_limited:d}, each of {TRIES} times")
        for seed in range(1, TRIES + 1):
            prompt = rig.digits(400, seed)
            with client.in_one_write():
                long = client.submit(prompt, 0, 8, logprobs=4)
                waiting = client.submit(rig.digits(50, 31), 1, 4)
                client.stop(waiting)
            ended(waiting, "DONE")
            client.stop(long)
            ended(long, "DONE")
            assert waiting.done is not None and waiting.prof is not None and long.done is not None and long.prof is not None
            figures = (waiting.done.emitted, waiting.done.length_limited, waiting.prof.forwards)
            expect("a stopped waiting turn: emitted, length_limited, forwards", figures, (0, False, 0))
            expect("the waiting turn ends first", waiting.ended_as < long.ended_as, True)
            if long.prof.forwards < 16:
                break
        else:
            raise Failed(f"all 16 chunks were computed, each of {TRIES} times")
        expect("a stopped prompt: emitted, length_limited", (long.done.emitted, long.done.length_limited), (0, False))
        client.stop(31337)
        client.not_found(31338)
        client.expect_quiet(0.05)
        again = client.answer(prompt, 0, 8, logprobs=4)
        line = client.reuse(again)
        said = rig.same(again, rig.fresh(prompt))
        if long.prof.forwards:
            expect("the prompt after its STOP", (line.word, line.reused), ("extend", 25 * long.prof.forwards))
        return f"stopped after {len(turn.tokens)} tokens and {long.prof.forwards} chunks; {said}"


@case
def cancel_waiting(rig: Rig) -> str:
    """A waiting turn is cancelled at once and never computed; the one that runs is not touched. CANCEL beats STOP."""
    with rig.start(2, GLM53_PREFILL_CHUNK="4096") as client:
        for seed in range(1, TRIES + 1):
            prompt = rig.digits(400, seed)
            first = client.submit(prompt, 0, 8, logprobs=4)
            second = client.submit(rig.digits(300, 30 + seed), 1, 4)
            client.wait_accept(second)
            at = client.cancel(second)
            second.wait()
            ended(first, "DONE")
            if second.outcome != "CANCELLED" or second.ended_as > first.ended_as:
                continue
            line = client.cancel_line(second)
            if not any(isinstance(note, ReuseLine) and note.id == second.id for note in client.notes):
                break
        else:
            raise Failed(f"the waiting turn ended with {second.outcome}, begun or behind the one that runs, each of {TRIES} times")
        took = second.ended_at - at
        said = rig.same(first, rig.fresh(prompt))
        expect("CANCEL", (line.prompt_tokens, line.emitted, line.filled), (300, 0, 0))
        for _ in range(8):
            both = client.submit(rig.digits(1000, 40), 1, 4)
            client.wait_accept(both)
            client.stop(both)
            client.cancel(both)
            both.wait()
            # a turn that was still waiting may have ended by its STOP alone
            if both.prof is None or both.prof.forwards:
                break
        expect("a prefilling turn with STOP and CANCEL ended with", both.outcome, "CANCELLED")
        return f"acknowledged in {1000 * took:.1f} ms; {said}"


@case
def cancel_decode(rig: Rig) -> str:
    """CANCEL while decoding: the counts on stderr are the DATA frames received, and the slot goes on from there."""
    runner = rig.runner()
    seen = []
    with rig.start(1, GLM53_CHECKPOINT_GB="0") as client:
        for after in (1, 4, 9):
            for _ in range(TRIES):
                turn = client.submit(runner, 0, 160, logprobs=1)
                client.wait_tokens(turn, after)
                client.cancel(turn)
                turn.wait()
                if turn.done is None:
                    break
            expect(f"CANCEL after {after} tokens", turn.outcome, "CANCELLED")
            assert turn.accept is not None
            line = client.cancel_line(turn)
            prompt = turn.accept.prompt_tokens
            expect("CANCEL", (line.prompt_tokens, line.emitted, line.filled), (prompt, len(turn.tokens), prompt + len(turn.tokens)))
            expect("the text so far", rig.fresh(runner, 160, 1).text.startswith(turn.text), True)
            seen.append(len(turn.tokens))
            follow = runner + turn.text + rig.digits(6, 32)
            said = rig.same(client.answer(follow, 0, 8, logprobs=4), rig.fresh(follow))
        client.not_found(turn.id)
    return f"after {seen} tokens; {said}"


@case
def cancel_chunk_one(rig: Rig) -> str:
    """PROMPT and CANCEL in one write with chunks of one token: no DATA, and the retry answers as a fresh engine."""
    prompt = rig.digits(150, 33)
    filled = []
    with rig.start(1, GLM53_PREFILL_CHUNK="1", GLM53_CHECKPOINT_GB="0") as client:
        for pause in (None, 0.0, 0.005, 0.02):
            turn = client.submit(prompt, 0, 4, logprobs=4, cancel=pause is None)
            if pause is not None:
                client.wait_accept(turn)
                time.sleep(pause)
                client.cancel(turn)
            turn.wait()
            if turn.done is not None and pause is not None:
                continue
            expect("turn ended with", turn.outcome, "CANCELLED")
            expect("DATA frames", len(turn.tokens), 0)
            line = client.cancel_line(turn)
            expect("CANCEL", (line.prompt_tokens, line.emitted), (150, 0))
            if line.filled >= 150:
                raise Failed(f"cancelled, but all {line.filled} positions are filled")
            filled.append(line.filled)
        retry = client.answer(prompt, 0, 8, logprobs=4)
        return f"filled {filled}; " + rig.same(retry, rig.fresh(prompt))


@case
def cancel_boundary(rig: Rig) -> str:
    """CANCEL in a later chunk: the chunks before it stay, the retry goes on from there."""
    prompt = rig.digits(400, 34)
    kept = []
    with rig.start(1, GLM53_PREFILL_CHUNK="100", GLM53_CHECKPOINT_GB="0") as client:
        prime(client, rig.digits(10, 35))
        timed = client.answer(prompt, 0, 1)
        assert timed.prof is not None
        for fraction in (0.6, 0.4, 0.2) * TRIES:
            if len(kept) == 3:
                break
            prime(client, rig.digits(10, 35))
            turn = client.submit(prompt, 0, 4)
            client.wait_accept(turn)
            time.sleep(fraction * timed.prof.forward_time)
            client.cancel(turn)
            turn.wait()
            line = client.cancel_line(turn) if turn.error is not None else None
            if line is None or line.emitted:
                continue
            # another prompt's tokens are only let go of when the first chunk is done
            begun = line.filled != 10
            if begun:
                expect("filled is a chunk boundary", line.filled % 100, 0)
            retry = client.answer(prompt, 0, 8, logprobs=4)
            expect("the retry reuses", client.reuse(retry).reused, line.filled if begun else 0)
            said = rig.same(retry, rig.fresh(prompt))
            kept.append(line.filled)
    if not kept:
        raise Failed("no CANCEL landed inside the prompt")
    return f"kept {kept}; {said}"


@case
def proof(rig: Rig) -> str:
    """CANCEL inside one chunk of 1,000 tokens over 10 that are cached: a HALT, nothing said, nothing changed."""
    ten, thousand = rig.digits(10, 40), rig.digits(1000, 40)
    with rig.start(2, GLM53_PREFILL_CHUNK="4096", GLM53_CHECKPOINT_GB="0") as client:
        expect("tokens that prime the slot", prime(client, ten, 1), 10)
        timed = client.answer(thousand, 1, 4, logprobs=4)
        assert timed.prof is not None
        whole = timed.prof.forward_time
        rig.same(timed, rig.fresh(thousand, 4))
        tried = []
        for fraction in FRACTIONS * TRIES:
            prime(client, ten)
            notes = len(client.notes)
            turn = client.submit(thousand, 0, 4, logprobs=4, id=51)
            client.wait_accept(turn)
            time.sleep(fraction * whole)
            client.cancel(turn)
            turn.wait()
            assert turn.cancelled_at is not None
            took = turn.ended_at - turn.cancelled_at
            halts = [note for note in client.notes[notes:] if isinstance(note, HaltLine)]
            tried.append(f"{fraction:g} {turn.outcome}{' HALT' if halts else ''}")
            if turn.outcome != "CANCELLED" or not halts:
                continue
            expect("DATA frames", len(turn.tokens), 0)
            line = client.cancel_line(turn)
            expect("CANCEL", (line.prompt_tokens, line.emitted, line.filled), (1000, 0, 10))
            expect("HALT back to", halts[-1].filled, 10)
            if rig.chain and not halts[-1].on_device:
                raise Failed(f"the HALT at layer {halts[-1].layer} was not on the device")
            retry = client.answer(thousand, 0, 4, logprobs=4)
            reused = client.reuse(retry)
            expect("the retry", (reused.word, reused.reused), ("extend", 10))
            said = rig.same(retry, rig.fresh(thousand, 4))
            where = f"layer {halts[-1].layer} of {halts[-1].layers}{' on the device' if halts[-1].on_device else ''}"
            return f"halted in {where}, {1000 * took:.1f} ms after CANCEL at {fraction:g} of {whole:.3f} s; {said}"
    raise Failed(f"no CANCEL landed inside the chunk of {whole:.3f} s: {', '.join(tried)}")
