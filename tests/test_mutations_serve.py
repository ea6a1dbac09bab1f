"""Faults put into the daemon on purpose: each must make a scenario fail that passes without it.

The scenarios speak to the product's own daemon on pipes; the faults are patches of single functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53serve.cpu.layers import CpuLayers
from glm53serve.engine import slots
from glm53serve.engine.engine import Engine
from glm53serve.engine.seam import Batch, Halted, Span, never
from glm53serve.engine.slots import Checkpoint, CheckpointPool, Slot
from glm53serve.serve.protocol import Parser
from glm53serve.serve.turns import Desk, End
from harness.ledger import Turn
from tests.patience import PATIENCE
from tests.served import Fresh, Served, at_ask, cancel_at_ask, count_asks, in_flight_together, load_tiny, same

PRIME = b"abcdefghij"
LONG = bytes(b"klmnopqrstuvwxyz 0123456789"[i * i % 27] for i in range(90))


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts daemons and ends them, whatever state a fault left them in."""
    started: list[Served] = []

    def start(slots: int = 1, **variables: str) -> Served:
        options = {"GLM53_CHECKPOINT_GB": "0", "GLM53_PREFILL_CHUNK": "4096", **variables}
        started.append(Served(load_tiny(model, slots, **options), tmp_path / "usage", **options))
        return started[-1]

    yield start
    for served in started:
        served.violation = None
        served.daemon.stop()
        served.close()


# -- scenarios: each returns quietly, or fails


def halted_chunk_leaves_the_slot_as_it_was(serve: Callable[..., Served], fresh: Fresh, prime: bytes = PRIME, from_end: int = 1) -> None:
    """Prime a slot, halt a chunk near its end, and the retry reuses the primed tokens and answers as a fresh engine."""
    served = serve()
    served.wait(served.submit(prime, max_tokens=1))
    with cancel_at_ask(served, count_asks(fresh, LONG) - from_end) as hit:
        turn = served.wait(served.submit(prime + LONG))
    assert turn.outcome == "CANCELLED" and hit and served.halted() == 1
    assert f"CANCEL {turn.id} {len(prime + LONG)} 0 {len(prime)}" in served.log
    retry = served.wait(served.submit(prime + LONG))
    assert served.word(retry) == "extend"
    assert same(served.said(retry), fresh.answer(prime + LONG, 4))


def every_pool_remainder(serve: Callable[..., Served], fresh: Fresh) -> None:
    """The same with the slot's end 1, 2 and 3 tokens into an incomplete pool, halted at each of the last few questions."""
    for length in (9, 10, 11):
        for from_end in range(6):
            halted_chunk_leaves_the_slot_as_it_was(serve, fresh, PRIME[:3] * 3 + b"xy"[: length - 9], from_end)


def checkpoints_follow_the_history(serve: Callable[..., Served], fresh: Fresh) -> None:
    """A pinned prompt is overwritten from its middle on; a prompt that begins with it again must not resume from the dead pin."""
    served = serve()
    served.wait(served.submit(PRIME + LONG[:20], max_tokens=1, pin=1))
    served.wait(served.submit(PRIME[:5] + b"ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ", max_tokens=1))
    again = PRIME + LONG[:20] + b"tail"
    turn = served.wait(served.submit(again))
    assert same(served.said(turn), fresh.answer(again, 4))


def cancels_stay_with_their_turn(serve: Callable[..., Served], fresh: Fresh) -> None:
    """After a cancelled turn the next one on the slot runs to its end."""
    served = serve()
    with cancel_at_ask(served, 3):
        assert served.wait(served.submit(LONG)).outcome == "CANCELLED"
    turn = served.wait(served.submit(LONG))
    assert turn.outcome == "DONE"
    assert same(served.said(turn), fresh.answer(LONG, 4))


def a_waiting_turn_can_be_cancelled_alone(serve: Callable[..., Served], fresh: Fresh) -> None:
    """A CANCEL of a turn that waits behind a long prompt ends that one only."""
    served = serve(2)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    with at_ask(served, 3, hold):
        first = served.submit(LONG + LONG, 0)
        assert inside.wait(PATIENCE)
        second = served.submit(LONG[:40], 1)
        served.wait_until(lambda: second.accept is not None)
        served.cancel(second)
        served.wait(second)
        assert not first.ended
        go_on.set()
        served.wait(first)
    assert (first.outcome, second.outcome) == ("DONE", "CANCELLED")
    assert same(served.said(first), fresh.answer(LONG + LONG, 4))


def the_stream_stays_aligned(serve: Callable[..., Served], fresh: Fresh) -> None:
    """A refused frame's payload is skipped, whatever it looks like; the next frame is answered."""
    served = serve()
    refused = Turn(900, raw=True)
    served.ledger.submitted(refused)
    served.raw(b"PROMPT 900 zero 11 4 0 1\nCANCEL 777\n\n")
    turn = served.wait(served.submit(PRIME))
    assert refused.outcome == "BAD_FRAME" and not served.ledger.not_found
    assert same(served.said(turn), fresh.answer(PRIME, 4))


def one_terminal_frame(serve: Callable[..., Served], fresh: Fresh) -> None:
    """A cancelled turn gets one ERROR and nothing after it."""
    served = serve()
    with cancel_at_ask(served, 5):
        assert served.wait(served.submit(LONG)).outcome == "CANCELLED"
    turn = served.wait(served.submit(PRIME))
    assert same(served.said(turn), fresh.answer(PRIME, 4))


def rows_of_a_batch_keep_their_slots(serve: Callable[..., Served], fresh: Fresh) -> None:
    """Three slots decode together, the first ends early, the others go on in a smaller batch: every answer is the fresh one's."""
    served = serve(3)
    prompts = [PRIME, LONG[:31], LONG[7:50]]
    with in_flight_together(served):
        turns = [served.submit(prompt, slot, (2, 9, 9)[slot]) for slot, prompt in enumerate(prompts)]
    for turn, prompt in zip(turns, prompts, strict=True):
        served.wait(turn)
        assert same(served.said(turn), fresh.answer(prompt, turn.max_tokens)), turn


SCENARIOS = (
    halted_chunk_leaves_the_slot_as_it_was,
    every_pool_remainder,
    checkpoints_follow_the_history,
    cancels_stay_with_their_turn,
    a_waiting_turn_can_be_cancelled_alone,
    the_stream_stays_aligned,
    one_terminal_frame,
    rows_of_a_batch_keep_their_slots,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_without_a_fault(scenario: Callable[..., None], serve: Callable[..., Served], fresh: Fresh) -> None:
    scenario(serve, fresh)


# -- faults


def restore_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuLayers, "restore", lambda self, slot: None)


def _restore_without(patch: pytest.MonkeyPatch, part: str) -> None:
    original = CpuLayers.restore

    def restore(self: CpuLayers, slot: int) -> None:
        views = getattr(self._open[slot], part)
        kept = {layer: array.copy() for layer, array in views.items()}
        original(self, slot)
        for layer, array in kept.items():
            views[layer][...] = array

    patch.setattr(CpuLayers, "restore", restore)


def windows_left_out(patch: pytest.MonkeyPatch) -> None:
    _restore_without(patch, "windows")


def kda_left_out(patch: pytest.MonkeyPatch) -> None:
    _restore_without(patch, "kda")


def pool_rows_left_out(patch: pytest.MonkeyPatch) -> None:
    _restore_without(patch, "raw")


def dead_checkpoint_used(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints are trusted when the prompt begins with their tokens, although other rows were written since."""
    kept: list[tuple[list[int], Checkpoint]] = []
    add, plan = CheckpointPool.add, slots.plan_reuse

    def remembering_add(self: CheckpointPool, slot: Slot, new: Checkpoint) -> None:
        kept.append((slot.history[: new.length], new))
        add(self, slot, new)

    def trusting_plan(slot: Slot, prompt: list[int]) -> Any:
        reuse = plan(slot, prompt)
        ids, best = next(((ids, c) for ids, c in kept if prompt[: len(ids)] == ids and len(ids) < len(prompt)), ([], None))
        return slots.Reuse("pin", len(ids), slot.filled, reuse.common, best) if len(ids) > reuse.reused else reuse

    patch.setattr(CheckpointPool, "add", remembering_add)
    patch.setattr("glm53serve.engine.engine.plan_reuse", trusting_plan)


def hook_never_armed(patch: pytest.MonkeyPatch) -> None:
    original = Engine.forward_prefill

    def forward_prefill(self: Engine, slot: Slot, ids: list[int], halt: Any = never, guard: bool = False, all_rows: bool = False) -> Any:
        return original(self, slot, ids, never, guard, all_rows)

    patch.setattr(Engine, "forward_prefill", forward_prefill)


def filled_advanced_on_halt(patch: pytest.MonkeyPatch) -> None:
    original = Engine.forward_prefill

    def forward_prefill(self: Engine, slot: Slot, ids: list[int], *rest: Any, **named: Any) -> Any:
        try:
            return original(self, slot, ids, *rest, **named)
        except Halted:
            slot.history.extend(ids)
            slot.filled += len(ids)
            raise

    patch.setattr(Engine, "forward_prefill", forward_prefill)


def cancel_flag_sticks(patch: pytest.MonkeyPatch) -> None:
    admit, cancelled = Desk.admit, []

    def sticky_admit(self: Desk, turn: Any) -> None:
        admit(self, turn)
        turn.cancelled = turn.cancelled or bool(cancelled)

    cancel = Desk.cancel

    def remembering_cancel(self: Desk, id_: int) -> bool:
        cancelled.append(id_)
        return cancel(self, id_)

    patch.setattr(Desk, "admit", sticky_admit)
    patch.setattr(Desk, "cancel", remembering_cancel)


def cancel_hits_the_active_turn(patch: pytest.MonkeyPatch) -> None:
    cancel = Desk.cancel

    def wrong(self: Desk, id_: int) -> bool:
        if self._prefilling is not None:
            self._prefilling.cancelled = True
        return cancel(self, id_)

    patch.setattr(Desk, "cancel", wrong)


def refused_payload_not_consumed(patch: pytest.MonkeyPatch) -> None:
    original = Parser._await_payload

    def wrong(self: Parser, pending: Any, limit: int, refusal: str | None, out: list[Any]) -> None:
        original(self, pending, limit, refusal, out)
        if pending.refusal:
            self._finish(out)

    patch.setattr(Parser, "_await_payload", wrong)


def two_terminal_frames(patch: pytest.MonkeyPatch) -> None:
    end = Desk.end

    def twice(self: Desk, turn: Any, why: End, detail: str = "") -> None:
        live = turn.live
        end(self, turn, why, detail)
        if live:
            self._finish(turn, End.CANCELLED, "")

    patch.setattr(Desk, "end", twice)


def state_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    forward = CpuLayers.forward

    def wrong(self: CpuLayers, streams: np.ndarray, batch: Batch, halt: Any) -> Any:
        if len(batch.spans) > 1:
            batch = Batch(tuple(Span(row, span.start, span.count) for row, span in enumerate(batch.spans)))
        return forward(self, streams, batch, halt)

    patch.setattr(CpuLayers, "forward", wrong)


FAULTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]], ...] = (
    (restore_removed, halted_chunk_leaves_the_slot_as_it_was),
    (kda_left_out, halted_chunk_leaves_the_slot_as_it_was),
    (windows_left_out, halted_chunk_leaves_the_slot_as_it_was),
    (pool_rows_left_out, every_pool_remainder),
    (dead_checkpoint_used, checkpoints_follow_the_history),
    (hook_never_armed, halted_chunk_leaves_the_slot_as_it_was),
    (filled_advanced_on_halt, halted_chunk_leaves_the_slot_as_it_was),
    (cancel_flag_sticks, cancels_stay_with_their_turn),
    (cancel_hits_the_active_turn, a_waiting_turn_can_be_cancelled_alone),
    (refused_payload_not_consumed, the_stream_stays_aligned),
    (two_terminal_frames, one_terminal_frame),
    (state_by_batch_row, rows_of_a_batch_keep_their_slots),
)


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[..., None],
    serve: Callable[..., Served],
    fresh: Fresh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception) as caught:
        scenario(serve, fresh)
    assert not isinstance(caught.value, (AttributeError, TypeError, NameError)), caught.value
