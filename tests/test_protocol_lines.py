"""The outbound wire, byte for byte."""

from __future__ import annotations

import os

import numpy as np
import pytest

from glm53serve.engine.sampling import NO_PREDICTOR, Score
from glm53serve.serve import lines


def test_handshake() -> None:
    assert lines.READY == b"\x01\x01READY\x01\x01\n"
    assert lines.caps(False, 4) == b"CAPS vision=0 slots=4\n"
    assert lines.caps(True, 1) == b"CAPS vision=1 slots=1\n"
    assert lines.stat(1.25) == b"STAT 0 0.00 0.0 1.2\n"
    assert lines.load_fail("format", "config.json:\n no layers") == b"LOAD_FAIL kind=format config.json: no layers\n"
    assert lines.load_fail("io", os.fsdecode(b"/a\xffb: gone")) == b"LOAD_FAIL kind=io /a\\udcffb: gone\n"


def test_emap_is_tier_and_heat() -> None:
    uses = np.array([[0, 1, 2, 3], [255, 256, (1 << 62) - 1, (1 << 64) - 1]], np.uint64)
    tiers = np.array([[0, 1, 2, 1], [0, 0, 1, 2]], np.uint8)
    heat = [[0, 1, 2, 2], [8, 9, 62, 63]]
    expected = "".join(f"{tier << 6 | h:02x}" for tier, h in zip(tiers.ravel().tolist(), heat[0] + heat[1], strict=True))
    assert lines.emap(tiers, uses) == f"EMAP 2 4 {expected}\n".encode()
    assert lines.heat(uses).tolist() == heat
    assert lines.emap(np.zeros((0, 4), np.uint8), np.zeros((0, 4), np.uint64)) == b""
    with pytest.raises(ValueError, match="EMAP"):
        lines.emap(tiers, uses[:1])


def test_hits_are_bits_low_first() -> None:
    used = np.zeros((3, 5), bool)
    used[0, 0] = used[1, 4] = used[2, 4] = True
    bits = bytearray(2)
    for row, col in ((0, 0), (1, 4), (2, 4)):
        i = row * 5 + col
        bits[i >> 3] |= 1 << (i & 7)
    assert lines.hits(used) == f"HITS 3 5 {bits.hex()}\n".encode()
    assert lines.hits(np.zeros((0, 5), bool)) == b""


def test_a_turns_frames() -> None:
    score = Score(-0.25, ((7, -0.25), (3, -1.5)))
    assert lines.accept(5, 10) == b"ACCEPT 5 10\n"
    assert lines.data(5, b"a\nb") == b"DATA 5 3\na\nb\n"
    assert lines.data(5, b"") == b"DATA 5 0\n\n"
    assert lines.data(5, b"\xff", score) == b"DATA 5 1 -0.250000 2 7 -0.250000 3 -1.500000\n\xff\n"
    assert lines.echo(5, 0, b"a", NO_PREDICTOR) == b"ECHO 5 1 0 0.000000 0\na\n"
    assert lines.echo(5, 3, b"", score) == b"ECHO 5 0 3 -0.250000 2 7 -0.250000 3 -1.500000\n\n"
    assert lines.done(5, 3, 12.345, 100.0, 0.25, 10, True) == b"DONE 5 STAT 3 12.35 100.0 0.2 10 1\n"
    assert len(lines.done(5, 3, 12.345, 100.0, 0.25, 10, False).split()) == 9
    profile = lines.Profile(1.0, 10, 3, 0.1234, 0.0, 0.5, 0.25, 0.125, 4)
    assert lines.prof(profile) == b"PROF 1.000 10 3 0.123 0.000 0.500 0.250 0.125 4\n"
    assert len(lines.prof(profile).split()) == 10
    with pytest.raises(ValueError, match="65537"):
        lines.data(5, bytes(65537))


def test_errors_are_one_line() -> None:
    assert lines.error(5, "CANCELLED") == b"ERROR 5 CANCELLED\n"
    assert lines.error(5, "IO", "model.layers.1.mlp.experts.0") == b"ERROR 5 IO model.layers.1.mlp.experts.0\n"
    assert lines.error(0, "CONTEXT_EXCEEDED", "prompt_tokens=9 requested=1 capacity=8") == b"ERROR 0 CONTEXT_EXCEEDED prompt_tokens=9 requested=1 capacity=8\n"


def test_lines_for_stderr() -> None:
    assert lines.reuse(51, 10, 1000, 10, 12, "extend") == "REUSE 51 10 1000 10 10 extend"
    assert lines.cancel(51, 1000, 0, 10) == "CANCEL 51 1000 0 10"
    assert lines.halt(3, 45, 10, False) == "HALT layer 3 of 45, back to 10"
    assert lines.halt(3, 45, 10, True) == "HALT layer 3 of 45, back to 10 on the device"
    assert lines.steps(7, 9) == "7 decode steps, 9 rows"
