"""Routed experts on disk, being read, or in RAM, under a budget: the threads that read them, and what they do when nobody asks.

Who has which buffer is in `glm53serve.experts.residence`; what a layer waits for in `glm53serve.experts.store_need`.

While a layer's attention computes, the readers fetch what its router already says it will choose (`foresee`): asked with the streams as they
are before the attention, the router names its first choices nine times in ten. Earlier tokens tell less: the likeliest absent expert by
them is used 30 to 39 times in 100.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.seam import Halt, never
from glm53serve.experts.files import THREADS, ExpertFiles
from glm53serve.experts.heat import Heat
from glm53serve.experts.memory import allocate
from glm53serve.experts.places import Place, place
from glm53serve.experts.residence import Buffer, Entry, Key, Residence, State
from glm53serve.experts.store_need import StoreNeed
from glm53serve.experts.supply import Ready
from glm53serve.model.checkpoint import Checkpoint, Piece
from glm53serve.model.errors import CheckpointError
from glm53serve.model.weights import FfnWeights, Matrix

FEWEST = 2
"""Experts that are held whatever the budget says: one is computed with while the next is read."""
EXTRA_SHARE = 10
"""As many transit buffers as there are readers may come on top of the budget, up to this part of it."""
MANY = 50
"""With this many buffers a reader one transit buffer more is worth its place: a read goes on while another's product is computed."""


class ExpertStore:
    """All routed experts of a checkpoint. An `ExpertSource` and a `Supply`; one thread computes with it.

    Made small and idle; `open` sets the budget and starts the readers. `note` gets the few lines worth telling. Raises CheckpointError
    (unsupported) when an expert's matrices differ in format.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: ExpertFiles,
        note: Callable[[str], None] = lambda _line: None,
        allocator: Callable[[int], Buffer] = allocate,
    ) -> None:
        config = checkpoint.config
        numbers = {path: number for number, path in enumerate(checkpoint.files)}
        self.layers = config.sparse_layers
        self.experts = config.n_routed_experts
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self.places: dict[Key, Place] = {
            (layer, e): place(_of_one_format(checkpoint.expert_pieces(layer, e)), numbers.__getitem__) for layer in self.layers for e in range(self.experts)
        }
        self.buffer_bytes = max((p.nbytes for p in self.places.values()), default=0)
        self.expert_bytes = max((p.stored for p in self.places.values()), default=1)
        self.heat = Heat(len(self.layers), self.experts)
        self.files = files
        self.reads = self.bytes_read = 0
        self._a_token = config.num_experts_per_tok
        self._note = note
        self._books = Residence(self.layers, self.heat, self.buffer_bytes, allocator, self._short_of_memory)
        self._stable = False
        self._warm: deque[Key] = deque()
        self._warming = 0
        self._warm_error: BaseException | None = None
        self._told = False
        self._readers: list[threading.Thread] = []
        files.on_trouble = note

    # -- life

    def open(self, budget: int) -> None:
        """Start with room for `budget` experts, at least FEWEST."""
        budget, books = min(max(budget, FEWEST), len(self.places)), self._books
        readers = THREADS * len(self.files.copies)
        extra = min(budget // EXTRA_SHARE, readers)
        books.transit = 0 if budget == len(self.places) else min(readers + (budget >= MANY * readers), budget)
        books.keep = budget - max(0, books.transit - extra)
        for number in range(readers):
            reader = threading.Thread(target=self._read_loop, name=f"experts-{number}", daemon=True)
            self._readers.append(reader)
            reader.start()

    @property
    def opened(self) -> bool:
        """True between `open` and `close`."""
        return bool(self._readers)

    @property
    def keep(self) -> int:
        """Experts that stay in RAM."""
        return self._books.keep

    @property
    def transit(self) -> int:
        """Buffers for experts on their way."""
        return self._books.transit

    @property
    def buffers(self) -> int:
        """Buffers made so far, of `buffer_bytes` bytes each."""
        return self._books.buffers

    @property
    def holds_all(self) -> bool:
        """True when every expert has a place in RAM."""
        return self.keep == len(self.places)

    @property
    def stable(self) -> bool:
        """True once every expert is in RAM, where it then stays."""
        if not self._stable and self.holds_all:
            self._stable = bool(self._books.ready.all())
        return self._stable

    def warm(self, history: NDArray[np.uint64] | None = None) -> None:
        """Fill free buffers in the background, the most used experts of the history first. history: uint64 [sparse layers, experts]."""
        if history is not None:
            self.heat.start_from(history, self._a_token)
        order = np.argsort(-self.heat.chance, axis=None, kind="stable")
        if not self.holds_all:
            order = order[self.heat.chance.reshape(-1)[order] > 0]
        with self._books.lock:
            self._warm = deque((self.layers[int(at) // self.experts], int(at) % self.experts) for at in order[: self.keep])
            self._books.work.notify_all()

    def wait_warm(self) -> None:
        """Wait until the background has filled what it could. Raises what its first failed read raised."""
        with self._books.lock:
            while (self._warm or self._warming) and self._warm_error is None and not self._books.closed:
                self._books.arrived.wait()
            if self._warm_error is not None:
                raise self._warm_error

    def close(self) -> None:
        """Stop the readers after the reads they are in, close the files, release memory."""
        with self._books.lock:
            self._books.closed = True
            self._warm.clear()
            self._books.queue.clear()
            self._books.guesses.clear()
            self._books.work.notify_all()
            self._books.arrived.notify_all()
        for reader in self._readers:
            reader.join()
        self._readers.clear()
        self._books.clear()
        self.files.close()

    # -- asking

    def need(self, layer: int, experts: NDArray[np.int64], counts: NDArray[np.int64], rows: int, halt: Halt, in_order: bool) -> StoreNeed:
        """See `Supply`."""
        self.heat.use(self._row[layer], experts, counts, rows)
        return StoreNeed(self._books, layer, [(layer, int(e)) for e in experts], halt, in_order)

    def foresee(self, layer: int, experts: NDArray[np.int64]) -> None:
        """See `Supply`."""
        with self._books.lock:
            self._books.foresee((layer, int(e)) for e in experts)

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """One expert's weights: a copy unless all are in RAM for good.

        Raises IndexError when there is none of that number, ExpertReadError when it cannot be read.
        """
        if (layer, expert) not in self.places:
            raise IndexError(f"no routed expert {expert} in layer {layer}")
        with StoreNeed(self._books, layer, [(layer, expert)], never, True) as need:
            for ready in next(iter(need)):
                w = ready.weights
                if self.stable:
                    return w
                return FfnWeights(_copied(w.gate), _copied(w.up), _copied(w.down))
        raise AssertionError("a need without experts")

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of a layer are in RAM now: bool [experts]."""
        with self._books.lock:
            row: NDArray[np.bool_] = self._books.ready[self._row[layer]].copy()
            return row

    # -- reader threads

    def _read_loop(self) -> None:
        books = self._books
        while True:
            with books.lock:
                entry = self._next()
                while entry is None:
                    if books.closed:
                        return
                    books.work.wait()
                    entry = self._next()
                warming = not entry.pinned and not entry.guessed
                self._warming += warming
                books.reading += 1
                buffer = entry.buffer
            assert buffer is not None
            error: BaseException | None = None
            ready = None
            where = self.places[entry.key]
            try:
                self.files.fetch(where, buffer)
                ready = Ready(*entry.key, where.weights(buffer))
            except Exception as reason:  # noqa: BLE001 - handed to the thread that asked for the expert
                error = reason
            with books.lock:
                self._warming -= warming
                books.reading -= 1
                self._landed(entry, ready, error, where.nbytes)

    def _next(self) -> Entry | None:
        """The next read, with its buffer; None when there is nothing to do or no room to do it in."""
        books = self._books
        if books.closed:
            return None
        if books.queue:
            entry = books.queue[0]
            try:
                if not books.room(entry):
                    return None
            except MemoryError as error:
                entry.error = error
                books.queue.popleft()
                books.arrived.notify_all()
                return None
            # giving room may have put another one at the end, never before this one
            books.queue.popleft()
            entry.state = State.READING
            return entry
        try:
            guess = books.guess()
            return guess if guess is not None else self._next_warm()
        except MemoryError:
            # who needs an expert is told; nobody needs these
            books.guesses.clear()
            self._warm.clear()
            books.arrived.notify_all()
            return None

    def _next_warm(self) -> Entry | None:
        """The next read that only fills the cache; one reader stays free for what is needed now."""
        while self._warm and self._warming < max(1, len(self._readers) - 1):
            key = self._warm.popleft()
            if key in self._books.entries:
                continue
            unasked = self._books.room_unasked(key)
            if unasked is None:
                self._warm.clear()
                self._books.arrived.notify_all()
            return unasked
        return None

    def _landed(self, entry: Entry, ready: Ready | None, error: BaseException | None, nbytes: int) -> None:
        books = self._books
        self.reads += 1
        self.bytes_read += nbytes
        if ready is not None:
            books.landed(entry, ready)
        else:
            pinned = entry.pinned
            books.drop(entry)
            if pinned:
                entry.error = error
            else:
                # whoever needs it reads it again, and is told when that fails too
                if not self._told:
                    self._note(f"{error}; it is tried again when needed")
                self._told = True
                books.guesses.clear()
                if not entry.guessed:
                    self._warm_error = self._warm_error or error
        books.arrived.notify_all()
        if books.queue or books.guesses or self._warm:
            books.work.notify_all()

    def _short_of_memory(self, line: str) -> None:
        self._note(line)
        self._warm.clear()


def _of_one_format(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    for piece in pieces:
        if piece.format != pieces[0].format:
            what = f"{piece.tensor}: {piece.format}, {pieces[0].tensor} is {pieces[0].format}"
            raise CheckpointError(f"{what}: an expert's matrices must have one format (glm53serve convert makes them alike)", "unsupported")
    return pieces


def _copied(m: Matrix) -> Matrix:
    scale: Any = None if m.scale is None else m.scale.copy()
    return Matrix(m.format, m.rows, m.cols, m.data.copy(), scale)
