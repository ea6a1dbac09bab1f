"""`doctor` answers on any machine, and says what a model would make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53serve.cli import main
from glm53serve.load import load
from glm53serve.model.checkpoint import open_checkpoint
from glm53serve.model.synth import synth
from glm53serve.settings import Settings


def test_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    synth(tmp_path / "m", "tiny", experts=8)
    total = open_checkpoint(tmp_path / "m").expert_bytes
    monkeypatch.setenv("GLM53_EXPERT_GB", repr(total / 4e9))
    monkeypatch.setattr("glm53serve.commands.doctor.SAMPLE_SECONDS", 0.02)
    assert main(["doctor", "--model", str(tmp_path / "m")]) == 0
    said = capsys.readouterr()
    labels = {line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")}
    assert {"processor", "kernels", "memory", "Vulkan", "CUDA", "model", "dense", "experts", "reads", "disk"} <= labels
    assert "24 of" in said.out and "RAM holds 6" in said.out and "(GLM53_EXPERT_GB)" in said.out
    assert "GB/s" in said.out and len(said.out.splitlines()) < 60 and said.err == ""


def test_as_many_experts_as_the_daemon_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    synth(tmp_path / "m", "tiny", experts=8)
    monkeypatch.setattr("glm53serve.commands.doctor.SAMPLE_SECONDS", 0.005)
    for budget in ("0", "0.000001", "1"):
        monkeypatch.setenv("GLM53_EXPERT_GB", budget)
        assert main(["doctor", "--model", str(tmp_path / "m")]) == 0
        loaded = load(tmp_path / "m", Settings.from_environ(), slots=1, specials_stop=False, backend="cpu")
        assert loaded.experts is not None
        assert f"RAM holds {loaded.experts.keep + loaded.experts.transit}," in capsys.readouterr().out
        loaded.engine.close()
        loaded.experts.close()


def test_a_bad_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "nothing" in said.err
