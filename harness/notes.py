"""What an engine with GLM53_VERBOSE=1 says about its turns on stderr: REUSE, CANCEL and HALT lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.frames import ProtocolViolation


@dataclass(frozen=True, slots=True)
class ReuseLine:
    """`REUSE` on stderr: what a turn took over from its slot."""

    id: int
    reused: int
    prompt_tokens: int
    filled_before: int
    common: int
    word: str


@dataclass(frozen=True, slots=True)
class CancelLine:
    """`CANCEL` on stderr: where a cancelled turn stood."""

    id: int
    prompt_tokens: int
    emitted: int
    filled: int


@dataclass(frozen=True, slots=True)
class HaltLine:
    """`HALT` on stderr: a chunk stopped inside."""

    layer: int
    layers: int
    filled: int
    on_device: bool


Noted = ReuseLine | CancelLine | HaltLine
_REUSE = re.compile(r"REUSE (\d+) (\d+) (\d+) (\d+) (\d+) (cold|equal|shorter|diverged|extend|pin|image)")
_CANCEL = re.compile(r"CANCEL (\d+) (\d+) (\d+) (\d+)")
_HALT = re.compile(r"HALT layer (\d+) of (\d+), back to (\d+)( on the device)?")


def parse_note(line: str) -> Noted | None:
    """A REUSE, CANCEL or HALT line of stderr, or None for any other line. Raises ProtocolViolation on a malformed one."""
    if m := _REUSE.fullmatch(line):
        return ReuseLine(int(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), m[6])
    if m := _CANCEL.fullmatch(line):
        return CancelLine(int(m[1]), int(m[2]), int(m[3]), int(m[4]))
    if m := _HALT.fullmatch(line):
        return HaltLine(int(m[1]), int(m[2]), int(m[3]), m[4] is not None)
    if re.match(r"(REUSE|CANCEL|HALT) [0-9l]", line):
        raise ProtocolViolation(f"a malformed note on stderr: {line[:200]!r}")
    return None
