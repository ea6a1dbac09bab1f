"""What admission owes the peer, seen through the daemon's own pipes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

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
