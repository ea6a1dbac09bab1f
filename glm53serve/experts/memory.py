"""Memory for routed experts: page-aligned buffers, and how much the machine can give."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RESERVE_BYTES = 256 << 20
"""Left free whatever the budget says: below it a system starts to kill."""
HUGE_PAGE = 2 << 20


def available_bytes() -> int:
    """Memory this process may still take: the system's estimate, or less where a limit of its control group or its own (ulimit -v) is nearer."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        if most.isdecimal() and now.isdecimal():
            available = min(available, max(0, int(most) - int(now)))
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        available = min(available, max(0, own - int(psutil.Process().memory_info().vms)))
    return available


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """A zeroed, page-aligned buffer. Raises MemoryError when there is none to be had, or when taking it would leave the system too little."""
    if available_bytes() - nbytes < RESERVE_BYTES:
        raise MemoryError(f"{nbytes} bytes would leave less than {RESERVE_BYTES} bytes of memory available")
    try:
        memory = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(str(error)) from None
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
