"""The environment: one table, checked values, one document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glm53serve.settings import SettingError, Settings, render_markdown

ROOT = Path(__file__).resolve().parent.parent


def test_document_is_the_table() -> None:
    assert (ROOT / "docs" / "ENVIRONMENT.md").read_text(encoding="utf-8") == render_markdown(), "run `make docs`"


def test_nothing_else_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "glm53serve").rglob("*.py")
        if re.search(r"\bos\.(environ|getenv|putenv)|from os import .*(environ|getenv)", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["glm53serve/settings.py"]


def test_defaults_and_values() -> None:
    assert Settings.from_environ({}) == Settings()
    read = Settings.from_environ({"KV_SLOTS": "4", "GLM53_BITS": "8", "GLM53_EXPERT_GB": "0.5", "GLM53_CAPS": "0", "SNAP": "/x", "GLM53_MAXT": ""})
    assert (read.slots, read.bits, read.expert_gb, read.caps, read.snap, read.maxt) == (4, 8, 0.5, False, "/x", 8192)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KV_SLOTS", "0", "from 1 to 16"),
        ("KV_SLOTS", "two", "a whole number"),
        ("GLM53_MAXT", "63", "from 64 to 16777216"),
        ("GLM53_BITS", "0", "one of 4, 8, 16, 32"),
        ("GLM53_BITS", "5", "one of 4, 8, 16, 32"),
        ("GLM53_EXPERT_GB", "nan", "a number from 0"),
        ("GLM53_EXPERT_GB", "-1", "a number from 0"),
        ("GLM53_EXPERT_GB", "1_0", "a number from 0"),
        ("GLM53_EXPERT_GB", "٣", "a number from 0"),
        ("GLM53_VERBOSE", "yes", "0 or 1"),
        ("GLM53_BACKEND", "tpu", "one of auto, cpu, cuda, vulkan"),
        ("COLI_VK_CHAIN", "3", "one of 0, 1, 2"),
        ("GLM53_PREFILL_CHUNK", "0", "from 1"),
        ("OMP_NUM_THREADS", "1_0", "a whole number"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.from_environ({name: value})
    line = str(refused.value)
    assert line.startswith(f"{name}={value!r}: ") and allowed in line and "\n" not in line


def test_the_chunk_row_says_that_it_does_not_bound_the_wait() -> None:
    row = next(line for line in render_markdown().splitlines() if "`GLM53_PREFILL_CHUNK`" in line)
    assert "inside the chunk" in row and "does not bound" in row
