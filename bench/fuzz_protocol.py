"""Random frames through the protocol's parser: `python bench/fuzz_protocol.py [frames] [seed]`. Exit code 0 when nothing went out of step.

Streams of up to 30 frames, cut at random, are compared with a naive whole-string parser. Streams without wild damage are also compared with
what their maker says each frame must give, refused ones included: one answer a frame, and the next frame whole.
"""

from __future__ import annotations

import collections
import random
import sys
from pathlib import Path
from time import perf_counter

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder: it has names that packages have, too

from bench.options import Parser as Options  # noqa: E402
from bench.options import whole  # noqa: E402
from glm53serve.serve.protocol import Parser  # noqa: E402
from tests.naive_protocol import Maker, Told, naive, told  # noqa: E402

LIMIT = 4096


def run(data: list[bytes]) -> list[Told]:
    """The parser's frames for an input in pieces."""
    parser = Parser(payload_limit=LIMIT)
    frames = [frame for piece in data for frame in parser.feed(piece)]
    return [told(frame) for frame in frames + parser.eof()]


def main() -> int:
    """Fuzz and report."""
    options = Options(__doc__)
    options.add_argument("frames", type=whole(1), nargs="?", default=1_000_000)
    options.add_argument("seed", type=whole(0), nargs="?", default=random.SystemRandom().getrandbits(32))
    args = options.parse_args()
    wanted, seed = args.frames, args.seed
    rng = random.Random(seed)
    maker = Maker(rng, LIMIT)
    sent: collections.Counter[str] = collections.Counter()
    answers: collections.Counter[str] = collections.Counter()
    desyncs = crashes = 0
    began = perf_counter()
    while sum(sent.values()) < wanted:
        wild = rng.random() < 0.4
        frames: list[bytes] = []
        expected: list[Told] = []
        for _ in range(rng.randrange(1, 31)):
            kind = rng.choice(["valid", "damaged", "wild"] if wild else ["valid", "damaged"])
            sent[kind] += 1
            if kind == "wild":
                frames.append(maker.wild())
            else:
                frame, answer = maker.good() if kind == "valid" else maker.refused()
                frames.append(frame)
                expected.append(answer)
        stream = b"".join(frames)
        try:
            got = run(maker.cut(stream))
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            crashes += 1
            print(f"crash: {error!r} on {stream[:400]!r}")
            continue
        answers.update(f"{answer[0]}{' ' + str(answer[2]) if answer[0] == 'REFUSED' else ''}" for answer in got)
        if got != naive(stream, LIMIT) or (not wild and got != expected):
            desyncs += 1
            if desyncs <= 5:
                print(f"desync: {stream[:400]!r}")
    seconds = perf_counter() - began
    print(f"seed {seed}: {sum(sent.values())} frames ({dict(sent)}) in {seconds:.1f} s; answers {dict(answers)}")
    print(f"{desyncs} desyncs, {crashes} crashes")
    return 1 if desyncs or crashes else 0


if __name__ == "__main__":
    raise SystemExit(main())
