"""SIGTERM and its like, from the first moment of a start to the last of an end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class Signals:
    """Waits for SIGTERM, SIGHUP and, with a terminal on stdin, SIGINT (ignored without one) in a thread of its own.

    Handlers of the interpreter run in the main thread, between any two steps of whatever it does, also inside an earlier handler: here they
    do nothing, and what counts is the byte that each signal leaves in a pipe. Until `then` says what is to be done, a signal ends the process
    with exit code 0: there is nothing yet to lose.
    """

    def __init__(self) -> None:
        self._act: Callable[[], None] = lambda: os._exit(0)
        self._bell_out, bell_in = os.pipe()
        os.set_blocking(bell_in, False)
        signal.set_wakeup_fd(bell_in, warn_on_full_buffer=False)
        waited = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            waited.append(signal.SIGHUP)
        if os.isatty(0):
            waited.append(signal.SIGINT)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in waited:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def then(self, act: Callable[[], None]) -> None:
        """What a signal does from now on; called in the thread, again for later ones."""
        self._act = act

    def _wait(self) -> None:
        while os.read(self._bell_out, 64):
            self._act()
