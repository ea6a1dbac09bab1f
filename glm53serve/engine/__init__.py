"""Slots, spans and sampling: no I/O, no protocol."""
