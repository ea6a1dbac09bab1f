"""The memory compiled layers work on: tables of slots, one row group, one chunk, one run of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cpu import packing as pk
from glm53serve.cpu.kernels import dsa, experts, kda
from glm53serve.cpu.kernels.fields import address
from glm53serve.cpu.packing import GROUP
from glm53serve.cpu.program import Cell, Form, zeros
from glm53serve.cpu.rows import GROUP_ROWS, Group
from glm53serve.cpu.state import SlotState, padded
from glm53serve.model.config import DSA, ModelConfig

F32 = NDArray[np.float32]
RUN_ROWS = 256
"""Assignments of rows to experts computed in one run."""


def p64(size: int) -> int:
    """The next multiple of 64."""
    return padded(size, GROUP)


class Slots:
    """Tables by which kernels find a slot's memory: its flat array, then latents and pool keys of each DSA layer held; and scratch for the
    scores of all pools of a few rows."""

    def __init__(self, config: ModelConfig, layers: range) -> None:
        self.dsa_layers = [i for i in layers if config.layer_kinds[i] == DSA]
        self.kpool = config.index_kpool
        self.tables: dict[int, NDArray[np.int64]] = {}
        self.room: dict[int, int] = {}
        self.scores, self.score_room = Cell(), Cell()
        self._scores: F32 = np.empty((dsa.FEW_ROWS, 0), np.float32)

    def latents_at(self, layer: int) -> int:
        """Byte offset of a layer's latents in a table; its pool keys are 8 bytes on."""
        return 8 + 16 * self.dsa_layers.index(layer)

    def open(self, slot: int, state: SlotState) -> None:
        """A new or emptied slot."""
        self.tables[slot] = np.zeros(1 + 2 * len(self.dsa_layers), np.int64)
        self.tables[slot][0] = address(state.flat)
        self.room[slot] = 0

    def reserve(self, slot: int, state: SlotState, end: int, keep: int) -> None:
        """Make room for positions below `end` in every DSA layer. Raises MemoryError; there is then no more room than before."""
        if end <= self.room[slot]:
            return
        table, room = self.tables[slot], end
        for n, layer in enumerate(self.dsa_layers):
            store = state.dsa[layer]
            store.reserve(end, keep)
            table[1 + 2 * n], table[2 + 2 * n] = address(store.latents), address(store.pool_keys)
            room = len(store.latents)
        pools = room // self.kpool + 4
        if pools > self._scores.shape[1]:
            self._scores = np.empty((dsa.FEW_ROWS, pools), np.float32)
            self.scores.set(address(self._scores))
            self.score_room.set(pools)
        self.room[slot] = room


class GroupMemory:
    """What describes the row group being computed, and scratch by width that lives no longer than one operation's successor."""

    def __init__(self) -> None:
        self.count, self.first, self.pieces, self.total, self.zero = (Cell() for _ in range(5))
        self.rows = np.zeros((GROUP_ROWS, len(dsa.ROW_FIELDS)), np.int64)
        self.table = np.zeros((GROUP_ROWS, len(kda.PIECE_FIELDS)), np.int64)
        self._buffers: dict[tuple[str, int], F32] = {}
        self._forms: dict[tuple[Any, ...], Form] = {}

    def buffer(self, name: str, width: int) -> F32:
        """Scratch float32 [GROUP_ROWS, width], shared by all layers under that name; columns beyond what is written stay zero."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = zeros(GROUP_ROWS, width)
        return self._buffers[name, width]

    def form(self, name: str, width: int, kinds: set[int], natural: F32 | None = None, offset: int = 0) -> Form:
        """The same for activations in forms."""
        key = (name, width, offset, *sorted(kinds & {pk.INT4, pk.INT4_Q16}))
        if key not in self._forms:
            self._forms[key] = Form(GROUP_ROWS, width, kinds, natural, offset)
        return self._forms[key]

    def describe(self, group: Group, slots: Slots) -> None:
        """Set the group that programs work on."""
        self.count.set(group.count)
        self.first.set(group.first)
        self.pieces.set(len(group.pieces))
        for n, piece in enumerate(group.pieces):
            slot = address(slots.tables[piece.slot])
            self.table[n] = (piece.first, piece.count, slot)
            part = self.rows[piece.first : piece.first + piece.count]
            part[:, 0] = np.arange(piece.start, piece.start + piece.count)
            part[:, 1] = slot


class ChunkMemory:
    """What lives as long as a chunk's pass through a layer, for up to `rows` rows."""

    def __init__(self, config: ModelConfig, row_count: int, kinds: set[int]) -> None:
        c, hidden = config, p64(config.hidden_size)
        n = c.hc_mult
        self.row_count = row_count
        self.streams = zeros(row_count, n, hidden)
        self.mixes = zeros(row_count, p64(n + n * n))
        self.x = Form(row_count, hidden, kinds)
        self.y, self.y2 = zeros(row_count, hidden), zeros(row_count, hidden)
        k = c.num_experts_per_tok
        self.chosen = zeros(row_count, k, dtype=np.int64)
        self.weights = zeros(row_count, k)
        self.starts = zeros(c.n_routed_experts + 1, dtype=np.int64)
        self.order_rows = zeros(row_count * k, dtype=np.int64)
        self.order_weights = zeros(row_count * k)
        budget = c.index_topk // c.index_kpool
        self.pools = zeros(row_count, budget, dtype=np.int32)
        self.pool_counts = zeros(row_count, dtype=np.int64)


class RunMemory:
    """Buffers of one run of experts and the record that says which assignments it has."""

    def __init__(self, config: ModelConfig, kinds: set[int]) -> None:
        hidden, inner = p64(config.hidden_size), p64(config.moe_intermediate_size)
        self.run = np.zeros(len(experts.RUN_FIELDS), np.int64)
        self.assignments = Cell(self.run[:1])
        self.row = Cell(self.run[4:5])
        self.x = Form(RUN_ROWS, hidden, kinds)
        self.both = zeros(RUN_ROWS, 2 * inner)
        self.middle = Form(RUN_ROWS, inner, kinds)
        self.out = zeros(RUN_ROWS, hidden)

    def set(self, first: int, count: int, first_expert: int, last_expert: int, row: int = 0) -> None:
        """Which assignments, whose, and where their rows begin in the buffers."""
        self.run[:] = (count, first, first_expert, last_expert, row)
