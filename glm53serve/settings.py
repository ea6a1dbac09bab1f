"""Every environment variable the program reads: one table, read once, checked, and rendered into docs/ENVIRONMENT.md.

Nothing else in the package looks at `os.environ`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any


class SettingError(ValueError):
    """A variable's value is not allowed; the message names the variable, the value and what is allowed."""


def _setting(
    name: str,
    kind: str,
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    default_text: str | None = None,
) -> Any:
    meta = {"name": name, "kind": kind, "meaning": meaning, "low": low, "high": high, "choices": choices, "default_text": default_text}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment, typed. An unset or empty variable has its default."""

    # -- how the program is started
    serve: bool = _setting("SERVE", "bool", False, "With the `glm53` name: run the daemon instead of the one-shot form.")
    serve_batch: bool = _setting(
        "SERVE_BATCH",
        "bool",
        False,
        "Set by gateways that speak this protocol. Without it the tokenizer's special tokens also end an answer. `glm53serve serve` sets it.",
    )
    snap: str = _setting("SNAP", "path", "", "Model directory of the `glm53` daemon.", default_text="none")
    ngen: str = _setting("NGEN", "text", "", "Accepted from gateways and ignored.", default_text="none")
    backend: str = _setting(
        "GLM53_BACKEND",
        "text",
        "auto",
        "Which backend runs the layers. `auto` takes CUDA when it is there, else a Vulkan GPU, else the CPU, and says why when it falls back; "
        "a named backend that is not to be had ends the start with one line.",
        choices=("auto", "cpu", "cuda", "vulkan"),
    )
    # -- slots and chunks
    slots: int = _setting("KV_SLOTS", "int", 1, "Conversations held at once.", low=1, high=16)
    maxt: int = _setting("GLM53_MAXT", "int", 8192, "Positions a slot holds, prompt and answer together.", low=64, high=1 << 24)
    prefill_chunk: int = _setting(
        "GLM53_PREFILL_CHUNK",
        "int",
        2048,
        "Rows of a prompt computed in one pass. Cancelling is checked inside the chunk, between and within layers, so its size does not bound how "
        "long a cancel waits; smaller chunks only keep finer checkpoints and use less scratch memory.",
        low=1,
        high=1 << 20,
    )
    # -- numbers and memory
    bits: int = _setting(
        "GLM53_BITS",
        "int",
        0,
        "Bits of the dense matrices in memory: 4, 8, 16 (as stored, BF16) or 32. Routed experts stay as stored.",
        choices=(4, 8, 16, 32),
        default_text="16 when they take less than half of the available memory, else 4",
    )
    expert_gb: float = _setting(
        "GLM53_EXPERT_GB",
        "float",
        -1.0,
        "RAM for routed experts in GB (10^9 bytes). The rest is read from disk when needed.",
        low=0.0,
        high=1e6,
        default_text="what is available after the dense weights",
    )
    vram_gb: float = _setting(
        "GLM53_VRAM_GB",
        "float",
        -1.0,
        "Device memory the CUDA backend may take, in GB. Routed experts that do not fit stay in pinned host memory, the least used ones first.",
        low=0.0,
        high=1e6,
        default_text="what is free",
    )
    threads: int = _setting("OMP_NUM_THREADS", "int", 0, "CPU threads of the kernels.", low=1, high=1024, default_text="all physical cores")
    # -- reuse and checkpoints
    pin_slots: int = _setting("COLI_PIN_SLOTS", "int", 4, "Checkpoints that `pin=1` may keep a slot (least recently used goes first).", low=0, high=1024)
    checkpoint_gb: float = _setting(
        "GLM53_CHECKPOINT_GB",
        "float",
        -1.0,
        "RAM for checkpoints at the last chunk boundaries, in GB; 0 turns them off.",
        low=0.0,
        high=1e6,
        default_text="a twentieth of the available memory, at most 4",
    )
    rewind: bool = _setting("GLM53_REWIND", "bool", False, "Keep a checkpoint before each generated run of blank tokens.")
    # -- experts on disk
    usage: str = _setting("COLI_USAGE", "path", "", "File of the expert usage history.", default_text="`.coli_usage` in the model directory")
    model_mirror: str = _setting(
        "COLI_MODEL_MIRROR",
        "text",
        "",
        "Further copies of the model directory, separated by `;` or `,`. Each shares the expert reads as far as it is fast enough, and stands in for one "
        "that fails.",
        default_text="none",
    )
    # -- Vulkan
    vulkan: bool = _setting(
        "COLI_VULKAN", "bool", False, "Makes `auto` prefer Vulkan, and allows a Vulkan device of type CPU (a software driver)."
    )
    vk_device: str = _setting("COLI_VK_DEVICE", "text", "", "Vulkan device: its index or a part of its name.", default_text="the first usable")
    vk_chain: int = _setting("COLI_VK_CHAIN", "int", 1, "Layers on the device: 0 off, 1 on, 2 for prompts only.", choices=(0, 1, 2))
    vk_chain_layers: int = _setting(
        "COLI_VK_CHAIN_LAYERS", "int", -1, "How many layers, from layer 0, the device holds.", low=0, high=100000, default_text="as many as fit"
    )
    vk_chain_rows: int = _setting("COLI_VK_CHAIN_ROWS", "int", 128, "Rows of a row group on the device.", low=1, high=4096)
    # -- the wire
    caps: bool = _setting("GLM53_CAPS", "bool", True, "Send the CAPS line (0 for gateways from before September 2026).")
    accept: bool = _setting("GLM53_ACCEPT", "bool", True, "Send ACCEPT (0 for old gateways, which cancel a live client without knowing it).")
    # -- debugging
    verbose: bool = _setting("GLM53_VERBOSE", "bool", False, "Explain on stderr what happens to each turn (REUSE, CANCEL, HALT lines).")
    fault: str = _setting(
        "GLM53_FAULT",
        "text",
        "",
        "Debugging: `<site>:<n>` raises at the n-th event of a site (alloc, read, layer, write), once.",
        default_text="none",
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read and check every variable of the table. Raises SettingError naming the first bad one."""
        env = os.environ if environ is None else environ
        values = {f.name: _parse(f, env[f.metadata["name"]]) for f in fields(cls) if env.get(f.metadata["name"], "") != ""}
        return cls(**values)


def _allowed(meta: Mapping[str, Any]) -> str:
    if meta["choices"] is not None:
        return "one of " + ", ".join(map(str, meta["choices"]))
    low, high = meta["low"], meta["high"]
    if meta["kind"] == "bool":
        return "0 or 1"
    noun = {"int": "a whole number", "float": "a number"}.get(meta["kind"], "text")
    return noun if low is None else f"{noun} from {low:.0f} to {high:.0f}"


def _parse(f: Field[Any], text: str) -> Any:
    meta = f.metadata
    kind = meta["kind"]
    try:
        value: Any = text
        if kind == "int":
            if not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):  # int() alone takes 1_0 and other alphabets' digits
                raise ValueError(text)
            value = int(text)
        elif kind == "float":
            if not re.fullmatch(r"[ -~]+", text) or "_" in text:  # float() too
                raise ValueError(text)
            value = float(text)
        elif kind == "bool":
            value = bool(("0", "1").index(text))
    except ValueError:
        raise SettingError(f"{meta['name']}={text!r}: must be {_allowed(meta)}") from None
    if meta["choices"] is not None and value not in meta["choices"]:
        raise SettingError(f"{meta['name']}={text!r}: must be {_allowed(meta)}")
    if meta["low"] is not None and not (isinstance(value, str) or (math.isfinite(value) and meta["low"] <= value <= meta["high"])):
        raise SettingError(f"{meta['name']}={text!r}: must be {_allowed(meta)}")
    return value


def render_markdown() -> str:
    """The text of docs/ENVIRONMENT.md."""
    lines = [
        "# Environment variables",
        "",
        "Read once at start. A value that is not allowed ends the start with one line naming the variable, the value and what is allowed (exit code 1).",
        "",
        "| name | type | default | allowed | meaning |",
        "|---|---|---|---|---|",
    ]
    for f in fields(Settings):
        meta = f.metadata
        default = meta["default_text"]
        if default is None:
            assert f.default is not MISSING
            default = f"`{int(f.default) if isinstance(f.default, bool) else f.default}`"
        lines.append(f"| `{meta['name']}` | {meta['kind']} | {default} | {_allowed(meta)} | {meta['meaning']} |")
    return "\n".join(lines) + "\n"
