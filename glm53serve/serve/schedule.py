"""The engine thread: one prompt chunk, one decode step, over and over, while there are turns.

A step carries one row of every decoding turn. The top of the loop always finds a decoding turn with `filled == prompt + emitted`, so a
cancel that is seen there leaves a slot whose history is exactly what was sent.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from time import perf_counter

from glm53serve.engine.engine import Engine
from glm53serve.engine.sampling import NO_PREDICTOR, choose, score
from glm53serve.engine.seam import DeviceLost, Halted
from glm53serve.engine.tokenizer import Tokenizer
from glm53serve.serve import lines
from glm53serve.serve.ahead import MOST_STOP_IDS, Ahead
from glm53serve.serve.emitter import Emitter
from glm53serve.serve.outbox import Outbox
from glm53serve.serve.telemetry import Telemetry
from glm53serve.serve.turns import Desk, End, Turn

SHARED_CHUNK_SECONDS = 1.0
SMALLEST_CHUNK = 16
ROOM_POLL_SECONDS = 0.02
ASCII_BLANKS = frozenset(b" \t\n\r\v\f")


class Schedule:
    """Runs turns of a `Desk` on an `Engine`, writing frames to an `Outbox`.

    `telemetry` counts what turns use; `log` takes verbose lines, `say` the one line about a change that lasts, `verbose` allows tracebacks.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        desk: Desk,
        outbox: Outbox,
        stop_ids: frozenset[int],
        rewind: bool,
        telemetry: Telemetry,
        log: Callable[[str], None],
        say: Callable[[str], None],
        verbose: bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._desk = desk
        self._outbox = outbox
        self._emitter = Emitter(desk, outbox, tokenizer, stop_ids)
        self._ahead = Ahead(engine, desk, self._emitter) if engine.ahead is not None and len(stop_ids) <= MOST_STOP_IDS else None
        self._rewind = rewind
        self._telemetry = telemetry
        self._log = log
        self._say = say
        self._verbose = verbose
        self._rows_a_second = 0.0
        self._started: Turn | None = None
        self.steps = 0
        self.step_rows = 0

    def run(self) -> None:
        """Work until input has ended and every turn is done, or until the desk says stop."""
        rested = True
        while True:
            with self._desk.lock:
                while not self._desk.stopping and self._desk.idle() and not self._desk.everything_done():
                    if not rested:
                        self._engine.check_integrity()
                        gc.collect()
                        rested = True
                    self._desk.wake.wait()
                if self._desk.stopping or self._desk.everything_done():
                    return
                rested = False
                prefilling = self._desk.prefilling()
                decoding = self._desk.decoding()
            leaving = any(turn.busy and (turn.cancelled or turn.stopped) for turn in decoding)
            if not self._outbox.wait_room(ROOM_POLL_SECONDS) and not leaving:
                continue
            if decoding:
                self._step(decoding, chunk_next=prefilling is not None)
            if prefilling is not None:
                self._count(decoding)
                self._chunk(prefilling, shared=bool(decoding))

    def _count(self, turns: list[Turn]) -> None:
        """A chunk comes next: count what these turns used, so that whoever ends one meanwhile need not ask a device that is at work."""
        with self._desk.lock:
            for turn in turns:
                if turn.live and not turn.busy:
                    self._telemetry.count(turn)

    # -- prompts

    def _chunk(self, turn: Turn, shared: bool) -> None:
        with self._desk.lock:
            if not turn.live:
                return
            turn.busy = True
        try:
            if turn is not self._started:
                self._start(turn)
                self._started = turn
            if turn.logits is None:
                self._compute(turn, shared)
            if turn.pin and turn.logits is not None:
                self._engine.checkpoint(turn.slot, "pin")
            failed = ""
        except Halted as halt:
            self._log(lines.halt(halt.layer, self._engine.config.num_layers, turn.slot.filled, halt.on_device))
            self._end(turn, End.CANCELLED)
            return
        except DeviceLost as lost:
            self._lose_device(lost)
            return
        except Exception as error:  # noqa: BLE001 - whatever fails in a pass costs that turn, never the daemon
            failed = self._explain(error)
        if failed:
            self._end(turn, End.FAILED, failed)
            return
        with self._desk.lock:
            turn.busy = False
            if turn.cancelled or turn.stopped:
                self._desk.end(turn, End.STOPPED)
            elif turn.logits is not None:
                self._desk.prefilled(turn)
                if turn.limit == 0:
                    self._desk.end(turn, End.SCORED)

    def _start(self, turn: Turn) -> None:
        slot = turn.slot
        reuse = self._engine.plan(slot, turn.prompt)
        self._log(lines.reuse(turn.id, reuse.reused, len(turn.prompt), reuse.filled_before, reuse.common, reuse.word))
        with self._desk.lock:
            self._telemetry.settle(turn)
        self._engine.begin(slot, turn.prompt, reuse)
        if reuse.word == "equal" and reuse.reused:
            turn.logits = slot.logits

    def _compute(self, turn: Turn, shared: bool) -> None:
        engine, slot = self._engine, turn.slot
        start = slot.filled
        rows = engine.chunk
        if shared:
            rows = min(rows, max(SMALLEST_CHUNK, int(self._rows_a_second * SHARED_CHUNK_SECONDS)))
        ids = turn.prompt[start : start + rows]
        before = slot.logits
        began = perf_counter()
        done = engine.forward_prefill(slot, ids, halt=lambda: turn.cancelled or self._desk.stopping, guard=True, all_rows=turn.scores > 0)
        self._rows_a_second = len(ids) / (perf_counter() - began)
        turn.forwards += 1
        turn.cost.add(done.cost)
        if turn.scores and done.rows is not None:
            for i, token in enumerate(ids):
                row = done.rows[i - 1] if i else before
                scored = NO_PREDICTOR if row is None else score(row, token, turn.scores)
                self._outbox.send(lines.echo(turn.id, start + i, self._tokenizer.text(token), scored))
        if slot.filled == len(turn.prompt):
            turn.logits = done.logits
        engine.checkpoint(slot, "boundary")

    # -- decode

    def _step(self, turns: list[Turn], chunk_next: bool) -> None:
        """One step of every decoding turn: ahead on the device where that is possible, row by row with the host otherwise."""
        ahead = self._ahead.places([turn for turn in turns if not turn.scores and not self._rewind]) if self._ahead is not None else []
        if self._ahead is not None and ahead:
            try:
                steps, rows = self._ahead.turn(ahead, drain=len(ahead) < len(turns), rest=chunk_next)
            except DeviceLost as lost:
                self._lose_device(lost)
                return
            except Exception as error:  # noqa: BLE001 - whatever fails in a step costs its turns, never the daemon
                self._lose_ahead(error)
                return
            self.steps += steps
            self.step_rows += rows
        if len(ahead) < len(turns):
            self._decode([turn for turn in turns if turn not in ahead])

    def _decode(self, turns: list[Turn]) -> None:
        chosen = [(turn, choose(row, turn.sampling, turn.emitted)) for turn in turns if (row := turn.logits) is not None]
        rows: list[tuple[Turn, int]] = []
        with self._desk.lock:
            for turn, token in chosen:
                if turn.live and self._emitter.emit(turn, token):
                    turn.busy = True
                    rows.append((turn, token))
        if not rows:
            return
        try:
            for turn, token in rows:
                self._remember_before_blanks(turn, token)
            logits, cost = self._engine.forward_step([(turn.slot, token) for turn, token in rows])
        except DeviceLost as lost:
            self._lose_device(lost)
            return
        except Exception as error:  # noqa: BLE001 - whatever fails in a step costs its turns, never the daemon
            detail = self._explain(error)
            for turn, _ in rows:
                self._end(turn, End.FAILED, detail)
            return
        self.steps += 1
        self.step_rows += len(rows)
        with self._desk.lock:
            for (turn, _), row in zip(rows, logits, strict=True):
                turn.busy = False
                turn.logits = row
                turn.forwards += 1
                turn.cost.add(cost, 1.0 / len(rows))
                if turn.cancelled or turn.stopped:
                    self._desk.end(turn, End.STOPPED)

    def _remember_before_blanks(self, turn: Turn, token: int) -> None:
        text = self._tokenizer.text(token)
        blank = bool(text) and all(b in ASCII_BLANKS for b in text)
        if self._rewind and blank and not turn.blank_run:
            self._engine.checkpoint(turn.slot, "rewind")
        turn.blank_run = blank

    # -- ends

    def _end(self, turn: Turn, end: End, detail: str = "") -> None:
        with self._desk.lock:
            turn.busy = False
            self._desk.end(turn, end, detail)

    def _lose_device(self, lost: DeviceLost) -> None:
        """Every running turn lost its state with the device; the daemon goes on without it."""
        with self._desk.lock:
            turns = self._desk.running()
            for turn in turns:
                turn.busy = True
        self._say(f"device lost ({lost}): going on on the CPU")
        self._engine.fail_over()
        self._ahead = None
        for turn in turns:
            self._end(turn, End.FAILED, "DEVICE_LOST")

    def _lose_ahead(self, error: Exception) -> None:
        """Where the device stands with its rows is unknown: their turns are over, and steps go through the host from now on."""
        assert self._ahead is not None
        turns = self._ahead.held()
        detail = self._explain(error)
        self._say(f"decoding ahead of the host failed ({error}): going on step by step")
        self._ahead = self._engine.ahead = None
        for turn in turns:
            self._engine.empty(turn.slot)
            self._end(turn, End.FAILED, detail)

    def _explain(self, error: Exception) -> str:
        if self._verbose:
            self._log(traceback.format_exc().rstrip("\n"))
        if isinstance(error, MemoryError):
            return "NO_MEMORY"
        tensor = getattr(error, "tensor", "")
        if tensor:
            return f"IO {tensor}"
        return "INTERNAL"

