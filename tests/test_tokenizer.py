"""Bytes to tokens and back, whatever the bytes are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53serve.engine.chat import TemplateError, render_chat
from glm53serve.engine.tokenizer import Tokenizer, TokenizerError
from glm53serve.load import shipped_model
from tests.patience import slowness

TOKENIZER = Tokenizer(shipped_model())


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_every_byte_string_comes_back(payload: bytes) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(payload)) == payload


def test_special_tokens_are_recognised_and_nothing_is_added() -> None:
    ids = TOKENIZER.encode(b"<|user|>1+1")
    assert ids[0] == 1005 and TOKENIZER.text(1005) == b"<|user|>" and 1005 in TOKENIZER.special_ids
    assert len(ids) == 4


def test_an_invalid_byte_splits_the_text_and_stands_alone() -> None:
    assert TOKENIZER.encode(b"the\xffthe") == TOKENIZER.encode(b"the") + TOKENIZER.encode(b"\xff") + TOKENIZER.encode(b"the")
    assert len(TOKENIZER.encode(b"\xff\xfe")) == 2
    assert len(TOKENIZER.encode("é".encode()[:1])) == 1


PIECES = [b"a", b"<|user|>", "ä€😀".encode(), b"\xff", b"\x80", b"\xe4", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", b"\0"]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map(b"".join))
def test_invalid_bytes_are_found_as_a_decoder_finds_them(payload: bytes) -> None:
    wanted: list[int] = []
    rest = payload
    while rest:
        try:
            rest, whole = b"", rest
            wanted += TOKENIZER.encode(whole.decode().encode())
        except UnicodeDecodeError as bad:
            wanted += TOKENIZER.encode(whole[: bad.start])
            wanted += [i for byte in whole[bad.start : bad.end] for i in TOKENIZER.encode(bytes([byte]))]
            rest = whole[bad.end :]
    assert TOKENIZER.encode(payload) == wanted


@pytest.mark.parametrize("payload", [b"\xff" * (1 << 20), b"a\xff" * (1 << 16)], ids=["bytes", "mixed"])
def test_time_grows_with_the_length_whatever_the_bytes(payload: bytes) -> None:
    began = time.process_time()
    ids = TOKENIZER.encode(payload)
    assert len(ids) == len(payload) and len(list(groupby(ids[:6]))) == (1 if payload[0] == 255 else 6)
    assert time.process_time() - began < 20 * slowness(), "a pass over the rest for every invalid byte takes minutes"


@pytest.mark.parametrize(
    "payload, most",
    [
        (b"What is 2 + 3?\n" * 40000, 0),
        (b"and so it went on " * 30000, 0),
        (b"0123456789" * 60000, 4),
        ("äö€".encode() * 90000, 12),
        (b"ab\xff" * 100000, 12),
        (b"<|user|>" * 80000, 24),
    ],
    ids=["lines", "words", "one word", "characters", "invalid", "special"],
)
def test_a_long_text_is_counted_in_pieces(payload: bytes, most: int) -> None:
    exact = len(TOKENIZER.encode(payload))
    assert exact <= TOKENIZER.count(payload) <= exact + most


@given(st.binary(max_size=400))
def test_counting_agrees_with_encoding(payload: bytes) -> None:
    assert TOKENIZER.count(payload) == len(TOKENIZER.encode(payload)) >= len(payload) / TOKENIZER.longest


def test_counting_takes_little_memory() -> None:
    """In a process of its own, as the peak of this one is not this test's."""
    program = (
        "import resource, sys; from pathlib import Path; from glm53serve.engine.tokenizer import Tokenizer; from glm53serve.load import shipped_model\n"
        "tokenizer = Tokenizer(shipped_model()); tokenizer.count(b'What is 2 + 3?\\n' * 10000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "tokenizer.count(b'What is 2 + 3?\\n' * 200000)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert grown < 200_000, f"{grown} KiB for 3 MB"


def test_an_unknown_id_has_no_text() -> None:
    assert TOKENIZER.text(10**6) == b""


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        Tokenizer(tmp_path)


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"\xff \n")
    directory.mkdir()
    shutil.copy(shipped_model() / "tokenizer.json", directory)
    assert Tokenizer(directory).encode(b"What is 2 + 3?") == TOKENIZER.encode(b"What is 2 + 3?")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{{ 1 / 0 }}"),
        ("chat_template.jinja", b"{{ messages[0].content + 1 }}"),
        ("chat_template.jinja", b"{% for %}"),
        ("chat_template.jinja", b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        ("chat_template.jinja", b"{% for i in range(10000000000) %}{% endfor %}"),
        ("chat_template.jinja", b"{{ raise_exception('no') }}"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100000),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
    ],
)
def test_a_template_that_is_none_says_so(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(TemplateError):
        render_chat(tmp_path, [{"role": "user", "content": "a"}])


def test_the_chat_template_makes_the_models_prompts() -> None:
    messages = [{"role": "user", "content": "What is 0 + 1?"}]
    assert render_chat(shipped_model(), messages, enable_thinking=False) == "[gMASK]<sop><|user|>What is 0 + 1?<|assistant|></think>"
    assert render_chat(shipped_model(), messages).endswith("<|assistant|><think>")


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render_chat(tmp_path, [])
