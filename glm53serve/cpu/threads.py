"""How many threads the kernels use."""

from __future__ import annotations

import os

import psutil


def physical_cores() -> int:
    """Physical cores this process may run on, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
