"""What a turn's end tells the peer and the next start: HITS, PROF, DONE, EMAP, and the usage history of experts."""

from __future__ import annotations

import resource
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.engine import Engine
from glm53serve.engine.seam import DeviceLost
from glm53serve.serve import lines
from glm53serve.serve.turns import End, Turn


def peak_rss_gb() -> float:
    """Peak resident memory of this process in KiB / 10^6, the wire's unit."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage's figure is inherited: a small program started by a large one would report the large one's peak
        return int(status.read_text().split("VmHWM:", 1)[1].split(maxsplit=1)[0]) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Telemetry:
    """Counts expert uses over all turns (`heat`, uint64 [sparse layers, experts]) and formats the lines about them. What counts is called under
    the desk's lock."""

    def __init__(self, engine: Engine, heat: NDArray[np.uint64]) -> None:
        self._engine = engine
        self.heat = heat

    def emap(self) -> bytes:
        """The EMAP line as of now; empty for a model without sparse layers."""
        return lines.emap(self._engine.tiers(), self.heat)

    def settle(self, turn: Turn) -> None:
        """A turn begins: what an earlier turn of its slot used and nobody counted goes to the heat, and its own count starts at 0.

        So a cancelled or failed turn's end asks no device for anything; in the engine's thread.
        """
        self.heat += self._engine.expert_uses(turn.slot)
        self._engine.clear_uses(turn.slot)

    def count(self, turn: Turn) -> None:
        """Take what the passes of a turn used since the last count, to the turn and the heat; nothing is asked when there was no pass.

        Uses that are lost with a device are not counted: the next pass meets the loss too, ends the turns that need the device and goes on
        without it, and a finished turn just ends well.
        """
        if turn.counted == turn.forwards:
            return
        try:
            uses = self._engine.expert_uses(turn.slot).copy()
            self._engine.clear_uses(turn.slot)
        except DeviceLost:
            return
        turn.uses = uses if turn.uses is None else turn.uses + uses
        turn.counted = turn.forwards
        self.heat += uses

    def success(self, turn: Turn, end: End) -> bytes:
        """HITS, PROF and DONE of a turn."""
        self.count(turn)
        uses = turn.uses if turn.uses is not None else np.zeros(self.heat.shape, np.uint32)
        wall = perf_counter() - turn.accepted
        cost = turn.cost
        profile = lines.Profile(
            wall, len(turn.prompt), turn.emitted, cost.disk, 0.0, cost.experts, cost.attention, cost.head, turn.forwards
        )
        speed = turn.emitted / wall if wall > 0 else 0.0
        done = lines.done(turn.id, turn.emitted, speed, self._engine.hit_rate(), peak_rss_gb(), len(turn.prompt), end is End.LIMIT)
        return lines.hits(uses > 0) + lines.prof(profile) + done
