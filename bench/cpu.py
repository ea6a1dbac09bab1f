"""Everything about the CPU in one go: kernels, whole models, experts that do not fit, how long a cancel waits.

    python -m bench.cpu [--quick]

Each part is a program of its own and measures the machine's limits again, so a part's ratios are of figures of the same minute.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.options import Parser

ROOT = Path(__file__).resolve().parent.parent
PARTS: tuple[tuple[str, list[str], list[str]], ...] = (
    ("kernels", [], ["--quick", "--seconds", "0.1"]),
    ("models", [], ["--quick"]),
    ("pools", [], []),
    ("streaming", [], ["--quick"]),
    ("cancel", ["--points", "60"], ["--shape", "tiny", "--points", "20"]),
)


def main() -> int:
    """Run the parts one after another; exit code 1 when one failed."""
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a first look in under a minute")
    args = parser.parse_args()
    failed = []
    for name, full, quick in PARTS:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"bench.{name}", *(quick if args.quick else full)], cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
