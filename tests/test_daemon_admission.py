"""What admission owes the peer, seen through the daemon's own pipes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53serve.engine.tokenizer import Tokenizer
from glm53serve.serve.turns import Desk
from tests.served import Served, load_tiny, tiny_model


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(load_tiny(tiny_model(tmp_path / "model"), 1), tmp_path / "usage")
    yield served
    assert served.close() == 0


def test_a_cancel_never_hears_not_found_before_its_prompt_was_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the id is free for the reader, the refusal is already on its way."""
    came: list[str] = []
    outbox = served.daemon._outbox
    send = outbox.send

    def sent(block: bytes) -> bool:
        came.extend(line.decode() for line in block.split(b"\n") if line.startswith(b"ERROR "))
        return send(block)

    refuse = Desk.refuse

    def refused(self: Desk, id_: int) -> None:
        refuse(self, id_)
        # the worst moment for a CANCEL; a reader that may take it now answers before this wait is over
        reader = threading.Thread(target=lambda: served.daemon._desk.cancel(id_) or sent(b"ERROR %d NOT_FOUND\n" % id_))
        reader.start()
        reader.join(0.2)

    monkeypatch.setattr(outbox, "send", sent)
    monkeypatch.setattr(Desk, "refuse", refused)
    turn = served.submit(b"hello", slot=7)
    served.ledger.cancelled(turn.id)
    served.wait(turn)
    served.wait_until(lambda: len(served.ledger.not_found) == 1)
    assert came == [f"ERROR {turn.id} BAD_REQUEST", f"ERROR {turn.id} NOT_FOUND"]


def test_a_prompt_that_cannot_fit_is_counted_and_not_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokenizer = served.loaded.engine, served.loaded.tokenizer
    prompt = b"0123456789" * 4000
    exact = len(tokenizer.encode(prompt))
    assert len(prompt) > engine.capacity * tokenizer.longest

    def encode(self: Tokenizer, payload: bytes) -> list[int]:
        raise AssertionError("every token of it was made")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", encode)
        turn = served.wait(served.submit(prompt))
    assert turn.outcome == f"CONTEXT_EXCEEDED prompt_tokens={exact} requested=4 capacity={engine.capacity}"
    for count in (engine.capacity, engine.capacity - 1):
        turn = served.wait(served.submit(b"0" * count, max_tokens=1))
        assert turn.outcome == ("DONE" if count < engine.capacity else f"CONTEXT_EXCEEDED prompt_tokens={count} requested=1 capacity={engine.capacity}")


def test_a_reader_that_fails_is_no_good_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(load_tiny(tiny_model(tmp_path / "model"), 1), tmp_path / "usage")
    monkeypatch.setattr("threading.excepthook", lambda _arguments: None)

    def stop(_id: int) -> None:
        raise MemoryError

    monkeypatch.setattr(served.daemon._desk, "stop", stop)
    turn = served.submit(b"hello", max_tokens=2)
    served.raw(b"STOP 99\n")
    served.wait_until(lambda: turn.ended)
    assert turn.outcome == "DONE" and served.close() == 1


def test_a_token_that_the_model_does_not_have_is_refused_and_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tokenizer of a larger model would give."""
    known = served.loaded.engine.config.vocab_size
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, payload: [known] if payload == b"strange" else encode(self, payload))
    assert served.wait(served.submit(b"strange")).outcome == "BAD_REQUEST"
    assert any(f"token id {known}: the model has 0 to {known - 1}" in line for line in served.log)
    assert served.wait(served.submit(b"known")).outcome == "DONE"
