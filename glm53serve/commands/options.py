"""What `generate` and `chat` have in common on their command lines."""

from __future__ import annotations

import argparse
import math

from glm53serve.oneshot import PromptError

_SEEDS = 1 << 64


def check_answer(arguments: argparse.Namespace) -> None:
    """Raise PromptError unless the options that shape an answer have values that the daemon would take as well."""
    if arguments.max_tokens < 1:
        raise PromptError(f"--max-tokens {arguments.max_tokens}: must be at least 1")
    for name, value in (("--temperature", arguments.temperature), ("--top-p", arguments.top_p)):
        if not math.isfinite(value) or value < 0:
            raise PromptError(f"{name} {value}: must be a number, 0 or more")
    if not 0 <= getattr(arguments, "seed", 0) < _SEEDS:
        raise PromptError(f"--seed {arguments.seed}: must be from 0 to 2^64-1")
