"""Ending a pass from another thread: the halt word that kernels read, the wake-up of a wait, and the guard against late cancels."""

from __future__ import annotations

import threading

import numpy as np

from glm53serve.engine.seam import DeviceLost, Halt, never
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.queue import Queue


class HaltGate:
    """One for a chain. The engine's thread arms it with a pass's own halt question and disarms it; `interrupt` may come from any thread."""

    def __init__(self, device: Device, queue: Queue) -> None:
        self.device, self.queue = device, queue
        self.word = device.host(64)
        self._lock = threading.Lock()
        self._asking: Halt | None = None
        self.interrupted = False

    def arm(self, halt: Halt) -> int | None:
        """Begin a pass; the number of wake-ups so far for `Queue.wait`, None for a pass that is never halted."""
        with self._lock:
            self.interrupted = False
            self._asking = None if halt is never else halt
            return None if halt is never else self.queue.wakes()

    def interrupt(self) -> None:
        """End the running pass if its own halt says so. A late cancel finds another pass, whose halt says no, or none, and does nothing."""
        with self._lock:
            if self.device.lost or self._asking is None or self.interrupted or not self._asking():
                return
            self.interrupted = True
            self.word.view(np.uint32)[0] = 1
            try:
                self.queue.wake()
            except DeviceLost:
                self.device.lost = True  # the pass that runs will meet it and say so

    def stops(self, asked_again: bool) -> bool:
        """Whether the pass was interrupted or, when asked again, wants to stop."""
        with self._lock:
            asking, interrupted = self._asking, self.interrupted
        return interrupted or (asked_again and asking is not None and asking())

    def disarm(self, last_submission: int | None) -> None:
        """After a pass or a halt: nothing is asked any more, what was submitted is over, the word is zero again."""
        unfinished = last_submission is not None and not self.device.lost
        with self._lock:
            self._asking = None
            if unfinished:
                self.word.view(np.uint32)[0] = 1
        if unfinished and last_submission is not None:
            self.queue.wait(last_submission)
        self.word.view(np.uint32)[0] = 0
