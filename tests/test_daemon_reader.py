"""The thread that reads never waits for a device: what a turn used was asked for before the device had something else to do."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from glm53serve.engine.decode_loop import DecodeLoop
from tests.patience import PATIENCE
from tests.served import Fresh, Served, at_ask, count_asks, in_flight_together, load_tiny, same
from tests.step_device import EngineStepDevice


def counts_when_idle(backend: Any) -> None:
    """Make a backend one that tells its counts only between passes, as a device does whose queue is in order."""
    running = threading.RLock()

    def alone(work: Any) -> Any:
        def locked(*arguments: Any) -> Any:
            with running:
                return work(*arguments)

        return locked

    for name in ("forward", "expert_uses", "clear_uses"):
        setattr(backend, name, alone(getattr(backend, name)))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_beside_a_chunk_holds_up_no_cancel_and_has_its_hits(ahead: bool, model: Path, fresh: Fresh, tmp_path: Path) -> None:
    loaded = load_tiny(model, 3)
    if ahead:
        loaded.engine.ahead = DecodeLoop(EngineStepDevice(loaded.engine, random.Random(3)), depth=2)
    counts_when_idle(loaded.engine.backends[0])
    served = Served(loaded, tmp_path / "usage")
    ended_inside: list[bool] = []

    def end() -> None:
        running = served.daemon._desk._prefilling
        assert running is not None
        served.stop(first)
        served.cancel(second)
        deadline = time.monotonic() + PATIENCE
        while not (first.ended and running.cancelled) and time.monotonic() < deadline:
            time.sleep(0.002)
        ended_inside.append(first.ended and running.cancelled)

    with at_ask(served, 2 * count_asks(fresh, b"one two") + 3, end):  # in the other prompt's second chunk
        with in_flight_together(served):
            first = served.submit(b"one two", 0, max_tokens=240, logprobs=0)
            second = served.submit(b"and a prompt of several chunks", 1)
        served.wait(second)
    assert ended_inside == [True] and first.outcome == "DONE" and second.outcome == "CANCELLED" and served.halted() == 1
    # all of its passes are in the HITS: the prompt's and those of the tokens fed back
    alone = served.wait(served.submit(b"one two", 2, max_tokens=len(first.tokens) + 1, logprobs=0))
    assert first.hits is not None and alone.hits is not None and first.hits.bits == alone.hits.bits
    turn = served.wait(served.submit(b"4 5 6", 0, max_tokens=6))
    assert same(served.said(turn), fresh.answer(b"4 5 6", 6))
    per_row = loaded.checkpoint.config.num_experts_per_tok * len(loaded.checkpoint.config.sparse_layers)
    rows = 7 + len(first.tokens) + 7 + len(alone.tokens) - 1 + 5 + len(turn.tokens) - 1
    assert int(served.daemon._telemetry.heat.sum()) == per_row * rows, "every use of a finished turn is counted, once"
    assert served.close() == 0
