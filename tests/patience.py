"""Time in tests. A machine under load stands still for seconds and is several times slower; only a broken product may make a test fail.

So tests wait for events, with PATIENCE as the end of waiting, and bounds on work are in processor time, as multiples of what `slowness` says.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

PATIENCE = 100.0
"""Seconds for what a working product does at once. Well below pytest's own timeout, so that a test still says what did not come."""

_USUAL_SECONDS = 0.025


def slowness() -> float:
    """How many times the processor time of the machine the bounds were written on a fixed piece of Python takes here; at least 1."""

    def work() -> float:
        began = time.thread_time()
        made = {f"layer.{number}": [number, number + 1] for number in range(20_000)}
        json.loads(json.dumps(made))
        sorted(made, key=lambda name: -made[name][0])
        return time.thread_time() - began

    return max(1.0, min(work() for _ in range(3)) / _USUAL_SECONDS)


def returns(call: Callable[[], object]) -> bool:
    """Whether a call comes back within PATIENCE; it runs in a thread of its own. What it raises leaves it unreturned."""
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done.wait(PATIENCE)
