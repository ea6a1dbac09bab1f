"""What can be wrong with a model directory."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal["nomem", "io", "format", "unsupported"]


LINE_LIMIT = 1000


def one_line(text: str) -> str:
    """Text that may quote a hostile file as one printable line of at most 1,000 characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in " ".join(text.split()))
    return text if len(text) <= LINE_LIMIT else text[: LINE_LIMIT - 3] + "..."


class ModelError(ValueError):
    """A model directory cannot be used. The message is one line: what is wrong, what was expected, where.

    `kind` is the word a protocol error carries: nomem, io, format or unsupported.
    """

    def __init__(self, message: str, kind: ErrorKind = "format") -> None:
        super().__init__(one_line(message))
        self.kind: ErrorKind = kind


class ConfigError(ModelError):
    """config.json or generation_config.json is unreadable, contradictory or asks for something this program does not compute."""


class CheckpointError(ModelError):
    """The weight files are unreadable, damaged, or do not fit the config."""
