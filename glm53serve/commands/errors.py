"""What a person or the machine did wrong becomes one line on stderr and exit code 1; anything else keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Outcome:
    """A command's exit code."""

    code: int = 0


@contextmanager
def one_line_errors(name: str) -> Iterator[Outcome]:
    """Run the body; expected errors are printed as `<name>: <error>` and set code 1, a closed stdout or Ctrl-C ends quietly.

    Ctrl-C counts from the first import on: nothing heavy is loaded before the body.
    """
    outcome = Outcome()
    try:
        yield outcome
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
    except KeyboardInterrupt:
        outcome.code = 130
    except Exception as error:
        line = _expected(error)
        if line is None:
            raise
        print(f"{name}: {' '.join(line.split())}", file=sys.stderr)
        _forget_output()
        outcome.code = 1


def _expected(error: Exception) -> str | None:
    """What to tell about an error that is nobody's mistake in the program; None for any other."""
    from glm53serve.engine.chat import TemplateError
    from glm53serve.engine.faults import FaultError
    from glm53serve.engine.tokenizer import TokenizerError
    from glm53serve.load import LoadError
    from glm53serve.model.errors import ModelError
    from glm53serve.oneshot import PromptError
    from glm53serve.settings import SettingError

    if isinstance(error, (LoadError, ModelError, TokenizerError, TemplateError, FaultError, PromptError, SettingError)):
        return str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory ({error})" if str(error) else "not enough memory"
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
    return None


def _forget_output() -> None:
    """What could not be written stays unwritten: keep the interpreter from trying again, and complaining, at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None
