"""The expert usage history: survives a restart, fades, and is never a reason to fail."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from glm53serve.experts import usage
from glm53serve.experts.usage import UsageError, UsageFile, parse, render

COUNTS = np.array([[0, 1, 7], [(1 << 64) - 1, 2, 100]], np.uint64)
TEXT = "glm53serve expert usage 1\nmodel 2 3\n0 1 7\n18446744073709551615 2 100\n"


def test_the_format() -> None:
    assert render(COUNTS) == TEXT
    assert np.array_equal(parse(TEXT, 2, 3), COUNTS)


def test_a_history_comes_back_halved(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "usage"
    file = UsageFile(path, 2, 3, notes.append)
    assert not file.load().any() and not path.exists()
    assert file.save(COUNTS) and path.read_text() == TEXT
    loaded = UsageFile(path, 2, 3, notes.append).load()
    assert loaded.dtype == np.uint64 and np.array_equal(loaded, COUNTS // np.uint64(2))
    assert notes == [] and sorted(os.listdir(tmp_path)) == ["usage"]


def test_a_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails half way leaves the old file and no litter."""
    notes: list[str] = []
    path = tmp_path / "usage"
    file = UsageFile(path, 2, 3, notes.append)
    assert file.save(COUNTS)

    def full(self: Path, text: str, **_: object) -> None:
        with open(self, "w") as half:
            half.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    more = COUNTS + np.eye(2, 3, dtype=np.uint64)
    assert not file.save(more) and not file.save(more)
    assert len(notes) == 1 and "No space left" in notes[0]
    assert path.read_text() == TEXT and os.listdir(tmp_path) == ["usage"]
    monkeypatch.undo()
    assert file.save(more) and path.read_text() == render(more)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "glm53serve expert usage 2\nmodel 2 3\n0 1 7\n1 2 3\n",
        "glm53serve expert usage 1\nmodel 2 4\n0 1 7 1\n1 2 3 1\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 7\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 7\n1 2 3",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 7\n1 2\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 -7\n1 2 3\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 18446744073709551616\n1 2 3\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 x\n1 2 3\n",
        "glm53serve expert usage 1\nmodel 2 3\n0 1 2\n1 2 3\nmore\n",
        "\x00\xff\xfe binary",
    ],
)
def test_a_file_that_is_not_usable_is_kept_aside(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, 2, 3)
    path = tmp_path / "usage"
    path.write_bytes(text.encode("latin-1"))
    notes: list[str] = []
    file = UsageFile(path, 2, 3, notes.append)
    assert not file.load().any() and len(notes) == 1 and "usage.aside" in notes[0]
    assert path.read_bytes() == text.encode("latin-1")  # reading alone changes nothing
    assert file.save(COUNTS) and path.read_text() == TEXT
    assert (tmp_path / "usage.aside").read_bytes() == text.encode("latin-1") and len(notes) == 1


@pytest.mark.parametrize("text", [TEXT[:-1] + " 1" * 1000, "\n" * 1000, TEXT + "\0" * 100])
def test_no_more_is_read_than_a_history_can_have(tmp_path: Path, text: str) -> None:
    """A file that has grown without bounds costs neither time nor memory; the largest real one is read."""
    path = tmp_path / "usage"
    path.write_text(text)
    os.truncate(path, 1 << 33)  # a hole
    with pytest.raises(UsageError, match="over 162 bytes"):
        usage.read_history(path, 2, 3)
    path.write_text(render(np.full((2, 3), (1 << 64) - 1, np.uint64)))
    assert usage.read_history(path, 2, 3) is not None


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "usage"
    file = UsageFile(path, 2, 3, print)
    assert not file.load().any() and file.save(COUNTS) and path.read_text() == TEXT


def test_a_directory_that_cannot_be_had_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    notes: list[str] = []
    file = UsageFile(tmp_path / "file" / "usage", 2, 3, notes.append)
    assert not file.load().any()
    assert not file.save(COUNTS) and not file.save(COUNTS)
    assert len(notes) == 1 and "cannot be saved" in notes[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser writes everywhere")
def test_a_read_only_directory_is_noted_once(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o500)
    notes: list[str] = []
    assert not UsageFile(tmp_path / "usage", 2, 3, notes.append).save(COUNTS)
    assert len(notes) == 1
    os.chmod(tmp_path, 0o700)


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    notes: list[str] = []
    for path in (Path("/dev/null"), tmp_path):
        file = UsageFile(path, 2, 3, notes.append)
        assert not file.load().any() and not file.save(COUNTS)
    assert notes == [] and tmp_path.is_dir() and not Path("/dev/null").is_file()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "usage")
    assert UsageFile(link, 2, 3, print).save(COUNTS)
    assert link.is_symlink() and (tmp_path / "real" / "usage").read_text() == TEXT


def test_unchanged_counts_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = UsageFile(tmp_path / "usage", 2, 3, print)
    assert file.save(COUNTS)
    monkeypatch.setattr(usage, "render", None)
    assert file.save(COUNTS.copy())


def test_a_wrong_shape_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        UsageFile(tmp_path / "usage", 2, 3, print).save(COUNTS[:1])


@pytest.mark.parametrize("saved", [True, False])
def test_a_directory_that_was_removed_meanwhile_stays_removed(tmp_path: Path, saved: bool) -> None:
    (tmp_path / "model").mkdir()
    notes: list[str] = []
    file = UsageFile(tmp_path / "model" / ".coli_usage", 2, 3, notes.append)
    if saved:
        assert file.save(COUNTS)
    shutil.rmtree(tmp_path / "model")
    assert not file.save(COUNTS + np.uint64(1)) and not (tmp_path / "model").exists()
    assert len(notes) == 1


def test_two_threads_may_save_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    file = UsageFile(tmp_path / "usage", 40, 64, told.append)
    work = [threading.Thread(target=lambda first: [file.save(np.full((40, 64), first + n, np.uint64)) for n in range(40)], args=(k * 1000,)) for k in range(3)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert not told and file.load()[0, 0] in {(k * 1000 + 39) // 2 for k in range(3)}
