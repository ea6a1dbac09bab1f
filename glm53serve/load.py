"""From a model directory to an engine: pick the backends, load the weights, size the caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53serve.backends import History, Request, choose
from glm53serve.engine.engine import Engine, Note
from glm53serve.engine.faults import FaultError, Faults
from glm53serve.engine.seam import Head, Layers
from glm53serve.engine.tokenizer import Tokenizer, TokenizerError
from glm53serve.experts import ExpertFiles, ExpertStore, experts_in_ram, model_copies, open_store
from glm53serve.experts.memory import available_bytes
from glm53serve.experts.usage import UsageError, read_history
from glm53serve.home import user_cache
from glm53serve.model.checkpoint import Checkpoint, open_checkpoint
from glm53serve.model.config import ModelConfig
from glm53serve.model.errors import ErrorKind, ModelError
from glm53serve.model.info import slot_bytes
from glm53serve.settings import Settings

GB = 10**9
Progress = Callable[[int], None]


class LoadError(Exception):
    """The engine cannot start. `kind` is nomem, io, format or unsupported."""

    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class Loaded:
    """A model ready to run: its engine, tokenizer and the ids that end an answer."""

    directory: Path
    checkpoint: Checkpoint
    engine: Engine
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    bits: int
    experts: ExpertStore | None = None


def shipped_model() -> Path:
    """The model that comes with the package."""
    return Path(__file__).parent / "data" / "glm53-nano"


def usage_path(directory: Path, setting: str) -> Path:
    """Where a model's expert usage history lives: COLI_USAGE, else beside the model; for the shipped model in the user's cache directory, or nowhere."""
    if setting:
        return Path(setting)
    if directory.resolve() != shipped_model().resolve():
        return directory / ".coli_usage"
    folder = user_cache()
    return Path(os.devnull) if folder is None else folder / f"{directory.name}.usage"


def load(
    directory: Path,
    settings: Settings,
    *,
    slots: int,
    specials_stop: bool,
    backend: str | None = None,
    expert_slots: int = 0,
    note: Note = lambda _line: None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model. `expert_slots` > 0 is the expert cache in experts a layer and wins over GLM53_EXPERT_GB. Raises LoadError."""
    try:
        faults = Faults(settings.fault)
        checkpoint = open_checkpoint(directory, mapped=False)
        tokenizer = Tokenizer(directory)
        engine, bits, store = _engine(checkpoint, settings, slots, backend or settings.backend, expert_slots, faults, note, progress)
    except ModelError as error:
        raise LoadError(error.kind, str(error)) from error
    except (TokenizerError, FaultError) as error:
        raise LoadError("format", str(error)) from error
    except MemoryError as error:
        raise LoadError("nomem", f"{directory}: not enough memory to load the model ({error})") from error
    except OSError as error:
        raise LoadError("io", f"{directory}: {error}") from error
    stop_ids = frozenset(checkpoint.config.eos_token_ids) | (tokenizer.special_ids if specials_stop else frozenset())
    return Loaded(directory, checkpoint, engine, tokenizer, stop_ids, bits, store)


def _engine(
    checkpoint: Checkpoint, settings: Settings, slots: int, wanted: str, expert_slots: int, faults: Faults, note: Note, progress: Progress | None
) -> tuple[Engine, int, ExpertStore | None]:
    from glm53serve.cpu.head import CpuHead
    from glm53serve.cpu.layers import CpuLayers

    config = checkpoint.config
    available = available_bytes()
    bits = settings.bits or default_bits(checkpoint, available)
    store = _expert_store(checkpoint, settings, faults, note)
    budget = int(settings.checkpoint_gb * GB) if settings.checkpoint_gb >= 0 else min(4 * GB, available // 20)

    def cpu(layers: range) -> Layers:
        return CpuLayers(config, layers, checkpoint.layer, store or checkpoint, slots, bits, progress, settings.threads, note)

    def open_experts() -> None:
        # open already when a device that is lost held only a part of the layers
        if store is not None and not store.opened:
            open_store(store, experts_in_ram(store, expert_slots, settings.expert_gb, later_bytes(config, slots, settings, budget)))

    def cpu_head() -> Head:
        return CpuHead(config, checkpoint.embedding(), checkpoint.final_norm(), checkpoint.lm_head(), bits, settings.threads)

    chosen = choose(wanted, Request(checkpoint, settings, slots, bits, cpu, note, progress, _history(checkpoint, settings, note)))
    head = chosen.head or cpu_head()

    def replace() -> tuple[list[Layers], Head]:
        layers = cpu(range(config.num_layers))
        open_experts()
        return [layers], cpu_head() if chosen.head else head

    engine = Engine(
        config,
        chosen.backends,
        head,
        slots,
        settings.maxt,
        settings.prefill_chunk,
        pins=settings.pin_slots,
        checkpoint_bytes=budget,
        faults=faults,
        note=note,
        replace=replace,
        ahead=chosen.ahead,
        network=chosen.network,
    )
    if any(isinstance(getattr(backend, "host", backend), CpuLayers) for backend in chosen.backends):
        open_experts()
    return engine, bits, store


def _history(checkpoint: Checkpoint, settings: Settings, note: Note) -> History:
    """Reads the expert usage history when a backend asks for it; one that is of no use is said once and left alone."""
    path, config = usage_path(checkpoint.directory, settings.usage), checkpoint.config

    def read() -> NDArray[np.uint64] | None:
        try:
            return read_history(path, len(config.sparse_layers), config.n_routed_experts)
        except UsageError as error:
            note(f"{path}: no usable usage history ({error}); experts are placed without")
            return None

    return read


def _expert_store(checkpoint: Checkpoint, settings: Settings, faults: Faults, note: Note) -> ExpertStore | None:
    """The store of the routed experts, still empty; None for a model without."""
    if not checkpoint.config.sparse_layers:
        return None
    files = ExpertFiles(model_copies(checkpoint.directory, checkpoint.files, settings.model_mirror), faults)
    return ExpertStore(checkpoint, files, note)


def later_bytes(config: ModelConfig, slots: int, settings: Settings, checkpoints: int) -> int:
    """Memory that conversations will take: states, rows of full slots, a snapshot, kept checkpoints, the activations of a chunk."""
    fixed, a_token = slot_bytes(config)
    scratch = settings.prefill_chunk * 4 * config.hidden_size * (3 * config.hc_mult + 8)
    return (slots + 1) * fixed + slots * settings.maxt * a_token + checkpoints + scratch


def default_bits(checkpoint: Checkpoint, available: int) -> int:
    """Bits of the dense matrices when GLM53_BITS is unset: 16 when they then take less than half of the available memory, else 4."""
    return 16 if checkpoint.dense_bytes < available // 2 else 4
