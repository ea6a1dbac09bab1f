"""`glm53`: the name and arguments a gateway uses for the daemon, and the one-shot form used by harnesses."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from glm53serve.serve.signals import Signals
from glm53serve.settings import Settings

USAGE = "usage: glm53 <cap> [<cap>] with SERVE=1 SNAP=<dir>, or glm53 [--model DIR] (--prompt TEXT | --ids a,b,c) --greedy N [--logits]"


class _Refusal(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refusal(message)


def run(argv: list[str], settings: Settings) -> int:
    """Daemon when SERVE is set, else the one-shot form. Wrong arguments: one line on stderr, exit 2."""
    try:
        if settings.serve:
            return _serve(argv, settings)
        return _one_shot(_parse(argv), settings)
    except _Refusal as refusal:
        print(f"glm53: {refusal}; {USAGE}", file=sys.stderr)
        return 2


def _serve(argv: list[str], settings: Settings) -> int:
    if not 1 <= len(argv) <= 2 or not all(re.fullmatch(r"[0-9]{1,18}", a) for a in argv):
        raise _Refusal(f"arguments {' '.join(argv) or '(none)'}: the daemon takes one or two numbers")
    if not settings.snap:
        raise _Refusal("SERVE is set and SNAP is not: no model directory")
    signals = Signals()  # before what follows is imported, which takes a while
    from glm53serve.serve.daemon import serve

    return serve(Path(settings.snap), settings, signals, slots=settings.slots, specials_stop=not settings.serve_batch, expert_slots=int(argv[0]))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="glm53", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt")
    parser.add_argument("--ids")
    parser.add_argument("--greedy", type=int)
    parser.add_argument("--logits", action="store_true")
    arguments = parser.parse_args(argv)
    if (arguments.prompt is None) == (arguments.ids is None):
        raise _Refusal("exactly one of --prompt and --ids is needed")
    if arguments.greedy is None or arguments.greedy < 0:
        raise _Refusal("--greedy needs a number of tokens, 0 or more")
    return arguments


def _one_shot(arguments: argparse.Namespace, settings: Settings) -> int:
    import numpy as np

    from glm53serve.load import load, shipped_model
    from glm53serve.oneshot import PromptError, greedy, teacher_forced

    directory = arguments.model or shipped_model()
    wanted: list[int] = []
    if arguments.ids is not None:
        try:
            wanted = [int(part, 10) for part in arguments.ids.split(",")]
        except ValueError:
            raise _Refusal(f"--ids {arguments.ids[:60]!r}: must be token ids separated by commas") from None
    loaded = load(directory, settings, slots=1, specials_stop=False, note=lambda line: print(line, file=sys.stderr))
    ids = loaded.tokenizer.encode(arguments.prompt.encode("utf-8", "surrogateescape")) if arguments.prompt is not None else wanted
    if len(ids) + arguments.greedy > loaded.engine.capacity:
        raise PromptError(f"{len(ids)} prompt tokens and {arguments.greedy} new ones: must fit GLM53_MAXT={loaded.engine.capacity}")
    best, logits = teacher_forced(loaded, ids)
    out = sys.stdout.buffer
    out.write(f"teacher_forcing {' '.join(map(str, best))}\n".encode())
    if arguments.logits:
        out.write(f"last_logits {' '.join(f'{float(v):.9g}' for v in np.asarray(logits))}\n".encode())
    tokens, seconds = greedy(loaded, logits, arguments.greedy)
    text = loaded.tokenizer.decode(tokens) if arguments.prompt is not None else f"greedy {' '.join(map(str, tokens))}".encode()
    rate = len(tokens) / seconds if seconds > 0 else 0.0
    out.write(text + f"\ndecode {len(tokens)} token in {seconds:.3f} = {rate:.2f} tok/s\n".encode())
    out.flush()
    loaded.engine.close()
    return 0
