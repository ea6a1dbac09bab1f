"""`glm53serve generate`: one prompt, the answer streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from glm53serve.commands.options import check_answer
from glm53serve.commands.progress import load_with_progress
from glm53serve.engine.chat import render_chat
from glm53serve.engine.sampling import Sampling
from glm53serve.load import shipped_model
from glm53serve.oneshot import stream
from glm53serve.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Load, answer, print; on a terminal also say how fast it was."""
    check_answer(arguments)
    directory = arguments.model or shipped_model()
    prompt = arguments.prompt
    if arguments.chat:
        variables = {"enable_thinking": False} if arguments.no_think else {}
        prompt = render_chat(directory, [{"role": "user", "content": prompt}], **variables)
    loaded = load_with_progress(directory, settings, slots=1, specials_stop=True, backend=arguments.backend)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    out = sys.stdout.buffer
    ids = loaded.tokenizer.encode(prompt.encode("utf-8", "surrogateescape"))
    began = perf_counter()
    count = 0
    for token in stream(loaded, ids, arguments.max_tokens, sampling):
        out.write(loaded.tokenizer.text(token))
        out.flush()
        count += 1
    out.write(b"\n")
    out.flush()
    if sys.stderr.isatty():
        print(f"{len(ids)} prompt tokens, {count} new ones, {perf_counter() - began:.2f} s", file=sys.stderr)
    loaded.engine.close()
    return 0
