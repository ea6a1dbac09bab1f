"""`glm53serve convert`: smaller experts for a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm53serve.cpu.threads import physical_cores
from glm53serve.model.convert import Progress, convert
from glm53serve.model.info import size
from glm53serve.model.verify import KindError, verify
from glm53serve.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Convert SRC to DST, unless --verify finds a finished DST; then compare when asked."""
    source, target = Path(arguments.source), Path(arguments.target)
    if not (arguments.verify and (target / "config.json").exists()):
        began = time.perf_counter()
        with _progress() as progress:
            plan = convert(source, target, arguments.experts, arguments.dense, threads=settings.threads or physical_cores(), progress=progress)
        seconds = time.perf_counter() - began
        print(f"{target}: {size(plan.total)} from {size(_source_bytes(source))} in {_duration(seconds)}")
    if arguments.verify:
        print(render_errors(verify(source, target)))
    return 0


def render_errors(kinds: dict[str, KindError]) -> str:
    """A table of errors by kind of tensor, the largest relative error last."""
    lines = [f"{'tensors':>7}  {'relative rms':>12}  {'worst':>9}  kind"]
    for name, kind in sorted(kinds.items(), key=lambda item: item[1].relative):
        lines.append(f"{kind.tensors:>7}  {kind.relative:>12.2e}  {kind.worst:>9.2e}  {name}")
    return "\n".join(lines)


def _source_bytes(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar with rate and remaining time on a terminal's stderr; nothing when a program reads it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
