"""Loading, with a progress bar when a person watches and nothing when output is piped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from glm53serve.load import Loaded, load
from glm53serve.model.config import load_config
from glm53serve.settings import Settings


def load_with_progress(directory: Path, settings: Settings, **options: Any) -> Loaded:
    """`load`, showing layers as they come on a terminal's stderr; other notes are lines on stderr."""
    options.setdefault("note", lambda line: print(line, file=sys.stderr))
    if not sys.stderr.isatty():
        return load(directory, settings, **options)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    layers = load_config(directory).num_layers
    columns = (TextColumn("loading"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=layers)
        return load(directory, settings, progress=lambda _layer: bar.advance(task), **options)
