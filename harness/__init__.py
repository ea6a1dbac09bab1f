"""Drives any engine executable through the serve protocol and checks what it answers; knows nothing of the engine's code."""
