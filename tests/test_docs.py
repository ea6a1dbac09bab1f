"""What the documents say holds: commands exist, links resolve, examples run as printed, variables are in the table."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from glm53serve import cli
from glm53serve.settings import Settings
from harness.engine_process import child_environment

pytestmark = pytest.mark.usefixtures("compiled_kernels")
ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SHIPPED = "glm53serve/data/glm53-nano"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests" / "oracle" / "README.md", ROOT / SHIPPED / "README.md"]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """The lines of the shell blocks of a page (those without a language), comments taken off."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def anchors(path: Path) -> set[str]:
    """The fragments a page can be linked at, as the usual renderers make them from its headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    env = child_environment({"COLI_USAGE": str(tmp_path / "usage"), "OMP_NUM_THREADS": "1", **extra})
    return {**env, "PATH": f"{Path(sys.executable).parent}:{env.get('PATH', '')}"}


def test_the_pages_are_there() -> None:
    names = {p.name for p in PAGES}
    assert names >= {"README.md", "PROTOCOL.md", "ARCHITECTURE.md", "ENVIRONMENT.md", "MODEL_FORMATS.md", "BENCHMARKS.md"}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, fragment = target.partition("#")
        there = (path.parent / file) if file else path
        assert there.exists(), f"{path.name} links to {target}"
        if fragment:
            assert fragment in anchors(there), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_a_page_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    folders = r"(?:glm53serve|harness|bench|tests|docs|serve|engine|cpu|cuda|vulkan|experts|model)"
    for name in set(re.findall(rf"(?<![\w/.])({folders}/[\w./-]*\w/?|{folders}/)(?![\w(])", text)):
        assert (ROOT / name).exists() or (ROOT / "glm53serve" / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_variable_named_is_in_the_table(path: Path) -> None:
    known = {field.metadata["name"] for field in fields(Settings)}
    named = set(re.findall(r"\b(?:GLM53|COLI)_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_page_knows_a_machine(path: Path) -> None:
    found = re.search(r"(?<![\w.])/(?:home|root|tmp|work|mnt|Users|opt)/\S*", path.read_text(encoding="utf-8"))
    assert found is None, f"{path.name}: {found}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    makefile = page("Makefile")
    parser = cli._glm53serve_parser()
    text = path.read_text(encoding="utf-8")
    for line in commands(text) + re.findall(r"`(make [a-z-]+)`", text):
        words = line.split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.M), line
        elif words[:1] == ["glm53serve"]:
            parsed = parser.parse_args([w.strip('"') for w in re.findall(r'"[^"]*"|\S+', line)[1:]])
            assert parsed.run
        elif words[:1] == [".venv/bin/python"]:
            assert (ROOT / words[1]).is_file(), line
    for name in set(re.findall(r"`glm53serve ([a-z]+)", text)):
        with pytest.raises(SystemExit) as leaving:
            parser.parse_args([name, "--help"])
        assert leaving.value.code == 0, name
    for extra in re.findall(r"\.\[(\w+)\]", text):
        assert re.search(rf"^{extra} = \[", page("pyproject.toml"), re.M), extra


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_programs_have_the_options_that_a_page_gives_them(path: Path) -> None:
    for folder, name, arguments in re.findall(r"\b(bench|harness)[/.](\w+)(?:\.py)?((?: +[^\s`|]+)*)", path.read_text(encoding="utf-8")):
        program = ROOT / folder / f"{name}.py"
        for option in re.findall(r"(?<= )--[a-z-]+", arguments):
            assert option == "--help" or f'"{option}"' in program.read_text(encoding="utf-8"), f"{path.name} gives {program.name} {option}"


def test_the_readme_names_every_command() -> None:
    listed = re.findall(r"^    ([a-z]+) ", cli._glm53serve_parser().format_help(), re.M)
    assert "serve" in listed
    text = README.read_text(encoding="utf-8")
    assert [name for name in listed if not re.search(rf"(?:glm53serve |`){name}\b", text)] == []


@pytest.mark.parametrize("target", ["run", "test"])
def test_make_knows_how(target: str) -> None:
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_its_two_commands_first() -> None:
    assert [line for line in commands(README.read_text(encoding="utf-8")) if line][:2] == ["make run", "make test"]


def test_the_readme_client_runs_as_printed(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(programs) == 1
    assert len([line for line in programs[0].splitlines() if line]) <= 20
    done = subprocess.run([sys.executable, "-c", programs[0]], capture_output=True, text=True, env=environment(tmp_path), cwd=ROOT, timeout=200)
    assert done.stderr == ""
    assert re.fullmatch(r"345 \+ 67 = 412 \| DONE 1 STAT 12 [\d.]+ [\d.]+ [\d.]+ 16 0\n", done.stdout)


def test_the_protocol_example_is_what_the_engine_says(tmp_path: Path) -> None:
    example = re.findall(r"^```\n(> .*?)^```", page("docs/PROTOCOL.md"), re.M | re.S)[-1].splitlines()
    engine = subprocess.Popen(
        [sys.executable, "-m", "glm53serve", "serve", "--model", SHIPPED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(tmp_path), cwd=ROOT,
    )  # fmt: skip
    assert engine.stdin and engine.stdout
    try:
        for _ in range(4):
            engine.stdout.readline()
        for line in example:
            mark, text = line[:2], line[2:]
            if mark == "> ":
                engine.stdin.write(text.encode() + b"\n")
                engine.stdin.flush()
            else:
                got = engine.stdout.readline().decode().removesuffix("\n")
                assert re.fullmatch(re.escape(text).replace(r"\.\.\.", ".+"), got), f"{got!r} is not {text!r}"
        engine.stdin.close()
        assert engine.stdout.read() == b""
        assert engine.wait(10) == 0
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


def test_the_licence_is_the_one_named() -> None:
    assert "Apache License" in page("LICENSE") and "Apache-2.0" in README.read_text(encoding="utf-8")
