"""Command lines of the programs here: a number that is not allowed is one line and exit code 2, before anything is measured."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose `description` is printed as it is written, and whose errors are one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """One line, exit 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of an option: a whole number from `low` on, to `high` if there is one."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) else low - 1
        if not low <= value <= (value if high is None else high):
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {_bounds(low, high)}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of an option: a number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {_bounds(low, high)}")
        return value

    return parse


def _bounds(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"
