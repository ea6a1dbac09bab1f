"""`glm53serve chat`: a conversation over pipes, and in a terminal where Ctrl-C cancels an answer and kills nothing."""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53serve.commands.chat import Chat, Screen, Thoughts
from glm53serve.commands.daemon_client import GRACE_SECONDS, DaemonClient, Outcome
from glm53serve.model.synth import synth
from harness.engine_process import child_environment
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("compiled_kernels")
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "glm53serve" / "data" / "glm53-nano"
CHAT = [sys.executable, "-m", "glm53serve", "chat"]


@pytest.fixture
def usage(tmp_path: Path) -> dict[str, str]:
    return child_environment({"COLI_USAGE": str(tmp_path / "usage"), "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, which never finds an end, with the simplest chat template. With a budget of 100,000 tokens no pause of this process
    outlasts its answer."""
    directory = tmp_path_factory.mktemp("endless")
    synth(directory, "tiny", seed=3)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return directory


def piped(lines: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAT, *options], input=lines, capture_output=True, text=True, env=env, cwd=ROOT, timeout=PATIENCE)


class Terminal:
    """A chat in a pseudo terminal of its own, as a person has it."""

    def __init__(self, env: dict[str, str], *options: str) -> None:
        self._master, slave = pty.openpty()
        # a person's shell leaves Ctrl-C at its default, whatever started these tests (nohup ... & ignores it)
        begin = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); signal.signal(signal.SIGINT, signal.SIG_DFL); "
        begin += "os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin, *CHAT, *options],
            stdin=slave, stdout=slave, stderr=slave, env={**env, "TERM": "dumb"}, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern shows in what was not yet waited for; returns everything up to its end."""
        text = self._shown(pattern, PATIENCE)
        assert text is not None, f"{pattern!r} did not come; the screen ends {self.seen[-300:]!r}"
        return text

    def _shown(self, pattern: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.S)):
            if time.monotonic() > deadline:
                return None
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += self._read()
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def _read(self) -> str:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says EIO when the other side has closed
            data = b""
        assert data, f"the chat ended; the screen ends {self.seen[-300:]!r}"
        return data.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_prompt(self) -> None:
        """Ctrl-C at the prompt, and again when nothing happens: between showing the prompt and waiting for keys the interpreter overlooks one."""
        deadline = time.monotonic() + PATIENCE
        self.type("\x03")
        while self._shown("\n", 5.0) is None:
            assert time.monotonic() < deadline, "Ctrl-C at the prompt does nothing"
            self.type("\x03")

    def children(self) -> list[int]:
        """Process ids of the chat's children (the daemon)."""
        return [child.pid for child in psutil.Process(self._process.pid).children()]

    def exit_code(self) -> int:
        # what is still written must be read, or the chat cannot end
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            assert time.monotonic() < deadline, "the chat does not end"
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    if not os.read(self._master, 65536):
                        break
                except OSError:
                    break
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(usage: dict[str, str]) -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def test_questions_from_a_pipe_get_one_answer_each(usage: dict[str, str]) -> None:
    done = piped("What is 345 + 67?\n\n/reset\nWhat is 20 + 3?\n/quit\nWhat is 1 + 1?\n", usage)
    assert done.stdout == "345 + 67 = 412\n20 + 3 = 23\n"
    assert (done.returncode, done.stderr) == (0, "glm53serve: The conversation begins anew.\n")


def test_the_conversation_is_remembered_until_reset(usage: dict[str, str]) -> None:
    done = piped("My name is Hugo.\nWhat is my name?\n/reset\nWhat is my name?\n", usage, "--no-think", "--max-tokens", "16")
    answers = done.stdout.splitlines()
    assert answers[:2] == ["Nice to meet you, Hugo.", "Your name is Hugo."]
    assert len(answers) == 3 and "Hugo" not in answers[2]


def test_a_budget_that_ends_in_the_thought_is_told(usage: dict[str, str]) -> None:
    done = piped("What is 345 + 67?\n", usage, "--max-tokens", "3")
    assert done.stdout == ""
    assert done.stderr == "glm53serve: (ended after 3 tokens or at the end of the context; the question is forgotten)\n"


class Script:
    """In the place of the daemon: answers with given pieces and keeps the prompts."""

    def __init__(self, *answers: tuple[list[bytes], str]) -> None:
        self.answers = list(answers)
        self.prompts: list[bytes] = []

    def turn(self, prompt: bytes, max_tokens: int, temperature: float, top_p: float, outcome: Outcome) -> Iterator[bytes]:
        self.prompts.append(prompt)
        pieces, outcome.error = self.answers.pop(0)
        yield from pieces


def scripted(*answers: tuple[list[bytes], str]) -> tuple[Chat, Script, io.TextIOWrapper]:
    script, stream = Script(*answers), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    arguments = argparse.Namespace(no_think=False, max_tokens=64, temperature=0.0, top_p=1.0)
    return Chat(SHIPPED, cast(DaemonClient, script), Screen(stream), arguments), script, stream


def printed(stream: io.TextIOWrapper) -> str:
    return cast(io.BytesIO, stream.buffer).getvalue().decode()


def test_characters_and_marks_that_are_split_over_frames() -> None:
    answer = "né</think>café 日".encode()
    chat, script, stream = scripted(([bytes([b]) for b in answer], ""), ([b"</think>ok"], ""))
    assert chat.take("one") and chat.take("two")
    assert printed(stream) == "café 日\nok\n"
    assert "</think>café 日<|user|>two" in script.prompts[1].decode() and "né" not in script.prompts[1].decode()


def test_what_was_cancelled_is_kept_as_far_as_it_was_answered(capsys: pytest.CaptureFixture[str]) -> None:
    chat, script, _ = scripted(([b"hm"], "CANCELLED"), ([b"</think>half"], "CANCELLED"), ([], "CONTEXT_EXCEEDED prompt_tokens=9 requested=8 capacity=7"))
    for question in ("one", "two", "three"):
        assert chat.take(question)
    assert [m["content"] for m in chat.messages] == ["two", "half"]
    assert "one" not in script.prompts[1].decode() and "half<|user|>three" in script.prompts[2].decode()
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "glm53serve: (cancelled; the question is forgotten)"
    assert second == "glm53serve: (cancelled)"
    assert "prompt_tokens=9 requested=8 capacity=7" in third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--max-tokens", "0"), "--max-tokens 0: must be at least 1"),
        (("--temperature", "nan"), "--temperature nan: must be a number, 0 or more"),
    ],
)
def test_what_cannot_start_is_one_line(usage: dict[str, str], options: tuple[str, ...], message: str) -> None:
    done = piped("hello\n", usage, *options)
    assert (done.stdout, done.returncode) == ("", 1)
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_model_without_a_template_is_refused_at_once(usage: dict[str, str], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((SHIPPED / name).read_bytes())
    done = piped("hello\n", usage, "--model", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, f"glm53serve: {tmp_path}: the model has no chat template (chat_template.jinja)\n")


def test_on_a_terminal_the_thought_is_dim_and_ctrl_d_ends(usage: dict[str, str], terminal: list[Terminal]) -> None:
    chat = Terminal(usage)
    terminal.append(chat)
    chat.wait_for("> $")
    chat.type("What is 345 + 67?\n")
    screen = chat.wait_for("= 412.*> $")
    dim = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", screen, re.S))
    plain = re.sub(r"\x1b\[2m.*?\x1b\[0m", "", screen, flags=re.S)
    assert "5+7=12" in dim and "345 + 67 = 412" not in dim
    assert "345 + 67 = 412\r\n" in plain and "think>" not in screen
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_cancels_an_answer_and_the_chat_goes_on(usage: dict[str, str], terminal: list[Terminal], endless: Path) -> None:
    chat = Terminal({**usage, "GLM53_MAXT": "120000"}, "--model", str(endless), "--max-tokens", "100000")
    terminal.append(chat)
    chat.wait_for("> $")
    daemon = chat.children()
    assert len(daemon) == 1
    for question in ("one", "two"):
        chat.type(f"{question}\n")
        chat.wait_for(question + "\r\n.{20}")
        chat.type("\x03")
        assert "ended" not in chat.wait_for(r"\(cancelled[^)]*\).*> $")
        assert chat.children() == daemon, "the daemon was replaced or died"
    chat.interrupt_prompt()
    assert chat.exit_code() == 0
    assert not psutil.pid_exists(daemon[0]), "the daemon outlives the chat"


def test_a_daemon_that_dies_ends_the_chat_with_one_line(usage: dict[str, str], terminal: list[Terminal], endless: Path) -> None:
    chat = Terminal({**usage, "GLM53_MAXT": "120000"}, "--model", str(endless), "--max-tokens", "100000")
    terminal.append(chat)
    chat.wait_for("> $")
    chat.type("one\n")
    chat.wait_for("one\r\n.{20}")
    os.kill(chat.children()[0], 9)
    chat.wait_for("glm53serve: the daemon ended with exit code -9\r\n")
    assert chat.exit_code() == 1


def test_ctrl_c_while_a_stuck_daemon_is_waited_for_ends_it_at_once() -> None:
    waits: list[float | None] = []

    class Stuck(subprocess.Popen[bytes]):
        """Ctrl-C comes the moment it is waited for."""

        def wait(self, timeout: float | None = None) -> int:
            waits.append(timeout)
            if timeout is not None:
                os.kill(os.getpid(), signal.SIGINT)
            return super().wait(timeout)

    client = DaemonClient.__new__(DaemonClient)
    client._process = stuck = Stuck(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        client.close()
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C left the daemon alone")
    finally:
        signal.signal(signal.SIGINT, before)
        stuck.kill()
    assert waits == [GRACE_SECONDS, None], "it was waited for again"
    assert stuck.poll() == -9


@given(st.sampled_from(["<think>a<b</think>c</think>d", "a<think>b", " <think>x</think>\ny", "<thin", "x</think>y<think>", "", "</thi"]), st.data())
@settings(max_examples=60)
def test_thoughts_are_told_apart_wherever_the_stream_is_cut(text: str, data: st.DataObject) -> None:
    begun = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thoughts = Thoughts(begun)
    pieces = [piece for number, part in enumerate(parts) for piece in thoughts.feed(part, number == len(parts) - 1)]
    thought = "".join(piece for thinking, piece in pieces if thinking)
    answer = "".join(piece for thinking, piece in pieces if not thinking)
    opened = text.lstrip()[len("<think>") :] if text.lstrip().startswith("<think>") and not begun else text
    if not begun and opened is text:
        assert (thought, answer) == ("", text)
    else:
        wanted, _, rest = opened.partition("</think>")
        assert (thought, answer) == (wanted, rest)
