"""Admission: every check that may refuse a prompt, in the protocol's order, then ACCEPT. Runs in its own thread, so no answer waits for a chunk."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from glm53serve.engine.engine import Engine
from glm53serve.engine.sampling import Sampling
from glm53serve.engine.tokenizer import Tokenizer, TokenizerError
from glm53serve.serve import lines
from glm53serve.serve.frames import Code, Prompt, Refused, check, check_tokens
from glm53serve.serve.outbox import Outbox
from glm53serve.serve.turns import Desk, Turn


@dataclass(slots=True)
class Admission:
    """Turns prompts into waiting turns, or into one ERROR. `emap` makes the EMAP line that follows a refused prompt."""

    engine: Engine
    tokenizer: Tokenizer
    desk: Desk
    outbox: Outbox
    emap: Callable[[], bytes]
    log: Callable[[str], None]
    send_accept: bool = True

    def consider(self, prompt: Prompt, image: bool) -> None:
        """Refuse or accept a prompt whose id the desk has announced. `image`: an IMAGE frame with its id came before it."""
        refused = check(prompt, len(self.engine.slots), (), _Busy(self.desk))
        ids: list[int] = []
        if refused is None:
            try:
                count, ids = self._tokens(prompt.payload)
            except TokenizerError as error:
                refused = Refused(prompt.id, Code.BAD_REQUEST, str(error))
            else:
                refused = check_tokens(prompt, count, self.engine.capacity, image)
        if refused is not None:
            self.log(f"refused {prompt.id}: {refused.reason}")
            block = lines.error(refused.id, refused.code, refused.detail) + self.emap()
            # in one go, so that a CANCEL never hears NOT_FOUND before the refusal
            with self.desk.lock:
                self.desk.refuse(prompt.id)
                self.outbox.send(block)
            return
        seed = secrets.randbits(64) if prompt.seed is None else prompt.seed
        turn = Turn(
            id=prompt.id,
            slot=self.engine.slots[prompt.slot],
            prompt=ids,
            sampling=Sampling(prompt.temperature, prompt.top_p, seed),
            limit=min(prompt.max_tokens, self.engine.capacity - len(ids)),
            scores=prompt.logprobs,
            pin=prompt.pin,
        )
        if self.send_accept:
            self.outbox.send(lines.accept(turn.id, len(ids)))
        self.desk.admit(turn)

    def _tokens(self, payload: bytes) -> tuple[int, list[int]]:
        """How many tokens a payload has, and which; of one that is sure not to fit the number alone, which takes little memory.

        Raises TokenizerError for a payload that has no tokens of this model.
        """
        if len(payload) > self.tokenizer.longest * self.engine.capacity:
            count = self.tokenizer.count(payload)
            if count >= self.engine.capacity:
                return count, []
        ids = self.tokenizer.encode(payload)
        known = self.engine.config.vocab_size
        if ids and max(ids) >= known:
            raise TokenizerError(f"token id {max(ids)}: the model has 0 to {known - 1}; its tokenizer belongs to another model")
        return len(ids), ids


@dataclass(frozen=True, slots=True)
class _Busy:
    """The slots with a turn, asked one at a time."""

    desk: Desk

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and self.desk.slot_taken(slot)
