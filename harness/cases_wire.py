"""Cases about the pipe itself: handshake, refusals and alignment, lines, half frames."""

from __future__ import annotations

import re
import subprocess
import time

from harness.client import Client, prompt_frame
from harness.engine_process import child_environment
from harness.frames import Data, Done, Emap, Hits, Prof
from harness.rig import Failed, Rig, case, ended, expect


@case
def handshake(rig: Rig) -> str:
    """READY, CAPS, STAT and EMAP, in order and with true figures."""
    with rig.start(3) as client:
        caps, emap = client.ledger.caps, client.ledger.emap
        assert caps is not None
        expect("CAPS slots", caps.slots, 3)
        client.expect_quiet(0.05)
        client.finish()
        if any(line for line in client.stderr_lines if "Traceback" in line):
            raise Failed("a traceback on stderr")
        return f"ready after {client.ready_at - client.started_at:.2f} s, " + ("no experts" if emap is None else f"experts {emap.rows} x {emap.cols}")


@case
def load_fail(rig: Rig) -> str:
    """A model that is not there: LOAD_FAIL in place of READY, exit 1; no SNAP at all: one line on stderr, exit 2."""
    missing = Client(rig.engine, rig.model / "no-such-model", env=rig.environment({}))
    with missing:
        if missing.ledger.load_fail is None:
            raise Failed("an engine without a model says READY")
        expect("exit code", missing.wait_exit(), 1)
        expect("lines on stderr", bool(missing.stderr_lines), True)
    env = child_environment({**rig.environment({}), "SERVE": "1", "SERVE_BATCH": "1"})
    bare = subprocess.run([*rig.engine, "0"], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    expect("exit code without SNAP", bare.returncode, 2)
    expect("lines on stderr without SNAP", bare.stderr.count(b"\n"), 1)
    return missing.ledger.load_fail.line.decode(errors="replace")[:80]


@case
def cli(rig: Rig) -> str:
    """A served answer is the one-shot form's."""
    prompt = rig.runner(4)
    turn = rig.fresh(prompt, 160, 1)
    command = [*rig.engine, "--model", str(rig.model), "--prompt", prompt.decode(), "--greedy", str(len(turn.tokens))]
    run = subprocess.run(command, env=child_environment(rig.environment({})), stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    if run.returncode:
        raise Failed(f"the one-shot form exits with {run.returncode}: {run.stderr[-200:]!r}")
    first, _, rest = run.stdout.partition(b"\n")
    text, _, last = rest.removesuffix(b"\n").rpartition(b"\n")
    words = first.split()
    assert turn.accept is not None
    expect("the first line", words[:1], [b"teacher_forcing"])
    expect("teacher-forced positions", len(words) - 1, turn.accept.prompt_tokens)
    if not re.fullmatch(rb"decode %d token in [0-9]+\.[0-9]{3} = [0-9]+\.[0-9]{2} tok/s" % len(turn.tokens), last):
        raise Failed(f"the last line is {last!r}")
    expect("the one-shot text", text, turn.text)
    both = subprocess.run([*rig.engine, "--prompt", "a", "--ids", "1", "--greedy", "1"], env=child_environment({}), capture_output=True, timeout=60)
    expect("exit code of --prompt with --ids", both.returncode, 2)
    return f"{len(turn.tokens)} tokens, {len(text)} bytes"


@case
def empty(rig: Rig) -> str:
    """A prompt of zero bytes is refused and the next one served."""
    prompt = rig.digits(8)
    with rig.start() as client:
        ended(client.submit(b""), "EMPTY_PROMPT")
        return rig.same(client.answer(prompt, max_tokens=8, logprobs=4), rig.fresh(prompt))


def refusals(text: bytes) -> list[tuple[str, bytes, int, str]]:
    """Frames an engine with two slots must refuse: (what, bytes, id of the answer, code)."""
    size = len(text)

    def frame(fields: str, payload: bytes = text, tail: bytes = b"\n") -> bytes:
        return f"PROMPT {fields}\n".encode() + payload + tail

    rows = [
        ("slot is a word", frame(f"901 x {size} 4 0 1"), 901, "BAD_FRAME"),
        ("slot with plus", frame(f"902 +1 {size} 4 0 1"), 902, "BAD_FRAME"),
        ("underscore in a number", frame(f"903 0 {size} 1_0 0 1"), 903, "BAD_FRAME"),
        ("hexadecimal budget", frame(f"904 0 {size} 0x4 0 1"), 904, "BAD_FRAME"),
        ("temperature is a word", frame(f"905 0 {size} 4 hot 1"), 905, "BAD_FRAME"),
        ("a field is missing", frame(f"906 0 {size} 4 0"), 906, "BAD_FRAME"),
        ("bytes is not readable", b"PROMPT 907 0 many 4 0 1\n", 907, "BAD_FRAME"),
        ("bytes over 2 GiB", b"PROMPT 908 0 3000000000 4 0 1\n", 908, "BAD_FRAME"),
        ("no id at all", b"PROMPT\n", 0, "BAD_FRAME"),
        ("id is a word", frame(f"x 0 {size} 4 0 1"), 0, "BAD_FRAME"),
        ("budget 0 without logprobs", frame(f"909 0 {size} 0 0 1"), 909, "BAD_FRAME"),
        ("budget below 0", frame(f"910 0 {size} -3 0 1"), 910, "BAD_FRAME"),
        ("terminator is not LF", frame(f"911 0 {size} 4 0 1", tail=b"!! and the rest of a line\n"), 911, "BAD_FRAME"),
        ("header over 4,096 bytes", frame(f"912 0 {size} 4 0 1 pad={'x' * 5000}"), 912, "BAD_FRAME"),
        ("payload over 16 MiB", frame(f"913 0 {(16 << 20) + 1} 4 0 1", payload=b"a" * ((16 << 20) + 1)), 913, "BAD_FRAME"),
        ("slot out of range", frame(f"914 2 {size} 4 0 1"), 914, "BAD_REQUEST"),
        ("slot below 0", frame(f"915 -1 {size} 4 0 1"), 915, "BAD_REQUEST"),
        ("temperature below 0", frame(f"916 0 {size} 4 -0.5 1"), 916, "BAD_REQUEST"),
        ("temperature nan", frame(f"917 0 {size} 4 nan 1"), 917, "BAD_REQUEST"),
        ("top_p inf", frame(f"918 0 {size} 4 0 inf"), 918, "BAD_REQUEST"),
        ("logprobs=33", frame(f"919 0 {size} 4 0 1 logprobs=33"), 919, "BAD_REQUEST"),
        ("pin=2", frame(f"920 0 {size} 4 0 1 pin=2"), 920, "BAD_REQUEST"),
        ("zero bytes", frame("921 0 0 4 0 1", payload=b""), 921, "EMPTY_PROMPT"),
        ("CANCEL without id", b"CANCEL\n", 0, "BAD_FRAME"),
        ("STOP of a word", b"STOP x\n", 0, "BAD_FRAME"),
        ("zero bytes and a CR LF", frame("922 0 0 4 0 1\r", payload=b"", tail=b"\r\n"), 922, "EMPTY_PROMPT"),
    ]
    return rows


@case
def alignment(rig: Rig) -> str:
    """After every refusal the next frame is read as what it is."""
    text = b"CANCEL 5\nPROMPT 6 0 1 1 0 1\nx\n"
    prompt = rig.digits(8)
    with rig.start(2, GLM53_MAXT="128") as client:
        rows = refusals(text)
        for what, data, id, code in rows:
            turn = client.raw(data, id)
            try:
                ended(turn, code)
                client.not_found(77_000_000)
            except Exception as error:
                raise Failed(f"{what}: {error}") from error
        for ignored in (b"\n", b"\r\n", b"HELLO 1 2 3\n", b"prompt 5 0 1 1 0 1\n", b"STOP 424242\n", b"\x00\xff\xfe\n"):
            client.write(ignored)
            client.not_found(77_000_001)
        long = client.submit(rig.digits(200), max_tokens=3)
        ended(long, "CONTEXT_EXCEEDED prompt_tokens=200 requested=3 capacity=128")
        for payload in (b"a\nb", b"a\r\nb\x00c", b"\xff\xfe\x80a", "ä€".encode()[:-1]):
            turn = client.submit(payload, max_tokens=1).wait()
            expect(f"payload {payload!r}", turn.outcome, "DONE")
            client.not_found(77_000_002)
        said = rig.same(client.answer(prompt, 1, 8, logprobs=4), rig.fresh(prompt))
        client.expect_quiet(0.05)
    return f"{len(rows)} refusals; {said}"


@case
def slot_busy(rig: Rig) -> str:
    """A second prompt for a slot with a turn in flight is refused; the first is not disturbed."""
    prompt = rig.digits(400, 1)
    with rig.start(1) as client:
        with client.in_one_write():
            first = client.submit(prompt, max_tokens=8, logprobs=4)
            second = client.submit(prompt)
        ended(second, "SLOT_BUSY")
        ended(first, "DONE")
        return rig.same(first, rig.fresh(prompt))


@case
def duplicate_id(rig: Rig) -> str:
    """An id in flight cannot be taken again; afterwards it can."""
    prompt, other = rig.digits(400, 1), rig.digits(9, 2)
    with rig.start(2) as client:
        with client.in_one_write():
            first = client.submit(prompt, 0, 8, logprobs=4, id=7)
            second = client.submit(other, 1, 4, id=7)
            third = client.raw(b"PROMPT 7 x 1 1 0 1\na\n", 7)
        ended(second, "DUPLICATE_ID")
        ended(third, "BAD_FRAME")
        ended(first, "DONE")
        said = rig.same(first, rig.fresh(prompt))
        rig.same(ended(client.submit(other, 1, 8, logprobs=4, id=7), "DONE"), rig.fresh(other))
        return said


@case
def context(rig: Rig) -> str:
    """A prompt that fills the slot is refused and leaves the cache alone; an answer ends at the capacity."""
    short, full, nearly = rig.digits(20, 3), rig.digits(64, 4), rig.digits(60, 3)
    with rig.start(1, GLM53_MAXT="64") as client:
        client.answer(short, max_tokens=1)
        ended(client.submit(full, max_tokens=5), "CONTEXT_EXCEEDED prompt_tokens=64 requested=5 capacity=64")
        turn = ended(client.submit(nearly, max_tokens=50, logprobs=2), "DONE")
        reuse = client.reuse(turn)
        expect("reuse after the refusal", (reuse.word, reuse.reused), ("extend", 20))
        assert turn.done is not None
        if turn.done.length_limited:
            expect("tokens at the capacity", turn.done.emitted, 4)
        elif turn.done.emitted > 4:
            raise Failed(f"{turn.done.emitted} tokens after 60 of 64 positions")
        want = rig.fresh(nearly, 4, 2)
        return rig.same(turn, want)


@case
def lines(rig: Rig) -> str:
    """What dashboards read: HITS and EMAP as long as their rows and columns say, PROF with 10 fields, DONE with 9, and true figures."""
    prompt = rig.digits(70, 5)
    with rig.start(1, keep=True, GLM53_PREFILL_CHUNK="32", GLM53_CHECKPOINT_GB="0") as client:
        turn = client.answer(prompt, max_tokens=6)
        frames = client.frames
    assert turn.done is not None and turn.prof is not None
    prof, done = turn.prof, turn.done
    expect("fields of PROF", len(prof.line.split(b" ")), 10)
    expect("fields of DONE", len(done.line.split(b" ")), 9)
    tail = [type(frame) for frame in frames[-4:]]
    if client.ledger.emap is not None:
        expect("the end of a turn", tail, [Hits, Prof, Done, Emap])
        assert turn.hits is not None
        rows, cols = turn.hits.rows, turn.hits.cols
        expect("hex digits of HITS", len(turn.hits.line.split(b" ")[3]), 2 * ((rows * cols + 7) // 8))
        used = [sum(turn.hits.bits[i >> 3] >> (i & 7) & 1 for i in range(r * cols, r * cols + cols)) for r in range(rows)]
        if not all(used):
            raise Failed(f"a sparse layer without a used expert: {used}")
        emaps = [frame for frame in frames if isinstance(frame, Emap)]
        expect("hex digits of EMAP", {len(frame.line.split(b" ")[3]) for frame in emaps}, {2 * rows * cols})
        heat = sum(cell & 63 for cell in emaps[-1].cells)
        if heat == 0 or any(bool(turn.hits.bits[i >> 3] >> (i & 7) & 1) and not emaps[-1].cells[i] & 63 for i in range(rows * cols)):
            raise Failed("EMAP shows no heat for experts that were used")
    fed = done.emitted - 1 if done.length_limited else done.emitted
    expect("forwards (3 chunks and the tokens fed back)", prof.forwards, 3 + fed)
    expect("wait", prof.wait, 0.0)
    if not 0 < prof.forward_time <= prof.wall + 0.004:
        raise Failed(f"forward time {prof.forward_time:.3f} of wall {prof.wall:.3f} s")
    data = [frame for frame in frames if isinstance(frame, Data)]
    expect("DATA frames", len(data), done.emitted)
    return f"{done.emitted} tokens, {prof.forwards} forwards, {prof.forward_time:.3f} of {prof.wall:.3f} s in the network"


@case
def old_gateway(rig: Rig) -> str:
    """GLM53_CAPS=0, GLM53_ACCEPT=0, the SUBMIT spelling and a second bare number."""
    prompt = rig.digits(9)
    client = Client([*rig.engine, "0"], rig.model, slots=2, env=rig.environment({"GLM53_CAPS": "0", "GLM53_ACCEPT": "0"}))
    with client:
        turn = ended(client.submit(prompt, 0, 8, logprobs=4, verb="SUBMIT"), "DONE")
        return rig.same(turn, rig.fresh(prompt))


@case
def half_frame(rig: Rig) -> str:
    """Half a frame on stdin does not delay a running turn."""
    runner, prompt = rig.runner(), rig.digits(9)
    with rig.start(2) as client:
        turn = client.submit(runner, 0, 24, logprobs=1)
        client.wait_accept(turn)
        data = prompt_frame(500, 1, prompt, 8, logprobs=4)
        late = client.raw(data[:-4], 500, max_tokens=8, logprobs=4)
        ended(turn, "DONE")
        expect("the half frame's turn", late.outcome, "in flight")
        client.write(data[-4:-1])
        time.sleep(0.05)
        client.write(data[-1:])
        ended(late, "DONE")
        rig.same(turn, rig.fresh(runner, 24, 1))
        return rig.same(late, rig.fresh(prompt))
