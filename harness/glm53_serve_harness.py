#!/usr/bin/env python3
"""Drive an engine executable through the serve protocol and check it case by case.

    python harness/glm53_serve_harness.py --engine glm53 --model DIR [--vk-chain] [--cases a,b] [--list]

One PASS, FAIL or SKIP line a case; exit 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness.cases import CASES, CaseResult, case_names, run_cases
from harness.engine_process import own_variables

CHAIN = {"COLI_VULKAN": "1", "COLI_VK_CHAIN": "1", "COLI_VK_CHAIN_ROWS": "128"}


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code: 0 nothing failed, 1 something did, 2 wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="glm53", help="the executable and its leading arguments, as one shell word list (default: glm53)")
    parser.add_argument("--model", help="model directory")
    parser.add_argument("--vk-chain", action="store_true", help="run with the Vulkan chain; the proof case must halt on the device")
    parser.add_argument("--cases", help="only these, separated by commas")
    parser.add_argument("--tolerance", type=float, help="how far two log probabilities may lie apart (default 2e-4; 5e-3 with --vk-chain)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds the engine has for any one answer (default 120; a software device needs more)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and what each wants")
    args = parser.parse_args(argv)
    if args.list:
        for name in case_names():
            print(f"{name:<18} {(CASES[name].__doc__ or '').splitlines()[0]}")
        return 0
    if not args.model:
        parser.error("--model is needed")
    if shutil.which(shlex.split(args.engine)[0]) is None:
        parser.error(f"{args.engine!r} is not an executable")
    names = args.cases.split(",") if args.cases else None
    if unknown := [name for name in names or () if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; --list shows them")
    env = own_variables()
    if args.vk_chain:
        env = {**CHAIN, **env}
    tolerance = args.tolerance if args.tolerance is not None else 5e-3 if args.vk_chain else 2e-4

    def report(result: CaseResult) -> None:
        print(result.line(), flush=True)

    options = {"tolerance": tolerance, "patience": args.timeout}
    results = run_cases(shlex.split(args.engine), args.model, names, env, chain=args.vk_chain, report=report, **options)
    counts = Counter(result.status for result in results)
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
