"""Frames out: values to the exact bytes of the serve protocol, and the lines for stderr.

Pure. What goes to stdout is bytes, whole lines with their line end; what goes to stderr is text without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.sampling import Score

READY = b"\x01\x01READY\x01\x01\n"
DATA_LIMIT = 65536
"""Most bytes one DATA or ECHO frame carries."""

LoadFailKind = Literal["nomem", "io", "format", "unsupported"]

_POWERS = np.uint64(1) << np.arange(63, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Profile:
    """The figures of a PROF line: seconds, but for the three counts."""

    wall: float
    prompt: int
    emitted: int
    disk: float
    wait: float
    experts: float
    attention: float
    head: float
    forwards: int


def caps(vision: bool, slots: int) -> bytes:
    """What this engine can do, second line of the handshake."""
    return b"CAPS vision=%d slots=%d\n" % (vision, slots)


def stat(rss_gb: float) -> bytes:
    """The handshake's STAT line. rss_gb: peak resident memory in 10^9 bytes."""
    return b"STAT 0 0.00 0.0 %.1f\n" % rss_gb


def heat(uses: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """min(63, bit length) of each use count: uint64 [...] -> uint8 [...]."""
    return np.searchsorted(_POWERS, uses, side="right").astype(np.uint8)


def emap(tiers: NDArray[np.uint8], uses: NDArray[np.uint64]) -> bytes:
    """Where experts are and how much they were used. tiers uint8, uses uint64, both [sparse layers, experts]; no bytes without sparse layers."""
    if tiers.shape != uses.shape or tiers.ndim != 2:
        raise ValueError(f"EMAP needs two equal matrices, got {tiers.shape} and {uses.shape}")
    rows, cols = tiers.shape
    if not rows:
        return b""
    cells = (tiers << np.uint8(6)) | heat(uses)
    return f"EMAP {rows} {cols} {cells.tobytes().hex()}\n".encode()


def hits(used: NDArray[np.bool_]) -> bytes:
    """Which experts a turn used: bool [sparse layers, experts]; no bytes without sparse layers."""
    rows, cols = used.shape
    if not rows:
        return b""
    return f"HITS {rows} {cols} {np.packbits(used.ravel(), bitorder='little').tobytes().hex()}\n".encode()


def accept(ident: int, prompt_tokens: int) -> bytes:
    """Nothing can refuse the turn any more."""
    return b"ACCEPT %d %d\n" % (ident, prompt_tokens)


def tail(score: Score | None) -> str:
    """What a DATA or ECHO header carries with logprobs: the token's own, then (token id, logprob) of the best in falling order."""
    if score is None:
        return ""
    return f" {score.logprob:.6f} {len(score.best)}" + "".join(f" {token} {value:.6f}" for token, value in score.best)


def data(ident: int, text: bytes, score: Score | None = None) -> bytes:
    """One emitted token's bytes, with its score when logprobs were asked for."""
    _fits(text)
    return b"DATA %d %d%s\n%s\n" % (ident, len(text), tail(score).encode(), text)


def echo(ident: int, position: int, text: bytes, score: Score) -> bytes:
    """One prompt token's bytes and score; position counts from 0."""
    _fits(text)
    return b"ECHO %d %d %d%s\n%s\n" % (ident, len(text), position, tail(score).encode(), text)


def _fits(text: bytes) -> None:
    if len(text) > DATA_LIMIT:
        raise ValueError(f"a token of {len(text)} bytes, a frame carries at most {DATA_LIMIT}")


def prof(profile: Profile) -> bytes:
    """Where a turn's time went."""
    p = profile
    times = f"{p.disk:.3f} {p.wait:.3f} {p.experts:.3f} {p.attention:.3f} {p.head:.3f}"
    return f"PROF {p.wall:.3f} {p.prompt} {p.emitted} {times} {p.forwards}\n".encode()


def done(ident: int, emitted: int, tokens_per_second: float, hit_percent: float, rss_gb: float, prompt_tokens: int, length_limited: bool) -> bytes:
    """A turn's successful end."""
    figures = f"{emitted} {tokens_per_second:.2f} {hit_percent:.1f} {rss_gb:.1f} {prompt_tokens} {length_limited:d}"
    return f"DONE {ident} STAT {figures}\n".encode()


def error(ident: int, code: str, detail: str = "") -> bytes:
    """A turn's or a frame's other end. detail: what follows the code (CONTEXT_EXCEEDED, IO)."""
    return b"ERROR %d %s%s%s\n" % (ident, code.encode(), b" " if detail else b"", _one_line(detail))


def load_fail(kind: LoadFailKind, detail: str) -> bytes:
    """In place of READY when the engine cannot start."""
    return b"LOAD_FAIL kind=%s %s\n" % (kind.encode(), _one_line(detail))


def reuse(ident: int, reused: int, prompt_tokens: int, filled_before: int, common: int, word: str) -> str:
    """stderr: what a turn took from its slot. common: longest common prefix of history and prompt; word: why."""
    return f"REUSE {ident} {reused} {prompt_tokens} {filled_before} {min(common, filled_before)} {word}"


def cancel(ident: int, prompt_tokens: int, emitted: int, filled: int) -> str:
    """stderr: how far a cancelled turn had come."""
    return f"CANCEL {ident} {prompt_tokens} {emitted} {filled}"


def halt(layer: int, layers: int, filled: int, on_device: bool) -> str:
    """stderr: a chunk stopped before or inside `layer`."""
    return f"HALT layer {layer} of {layers}, back to {filled}{' on the device' if on_device else ''}"


def steps(decode_steps: int, rows: int) -> str:
    """stderr, at exit: how full the decode steps were."""
    return f"{decode_steps} decode steps, {rows} rows"


def _one_line(text: str) -> bytes:
    """A detail must not end its line early, and may name a file whose name is no UTF-8."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace")
