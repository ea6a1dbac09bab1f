"""The launch-ahead decisions as a truth table, and the decode loop against a simulated device under random schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53serve.engine.decode_loop import Commit, DecodeLoop
from glm53serve.engine.launch_ahead import DepthControl, LaunchRefused, Lease, Shape, Situation, consume, lease
from glm53serve.engine.ranks import RankMismatch, agree, shut_down
from glm53serve.engine.step_device import End, Record, RowPlan

S = Shape(2, ((0, 1), (1, 2)))


@pytest.mark.parametrize(
    ("in_flight", "wanted", "expected", "why"),
    [
        (None, S, False, "nothing is in flight"),
        (S, S, True, "the same rows in the same hands"),
        (S, Shape(2, ((0, 1), (1, 3))), False, "a slot was handed over under an identical shape"),
        (S, Shape(2, ((0, 1),)), False, "a row turned into padding"),
        (Shape(2, ((0, 1),)), S, False, "padding turned into a row"),
        (S, Shape(4, S.rows), False, "another bucket"),
        (S, Shape(2, ((1, 2), (0, 1))), False, "rows changed places"),
        (S, Shape(2, ((0, 1), (3, 2))), False, "another slot"),
    ],
)
def test_consume(in_flight: Shape | None, wanted: Shape, expected: bool, why: str) -> None:
    assert consume(in_flight, wanted) is expected, why


def sit(active: int = 2, out: int = 0, depth: int = 1, limit: int = 100, room: int = 100, **more: object) -> Situation:
    return Situation(active, out, depth, limit, room, **more)  # type: ignore[arg-type]


TABLE = [
    ("nothing outstanding: this step and one ahead", sit(), Lease(2)),
    ("one outstanding: one more", sit(out=1), Lease(1)),
    ("the host is as far behind as it may be", sit(out=2), Lease(0)),
    ("depth 0 waits for every step", sit(depth=0), Lease(1)),
    ("depth 0 with a step outstanding", sit(depth=0, out=1), Lease(0)),
    ("depth 8", sit(depth=8, out=3), Lease(6)),
    ("no active rows: never speculate on padding only", sit(active=0), Lease(0)),
    ("no active rows, a slot held back, nothing outstanding", sit(active=0, deferred=1), Lease(0, release=True)),
    ("no active rows, a slot held back, a step outstanding", sit(active=0, deferred=1, out=1), Lease(0)),
    ("an admission is possible: drain", sit(out=1, admission=True), Lease(0)),
    ("an admission is possible, nothing outstanding: let it in first", sit(admission=True), Lease(0)),
    ("a waiting turn that cannot start does not cost the lease", sit(out=1, admission=False), Lease(1)),
    ("a row must leave: drain", sit(out=1, leaving=True), Lease(0)),
    ("a slot is held back: drain", sit(out=1, deferred=1), Lease(0)),
    ("drained: release it and go on", sit(deferred=1), Lease(2, release=True)),
    ("the rows changed: drain", sit(out=1, shape_changed=True), Lease(0)),
    ("the rows changed, drained: upload first", sit(shape_changed=True), Lease(2, prologue=True)),
    ("a request at its cap", sit(limit=0), Lease(0)),
    ("a request that reaches its cap with the steps outstanding", sit(out=1, limit=1), Lease(0)),
    ("one token below the cap: no step too many", sit(depth=8, limit=1), Lease(1)),
    ("no room left in a slot", sit(room=0), Lease(0)),
    ("room for two positions", sit(depth=8, room=2), Lease(2)),
    ("a row depends on the host: one step at a time", sit(host_rows=True, depth=4), Lease(1)),
    ("a row depends on the host, step outstanding", sit(host_rows=True, out=1), Lease(0)),
    ("device loop: as many steps as its bound", sit(loop_bound=16), Lease(16)),
    ("device loop, the shortest row has five left", sit(loop_bound=16, limit=5), Lease(5)),
    ("device loop running", sit(loop_bound=16, out=9), Lease(0)),
    ("device loop running, an admission is possible", sit(loop_bound=16, out=9, admission=True), Lease(0, stop_loop=True)),
    ("device loop with host rows: plain single steps", sit(loop_bound=16, host_rows=True), Lease(1)),
]


@pytest.mark.parametrize(("why", "situation", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_lease(why: str, situation: Situation, expected: Lease) -> None:
    assert lease(situation) == expected


def test_rows_without_a_graph_are_refused() -> None:
    with pytest.raises(LaunchRefused):
        lease(sit(captured=False))
    assert lease(sit(active=0, captured=False)) == Lease(0)


def test_ranks_that_disagree_are_fatal() -> None:
    view = (S, Lease(1))
    assert agree([view, view]) == view
    with pytest.raises(RankMismatch, match="rank 1"):
        agree([view, (S, Lease(0))])
    with pytest.raises(RankMismatch):
        agree([view, (None, Lease(1))])
    with pytest.raises(RankMismatch):
        agree([])


def test_shutdown_tells_every_worker_before_joining_any() -> None:
    log: list[str] = []

    @dataclass
    class Worker:
        name: str
        broken: bool = False

        def tell(self) -> None:
            log.append("tell " + self.name)
            if self.broken:
                raise OSError("pipe closed")

        def join(self) -> None:
            log.append("join " + self.name)

    with pytest.raises(OSError, match="pipe closed"):
        shut_down([Worker("a"), Worker("b", broken=True), Worker("c")])
    assert log == ["tell a", "tell b", "tell c", "join a", "join b", "join c"]


def test_depth_follows_the_worst_recent_delay() -> None:
    control = DepthControl()
    assert control.depth == 1
    for _ in range(40):
        control.observe(0.0001, 0.001)
    assert control.depth == 1
    control.observe(0.0035, 0.001)
    assert control.depth == 4
    control.observe(1.0, 0.001)
    assert control.depth == 8
    for _ in range(32):
        control.observe(0.0001, 0.001)
    assert control.depth == 1


# --- a simulated device ----------------------------------------------------------------------------------------------------------


def next_token(slot_state: int, token: int, position: int) -> int:
    """A chained function of everything a row depends on, so a wrong feed, a lost step or a doubled one changes all that follows."""
    return (slot_state * 1103515245 + token * 12345 + position * 7 + 3) % 101


@dataclass
class Cell:
    """A row on the simulated device."""

    plan: RowPlan
    generation: int
    token: int
    position: int
    left: int
    parked: bool = False


@dataclass
class SimulatedDevice:
    """Runs queued steps when told to (or waited for), with the commit kernel's rules; each slot has a state that every step advances."""

    buckets: tuple[int, ...] = (1, 2, 4)
    rows: list[Cell] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    ring: list[list[Record]] = field(default_factory=list)
    state: dict[int, int] = field(default_factory=dict)
    writers: dict[int, int] = field(default_factory=dict)
    cancels: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    loop: bool = False

    def upload(self, bucket: int, rows: Sequence[tuple[RowPlan, int]]) -> None:
        assert not self.queue, "inputs uploaded under outstanding steps"
        assert len(rows) <= bucket
        self.rows = [Cell(plan, generation, plan.token, plan.position, min(plan.limit, plan.room)) for plan, generation in rows]
        self.cancels.clear()

    def launch(self, bucket: int, steps: int, loop: bool) -> None:
        assert bucket >= len(self.rows) and loop == self.loop
        self.queue += [bucket] * steps

    def committed(self) -> int:
        return len(self.ring)

    def wait(self, step: int) -> None:
        while self.committed() <= step and self.queue:
            self.run_one()

    def record(self, step: int, row: int) -> Record:
        return self.ring[step][row]

    def cancel(self, row: int, generation: int) -> None:
        if row < len(self.rows) and self.rows[row].generation == generation:
            self.cancels.add(row)

    def stop_loop(self) -> None:
        if self.loop:
            self.queue.clear()

    def run_one(self) -> None:
        bucket = self.queue.pop(0)
        records = []
        for index in range(bucket):
            if index >= len(self.rows) or self.rows[index].parked:
                generation = self.rows[index].generation if index < len(self.rows) else 0
                records.append(Record(generation, 0, 0, End.PADDING))
                continue
            cell = self.rows[index]
            slot = cell.plan.slot
            assert slot not in self.released, "a released slot was written"
            token = next_token(self.state[slot], cell.token, cell.position)
            self.state[slot] = (self.state[slot] * 31 + cell.token + 1) % 1000003
            cell.left -= 1
            end = End.LIVE
            if index in self.cancels:
                end = End.CANCELLED
            elif token in cell.plan.stop_ids:
                end = End.STOP
            elif cell.left == 0:
                end = End.LENGTH
            cell.parked = end != End.LIVE
            records.append(Record(cell.generation, cell.position, token, end))
            cell.token, cell.position = token, cell.position + 1
        self.ring.append(records)
        if self.loop and all(cell.parked for cell in self.rows):
            self.queue.clear()


def alone(plan: RowPlan, state: int) -> list[tuple[int, End]]:
    """What a plan must give, whoever else decodes at the time."""
    out: list[tuple[int, End]] = []
    token, position = plan.token, plan.position
    for produced in range(1, min(plan.limit, plan.room) + 1):
        new = next_token(state, token, position)
        state = (state * 31 + token + 1) % 1000003
        end = End.STOP if new in plan.stop_ids else End.LENGTH if produced == min(plan.limit, plan.room) else End.LIVE
        out.append((new, end))
        token, position = new, position + 1
        if end != End.LIVE:
            break
    return out


ACTION = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 5), st.integers(1, 12), st.integers(1, 12), st.integers(0, 100)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("turn"), st.booleans()),
    st.tuples(st.just("device"), st.integers(1, 3)),
)


class Schedule:
    """Drives a loop through actions and checks every promise on the way."""

    def __init__(self, depth: int | None, loop_bound: int) -> None:
        self.device = SimulatedDevice(loop=loop_bound > 0)
        self.loop = DecodeLoop(self.device, depth, loop_bound)
        self.waiting: list[RowPlan] = []
        self.expected: dict[int, list[tuple[int, End]]] = {}
        self.got: dict[int, list[tuple[int, End]]] = {}
        self.filled: dict[int, int] = {}
        self.finished: list[tuple[int, tuple[tuple[int, End], ...]]] = []
        self.serial = 0
        self.cancelled_at: dict[int, int] = {}
        self.free = set(range(6))
        self.numbers: dict[int, int] = {}

    def start(self, slot: int, limit: int, room: int, token: int) -> None:
        if slot not in self.free or any(plan.slot == slot for plan in self.waiting):
            return
        self.waiting.append(RowPlan(slot, token, 10 + slot, limit, room, stop_ids=(7, 11)))

    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.loop.live_slots) < self.device.buckets[-1]

    def admit(self) -> None:
        while self.can_admit() and not self.loop.outstanding:
            plan = self.waiting.pop(0)
            self.free.discard(plan.slot)
            self.device.released.discard(plan.slot)
            self.serial += 1
            self.device.state[plan.slot] = self.serial
            self.expected[plan.slot] = alone(plan, self.serial)
            self.got[plan.slot] = []
            self.filled[plan.slot] = plan.position
            self.numbers[plan.slot] = self.serial
            self.loop.start(plan)

    def turn(self) -> None:
        self.admit()
        self.take(self.loop.turn(admission=self.can_admit()))

    def take(self, commits: list[Commit]) -> None:
        for c in commits:
            assert c.slot in self.expected, "a token for a slot without a turn"
            index = len(self.got[c.slot])
            if c.token is None:
                assert c.end == End.CANCELLED and c.slot in self.cancelled_at
            else:
                assert (c.token, c.end) == self.expected[c.slot][index], "a token lost, doubled or given to the wrong turn"
                self.got[c.slot].append((c.token, c.end))
                assert c.filled == self.filled[c.slot] + 1
                self.filled[c.slot] = c.filled
            if c.end != End.LIVE:
                self.finished.append((self.numbers[c.slot], tuple(self.got[c.slot])))
                del self.expected[c.slot]
                self.cancelled_at.pop(c.slot, None)
        for slot in self.loop.take_released():
            assert slot not in self.free and slot not in self.expected
            assert not any(cell.plan.slot == slot and not cell.parked for cell in self.device.rows) or not self.device.queue
            self.device.released.add(slot)
            self.free.add(slot)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.waiting and not self.loop.live_slots:
                break
            self.turn()
        self.take(self.loop.drain())
        assert not self.expected and not self.waiting
        assert self.free == set(range(6)), "a slot was never released"


@settings(max_examples=150)
@given(st.lists(ACTION, max_size=60), st.sampled_from([(0, 0), (1, 0), (4, 0), (8, 0), (None, 0), (1, 16)]))
def test_any_schedule_gives_every_turn_its_own_sequence(actions: list[tuple], mode: tuple[int | None, int]) -> None:
    run = Schedule(*mode)
    for action in actions:
        if action[0] == "start":
            run.start(*action[1:])
        elif action[0] == "cancel":
            slot = action[1]
            if slot in run.expected:
                run.cancelled_at[slot] = run.device.committed()
                run.loop.cancel(slot)
                before = len(run.device.ring)
                row = [i for i, cell in enumerate(run.device.rows) if cell.plan.slot == slot and not cell.parked]
                if row and run.device.queue:
                    run.device.run_one()
                    assert run.device.rows[row[0]].parked, "a cancelled row ran more than one step"
                    assert len(run.device.ring) == before + 1
        elif action[0] == "turn":
            run.turn()
        else:
            for _ in range(action[1]):
                if run.device.queue:
                    run.device.run_one()
    run.finish()


def test_length_stops_waste_no_step() -> None:
    run = Schedule(8, 0)
    run.start(0, 5, 100, 1)
    run.device.state[0] = 1
    run.waiting[0] = RowPlan(0, 1, 0, 5, 100)
    run.turn()
    assert run.device.committed() + len(run.device.queue) == 5
    run.expected[0] = alone(RowPlan(0, 1, 0, 5, 100), 1)
    run.finish()


def test_a_slot_is_held_until_its_last_step_is_fenced() -> None:
    device = SimulatedDevice()
    device.state = {0: 1, 1: 2}
    loop = DecodeLoop(device, depth=4)
    loop.start(RowPlan(0, 5, 0, 100, 100))
    loop.start(RowPlan(1, 6, 0, 100, 100))
    loop.turn()
    loop.cancel(0)
    commits = loop.turn()
    assert any(c.slot == 0 and c.end == End.CANCELLED for c in commits)
    assert loop.outstanding and loop.take_released() == []
    with pytest.raises(ValueError, match="slot 0"):
        loop.start(RowPlan(0, 5, 0, 1, 1))
    while loop.outstanding:
        loop.turn(admission=True)
    loop.turn(admission=True)
    assert loop.take_released() == [0]


def test_more_rows_than_the_largest_bucket_are_refused() -> None:
    loop = DecodeLoop(SimulatedDevice(), 1)
    for slot in range(4):
        loop.start(RowPlan(slot, 1, 0, 5, 5))
    with pytest.raises(LaunchRefused):
        loop.start(RowPlan(4, 1, 0, 5, 5))


def test_a_record_of_another_generation_is_fatal() -> None:
    device = SimulatedDevice()
    device.state = {0: 1}
    loop = DecodeLoop(device, 1)
    loop.start(RowPlan(0, 5, 0, 100, 100))
    loop.turn()
    while device.queue:
        device.run_one()
    device.ring[1][0] = Record(99, 0, 0, End.LIVE)
    with pytest.raises(RankMismatch, match="generation 99"):
        loop.turn()
