"""A first look: start the daemon, ask it a few things, cancel a long prompt in the middle of a chunk.

    python -m harness.demo --engine glm53 [--model DIR]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.client import Client
from harness.ledger import Turn

SHIPPED = Path(__file__).resolve().parent.parent / "glm53serve" / "data" / "glm53-nano"
QUESTIONS = ("Who are you?", "What is 345 + 67?", "Sort the numbers: 46, 36, 9, 8", "Tell me a story about a fox.")
LONG_TOKENS = 7000


def ask(question: str) -> bytes:
    """A question in the shipped model's prompt form, to be answered without a thought."""
    return f"[gMASK]<sop><|user|>{question}<|assistant|></think>".encode()


def stream(client: Client, turn: Turn) -> None:
    """Print a turn's text as its frames arrive."""
    shown = seen = 0
    while True:
        client.wait_tokens(turn, seen + 1)
        seen, over = len(turn.tokens), turn.ended
        text = turn.text
        sys.stdout.write(text[shown:].decode("utf-8", "replace"))
        sys.stdout.flush()
        shown = len(text)
        if over:
            print()
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; exit code 0 when every step did what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="the engine's command")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="model directory (default: the shipped model)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with Client(shlex.split(options.engine), options.model) as client:
        print(f"daemon ready after {time.monotonic() - began:.1f} s\n")
        for question in QUESTIONS:
            print(f"> {question}")
            stream(client, client.submit(ask(question), max_tokens=80))
        print("> (a prompt of several thousand tokens, cancelled while it is being computed)")
        turn = client.submit(ask("7 " * (LONG_TOKENS // 2)), max_tokens=8)
        client.wait_accept(turn)
        time.sleep(0.15)
        sent = client.cancel(turn)
        client.wait_until("the end of the cancelled turn", lambda: turn.ended)
        tokens = turn.accept.prompt_tokens if turn.accept else 0
        if turn.error is None:
            print(f"the prompt of {tokens} tokens was done before the CANCEL arrived\n")
        else:
            print(f"CANCEL -> {turn.outcome} after {1000 * (turn.ended_at - sent):.1f} ms ({tokens} prompt tokens)\n")
        print(f"> {QUESTIONS[1]}  (the slot is as it was)")
        stream(client, client.submit(ask(QUESTIONS[1]), max_tokens=80))
    return 0


if __name__ == "__main__":
    sys.exit(main())
