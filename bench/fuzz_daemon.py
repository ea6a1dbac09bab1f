"""Random frames through a live daemon: `python bench/fuzz_daemon.py [frames] [seed] [--model DIR] [--engine CMD]`. Exit code 0 when all were answered right."""

from __future__ import annotations

import random
import shlex
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: it has names that packages have, too

from bench.options import Parser, whole  # noqa: E402
from harness.engine_process import own_variables  # noqa: E402
from harness.fuzz import fuzz  # noqa: E402
from harness.rig import Rig  # noqa: E402


def main() -> int:
    """Fuzz and report."""
    parser = Parser(__doc__)
    parser.add_argument("frames", type=whole(1), nargs="?", default=10_000)
    parser.add_argument("seed", type=whole(0), nargs="?", default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--model", default=str(ROOT / "glm53serve" / "data" / "glm53-nano"))
    parser.add_argument("--engine", default=str(Path(sys.executable).parent / "glm53"))
    args = parser.parse_args()
    rig = Rig(shlex.split(args.engine), args.model, own_variables())
    began = perf_counter()
    try:
        seen = fuzz(rig, args.frames, args.seed)
    except AssertionError as failure:
        print(f"FAIL {failure}")
        return 1
    finally:
        rig.close()
    print(f"{args.frames} frames in {perf_counter() - began:.0f} s, seed {args.seed}: " + ", ".join(f"{n} {answer}" for answer, n in seen.most_common()))
    print("0 desyncs, 0 crashes, 0 hangs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
