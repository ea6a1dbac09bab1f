"""What a person did wrong becomes one line on stderr and exit code 1; anything else keeps its traceback."""

from __future__ import annotations

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
    """Run the body; expected errors are printed as `<name>: <error>` and set code 1, a closed stdout or Ctrl-C ends quietly."""
    from glm53serve.engine.chat import TemplateError
    from glm53serve.engine.faults import FaultError
    from glm53serve.engine.tokenizer import TokenizerError
    from glm53serve.load import LoadError
    from glm53serve.model.errors import ModelError
    from glm53serve.oneshot import PromptError
    from glm53serve.settings import SettingError

    outcome = Outcome()
    try:
        yield outcome
        sys.stdout.flush()
    except (LoadError, ModelError, TokenizerError, TemplateError, FaultError, PromptError, SettingError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        outcome.code = 1
    except BrokenPipeError:
        # the reader of our output is gone; keep the interpreter from complaining when it flushes at exit
        sys.stdout = None
    except KeyboardInterrupt:
        outcome.code = 130
