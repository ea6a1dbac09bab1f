"""All cases, in the order they are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from harness import cases_cancel, cases_ends, cases_turns, cases_wire
from harness.engine_process import DEFAULT_TIMEOUT, EngineGone, NoAnswer
from harness.frames import ProtocolViolation
from harness.rig import CASES, TOLERANCE, CaseResult, Failed, Rig, Skipped

__all__ = ["CASES", "CaseResult", "case_names", "run_case", "run_cases"]


def case_names() -> list[str]:
    """Names of all cases, in order."""
    rank = {module.__name__: place for place, module in enumerate((cases_wire, cases_ends, cases_turns, cases_cancel))}
    return sorted(CASES, key=lambda name: rank[CASES[name].__module__])


def run_case(rig: Rig, name: str) -> CaseResult:
    """Run one case; whatever goes wrong in it becomes its FAIL."""
    began = time.monotonic()
    try:
        status, reason = "PASS", CASES[name](rig)
    except Skipped as skip:
        return CaseResult(name, "SKIP", str(skip), time.monotonic() - began)
    except (Failed, ProtocolViolation, EngineGone, NoAnswer) as failure:
        return CaseResult(name, "FAIL", f"{type(failure).__name__}: {failure}".replace("\n", " "), time.monotonic() - began)
    assert status == "PASS"
    return CaseResult(name, "PASS", reason, time.monotonic() - began)


def run_cases(
    engine: Sequence[str],
    model: str | Path,
    names: Iterable[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    chain: bool = False,
    tolerance: float = TOLERANCE,
    patience: float = DEFAULT_TIMEOUT,
    report: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run cases (all, or the named ones) against an engine; `report` sees each result as it comes. Raises KeyError for an unknown name."""
    wanted = list(names) if names is not None else case_names()
    for name in wanted:
        if name not in CASES:
            raise KeyError(f"no case {name!r}; there are {', '.join(CASES)}")
    rig = Rig(engine, model, env, chain=chain, tolerance=tolerance, patience=patience)
    results = []
    try:
        for name in wanted:
            results.append(run_case(rig, name))
            if report is not None:
                report(results[-1])
    finally:
        rig.close()
    return results
