"""The expert store: budgets, reads, eviction, errors, copies. What it hands out must be the file's bytes, whatever happened before."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from glm53serve.engine.faults import Faults
from glm53serve.engine.seam import Halted, never
from glm53serve.experts import ExpertFiles, ExpertReadError, ExpertStore, Heat, model_copies
from glm53serve.experts import files as files_module
from glm53serve.experts.memory import allocate
from glm53serve.experts.places import PAGE, Place, place
from glm53serve.model.checkpoint import Checkpoint, Piece, open_checkpoint
from glm53serve.model.errors import ModelError
from glm53serve.model.synth import synth
from tests.patience import PATIENCE

LAYERS = (1, 2, 3)
EXPERTS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    synth(path, "tiny", experts=EXPERTS, seed=3)
    return path


@pytest.fixture(scope="module")
def truth(directory: Path) -> Checkpoint:
    return open_checkpoint(directory)


def make(directory: Path, budget: int, faults: str = "", mirrors: str = "", **options: object) -> ExpertStore:
    checkpoint = open_checkpoint(directory, mapped=False)
    store = ExpertStore(checkpoint, ExpertFiles(model_copies(directory, checkpoint.files, mirrors), Faults(faults)), **options)  # type: ignore[arg-type]
    store.open(budget)
    return store


def ask(store: ExpertStore, layer: int, experts: list[int], in_order: bool = True, rows: int = 1) -> dict[int, bytes]:
    """Everything a need hands out, as bytes."""
    got: dict[int, bytes] = {}
    ids = np.array(sorted(experts), np.int64)
    with store.need(layer, ids, np.ones(len(ids), np.int64), rows, never, in_order) as need:
        for group in need:
            for ready in group:
                assert ready.expert not in got, "handed out twice"
                if in_order:
                    assert all(ready.expert > e for e in got)
                got[ready.expert] = flat(ready.weights)
        assert 0 <= need.found <= need.wanted == len(ids)
    return got


def flat(w: object) -> bytes:
    parts = []
    for name in ("gate", "up", "down"):
        m = getattr(w, name)
        parts.append(m.data.tobytes() + (b"" if m.scale is None else m.scale.tobytes()))
    return b"".join(parts)


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 6, 12, 23, 24, 48])
@pytest.mark.parametrize("in_order", [True, False])
def test_any_budget_gives_the_files_bytes(directory: Path, truth: Checkpoint, budget: int, in_order: bool) -> None:
    store = make(directory, budget)
    try:
        rng = np.random.default_rng(budget)
        for _ in range(12):
            for layer in LAYERS:
                chosen = rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist()
                got = ask(store, layer, chosen, in_order)
                assert got == {e: flat(truth.expert(layer, e)) for e in sorted(chosen)}
        assert store.buffers <= max(budget, 2) + max(budget, 2) // 10
        assert sum(int(store.resident(layer).sum()) for layer in LAYERS) <= store.buffers
    finally:
        store.close()


@pytest.mark.parametrize("budget", [2, 3, 6, 12])
def test_a_chunk_reads_each_expert_of_a_layer_at_most_once(directory: Path, budget: int) -> None:
    store = make(directory, budget)
    try:
        for _ in range(4):
            for layer in LAYERS:
                before = store.reads
                held = int(store.resident(layer).sum())
                ask(store, layer, list(range(EXPERTS)), rows=500)
                assert store.reads - before <= EXPERTS
                if budget >= 6:
                    assert store.reads - before == EXPERTS - held
    finally:
        store.close()


def landed(store: ExpertStore, reads: int) -> None:
    """Wait until the store has made that many reads since it was opened."""
    until = time.monotonic() + PATIENCE
    while store.reads < reads:
        assert time.monotonic() < until, f"{store.reads} of {reads} reads"
        time.sleep(0.001)


def rested(store: ExpertStore) -> None:
    """Wait until every reader has found that there is nothing to read, or no room for it."""
    work, until = store._books.work, time.monotonic() + PATIENCE
    while True:
        with work:
            if len(work._waiters) == len(store._readers):  # type: ignore[attr-defined]
                return
        assert time.monotonic() < until, f"{store._books.reading} reads are going on"
        time.sleep(0.001)


def test_what_is_foreseen_is_read_once_and_counts_as_a_miss(directory: Path, truth: Checkpoint) -> None:
    store = make(directory, 6)
    try:
        store.foresee(2, np.array([5, 3]))
        landed(store, 2)
        with store.need(2, np.array([3, 5]), np.ones(2, np.int64), 1, never, False) as need:
            assert need.found == 0
            groups = list(need)
            assert sorted(ready.expert for ready in groups[0]) == [3, 5] and need.blocked == 0
        assert store.reads == 2
        assert ask(store, 2, [3, 5]) == {e: flat(truth.expert(2, e)) for e in (3, 5)}
        assert store.reads == 2, "an expert that was foreseen and used stays as any other"
    finally:
        store.close()


@pytest.mark.parametrize("budget", [2, 4, 12])
def test_a_wrong_guess_pushes_out_nothing_that_is_kept_and_no_other_guess(directory: Path, budget: int) -> None:
    store = make(directory, budget)
    try:
        for _ in range(8):
            ask(store, 1, list(range(EXPERTS)))
        kept = store._books._kept.copy()
        before = store.reads
        store.foresee(3, np.arange(EXPERTS))
        rested(store)
        assert (store._books._kept == kept).all()
        assert store.reads - before <= store.transit
        guessed = np.flatnonzero(store.resident(3)).tolist()
        ask(store, 3, list(range(EXPERTS)), rows=500)
        assert store.reads - before == EXPERTS and guessed == list(range(len(guessed)))
    finally:
        store.close()


def test_foreseeing_goes_on_after_guesses_that_did_not_come_true(directory: Path) -> None:
    store = make(directory, 2)
    try:
        ask(store, 1, [0, 1])
        for layer in (2, 3, 2, 3):
            before = store.reads
            store.foresee(layer, np.array([6, 7]))
            landed(store, before + 1)
    finally:
        store.close()


def test_a_guess_that_cannot_be_read_fails_nobody(directory: Path, truth: Checkpoint) -> None:
    said: list[str] = []
    store = make(directory, 4, faults="read:1", note=said.append)
    try:
        store.foresee(2, np.array([1]))
        landed(store, 1)
        assert ask(store, 2, [1]) == {1: flat(truth.expert(2, 1))}
        assert store.reads == 2 and len(said) == 1 and "tried again when needed" in said[0]
    finally:
        store.close()


def test_without_memory_for_guesses_or_warmth_readers_go_on(directory: Path, truth: Checkpoint) -> None:
    short = True

    def allocator(nbytes: int) -> np.ndarray:
        if short:
            raise MemoryError
        return allocate(nbytes)

    store = make(directory, 12, allocator=allocator)
    try:
        store.warm(np.ones((3, EXPERTS), np.uint64))
        store.foresee(2, np.arange(4))
        store.wait_warm()
        rested(store)
        short = False
        assert ask(store, 2, [1]) == {1: flat(truth.expert(2, 1))}
    finally:
        store.close()


def test_everything_fits(directory: Path) -> None:
    store = make(directory, 3 * EXPERTS)
    try:
        assert store.holds_all and not store.stable
        store.warm()
        store.wait_warm()
        assert store.stable and store.reads == 3 * EXPERTS
        for layer in LAYERS:
            assert store.resident(layer).all()
            ask(store, layer, list(range(EXPERTS)))
        assert store.reads == 3 * EXPERTS
        assert np.shares_memory(store.expert(2, 3).gate.data, store.expert(2, 3).gate.data)
    finally:
        store.close()


def test_history_warms_the_most_used_first(directory: Path) -> None:
    store = make(directory, 12)
    try:
        history = np.arange(3 * EXPERTS, dtype=np.uint64).reshape(3, EXPERTS)
        history[0] = 0
        store.warm(history)
        store.wait_warm()
        assert not store.resident(1).any()
        assert store.resident(2)[-4:].all() and store.resident(3)[-4:].all()
    finally:
        store.close()


def test_a_hot_expert_is_not_pushed_out_by_passers_by(directory: Path) -> None:
    store = make(directory, 10)
    try:
        for _ in range(30):
            for layer in LAYERS:
                ask(store, layer, [0, 1])
        before = store.reads
        for e in (4, 5, 6, 7):
            ask(store, 1, [0, 1, e])
        assert store.reads - before <= 4
        assert store.resident(1)[:2].all()
    finally:
        store.close()


def test_a_failed_read_names_its_tensor_and_the_next_try_succeeds(directory: Path, truth: Checkpoint) -> None:
    for n in (1, 3, 5):
        store = make(directory, 4, faults=f"read:{n}")
        try:
            with pytest.raises(ExpertReadError) as failure:
                ask(store, 1, list(range(EXPERTS)))
            assert failure.value.tensor.startswith("model.language_model.layers.1.mlp.experts.")
            assert failure.value.tensor in str(failure.value) and "\n" not in str(failure.value)
            assert ask(store, 1, [0, 4]) == {e: flat(truth.expert(1, e)) for e in (0, 4)}
        finally:
            store.close()


@pytest.mark.parametrize("direct", [False, True])
def test_a_truncated_file_is_an_error_not_a_crash(directory: Path, tmp_path: Path, direct: bool) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    store = make(copy, 4)
    try:
        if direct:
            if not store.files.open_direct():
                pytest.skip("this file system has no direct reads")
            store.files.direct = True
        piece = store.places[2, 5].pieces[4][0] if len(store.places[2, 5].pieces) > 4 else store.places[2, 5].pieces[2][0]
        os.truncate(piece.path, piece.offset + 100)
        with pytest.raises(ExpertReadError) as failure:
            ask(store, 2, [5])
        assert failure.value.tensor == piece.tensor
        assert str(failure.value) == f"{piece.path}: {piece.tensor}: the file has {piece.offset + 100} bytes now, it had more when it was opened"
        assert store.files._buffered
    finally:
        store.close()


def test_direct_and_buffered_reads_agree(directory: Path, truth: Checkpoint) -> None:
    store = make(directory, 2)
    try:
        if not store.files.open_direct():
            pytest.skip("this file system has no direct reads")
        store.files.direct = True
        for layer in LAYERS:
            assert ask(store, layer, list(range(EXPERTS))) == {e: flat(truth.expert(layer, e)) for e in range(EXPERTS)}
        rates = store.files.measure(list(store.places.values()), 0.02)
        assert rates.direct is not None and rates.direct > 0 and rates.buffered > 0
    finally:
        store.close()


def test_a_halt_while_waiting_comes_at_once_and_leaves_nothing_queued(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(directory, 4)
    original = ExpertFiles.fetch

    reading, go_on = threading.Event(), threading.Event()

    def stuck(self: ExpertFiles, *arguments: object) -> None:
        reading.set()
        go_on.wait(PATIENCE)
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertFiles, "fetch", stuck)
    try:
        with pytest.raises(Halted) as halt, store.need(2, np.arange(8), np.ones(8, np.int64), 1, reading.is_set, True) as need:
            for _ in need:
                pass
        assert halt.value.layer == 2
        assert not store.reads, "a read was waited for"
        assert not store._books.queue
        assert not store._books._pinned.any()
    finally:
        go_on.set()
        store.close()


def test_copies_share_the_reads_and_stand_in_for_each_other(directory: Path, truth: Checkpoint, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    said: list[str] = []
    store = make(directory, 2, mirrors=f" {copy} ;", note=said.append)
    used: set[int] = set()
    original = store.files._read
    store.files._read = lambda number, run, buffer: (used.add(number), original(number, run, buffer))[1]  # type: ignore[assignment,func-returns-value]
    try:
        for _ in range(5):
            ask(store, 1, list(range(EXPERTS)))
        assert used == {0, 1}
        os.truncate(next(copy.glob("*.safetensors")), 5000)
        until = time.monotonic() + PATIENCE
        while not said:  # a copy that was slow just now is left alone for a while
            assert time.monotonic() < until, "the damaged copy is never read"
            assert ask(store, 1, list(range(EXPERTS))) == {e: flat(truth.expert(1, e)) for e in range(EXPERTS)}
        assert ask(store, 1, list(range(EXPERTS))) == {e: flat(truth.expert(1, e)) for e in range(EXPERTS)}
        assert len(said) == 1 and "another copy" in said[0]
    finally:
        store.close()


def test_a_directory_that_is_no_copy_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere.*no such file"):
        make(directory, 2, mirrors=str(tmp_path / "nowhere"))
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    with next(other.glob("*.safetensors")).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="not a copy of it"):
        make(directory, 2, mirrors=str(other))
    synth(tmp_path / "seed", "tiny", experts=EXPERTS, seed=4)
    with pytest.raises(ModelError, match=r"other bytes than the model's own file .*: not a copy of it"):
        make(directory, 2, mirrors=str(tmp_path / "seed"))


def test_short_memory_shrinks_the_cache_with_one_line(directory: Path, truth: Checkpoint) -> None:
    given = 0

    def allocator(nbytes: int) -> np.ndarray:
        nonlocal given
        given += 1
        if given > 5:
            raise MemoryError
        return allocate(nbytes)

    said: list[str] = []
    store = make(directory, 3 * EXPERTS, note=said.append, allocator=allocator)
    try:
        store.warm()
        store.wait_warm()
        for _ in range(3):
            for layer in LAYERS:
                assert ask(store, layer, list(range(EXPERTS))) == {e: flat(truth.expert(layer, e)) for e in range(EXPERTS)}
        assert len(said) == 1 and "5 of 24" in said[0]
        assert not store.stable
    finally:
        store.close()


def test_no_memory_at_all_is_a_memory_error(directory: Path) -> None:
    def allocator(nbytes: int) -> np.ndarray:
        raise MemoryError

    store = make(directory, 4, allocator=allocator)
    try:
        with pytest.raises(MemoryError):
            ask(store, 1, [0, 1])
    finally:
        store.close()


def pieces_at(*spans: tuple[int, int]) -> list[Piece]:
    return [Piece(Path("a"), o, n, np.dtype(np.uint8), (n,), f"r{i}", "int8", f"t{i}") for i, (o, n) in enumerate(spans)]


def test_pieces_side_by_side_are_one_read_and_others_more() -> None:
    one = place(pieces_at((5000, 3000), (8000, 100), (8100, 9000)), lambda _: 0)
    assert len(one.runs) == 1
    run = one.runs[0]
    assert run.offset % PAGE == 0 and run.nbytes % PAGE == 0 and run.offset <= 5000 and run.offset + run.needed == 17100
    apart = place(pieces_at((500000, 3000), (0, 100), (12500, 9000)), lambda _: 0)
    assert len(apart.runs) == 3
    for piece, at in apart.pieces:
        holder = next(r for r in apart.runs if r.offset <= piece.offset < r.offset + r.needed)
        assert at == holder.at + piece.offset - holder.offset
    assert apart.runs[-1].tensor_at(500000) == "t0"


def test_heat_prefers_what_is_used_and_fades() -> None:
    heat = Heat(2, 4)
    for _ in range(20):
        heat.use(0, np.array([0, 1]), np.array([1, 1]), 1)
        heat.use(1, np.array([2]), np.array([1]), 1)
    assert heat.chance[0, 0] > 0.5 > heat.chance[0, 2]
    assert heat.coldest(np.array([[True, True, False, False], [False, False, True, True]])) == (1, 3)
    before = heat.chance[0, 0]
    heat.use(0, np.array([3]), np.array([1000]), 1000)
    assert heat.chance[0, 0] < before / 10 and heat.chance[0, 3] > 0.9
    assert heat.coldest(np.zeros((2, 4), np.bool_)) is None


def test_one_chunk_counts_as_its_rows() -> None:
    """Rows one by one or in a chunk leave nearly the same heat when every row chose alike."""
    a, b = Heat(1, 3), Heat(1, 3)
    for _ in range(64):
        a.use(0, np.array([1]), np.array([1]), 1)
    b.use(0, np.array([1]), np.array([64]), 64)
    np.testing.assert_allclose(a.chance, b.chance)


EXPERT_SETS = st.sets(st.integers(0, EXPERTS - 1))


class StoreAgainstAModel(RuleBasedStateMachine):
    """Any sequence of needs, guesses, halts, failures and errors, with memory that may run short: right bytes, bounded buffers, books that agree
    with each other."""

    directory: Path
    truth: Checkpoint

    @initialize(budget=st.integers(0, 26), direct=st.booleans(), memory=st.one_of(st.just(99), st.integers(2, 20)))
    def start(self, budget: int, direct: bool, memory: int) -> None:
        def allocator(nbytes: int) -> np.ndarray:
            if self.store.buffers >= memory:
                raise MemoryError
            return allocate(nbytes)

        self.store = make(self.directory, budget, allocator=allocator)
        self.most = min(max(budget, 2) + max(budget, 2) // 10, memory)
        self.read: Counter[tuple[int, int]] = Counter()
        keys = {id(where): key for key, where in self.store.places.items()}
        fetch = self.store.files.fetch

        def counted(where: Place, buffer: np.ndarray) -> None:
            self.read[keys[id(where)]] += 1
            fetch(where, buffer)

        self.store.files.fetch = counted  # type: ignore[method-assign]
        self.store.files.direct = direct and self.store.files.open_direct()

    @rule(layer=st.sampled_from(LAYERS), experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1), in_order=st.booleans(), rows=st.integers(1, 40))
    def use(self, layer: int, experts: set[int], in_order: bool, rows: int) -> None:
        with self.store._books.lock:
            held = set(np.flatnonzero(self.store._books.ready[LAYERS.index(layer)]).tolist())
            before = self.store.reads
        got = ask(self.store, layer, sorted(experts), in_order, rows)
        assert got == {e: flat(self.truth.expert(layer, e)) for e in sorted(experts)}
        assert self.store.reads - before >= len(experts - held)

    @rule(layer=st.sampled_from(LAYERS), experts=st.permutations(range(EXPERTS)), count=st.integers(0, EXPERTS))
    def foresee(self, layer: int, experts: list[int], count: int) -> None:
        self.store.foresee(layer, np.array(experts[:count], np.int64))

    @rule(layer=st.sampled_from(LAYERS), guessed=EXPERT_SETS, experts=EXPERT_SETS.filter(bool), landed=st.booleans(), in_order=st.booleans())
    def chunk(self, layer: int, guessed: set[int], experts: set[int], landed: bool, in_order: bool) -> None:
        """Each expert is read at most once for a chunk, what was read ahead for it counted."""
        rested(self.store)
        self.read.clear()
        self.store.foresee(layer, np.array(sorted(guessed), np.int64))
        if landed:
            rested(self.store)
        got = ask(self.store, layer, sorted(experts), in_order, 500)
        assert got == {e: flat(self.truth.expert(layer, e)) for e in sorted(experts)}
        assert max(self.read.values(), default=0) <= 1, self.read

    @rule(layer=st.sampled_from(LAYERS), after=st.integers(0, 3))
    def halt(self, layer: int, after: int) -> None:
        left = after

        def stop() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        try:
            with self.store.need(layer, np.arange(EXPERTS), np.ones(EXPERTS, np.int64), 1, stop, True) as need:
                for _ in need:
                    pass
        except Halted:
            pass

    @rule(layer=st.sampled_from(LAYERS), n=st.integers(1, 6))
    def fail(self, layer: int, n: int) -> None:
        self.store.files._faults = Faults(f"read:{n}")
        try:
            ask(self.store, layer, list(range(EXPERTS)))
        except ExpertReadError as error:
            assert error.tensor
        self.store.files._faults = Faults()

    @rule(layer=st.sampled_from(LAYERS), expert=st.integers(0, EXPERTS - 1))
    def one(self, layer: int, expert: int) -> None:
        assert flat(self.store.expert(layer, expert)) == flat(self.truth.expert(layer, expert))

    @rule(history=st.lists(st.integers(0, 9), min_size=3 * EXPERTS, max_size=3 * EXPERTS))
    def warm(self, history: list[int]) -> None:
        self.store.warm(np.array(history, np.uint64).reshape(3, EXPERTS))

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "store"):
            return
        s = self.store._books
        with s.lock:
            assert not s._pinned.any() and not s.queue
            assert s.buffers <= self.most
            in_use = [e.buffer for e in s.entries.values() if e.buffer is not None]
            assert len(in_use) + len(s._free) == s.buffers
            assert len({b.ctypes.data for b in (*in_use, *s._free)}) == s.buffers
            assert np.count_nonzero(s._kept) <= max(s.keep, 0)
            assert {e.key for e in s.entries.values() if e.kept} == {(LAYERS[r], int(x)) for r, x in np.argwhere(s._kept)}
            assert all(not e.kept for e in s._in_transit) and len(s._in_transit) + np.count_nonzero(s._kept) == len(in_use)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


def test_store_against_a_model(directory: Path, truth: Checkpoint) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    StoreAgainstAModel.directory, StoreAgainstAModel.truth = directory, truth
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StoreAgainstAModel,
        settings=settings(max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )


def test_errors_of_the_system_are_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(directory, 2)
    try:
        monkeypatch.setattr(files_module.os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "x")))
        with pytest.raises(ExpertReadError, match="Input/output error"):
            ask(store, 1, [0])
    finally:
        monkeypatch.undo()
        store.close()
