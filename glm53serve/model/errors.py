"""What can be wrong with a model directory."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal["nomem", "io", "format", "unsupported"]


class ModelError(ValueError):
    """A model directory cannot be used. The message is one line: what is wrong, what was expected, where.

    `kind` is the word a protocol error carries: nomem, io, format or unsupported.
    """

    def __init__(self, message: str, kind: ErrorKind = "format") -> None:
        super().__init__(" ".join(message.split()))
        self.kind: ErrorKind = kind


class ConfigError(ModelError):
    """config.json or generation_config.json is unreadable, contradictory or asks for something this program does not compute."""


class CheckpointError(ModelError):
    """The weight files are unreadable, damaged, or do not fit the config."""
