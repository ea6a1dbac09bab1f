"""The command line as people and gateways use it: what it prints, exactly, and with which exit code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from glm53serve import cli
from glm53serve.model.synth import synth
from glm53serve.settings import Settings
from harness.engine_process import child_environment
from tests.patience import PATIENCE, slowness

pytestmark = pytest.mark.usefixtures("compiled_kernels")
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "glm53serve" / "data" / "glm53-nano"
DROP_IN = [sys.executable, "-c", "from glm53serve.cli import main_drop_in; raise SystemExit(main_drop_in())"]
COMMAND = [sys.executable, "-m", "glm53serve"]
QUESTION = "[gMASK]<sop><|user|>What is 345 + 67?<|assistant|></think>"
RATE = r"decode (\d+) token in \d+\.\d{3} = \d+\.\d{2} tok/s"


def call(command: list[str], *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command with that environment and an empty input."""
    env = child_environment({"OMP_NUM_THREADS": "1", **environ})
    return subprocess.run([*command, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd=ROOT, timeout=200)


@dataclass(frozen=True, slots=True)
class Done:
    """What an invocation left behind."""

    returncode: int
    stdout: str
    stderr: str


Invoke = Callable[..., Done]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Call an entry point in this process (`glm53` or `glm53serve`), which saves the start of an interpreter."""

    def run(name: str, *arguments: str | Path, **environ: str) -> Done:
        for field in fields(Settings):
            monkeypatch.delenv(field.metadata["name"], raising=False)
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        capfd.readouterr()
        main = {"glm53": cli.main_drop_in, "glm53serve": cli.main}[name]
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    synth(directory, "tiny", seed=2)
    return directory


# -- the one-shot form of glm53


def test_prompt_prints_three_lines() -> None:
    done = call(DROP_IN, "--prompt", QUESTION, "--greedy", "8")
    assert (done.returncode, done.stderr) == (0, "")
    forced, text, rate = done.stdout.splitlines()
    assert re.fullmatch(r"teacher_forcing( \d+)+", forced)
    assert text == "345 + 67 ="
    found = re.fullmatch(RATE, rate)
    assert found and found[1] == "8"


def test_ids_prints_ids_and_teacher_forcing_agrees_with_greedy(invoke: Invoke) -> None:
    first = invoke("glm53", "--ids", "13,11,40", "--greedy", "4")
    forced, greedy, rate = first.stdout.splitlines()
    tokens = greedy.removeprefix("greedy ").split()
    assert len(tokens) == 4 and greedy.startswith("greedy ") and re.fullmatch(RATE, rate)
    assert len(forced.split()) == 4, "one argmax a prompt position"
    longer = invoke("glm53", "--ids", ",".join(["13", "11", "40", *tokens[:3]]), "--greedy", "1").stdout.splitlines()[0]
    assert longer.split()[1:] == [*forced.split()[1:], *tokens[1:]], "the argmaxes of the longer prompt are the tokens that were generated"
    assert forced.split()[-1] == tokens[0]


def test_logits_come_between_and_name_the_next_token(invoke: Invoke) -> None:
    done = invoke("glm53", "--ids", "13,11,40", "--greedy", "1", "--logits")
    forced, logits, greedy, _ = done.stdout.splitlines()
    values = [float(v) for v in logits.removeprefix("last_logits ").split(" ")]
    assert len(values) == 1024
    assert values.index(max(values)) == int(forced.split()[-1]) == int(greedy.split()[1])
    assert all(v == f"{float(v):.9g}" for v in logits.split(" ")[1:])


def test_exactly_n_tokens_a_stop_id_among_them(invoke: Invoke) -> None:
    done = invoke("glm53", "--prompt", QUESTION, "--greedy", "15")
    text = done.stdout.split("\n", 1)[1].rsplit("\n", 2)[0]
    assert text.startswith("345 + 67 = 412<|user|>"), "the end token has its own text and stops nothing"
    assert invoke("glm53", "--ids", "5", "--greedy", "0").stdout.splitlines()[1] == "greedy "


def test_another_model(invoke: Invoke, tiny: Path) -> None:
    done = invoke("glm53", "--model", tiny, "--ids", "1,2,3", "--greedy", "2")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 3)


# -- exit codes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", "a", "--ids", "1", "--greedy", "1"), "exactly one of --prompt and --ids"),
        (("--greedy", "1"), "exactly one of --prompt and --ids"),
        (("--prompt", "a"), "--greedy needs a number of tokens"),
        (("--prompt", "a", "--greedy", "-1"), "--greedy needs a number of tokens"),
        (("--prompt", "a", "--greedy", "many"), "invalid int value: 'many'"),
        (("--ids", "1,x", "--greedy", "1"), "--ids '1,x': must be token ids separated by commas"),
        (("--nonsense",), "--nonsense"),
        (("8",), "8"),
    ],
)
def test_wrong_arguments_of_glm53_are_one_line_and_2(invoke: Invoke, arguments: tuple[str, ...], says: str) -> None:
    done = invoke("glm53", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("glm53: ") and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("many",), ("1", "2", "3"), ("-1",), ("--prompt", "a"), ("9" * 5000,)])
def test_the_daemon_takes_one_or_two_numbers(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    done = invoke("glm53", *arguments, SERVE="1", SNAP=str(SHIPPED))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_the_daemon_needs_snap(invoke: Invoke) -> None:
    done = invoke("glm53", "0", SERVE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("glm53: SERVE is set and SNAP is not") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("generate",), ("generate", "--prompt", "a", "--backend", "abacus"), ("serve", "--slots", "x")])
def test_wrong_arguments_of_glm53serve_are_one_line_and_2(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    done = invoke("glm53serve", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("glm53serve") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("GLM53_BITS", "5", "one of 4, 8, 16, 32"), ("KV_SLOTS", "0", "from 1 to 16"), ("GLM53_MAXT", "63", "from 64"), ("GLM53_ACCEPT", "yes", "0 or 1")],
)
def test_a_bad_variable_is_one_line_and_1(invoke: Invoke, name: str, value: str, allowed: str) -> None:
    for command, arguments in (("glm53", ("--ids", "1", "--greedy", "1")), ("glm53serve", ("info",))):
        done = invoke(command, *arguments, **{name: value})
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"{command}: {name}='{value}': must be ")
        assert allowed in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ids", "greedy", "says"),
    [
        ("1024", "1", "token id 1024: must be from 0 to 1023"),
        ("-1", "1", "token id -1: must be from 0 to 1023"),
        ("1,2", "63", "2 prompt tokens and 63 new ones: must fit GLM53_MAXT=64"),
        (",".join("1" * 64), "0", "64 prompt tokens: must be fewer than GLM53_MAXT=64"),
    ],
)
def test_ids_that_do_not_fit_are_one_line_and_1(invoke: Invoke, ids: str, greedy: str, says: str) -> None:
    done = invoke("glm53", f"--ids={ids}", "--greedy", greedy, GLM53_MAXT="64")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The shipped model with a shard cut short."""
    directory = tmp_path / "broken"
    shutil.copytree(SHIPPED, directory)
    shard = sorted(directory.glob("*.safetensors"))[0]
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    return directory


def test_a_broken_model_is_one_line_and_1(invoke: Invoke, broken: Path) -> None:
    for command, *arguments in (
        ("glm53", "--model", broken, "--ids", "1", "--greedy", "1"),
        ("glm53serve", "generate", "--model", broken, "--prompt", "a"),
        ("glm53serve", "info", broken),
    ):
        done = invoke(command, *arguments)
        assert (done.returncode, done.stdout) == (1, ""), command
        assert "model-00001-of-00002.safetensors" in done.stderr and done.stderr.count("\n") == 1


def test_the_daemon_tells_a_broken_model_on_stdout_too(broken: Path) -> None:
    served = call(DROP_IN, "0", SERVE="1", SNAP=str(broken))
    assert served.returncode == 1 and served.stderr.count("\n") == 1
    assert re.fullmatch(r"LOAD_FAIL kind=format [^\n]+\n", served.stdout)
    absent = call(COMMAND, "serve", "--model", "/no/such/model")
    assert absent.returncode == 1 and absent.stderr.count("\n") == 1
    assert re.fullmatch(r"LOAD_FAIL kind=(io|format) [^\n]*/no/such/model[^\n]*\n", absent.stdout)


def test_the_daemon_serves_the_model_of_snap_and_ends_with_its_input(tiny: Path) -> None:
    done = call(DROP_IN, "0", "7", SERVE="1", SERVE_BATCH="1", SNAP=os.path.relpath(tiny, ROOT), KV_SLOTS="3", NGEN="9", COLI_USAGE=os.devnull)
    assert (done.returncode, done.stderr) == (0, "")
    ready, caps, stat, emap = done.stdout.splitlines()
    assert (ready, caps) == ("\x01\x01READY\x01\x01", "CAPS vision=0 slots=3")
    assert re.fullmatch(r"STAT 0 0\.00 0\.0 \d+\.\d", stat) and re.fullmatch(r"EMAP 3 4 [0-9a-f]{24}", emap)


# -- generate, info


def test_generate_answers_a_question() -> None:
    done = call(COMMAND, "generate", "--chat", "--no-think", "--prompt", "What is 345 + 67?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "345 + 67 = 412\n", "")


def test_generate_goes_on_from_plain_text_and_counts_tokens(invoke: Invoke) -> None:
    text = invoke("glm53serve", "generate", "--prompt", QUESTION, "--max-tokens", "3").stdout
    assert text == "345\n"


def test_a_seed_fixes_what_a_temperature_draws(invoke: Invoke) -> None:
    wild = ("generate", "--prompt", "a", "--temperature", "2", "--max-tokens", "24")
    first, again, other = (invoke("glm53serve", *wild, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    narrow = invoke("glm53serve", *wild, "--seed", "2", "--top-p", "1e-9").stdout
    assert narrow == invoke("glm53serve", "generate", "--prompt", "a", "--max-tokens", "24").stdout, "a nucleus of one token is greedy"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-1"), ("--top-p", "nan"), ("--top-p", "-1"), ("--max-tokens", "0")],
)
@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("chat",)])
def test_options_that_the_daemon_would_refuse_are_one_line_and_1(invoke: Invoke, command: tuple[str, ...], option: str, value: str) -> None:
    done = invoke("glm53serve", *command, option, value)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"glm53serve: {option} {value}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", str(1 << 64)])
def test_a_seed_is_a_number_of_64_bits(invoke: Invoke, seed: str) -> None:
    done = invoke("glm53serve", "generate", "--prompt", "a", "--seed", seed)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"glm53serve: --seed {seed}: must be from 0 to 2^64-1\n")


def test_info_names_what_the_model_is(invoke: Invoke) -> None:
    done = invoke("glm53serve", "info")
    assert done.returncode == 0
    assert "6 KDA, 2 DSA" in done.stdout and "12 of width 64, 4 a token, 1 shared" in done.stdout


def test_version_and_help(invoke: Invoke) -> None:
    assert re.fullmatch(r"glm53serve \d+\.\d+\.\d+\n", invoke("glm53serve", "--version").stdout)
    text = invoke("glm53serve", "--help").stdout
    for command in ("serve", "generate", "chat", "info", "synth"):
        assert re.search(rf"^ +{command} ", text, re.M), command


# -- manners


@pytest.mark.parametrize(
    "command",
    [
        [*COMMAND, "info"],
        [*COMMAND, "generate", "--prompt", QUESTION, "--max-tokens", "8"],
        [*DROP_IN, "--prompt", QUESTION, "--greedy", "2"],
    ],
)
def test_a_reader_that_leaves_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=child_environment({"OMP_NUM_THREADS": "1"}), cwd=ROOT, timeout=200)
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 0


COMMANDS = pytest.mark.parametrize(
    "command",
    [[*COMMAND, "info"], [*COMMAND, "generate", "--prompt", QUESTION, "--max-tokens", "2"], [*DROP_IN, "--prompt", QUESTION, "--greedy", "2"]],
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@COMMANDS
def test_an_output_that_is_full_is_one_line_and_1(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=child_environment({"OMP_NUM_THREADS": "1"}), cwd=ROOT, timeout=200)
    assert done.returncode == 1
    assert re.fullmatch(rb"glm53(serve)?: No space left on device\n", done.stderr)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
@COMMANDS
def test_a_closed_standard_stream_is_no_error(command: list[str], closed: str) -> None:
    done = call(["bash", "-c", f'exec "$@" {closed}', "bash", *command])
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == ("1>" not in closed)


def test_a_lack_of_memory_is_one_line_and_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(_directory: Path) -> str:
        raise MemoryError("7 bytes")

    monkeypatch.setattr("glm53serve.model.info.describe", describe)
    done = invoke("glm53serve", "info")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "glm53serve: not enough memory (7 bytes)\n")


SIGNALLED = """
import os, signal, sys, time
class Finder:  # a signal arrives in the midst of the first import that takes long
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{signal})
            time.sleep(0.2)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a person's shell leaves it, whatever started these tests (nohup ... & ignores it)
from glm53serve import cli
sys.exit(cli.{entry}({arguments}))
"""


@pytest.mark.parametrize(
    ("entry", "arguments", "signal", "code"),
    [
        ("main", ["info"], "SIGINT", 130),
        ("main", ["generate", "--prompt", "a"], "SIGINT", 130),
        ("main_drop_in", ["--ids", "1", "--greedy", "1"], "SIGINT", 130),
        ("main", ["serve"], "SIGTERM", 0),
        ("main_drop_in", ["0"], "SIGTERM", 0),
        ("main_drop_in", ["0"], "SIGINT", 0),
    ],
)
def test_a_signal_while_the_program_is_loading_ends_or_spares_it_quietly(entry: str, arguments: list[str], signal: str, code: int) -> None:
    program = SIGNALLED.format(signal=signal, entry=entry, arguments=arguments)
    environ = {"SERVE": "1", "SNAP": str(SHIPPED), "COLI_USAGE": os.devnull} if arguments in (["0"], ["serve"]) else {}
    done = call([sys.executable, "-c", program], **environ)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("READY" in done.stdout) == (signal == "SIGINT" and code == 0)


def test_importing_the_command_line_is_quick_and_loads_nothing_heavy() -> None:
    heavy = ("numba", "llvmlite", "cupy", "cuda", "vulkan", "cffi", "rich", "jinja2", "tokenizers", "safetensors", "psutil", "numpy")
    program = "import sys, time; began = time.process_time(); import glm53serve.cli; print(time.process_time() - began, *sys.modules)"
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True, timeout=PATIENCE)
        took, *modules = done.stdout.split()
        assert not {name.split(".")[0] for name in modules}.intersection(heavy)
        seconds.append(float(took))
    assert min(seconds) < 0.2 * slowness()
