"""`glm53serve serve`: the daemon as a person starts it."""

from __future__ import annotations

import argparse
from pathlib import Path

from glm53serve.serve.signals import Signals
from glm53serve.settings import SettingError, Settings

MOST_SLOTS = 16


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Serve --model, else SNAP, else the shipped model."""
    slots = arguments.slots if arguments.slots is not None else settings.slots
    if not 1 <= slots <= MOST_SLOTS:
        raise SettingError(f"--slots {slots}: must be from 1 to {MOST_SLOTS}")
    signals = Signals()  # before what follows is imported, which takes a while
    from glm53serve.load import shipped_model
    from glm53serve.serve.daemon import serve

    directory = arguments.model or (Path(settings.snap) if settings.snap else shipped_model())
    return serve(directory, settings, signals, slots=slots, specials_stop=False, backend=arguments.backend)
