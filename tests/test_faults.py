"""Whatever fails inside a pass costs its turn and nothing else: the slot is where it was, the other turns and the daemon go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm53serve.engine.faults import FaultError, Faults
from glm53serve.engine.seam import DeviceLost
from tests.served import Fresh, Served, in_flight_together, load_tiny, same

PRIME = b"0123456789"
LONG = bytes(b"abcdefghijklmnopqrstuvwxyz"[i * i % 26] for i in range(80))


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(slots: int = 1, **variables: str) -> Served:
        options = {"GLM53_CHECKPOINT_GB": "0", **variables}
        started.append(Served(load_tiny(model, slots, **options), tmp_path / "usage", **options))
        return started[-1]

    yield start
    for served in started:
        assert served.close() == 0


@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_a_failure_inside_a_chunk_leaves_the_last_boundary(serve: Callable[..., Served], fresh: Fresh, n: int) -> None:
    served = serve(GLM53_FAULT=f"layer:{n}")
    served.loaded.engine.faults, faults = Faults(), served.loaded.engine.faults
    served.wait(served.submit(PRIME, max_tokens=1))
    served.loaded.engine.faults = faults
    failed = served.wait(served.submit(PRIME + LONG))
    assert failed.outcome == "INTERNAL" and not failed.tokens
    assert any("injected fault: layer" in line for line in served.log), "the traceback is told when verbose"
    retry = served.wait(served.submit(PRIME + LONG))
    assert served.word(retry) == "extend"
    reused = int(next(line for line in served.log if line.startswith(f"REUSE {retry.id} ")).split()[2])
    assert reused % 9 == 1 and reused >= len(PRIME), "a chunk boundary"
    assert same(served.said(retry), fresh.answer(PRIME + LONG, 4))


def test_no_memory_for_the_snapshot_is_said_once_and_serves_on(serve: Callable[..., Served], fresh: Fresh) -> None:
    served = serve(GLM53_FAULT="alloc:1")
    turn = served.wait(served.submit(PRIME + LONG))
    assert same(served.said(turn), fresh.answer(PRIME + LONG, 4))
    assert sum("no memory for a snapshot" in line for line in served.log) == 1


def test_a_failing_step_empties_its_slots_and_ends_their_turns(serve: Callable[..., Served], fresh: Fresh) -> None:
    served = serve(2)

    class WhenBothDecode(Faults):
        """The first layer of a step that both turns are in, some tokens after their first."""

        def watches(self, site: str) -> bool:
            turns = served.daemon._desk.decoding()
            return super().watches(site) and len(turns) == 2 and all(turn.emitted > 2 for turn in turns)

    served.loaded.engine.faults = WhenBothDecode("layer:1")
    with in_flight_together(served):
        first, second = served.submit(PRIME, 0, 40), served.submit(LONG, 1, 40)
    served.wait(first)
    served.wait(second)
    assert {first.outcome, second.outcome} == {"INTERNAL"}
    for slot, prompt in enumerate((PRIME, LONG)):
        again = served.wait(served.submit(prompt, slot))
        assert served.word(again) == "cold"
        assert same(served.said(again), fresh.answer(prompt, 4))


def test_memory_errors_have_their_own_word(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(served.loaded.engine), "run_layers", broken)
        assert served.wait(served.submit(PRIME)).outcome == "NO_MEMORY"
    assert served.wait(served.submit(PRIME)).outcome == "DONE"


def test_a_device_lost_between_two_passes_costs_no_finished_turn(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a turn asks for its expert uses, in whatever thread it comes; a device that is gone by then must not end that thread."""
    served = serve(2)

    def lost(*_: object) -> None:
        raise DeviceLost("gone")

    turn = served.submit(PRIME, 0, 200)
    served.wait_until(lambda: len(turn.tokens) >= 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(served.loaded.engine), "expert_uses", lost)
        served.stop(turn)
        served.wait(turn)
    assert turn.outcome == "DONE"
    assert served.wait(served.submit(PRIME, 1)).outcome == "DONE"


@pytest.mark.parametrize("text", ["layer", "layer:", "layer:0", "layer:x", "disk:1", ":1", "layer:-1"])
def test_a_wrong_fault_is_refused(text: str) -> None:
    with pytest.raises(FaultError, match="must be <site>:<n>"):
        Faults(text)


def test_a_fault_comes_once() -> None:
    faults = Faults("read:2")
    faults.hit("read")
    faults.hit("layer")
    with pytest.raises(OSError, match="read"):
        faults.hit("read")
    for _ in range(5):
        faults.hit("read")
