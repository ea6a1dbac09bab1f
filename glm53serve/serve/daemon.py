"""The daemon: reader, admission, engine and writer wired together, from READY to a clean exit."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from glm53serve.experts.usage import UsageFile
from glm53serve.load import Loaded, LoadError, load, usage_path
from glm53serve.serve import lines
from glm53serve.serve.admission import Admission
from glm53serve.serve.frames import Cancel, Code, Frame, Image, Prompt, Refused, Stop
from glm53serve.serve.inbox import Eof, Inbox
from glm53serve.serve.outbox import REPLY_LIMIT, Outbox
from glm53serve.serve.schedule import Schedule
from glm53serve.serve.signals import Signals
from glm53serve.serve.stderr import StderrLog
from glm53serve.serve.telemetry import Telemetry, peak_rss_gb
from glm53serve.serve.turns import Desk, End, Phase, Turn
from glm53serve.settings import Settings

SWITCH_INTERVAL = 1e-4
"""Seconds. With the interpreter's default of 5 ms one busy Python thread costs each decode step 4-25 ms."""

FLUSH_SECONDS = 0.5


def serve(
    directory: Path, settings: Settings, signals: Signals, *, slots: int, specials_stop: bool, expert_slots: int = 0, backend: str | None = None
) -> int:
    """Load a model and serve it on stdin and stdout until the input ends. Returns the exit code."""
    out = os.dup(1)
    # nothing but frames may reach the pipe, whatever a library prints
    os.dup2(2, 1)
    # nor onto stderr, which is somebody's terminal: NumPy warns when a model's numbers overflow
    warnings.simplefilter("ignore")
    say = StderrLog()
    try:
        loaded = load(
            directory,
            settings,
            slots=slots,
            specials_stop=specials_stop,
            expert_slots=expert_slots,
            backend=backend,
            note=lambda line: say(f"glm53: {line}"),
        )
        daemon = Daemon(loaded, settings, 0, out, say if settings.verbose else _no_log, say)
        signals.then(daemon.stop)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.collect()
        gc.freeze()
        gc.disable()
    except LoadError as error:
        return _fail(out, say, error)
    except OSError as error:
        return _fail(out, say, LoadError("io", f"{directory}: {error}"))
    except MemoryError as error:
        return _fail(out, say, LoadError("nomem", f"{directory}: not enough memory to serve the model ({error})"))
    try:
        daemon.start()
    except RuntimeError as error:
        say(f"glm53: {error}")
        return 1
    code = daemon.wait()
    # a pass that still runs must not hold up the exit, and there is nothing left to lose
    os._exit(code)


def _fail(out: int, say: Callable[[str], None], error: LoadError) -> int:
    """The engine cannot start: tell the peer and the person. Returns the exit code."""
    say(f"glm53: {error}")
    with contextlib.suppress(OSError):
        os.write(out, lines.load_fail(error.kind, str(error)))
    return 1


class Daemon:
    """One served model between two descriptors: frames come from `source` and go to `out`; `log` takes verbose lines, `say` the others.

    `start` sends the handshake and starts the threads; `wait` returns the exit code when all is done, from a thread that only waits, so
    that signals are seen at once; `stop` ends it from anywhere.
    """

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        source: int,
        out: int,
        log: Callable[[str], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say or log
        self._engine = loaded.engine
        self._settings = settings
        self._log = log
        config = loaded.checkpoint.config
        self._usage = UsageFile(usage_path(loaded.directory, settings.usage), len(config.sparse_layers), config.n_routed_experts, self._note)
        self._over = threading.Event()
        history = self._usage.load()
        self._telemetry = Telemetry(loaded.engine, history)
        if loaded.experts is not None:
            loaded.experts.warm(history)
        self._desk = Desk(self._finish, self._interrupt)
        self._outbox = Outbox(out, on_closed=self.stop, on_drain=lambda: self._inbox.wake(), fault=lambda: loaded.engine.faults.hit("write"))
        self._inbox = Inbox(source, self._on_frame, backlog=lambda: self._outbox.unsent_bytes)
        self._admission = Admission(loaded.engine, loaded.tokenizer, self._desk, self._outbox, self._emap, log, settings.accept)
        self._schedule = Schedule(
            loaded.engine,
            loaded.tokenizer,
            self._desk,
            self._outbox,
            loaded.stop_ids,
            settings.rewind,
            self._telemetry,
            log,
            self._say,
            settings.verbose,
        )
        self._image_for = 0
        self._images: dict[int, bool] = {}
        self._failed = False
        self._threads = [
            threading.Thread(target=self._guarded(self._admit), name="admission", daemon=True),
            threading.Thread(target=self._guarded(self._schedule.run), name="engine", daemon=True),
        ]
        self._save_due = threading.Event()

    def start(self) -> None:
        """Handshake, then serve. Raises RuntimeError when a thread cannot be had."""
        self._engine.note = self._note
        self._outbox.send(
            lines.READY
            + (lines.caps(False, len(self._engine.slots)) if self._settings.caps else b"")
            + lines.stat(peak_rss_gb())
            + self._telemetry.emap()
        )
        self._inbox.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Drop every turn and end: a signal came, or the peer is gone."""
        self._desk.stopping = True
        self._over.set()

    def wait(self) -> int:
        """Wait for the end, save what is to be saved, give the last frames time to leave. Returns the exit code."""
        self._over.wait()
        with self._desk.lock:
            self._desk.wake.notify_all()
        self._inbox.poke()
        self._usage.save(self._telemetry.heat)
        if self._settings.verbose:
            self._log(lines.steps(self._schedule.steps, self._schedule.step_rows))
        while not self._desk.stopping and not self._outbox.flush(FLUSH_SECONDS):
            pass
        self._outbox.close(FLUSH_SECONDS)
        for thread in self._threads:
            thread.join(FLUSH_SECONDS)
        return 1 if self._failed else 0

    # -- threads

    def _guarded(self, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except BaseException:  # noqa: BLE001 - whatever ends a thread ends the daemon, with exit code 1
                self._say(traceback.format_exc().rstrip("\n"))
                self._failed = True
            finally:
                self._over.set()

        return run

    def _admit(self) -> None:
        while True:
            # many tiny prompts may each be refused with a whole EMAP: what waits to be read stays bounded here
            while not self._outbox.wait_room(FLUSH_SECONDS, REPLY_LIMIT) and not self._over.is_set():
                pass
            frame = self._inbox.get()
            if self._over.is_set():
                return
            if self._save_due.is_set():
                self._save_due.clear()
                self._usage.save(self._telemetry.heat)
            if isinstance(frame, Eof):
                self._failed |= self._inbox.crashed
                self._desk.end_of_input()
                self._over.wait()
                return
            if isinstance(frame, Prompt):
                self._admission.consider(frame, self._images.pop(frame.id, False))

    def _on_frame(self, frame: Frame) -> bool:
        """In the reader thread: everything that needs no tokens takes effect here and now."""
        if isinstance(frame, Prompt):
            if self._desk.announce(frame.id):
                self._images[frame.id] = frame.id == self._image_for
                if self._images[frame.id]:
                    self._image_for = 0
                return False
            self._outbox.send(lines.error(frame.id, Code.DUPLICATE_ID))
        elif isinstance(frame, Cancel):
            if not self._desk.cancel(frame.id):
                self._outbox.send(lines.error(frame.id, Code.NOT_FOUND))
        elif isinstance(frame, Stop):
            self._desk.stop(frame.id)
        elif isinstance(frame, Image):
            self._image_for = frame.id
        elif isinstance(frame, Refused):
            self._log(f"refused {frame.id}: {frame.reason}")
            self._outbox.send(lines.error(frame.id, frame.code, frame.detail))
        else:
            self._log(f"ignored a line: {frame.line[:80]!r}")
        return True

    def _interrupt(self, turn: Turn) -> None:
        """In the reader thread: rows of a cancelled or stopped turn are in a pass."""
        if turn.phase is Phase.PREFILL:
            self._engine.interrupt()
        elif (ahead := self._engine.ahead) is not None:
            ahead.cancel(turn.slot.index)

    # -- ends of turns

    def _finish(self, turn: Turn, end: End, detail: str) -> None:
        """The one terminal frame of a turn, and what goes with it."""
        if turn.scores and turn.forwards:
            turn.slot.resumable = False
        if self._desk.stopping:
            return
        if end is End.CANCELLED:
            self._log(lines.cancel(turn.id, len(turn.prompt), turn.emitted, turn.slot.filled))
            block = lines.error(turn.id, Code.CANCELLED)
        elif end is End.FAILED:
            code, _, rest = detail.partition(" ")
            block = lines.error(turn.id, code, rest)
        else:
            block = self._telemetry.success(turn, end)
        self._outbox.send(block + self._emap())
        self._save_due.set()
        self._inbox.poke()

    def _emap(self) -> bytes:
        return b"" if self._desk.no_more else self._telemetry.emap()

    def _note(self, line: str) -> None:
        self._log(line)


def _no_log(_line: str) -> None:
    return
