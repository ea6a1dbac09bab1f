"""The three standard streams, whatever a program was started with."""

from __future__ import annotations

import os
import sys


def fill_standard_descriptors() -> None:
    """Give a closed stdin, stdout or stderr to /dev/null: the next file opened would take its number, and `sys` has None in its place."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for as long as the process lives
