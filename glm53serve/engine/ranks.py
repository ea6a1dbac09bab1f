"""Several ranks under one engine: one decision for all of them, one way to end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from glm53serve.engine.launch_ahead import Lease, Shape


class RankMismatch(RuntimeError):
    """The ranks do not agree on the step: fatal, never answered by falling back on one of them."""


def agree(views: Sequence[tuple[Shape | None, Lease]]) -> tuple[Shape | None, Lease]:
    """The one decision all ranks take, from what each of them holds in flight and would do. Raises RankMismatch when they differ."""
    if not views:
        raise RankMismatch("no rank took part in the decision")
    for rank, view in enumerate(views):
        if view != views[0]:
            raise RankMismatch(f"rank {rank} holds {view}, rank 0 holds {views[0]}")
    return views[0]


class Worker(Protocol):
    """A rank's worker as shutdown sees it."""

    def tell(self) -> None:
        """Ask it to stop; returns at once."""
        ...

    def join(self) -> None:
        """Wait for its end."""
        ...


def shut_down(workers: Sequence[Worker]) -> None:
    """Tell every worker before joining any: a worker may wait for its peers while it stops. The first error is raised after all were joined."""
    errors: list[Exception] = []
    for act in [worker.tell for worker in workers] + [worker.join for worker in workers]:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - every other worker must still be told and joined; raised below
            errors.append(error)
    if errors:
        raise errors[0]
