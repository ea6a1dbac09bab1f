"""Copies of a model on disks of any speed: the choice of the copy in simulated time, and a slow one behind a real store."""

from __future__ import annotations

import errno
import heapq
import os
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from glm53serve.engine.seam import never
from glm53serve.experts import ExpertFiles, ExpertStore, model_copies
from glm53serve.experts.copies import REST_READS, REST_SECONDS, Copies, Read
from glm53serve.experts.files import THREADS
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.errors import ModelError
from glm53serve.model.synth import synth


class Disks:
    """Disks that serve their reads one after another, `seconds` each, and readers that always want more."""

    def __init__(self, *seconds: float, stall: float = 0.0) -> None:
        """stall: seconds that every fiftieth read of the first disk takes longer."""
        self.seconds = list(seconds)
        self.stall = stall
        self.now = 100.0
        self.copies = Copies(len(seconds), THREADS, lambda: self.now)
        self.free = [self.now] * len(seconds)
        self.ends: list[tuple[float, int, Read]] = []
        self.reads: Counter[int] = Counter()

    def run(self, wanted: int) -> float:
        """Seconds until so many reads have ended; those still under way then stay so."""
        began, done = self.now, 0
        while done < wanted:
            while len(self.ends) < THREADS * len(self.seconds) and (read := self.copies.begin()) is not None:
                stalled = self.stall if read.copy == 0 and self.reads[0] % 50 == 49 else 0.0
                end = self.free[read.copy] = max(self.now, self.free[read.copy]) + self.seconds[read.copy] + stalled
                heapq.heappush(self.ends, (end, self.reads.total(), read))
                self.reads[read.copy] += 1
            self.now, _, read = heapq.heappop(self.ends)
            self.copies.end(read)
            done += 1
        return self.now - began


@pytest.mark.parametrize(
    ("slower", "share"), [(1.0, 0.53), (1.5, 0.70), (3.0, 1.0), (10.0, 1.06), (100.0, 1.06)], ids=["equal", "1.5", "3", "10", "100 times slower"]
)
def test_a_further_copy_helps_as_far_as_it_is_fast_and_costs_next_to_nothing(slower: float, share: float) -> None:
    one, both = Disks(0.01), Disks(0.01, 0.01 * slower)
    alone = one.run(4000)
    both.run(100)  # until its first reads have told how slow it is
    assert both.run(4000) <= share * alone


def test_a_read_that_hangs_is_noticed_before_it_ends() -> None:
    alone, both = Disks(0.01).run(1000), Disks(0.01, 1e9)
    assert both.run(1000) <= 1.01 * alone
    assert both.reads[1] <= THREADS


def test_a_disk_that_stalls_now_and_then_is_not_left_for_a_slow_one() -> None:
    alone = Disks(0.01, stall=1.0).run(2000)
    assert Disks(0.01, 0.1, stall=1.0).run(2000) <= alone
    assert Disks(0.01, 0.03, stall=1.0).run(2000) <= 0.6 * alone, "the other one helps while it stalls, and only then"


def test_a_copy_that_has_become_fast_is_found_out_about_and_one_that_became_slow_is_left() -> None:
    disks = Disks(0.01, 10.0)
    disks.run(3000)
    disks.seconds[1] = 0.01
    disks.run(2 * REST_READS * 1000)
    disks.reads.clear()
    disks.run(1000)
    assert disks.reads[1] > 400
    disks.seconds[0] = 1.0
    disks.run(100)
    disks.reads.clear()
    disks.run(1000)
    assert disks.reads[0] < 50


def test_a_copy_that_fails_rests_and_then_gets_another_chance() -> None:
    now = 0.0
    copies = Copies(2, THREADS, lambda: now)
    taken = []
    for _ in range(20):
        read = copies.begin()
        assert read is not None
        now += 0.001
        copies.end(read, failed=read.copy == 0)
        taken.append(read.copy)
    assert taken == [0] + [1] * 19
    only = copies.begin(tried={1})
    assert only is not None and only.copy == 0, "the last one there is"
    copies.end(only, failed=True)
    now += REST_SECONDS
    again = copies.begin()
    assert again is not None and again.copy == 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    synth(path, "tiny", experts=8, seed=3)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors where Linux lists them")
def test_copies_that_cannot_all_be_opened_leave_nothing_open(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(directory, mirror)
    copies = model_copies(directory, sorted(directory.glob("*.safetensors")), str(mirror))
    files, before = ExpertFiles(copies), len(os.listdir("/proc/self/fd"))
    real = os.open

    def without_direct_reads_on_the_mirror(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and mirror in Path(path).parents:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags & ~os.O_DIRECT)

    monkeypatch.setattr(os, "open", without_direct_reads_on_the_mirror)
    assert not files.open_direct()
    assert len(os.listdir("/proc/self/fd")) == before
    files.close()
    with pytest.raises(ModelError, match="no such file"):
        ExpertFiles([*copies, [tmp_path / "nowhere"]])
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_slow_mirror_holds_up_few_layers(directory: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(directory, mirror)
    checkpoint = open_checkpoint(directory, mapped=False)

    def held_up() -> int:
        """How many of 20 needs wait for the mirror."""
        store = ExpertStore(checkpoint, ExpertFiles(model_copies(directory, checkpoint.files, str(mirror))))
        original, lock, slow = store.files._read, threading.Lock(), 0

        def read(copy: int, *rest: object) -> None:
            nonlocal slow
            with lock:
                slow += copy
            time.sleep(0.002 if copy == 0 else 0.1)
            original(copy, *rest)  # type: ignore[arg-type]

        store.files._read = read  # type: ignore[method-assign,assignment]
        store.open(2)
        needs = 0
        try:
            for _ in range(20):
                before = slow
                with store.need(1, np.arange(8), np.ones(8, np.int64), 1, never, True) as need:
                    assert sum(len(group) for group in need) == 8
                needs += slow > before
        finally:
            store.close()
        return needs

    # a machine that stands still makes the model's own disk look slow, but not every time
    assert any(held_up() <= 5 for _ in range(5))
