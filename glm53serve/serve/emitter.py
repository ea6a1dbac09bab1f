"""A chosen token on its way out: DATA, or the end that it means."""

from __future__ import annotations

from dataclasses import dataclass

from glm53serve.engine.sampling import score
from glm53serve.engine.tokenizer import Tokenizer
from glm53serve.serve import lines
from glm53serve.serve.outbox import Outbox
from glm53serve.serve.turns import Desk, End, Turn


@dataclass(frozen=True, slots=True)
class Emitter:
    """Sends tokens of turns; `stop_ids` are the tokens that end an answer and are neither sent nor kept."""

    desk: Desk
    outbox: Outbox
    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    def emit(self, turn: Turn, token: int) -> bool:
        """Send a chosen token, or end the turn instead of it or after it; True when the turn goes on and the token is to be fed back.

        Under the desk's lock, with no row of the turn in a pass.
        """
        if turn.cancelled or turn.stopped:
            self.desk.end(turn, End.STOPPED)
            return False
        if token in self.stop_ids:
            self.desk.end(turn, End.STOP_TOKEN)
            return False
        self.send(turn, token)
        if turn.emitted == turn.limit:
            self.keep_unfed(turn, token)
            self.desk.end(turn, End.LIMIT)
            return False
        return True

    def send(self, turn: Turn, token: int) -> None:
        """The DATA frame of a token."""
        scored = score(turn.logits, token, turn.scores) if turn.scores and turn.logits is not None else None
        self.outbox.send(lines.data(turn.id, self.tokenizer.text(token), scored))
        turn.emitted += 1

    @staticmethod
    def keep_unfed(turn: Turn, token: int) -> None:
        """The last token of a budget was sent and will not be fed back: the history has one token more than is computed."""
        turn.slot.cut(turn.slot.filled)
        turn.slot.history.append(token)
