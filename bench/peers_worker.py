"""One engine in a process of its own, asked over a line protocol, and how busy the cores were with anything else meanwhile.

A worker first prints {"ready": text}. Requests are lines of words, answers one JSON object a line:
  measure P ID ...     compute the first P ids as one prompt in an empty context, then the others one at a time:
                       {"prefill": seconds, "steps": [seconds, ...], "best": [argmax after the prompt and after each step]}
  logits PATH ID ...   compute all ids as one prompt and write every row of logits, float32 [ids, vocabulary]: {"rows": count}
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

TICK = os.sysconf("SC_CLK_TCK")


class PeerError(RuntimeError):
    """An engine could not be prepared or did not answer; the message names it and says why."""


def spread_cpus(cores: Mapping[int, tuple[int, int]], count: int) -> list[int]:
    """`count` CPUs on as many different cores as there are; cores: (package, core) of each CPU that may be used."""
    seen: dict[tuple[int, int], int] = {}
    order = []
    for cpu in sorted(cores):
        order.append((seen.get(cores[cpu], 0), cpu))
        seen[cores[cpu]] = seen.get(cores[cpu], 0) + 1
    return sorted(cpu for _, cpu in sorted(order)[:count])


def allowed_cores() -> dict[int, tuple[int, int]]:
    """(package, core) of every CPU this process may run on."""
    found = {}
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            found[cpu] = (int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()))
        except OSError:  # no topology in some containers: every CPU counts as a core
            found[cpu] = (0, cpu)
    return found


def busy_seconds(stat: str, cpus: Sequence[int]) -> float:
    """Seconds since boot in which these CPUs did something, from the text of /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _wait, irq, soft = (int(f) for f in fields[:7])  # steal is time we did not get; guests are in user
            total += user + nice + system + irq + soft
    return total / TICK


def process_seconds(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt and the steps after it: seconds each, best tokens, and the cores that something else kept busy meanwhile."""

    prompt: int
    prefill: float
    steps: tuple[float, ...]
    best: tuple[int, ...]
    foreign: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt / self.prefill

    @property
    def decode_rate(self) -> float:
        """Decoded tokens a second; the first step, in which caches warm up, is left out."""
        counted = self.steps[1:]
        return len(counted) / sum(counted)


class Worker:
    """A running engine."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], cpus: Sequence[int], log: Path) -> None:
        """Start it on the given CPUs and wait until it is ready. What it says on standard error goes to `log`. Raises PeerError."""
        self.name, self._cpus, self._log = name, cpus, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment),
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self.about = str(self._answer()["ready"])

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise PeerError(f"{self.name}: ended with exit code {self._process.wait()}: {' | '.join(said) or 'nothing said'} ({self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, verb: str, argument: object, ids: Sequence[int]) -> dict[str, Any]:
        try:
            self._requests.write(" ".join([verb, str(argument), *map(str, ids)]) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says why
        return self._answer()

    def measure(self, ids: Sequence[int], prompt: int) -> Measured:
        """Compute `prompt` ids at once and the others one by one."""
        before = busy_seconds(Path("/proc/stat").read_text(), self._cpus) - process_seconds(self._process.pid)
        began = perf_counter()
        answer = self._ask("measure", prompt, ids)
        wall = perf_counter() - began
        after = busy_seconds(Path("/proc/stat").read_text(), self._cpus) - process_seconds(self._process.pid)
        return Measured(prompt, answer["prefill"], tuple(answer["steps"]), tuple(answer["best"]), max(0.0, after - before) / wall)

    def logits(self, ids: Sequence[int], scratch: Path) -> NDArray[np.float32]:
        """Logits after every position: [ids, vocabulary]."""
        rows = int(self._ask("logits", scratch, ids)["rows"])
        values = np.fromfile(scratch, np.float32).reshape(rows, -1)
        scratch.unlink()
        return values

    def close(self) -> None:
        """End it."""
        self._requests.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
