"""A run of layers on the CPU, behind the seam of `glm53serve.engine.seam`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu.plain import PlainStack
from glm53serve.cpu.state import SlotState
from glm53serve.cpu.threads import physical_cores
from glm53serve.engine.seam import Batch, Halt, Meter
from glm53serve.model.config import DSA, SHARED, SPARSE, ModelConfig
from glm53serve.model.weights import ExpertSource, LayerWeights

if TYPE_CHECKING:
    from glm53serve.cpu.stack import CompiledStack

F32 = NDArray[np.float32]


class CpuLayers:
    """Layers `layers` of a model, computed in row groups so that `halt` is asked often.

    layer_weights(l) gives the weights of layer l, asked once each in order; experts the routed ones as they are needed. Dense matrices
    are kept in `bits` (4, 8, 16 or 32); mHC, router, norms, biases, convolution taps and b_proj stay as stored. `slots` bounds the slots
    that may be open; `threads` is the number of threads, 0 = all physical cores. Without Numba the layers run in NumPy; `note` is told of
    that and of compiling.
    Raises ValueError when the run begins with a shared indexer layer, whose selection another backend would hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        layer_weights: Callable[[int], LayerWeights],
        experts: ExpertSource,
        slots: int,
        bits: int,
        progress: Callable[[int], None] | None = None,
        threads: int = 0,
        note: Callable[[str], None] = lambda _line: None,
    ) -> None:
        if len(layers) and config.layer_kinds[layers[0]] == DSA and config.indexer_kinds[layers[0]] == SHARED:
            raise ValueError(f"layer {layers[0]} uses the selection of layer {layers[0] - 1}: both must be on one backend")
        self.config = config
        self.layers = layers
        self.meter = Meter()
        self.slots = slots
        self.experts = experts
        self._sparse = {l: n for n, l in enumerate(i for i in layers if config.mlp_kinds[i] == SPARSE)}
        self._open: dict[int, SlotState] = {}
        self._uses: dict[int, NDArray[np.uint32]] = {}
        self._snapshot: F32 | None = None
        self._stack: PlainStack | CompiledStack
        try:
            from glm53serve.cpu.warm import ensure_compiled

            ensure_compiled(note)
            from glm53serve.cpu.stack import CompiledStack
        except ImportError as missing:
            note(f"compiled kernels are not to be had ({missing}); NumPy computes, slowly")
            self._stack = PlainStack(config, experts, self.meter, bits, self._count)
        else:
            self._stack = CompiledStack(config, layers, experts, self.meter, bits, threads or physical_cores(), self._count)
        for index in layers:
            self._stack.append(layer_weights(index))
            if progress is not None:
                progress(index)

    # --- slots -------------------------------------------------------------------------------------------------------------------

    def open_slot(self, slot: int, capacity: int) -> None:
        """Make room for `capacity` positions of a slot and empty it. DSA rows are allocated as they come."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot}: there are slots 0..{self.slots - 1}")
        self._open[slot] = SlotState(self.config, self.layers, capacity, self._stack.multiple)
        self._stack.open(slot, self._open[slot])
        self._uses[slot] = np.zeros((len(self._sparse), self.config.n_routed_experts), np.uint32)

    def reset_slot(self, slot: int) -> None:
        """Empty a slot."""
        self._open[slot].reset()

    def state(self, slot: int) -> SlotState:
        """The slot's state itself, for a backend that shares these layers and moves it."""
        return self._open[slot]

    def snapshot(self, slot: int) -> None:
        """Copy what a chunk changes in place into the one buffer, allocated at first use. Raises MemoryError when there is none to be had."""
        flat = self._open[slot].flat
        if self._snapshot is None:
            self._snapshot = np.empty_like(flat)
        np.copyto(self._snapshot, flat)

    def restore(self, slot: int) -> None:
        """Put the last snapshot back. Raises RuntimeError when there was none."""
        if self._snapshot is None:
            raise RuntimeError("restore without a snapshot")
        np.copyto(self._open[slot].flat, self._snapshot)

    def save(self, slot: int) -> F32:
        """An independent copy of what `snapshot` holds."""
        return self._open[slot].flat.copy()

    def load(self, slot: int, copy: F32) -> None:
        """Put a saved copy back."""
        np.copyto(self._open[slot].flat, copy)

    # --- telemetry ---------------------------------------------------------------------------------------------------------------

    def expert_uses(self, slot: int) -> NDArray[np.uint32]:
        """Uses of each routed expert by this slot's rows since `clear_uses`: uint32 [sparse layers held, experts]."""
        return self._uses[slot]

    def clear_uses(self, slot: int) -> None:
        """Zero this slot's expert uses."""
        self._uses[slot].fill(0)

    def tiers(self) -> NDArray[np.uint8]:
        """Where each routed expert is now: uint8 [sparse layers held, experts], 0 disk, 1 RAM. A source that cannot tell holds all in RAM."""
        resident = getattr(self.experts, "resident", None)
        tiers = np.ones((len(self._sparse), self.config.n_routed_experts), np.uint8)
        if resident is not None:
            for layer, row in self._sparse.items():
                tiers[row] = resident(layer)
        return tiers

    def interrupt(self) -> None:
        """A halt was asked for: stop inside the operation that runs instead of at the next question. From any thread."""
        if not isinstance(self._stack, PlainStack):
            self._stack.interrupt()

    def close(self) -> None:
        """Release weights, slots and the snapshot buffer."""
        self._stack.close()
        release = getattr(self.experts, "close", None)
        if release is not None:
            release()
        self._open.clear()
        self._uses.clear()
        self._snapshot = None

    # --- the way through ---------------------------------------------------------------------------------------------------------

    def forward(self, streams: F32, batch: Batch, halt: Halt) -> F32:
        """Run all layers over streams [rows, hc_mult, H], overwritten and returned (see the seam). Raises Halted."""
        return self._stack.forward(streams, batch, self._open, halt)

    def _count(self, index: int, batch: Batch, chosen: NDArray[np.int64]) -> None:
        first = 0
        for span in batch.spans:
            used = chosen[first : first + span.count]
            self._uses[span.slot][self._sparse[index]] += np.bincount(used.ravel(), minlength=self.config.n_routed_experts).astype(np.uint32)
            first += span.count
