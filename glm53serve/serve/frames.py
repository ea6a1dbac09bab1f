"""What arrives over the wire, as values, and the checks that refuse a prompt in the protocol's order. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import StrEnum


class Code(StrEnum):
    """The word an ERROR frame carries."""

    BAD_FRAME = "BAD_FRAME"
    DUPLICATE_ID = "DUPLICATE_ID"
    BAD_REQUEST = "BAD_REQUEST"
    SLOT_BUSY = "SLOT_BUSY"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    CANCELLED = "CANCELLED"
    NOT_FOUND = "NOT_FOUND"
    NO_MEMORY = "NO_MEMORY"
    IO = "IO"
    DEVICE_LOST = "DEVICE_LOST"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A well-formed PROMPT or SUBMIT. `problem` says what makes it a BAD_REQUEST whatever the engine's state, None when nothing does.

    slot may be any integer, out of range included; id is 1..2^64-1; max_tokens >= 1, or 0 with logprobs > 0.
    With `old_extra` (an old gateway's seventh field) the payload was consumed and is empty here.
    """

    id: int
    slot: int
    max_tokens: int
    temperature: float
    top_p: float
    payload: bytes = field(default=b"", repr=False)
    seed: int | None = None
    logprobs: int = 0
    pin: bool = False
    old_extra: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An IMAGE frame whose `size` payload bytes were consumed; it belongs to the PROMPT with that id."""

    id: int
    size: int
    grid_h: int
    grid_w: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """CANCEL <id>."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """STOP <id>."""

    id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame to be answered with ERROR. `detail` follows the code on the wire; `reason` is for people (stderr when verbose)."""

    id: int
    code: Code
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """An empty line or one with an unknown verb: its first bytes, without the line end."""

    line: bytes


Frame = Prompt | Image | Cancel | Stop | Refused | Ignored


def check(prompt: Prompt, slots: int, ids: Container[int], busy: Container[int]) -> Refused | None:
    """The refusals that need no tokens, in the protocol's order. slots: KV_SLOTS; ids: in flight or waiting; busy: slots with such a turn."""
    if prompt.id in ids:
        return Refused(prompt.id, Code.DUPLICATE_ID, "the id is in flight or waiting")
    if prompt.problem:
        return Refused(prompt.id, Code.BAD_REQUEST, prompt.problem)
    if not 0 <= prompt.slot < slots:
        return Refused(prompt.id, Code.BAD_REQUEST, f"slot {prompt.slot}: must be from 0 to {slots - 1}")
    if prompt.slot in busy:
        return Refused(prompt.id, Code.SLOT_BUSY, f"slot {prompt.slot} has a turn in flight or waiting")
    if not prompt.payload:
        return Refused(prompt.id, Code.EMPTY_PROMPT, "zero bytes")
    return None


def check_tokens(prompt: Prompt, tokens: int, capacity: int, image: bool) -> Refused | None:
    """The refusals that need the token count, in the protocol's order. capacity: positions a slot holds; image: an IMAGE waits for this id."""
    if not tokens:
        return Refused(prompt.id, Code.EMPTY_PROMPT, "zero tokens")
    if tokens >= capacity:
        detail = f"prompt_tokens={tokens} requested={prompt.max_tokens} capacity={capacity}"
        return Refused(prompt.id, Code.CONTEXT_EXCEEDED, "the prompt does not fit the slot", detail)
    if image:
        return Refused(prompt.id, Code.BAD_REQUEST, "an image came with it and there is no vision tower")
    return None
