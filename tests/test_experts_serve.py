"""The daemon on experts that do not fit: same answers under every budget, clear errors, no harm from a disk that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53serve import load as load_module
from glm53serve.backends import Chosen
from glm53serve.engine.sampling import Sampling
from glm53serve.experts import ExpertFiles
from glm53serve.load import Loaded, LoadError, load, shipped_model
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.synth import synth
from glm53serve.oneshot import stream
from glm53serve.settings import Settings
from tests.patience import PATIENCE
from tests.served import CAPACITY, CHUNK, Served

PROMPT = b"What a piece of work is a man, how noble in reason"
WORDS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed") / "tiny"
    synth(path, "tiny", experts=16, seed=9)
    return path


def load_share(directory: Path, share: float | None, note: Callable[[str], None] = lambda _line: None, **variables: str) -> Loaded:
    environ = {"GLM53_BITS": "32", "GLM53_PREFILL_CHUNK": str(CHUNK), "GLM53_MAXT": str(CAPACITY), "OMP_NUM_THREADS": "1", **variables}
    if share is not None:
        environ["GLM53_EXPERT_GB"] = repr(share * open_checkpoint(directory).expert_bytes / 1e9)
    return load(directory, Settings.from_environ(environ), slots=2, specials_stop=False, backend="cpu", note=note)


@pytest.fixture
def served(directory: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A daemon at a 25 % budget; parameters are further variables."""
    variables = getattr(request, "param", {})
    daemon = Served(load_share(directory, 0.25, **variables), tmp_path / "usage")
    yield daemon
    assert daemon.close() == 0
    close(daemon.loaded)


def close(loaded: Loaded) -> None:
    loaded.engine.close()
    if loaded.experts is not None:
        loaded.experts.close()


def answer(served: Served, prompt: bytes = PROMPT, slot: int = 0) -> list[tuple[bytes, float]]:
    turn = served.wait(served.submit(prompt, slot, WORDS))
    assert turn.outcome == "DONE"
    return served.said(turn)


@pytest.fixture(scope="module")
def wanted(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, float]]:
    """The answer with every expert in RAM."""
    served = Served(load_share(directory, None), tmp_path_factory.mktemp("usage") / "usage")
    said = answer(served)
    assert served.loaded.engine.hit_rate() == 100.0
    assert (served.loaded.engine.tiers() == 1).all()
    served.close()
    close(served.loaded)
    assert len(said) == WORDS
    return said


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0, 2.0])
def test_every_budget_gives_the_same_tokens(directory: Path, tmp_path: Path, wanted: list[tuple[bytes, float]], share: float) -> None:
    """To the last bit of the scores; twice, so that the second answer starts from another state of the cache."""
    served = Served(load_share(directory, share), tmp_path / "usage")
    try:
        assert answer(served) == wanted
        other = served.submit(b"something else entirely", 1, 3)
        served.wait(other)
        assert answer(served, slot=1) == wanted
        tiers = served.loaded.engine.tiers()
        held = int((tiers == 1).sum())
        assert held <= max(2, share * 48) * 1.1 + 1
        if share >= 1:
            assert served.loaded.engine.hit_rate() == 100.0
    finally:
        assert served.close() == 0
        close(served.loaded)


def test_positional_capacity_wins(directory: Path) -> None:
    environ = Settings.from_environ({"GLM53_EXPERT_GB": "100", "GLM53_MAXT": "64"})
    loaded = load(directory, environ, slots=1, specials_stop=False, backend="cpu", expert_slots=5)
    assert loaded.experts is not None
    assert loaded.experts.keep + loaded.experts.transit in (15, 16)
    close(loaded)


@pytest.mark.parametrize("n", [1, 7, 40])
def test_a_disk_error_costs_one_turn(directory: Path, tmp_path: Path, wanted: list[tuple[bytes, float]], n: int) -> None:
    """ERROR IO with the tensor's name, or, when it was only a read ahead, a line with the name and the right answer; the daemon lives and the
    next answer is right."""
    notes: list[str] = []
    served = Served(load_share(directory, 0.1, notes.append, GLM53_FAULT=f"read:{n}"), tmp_path / "usage")
    errors = []
    try:
        for _ in range(6):
            turn = served.wait(served.submit(PROMPT, 0, WORDS))
            if turn.outcome == "DONE":
                assert served.said(turn) == wanted
            else:
                errors.append(turn.outcome)
                break
        name = r"model\.language_model\.layers\.\d\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"
        ahead = [line for line in notes if re.search(name + ".*it is tried again when needed", line)]
        assert (len(errors), len(ahead)) in {(1, 0), (0, 1)}
        assert all(re.fullmatch("IO " + name, error) for error in errors)
        assert answer(served) == wanted
    finally:
        assert served.close() == 0
        close(served.loaded)


def test_a_file_that_shrinks_while_serving(directory: Path, tmp_path: Path, wanted: list[tuple[bytes, float]]) -> None:
    """Nothing is mapped, so there is no bus error: experts beyond the new end fail with their name, dense weights are in memory."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    served = Served(load_share(copy, 0.1), tmp_path / "usage")
    try:
        assert answer(served) == wanted
        for path in copy.glob("*.safetensors"):
            os.truncate(path, 4096)
        turn = served.wait(served.submit(b"another prompt, long enough to need most of them", 0, 2))
        assert turn.outcome.startswith("IO model.language_model.layers.")
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as good, (copy / path.name).open("r+b") as file:
                shutil.copyfileobj(good, file)
        assert answer(served) == wanted
    finally:
        assert served.close() == 0
        close(served.loaded)


def test_a_cancel_does_not_wait_for_the_queue_of_reads(served: Served, wanted: list[tuple[bytes, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExpertFiles.fetch
    reading, go_on = threading.Event(), threading.Event()

    def stuck(self: ExpertFiles, *arguments: object) -> None:
        reading.set()
        go_on.wait(2 * PATIENCE)
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertFiles, "fetch", stuck)
    try:
        turn = served.submit(b"a prompt whose chunk takes very many reads", 1)
        assert reading.wait(PATIENCE)
        served.cancel(turn)
        served.wait(turn)
        assert turn.outcome == "CANCELLED" and served.halted() == 1
    finally:
        go_on.set()
    monkeypatch.undo()
    assert answer(served) == wanted


def test_mirrors_answer_alike(directory: Path, tmp_path: Path, wanted: list[tuple[bytes, float]]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    served = Served(load_share(directory, 0.1, COLI_MODEL_MIRROR=str(copy)), tmp_path / "usage")
    try:
        assert answer(served) == wanted
        for path in copy.glob("*.safetensors"):
            os.truncate(path, 4096)
        assert answer(served, slot=1) == wanted
    finally:
        assert served.close() == 0
        close(served.loaded)


def test_a_missing_mirror_ends_the_start_with_one_line(directory: Path) -> None:
    with pytest.raises(LoadError) as failure:
        load_share(directory, 0.1, COLI_MODEL_MIRROR="/nowhere/at/all")
    assert failure.value.kind == "io" and "/nowhere/at/all" in str(failure.value)


def test_usage_history_warms_the_cache(directory: Path, tmp_path: Path) -> None:
    usage = tmp_path / "usage"
    served = Served(load_share(directory, 0.25), usage)
    for number in range(3):
        answer(served, PROMPT + str(number).encode())
    served.close()
    close(served.loaded)
    again = Served(load_share(directory, 0.25), usage)
    store = again.loaded.experts
    assert store is not None
    store.wait_warm()
    assert int((again.loaded.engine.tiers() == 1).sum()) >= 10
    warm = store.reads
    answer(again, PROMPT)
    assert again.loaded.engine.hit_rate() > 20
    assert warm >= 10
    again.close()
    close(again.loaded)


def test_what_is_read_ahead_is_mostly_what_the_router_then_chooses() -> None:
    """On the shipped model: the likeliest expert of each layer nine times in ten, and never after the need it was for."""
    environ = Settings.from_environ({"GLM53_EXPERT_GB": repr(0.25 * open_checkpoint(shipped_model()).expert_bytes / 1e9), "GLM53_MAXT": "256"})
    loaded = load(shipped_model(), environ, slots=1, specials_stop=True, backend="cpu")
    store = loaded.experts
    assert store is not None
    calls: list[tuple[int, str, list[int]]] = []
    foresee, need = store.foresee, store.need

    def seen(layer: int, experts: NDArray[np.int64]) -> None:
        calls.append((layer, "foreseen", experts.tolist()))
        foresee(layer, experts)

    def asked(layer: int, experts: NDArray[np.int64], *rest: Any) -> Any:
        calls.append((layer, "needed", experts.tolist()))
        return need(layer, experts, *rest)

    store.foresee, store.need = seen, asked  # type: ignore[method-assign]
    prompt = loaded.tokenizer.encode(b"What is 12 plus 30?")
    list(stream(loaded, prompt, 12, Sampling()))
    close(loaded)
    pairs = [(a, b) for a, b in pairwise(calls) if a[1] == "foreseen"]
    assert len(pairs) > 40
    assert all(b[1] == "needed" and b[0] == a[0] for a, b in pairs)
    firsts = [a[2][0] in b[2] for a, b in pairs]
    assert sum(firsts) / len(firsts) > 0.85


def test_experts_leave_memory_for_everything_else(directory: Path) -> None:
    """Under a limit of the process the cache becomes smaller with one line, and what is not the cache still gets memory and threads."""
    program = (
        "import resource, sys, threading; import numpy as np; from pathlib import Path\n"
        "from glm53serve.experts import ExpertFiles, ExpertStore, model_copies\n"
        "from glm53serve.experts.memory import RESERVE_BYTES, available_bytes\n"
        "from glm53serve.model.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1], mapped=False); free = available_bytes()\n"
        "store = ExpertStore(checkpoint, ExpertFiles(model_copies(Path(sys.argv[1]), checkpoint.files, '')), print)\n"
        "store.open(len(store.places))\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + RESERVE_BYTES + 5 * store.buffer_bytes + 1000,) * 2)\n"
        "assert available_bytes() < free; store.warm(); store.wait_warm(); assert store.buffers == 5, store.buffers\n"
        "store.expert(2, 3); np.ones(RESERVE_BYTES // 20); threading.Thread(target=print).start(); store.close()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no memory for more routed experts: 5 of 48 are kept, the others are read when needed\n\n"


def test_a_lost_chain_leaves_the_experts_open_as_they_were(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device held the first layers, the CPU the rest: when it is lost, the CPU takes them all, over the store that is there already."""
    monkeypatch.setattr(load_module, "choose", lambda _name, request: Chosen([request.cpu(range(2)), request.cpu(range(2, 4))]))
    loaded = load_share(directory, 0.25)
    store = loaded.experts
    assert store is not None

    def readers() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("experts-"))

    opened, before, keep = readers(), list(stream(loaded, [1, 2, 3], 8, Sampling())), store.keep
    loaded.engine.fail_over()
    assert [backend.layers for backend in loaded.engine.backends] == [range(4)]
    assert readers() == opened and store.keep == keep
    assert list(stream(loaded, [1, 2, 3], 8, Sampling())) == before
    close(loaded)
