"""Faults on purpose (`GLM53_FAULT=<site>:<n>`): the n-th event of a site fails, once, so that every road back can be tested."""

from __future__ import annotations

import errno
from collections.abc import Callable

_ERRORS: dict[str, Callable[[], Exception]] = {
    "alloc": lambda: MemoryError("injected fault: alloc"),
    "read": lambda: OSError(errno.EIO, "injected fault: read"),
    "layer": lambda: RuntimeError("injected fault: layer"),
    "write": lambda: OSError(errno.EIO, "injected fault: write"),
}


class FaultError(ValueError):
    """GLM53_FAULT does not say `<site>:<n>` with a known site and n >= 1."""


class Faults:
    """Counts events; `hit(site)` raises at the chosen one. With no fault chosen it does nothing."""

    def __init__(self, text: str = "") -> None:
        self._site, _, number = text.partition(":")
        self._left = 0
        if text:
            if self._site not in _ERRORS or not number.isdecimal() or int(number) < 1:
                raise FaultError(f"GLM53_FAULT={text!r}: must be <site>:<n> with a site of {', '.join(sorted(_ERRORS))} and n >= 1")
            self._left = int(number)

    def watches(self, site: str) -> bool:
        """True while a fault of this site is still to come."""
        return self._left > 0 and site == self._site

    def hit(self, site: str) -> None:
        """An event of `site` happens now; raises that site's error when it is the chosen one."""
        if self.watches(site):
            self._left -= 1
            if self._left == 0:
                raise _ERRORS[site]()
