"""`glm53serve chat`: a conversation in the terminal, through the daemon."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from glm53serve.commands.daemon_client import DaemonClient, DaemonGone, Outcome
from glm53serve.commands.options import check_answer
from glm53serve.engine.chat import render_chat
from glm53serve.load import shipped_model
from glm53serve.settings import Settings

HELP = """\
Type a question and press Enter. Ctrl-C during an answer cancels it, Ctrl-C or Ctrl-D at the prompt ends the chat.
/reset  forget the conversation
/help   this text
/quit   end the chat"""
OPEN, CLOSE = "<think>", "</think>"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Start the daemon, talk until the input ends. Exit code 1 when the daemon cannot start or is lost."""
    check_answer(arguments)
    directory = arguments.model or (Path(settings.snap) if settings.snap else shipped_model())
    if directory.is_dir():
        render_chat(directory, [{"role": "user", "content": ""}])  # better to learn now than after a long load that there is no template
    screen = Screen(sys.stdout)
    watched = sys.stdin.isatty() and screen.terminal
    client = DaemonClient(directory, arguments.backend)
    at_once = True
    try:
        screen.notice(f"loading {directory} ...", watched)
        client.wait_ready()
        screen.notice("Ctrl-C cancels an answer, /help tells more.", watched)
        chat = Chat(directory, client, screen, arguments)
        for line in _lines(watched):
            if not chat.take(line):
                break
        at_once = False
    except DaemonGone as gone:
        if str(gone):
            print(f"glm53serve: {gone}", file=sys.stderr)
        return 1
    finally:
        client.close(at_once)
    return 0


def _lines(watched: bool) -> Iterator[str]:
    """Lines of the standard input, with a prompt and line editing when a person is `watched`; ends at Ctrl-D or Ctrl-C there."""
    reconfigure: Callable[..., None] | None = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    if not watched:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and a history; not there on every platform
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line


@dataclass(slots=True)
class Screen:
    """Where answers go. Thoughts and notices are for people: on a terminal they are dimmed, elsewhere they are left out."""

    stream: TextIO
    terminal: bool = field(init=False)

    def __post_init__(self) -> None:
        self.terminal = self.stream.isatty()

    def answer(self, text: str) -> None:
        """A piece of an answer."""
        self._put(text)

    def thought(self, text: str) -> None:
        """A piece of a thought."""
        if self.terminal and text:
            self._put(DIM + text + PLAIN)

    def notice(self, text: str, shown: bool = True) -> None:
        """One line about the conversation: on the screen of a terminal, else on stderr; not at all when not `shown`."""
        if not shown:
            return
        if self.terminal:
            self._put(f"{DIM}{text}{PLAIN}\n")
        else:
            print(f"glm53serve: {text}", file=sys.stderr)

    def _put(self, text: str) -> None:
        self.stream.buffer.write(text.encode("utf-8", "surrogateescape"))  # whatever the locale: answers are UTF-8
        self.stream.buffer.flush()


class Thoughts:
    """Tells a thought from the answer in a stream of text, wherever the stream is cut. `begun`: the prompt has opened the thought already."""

    def __init__(self, begun: bool) -> None:
        self._part = "thought" if begun else "start"
        self._held = ""

    def feed(self, text: str, last: bool = False) -> Iterator[tuple[bool, str]]:
        """(is it thought, piece) in order. What may be the beginning of a mark is held back until more comes, or until the `last` text."""
        self._held += text
        if self._part == "start":
            begin = self._held.lstrip()
            if begin.startswith(OPEN):
                self._part, self._held = "thought", begin[len(OPEN) :]
            elif OPEN.startswith(begin) and not last:
                return
            else:
                self._part = "answer"
        if self._part == "thought":
            thought, found, rest = self._held.partition(CLOSE)
            if not found:
                sure = len(thought) - (0 if last else _mark_begun(thought))
                self._held = thought[sure:]
                yield True, thought[:sure]
                return
            self._part, self._held = "answer", rest
            yield True, thought
        piece, self._held = self._held, ""
        yield False, piece


def _mark_begun(text: str) -> int:
    """How many last characters of `text` may be the beginning of the mark that ends a thought."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)


class Chat:
    """One conversation. The history holds what was answered, not what was thought."""

    def __init__(self, directory: Path, client: DaemonClient, screen: Screen, arguments: argparse.Namespace) -> None:
        self.messages: list[dict[str, Any]] = []
        self._directory = directory
        self._client = client
        self._screen = screen
        self._arguments = arguments

    def take(self, line: str) -> bool:
        """Deal with one line: a command or a question. False when the chat shall end."""
        command = line.strip()
        if command == "/quit":
            return False
        if command == "/help":
            self._screen.notice(HELP)
        elif command == "/reset":
            self.messages.clear()
            self._screen.notice("The conversation begins anew.")
        elif command.startswith("/") and command[1:].isalpha():
            self._screen.notice(f"{command} is no command: /reset, /help and /quit are.")
        elif command:
            self._ask(line)
        return True

    def _ask(self, question: str) -> None:
        messages = [*self.messages, {"role": "user", "content": question}]
        variables = {"enable_thinking": False} if self._arguments.no_think else {}
        prompt = render_chat(self._directory, messages, **variables)
        outcome = Outcome()
        answer = self._stream(prompt, outcome)
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._close(outcome, bool(answer))

    def _stream(self, prompt: str, outcome: Outcome) -> str:
        """Show an answer as it comes and return it, without its thought."""
        options = self._arguments
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        thoughts = Thoughts(prompt.rstrip().endswith(OPEN))
        answer, thought = "", ""
        pieces = self._client.turn(prompt.encode("utf-8", "surrogateescape"), options.max_tokens, options.temperature, options.top_p, outcome)
        for data in itertools.chain(pieces, [None]):
            last = data is None
            for thinking, piece in thoughts.feed(decoder.decode(data or b"", last), last):
                if thinking:
                    thought += piece
                    self._screen.thought(piece)
                elif piece:
                    if thought and not answer:
                        self._screen.thought("\n")
                    answer += piece
                    self._screen.answer(piece)
        if answer or (thought and self._screen.terminal):
            self._screen.answer("\n")
        return answer

    def _close(self, outcome: Outcome, answered: bool) -> None:
        """Say how the turn ended when it did not end by itself."""
        kept = "" if answered else "; the question is forgotten"
        code, _, detail = outcome.error.partition(" ")
        if code == "CANCELLED":
            self._screen.notice(f"(cancelled{kept})")
        elif code == "CONTEXT_EXCEEDED":
            self._screen.notice(f"The conversation no longer fits ({detail}); the question is forgotten, /reset begins anew.")
        elif code:
            self._screen.notice(f"The engine could not answer: {outcome.error}{kept}.")
        elif outcome.limited:
            self._screen.notice(f"(ended after {self._arguments.max_tokens} tokens or at the end of the context{kept})")
        elif not answered:
            self._screen.notice(f"(no answer{kept})")
