"""Bytes to token ids and back, over a byte-level BPE `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any


class TokenizerError(ValueError):
    """The tokenizer file is missing, broken or not byte-level."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as a map from character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ESCAPE = 0xDC00
"""What `surrogateescape` adds to a byte; no valid UTF-8 decodes to a surrogate."""

_PARTS = re.compile("[^\udc80-\udcff]+|[\udc80-\udcff]")
_PARTS_AT_ONCE = 4096

PIECE_BYTES = 1 << 18
"""How much of a long byte string is counted at once."""

TOKEN_LIMIT = 65536
"""Most bytes of one token: what a DATA frame carries."""


def _split_invalid(payload: bytes) -> Iterator[str | int]:
    """Runs of valid UTF-8 as text, every byte that is not part of valid UTF-8 as its own number."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        # one pass, however many bytes are invalid
        for match in _PARTS.finditer(payload.decode("utf-8", "surrogateescape")):
            escaped = ord(match[0][0]) - _ESCAPE
            yield escaped if 0x80 <= escaped <= 0xFF else match[0]
    else:
        if text:
            yield text


def _piece_end(payload: bytes, start: int) -> int:
    """Where a piece that begins at `start` ends: behind a line end, before a blank, or at least not inside a character."""
    end = start + PIECE_BYTES
    if end >= len(payload):
        return len(payload)
    middle = end - PIECE_BYTES // 2
    line = payload.rfind(b"\n", middle, end)
    if line >= 0:
        return line + 1
    blank = payload.rfind(b" ", middle, end)
    if blank >= 0:
        return blank
    for cut in range(end, end - 4, -1):
        if payload[cut] & 0xC0 != 0x80:
            return cut
    return end


class Tokenizer:
    """Encodes any byte string, decodes any token id.

    Special tokens are recognised in the text and no token is added in front. `special_ids` are the tokens flagged special, `longest` is
    how many bytes the longest token has.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file, the model needs a tokenizer.json")
        try:
            # its own reading of files takes names in UTF-8 only
            self._backend: Any = Backend.from_buffer(path.read_bytes())
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of broken file
            reason = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
            raise TokenizerError(f"{path}: not a tokenizer file ({reason})") from None
        alphabet = _byte_alphabet()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        for token, index in self._backend.get_vocab(with_added_tokens=True).items():
            if index in added:
                self._bytes[index] = added[index].content.encode("utf-8")
            elif all(c in alphabet for c in token):
                self._bytes[index] = bytes(alphabet[c] for c in token)
            else:
                raise TokenizerError(f"{path}: token {index} is {token!r}, a byte-level vocabulary is needed")
        self.longest = max(map(len, self._bytes.values()), default=0)
        if self.longest > TOKEN_LIMIT:
            raise TokenizerError(f"{path}: a token of {self.longest} bytes, at most {TOKEN_LIMIT} are possible")
        self._byte_ids = {b: self._backend.token_to_id(c) for c, b in alphabet.items()}

    def encode(self, payload: bytes) -> list[int]:
        """Token ids of a byte string. An invalid UTF-8 byte splits the text there and becomes its own byte-level token.

        Raises TokenizerError when the vocabulary has no token for a byte that needs one.
        """
        ids: list[int] = []
        for run in self._runs(payload):
            if isinstance(run, int):
                ids.append(run)
            else:
                ids.extend(run.ids)
        return ids

    def count(self, payload: bytes) -> int:
        """How many tokens a byte string of any length has, in little memory: `encode` takes some 250 bytes for each byte.

        Counted in pieces that end at line ends, else at blanks; a piece that must end inside a word may add a token.
        """
        total = at = 0
        while at < len(payload):
            end = _piece_end(payload, at)
            total += sum(1 if isinstance(run, int) else len(run) for run in self._runs(payload[at:end]))
            at = end
        return total

    def _runs(self, payload: bytes) -> Iterator[Any]:
        """The library's encodings of the valid parts, and the token ids of the invalid bytes between them, in order."""
        parts = _split_invalid(payload)
        while group := list(islice(parts, _PARTS_AT_ONCE)):
            # encode_batch_fast releases the interpreter lock, encode does not: a long prompt must not hold up a cancel
            texts = iter(self._backend.encode_batch_fast([part for part in group if isinstance(part, str)], add_special_tokens=False))
            for part in group:
                if isinstance(part, str):
                    yield next(texts)
                else:
                    index = self._byte_ids[part]
                    if index is None:
                        raise TokenizerError(f"byte 0x{part:02x} has no token")
                    yield index

    def text(self, token: int) -> bytes:
        """Raw bytes of a token; empty for ids the vocabulary does not have. A character may be split over two tokens."""
        return self._bytes.get(token, b"")

    def decode(self, ids: list[int]) -> bytes:
        """Raw bytes of a list of tokens."""
        return b"".join(self.text(i) for i in ids)
