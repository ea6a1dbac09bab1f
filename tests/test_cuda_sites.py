"""A site of few rows on the emulated device: clusters of all sizes give what the model spec says, and what clusters may not do is found."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from emulated_device import EmulatedDevice, build, compiler  # noqa: E402

from glm53serve.cuda.model import site_blocks  # noqa: E402
from glm53serve.cuda.runtime import Buffer, Returned, SiteGiven  # noqa: E402
from glm53serve.model.quant import bf16_to_f32  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
Floats = NDArray[np.float64]
EPS, HC_EPS, ROUNDS, TOP_K = 1e-5, 1e-6, 7, 3


class SiteDevice(EmulatedDevice):
    """An emulated device with the kernels of the residual streams alone. `edit` may change their text."""

    def __init__(self, streams: int, h: int, blocks: int, edit: Callable[[str], str] = str) -> None:
        self._edit = edit
        self.blocks = blocks
        others = {"KDA_D": 16, "CONV": 4, "LATENT": 64, "HEADS": 4, "MAX_ROWS": 16, "FORMATS": 2, "EXACT": 0}
        super().__init__({"HIDDEN": h, "SITE_BLOCKS": blocks, "HC": streams, **others})

    def _build(self, defines: Mapping[str, int]) -> Path:
        return build(defines, edit=self._edit, sources=("hyper",))

    def put(self, values: NDArray[Any]) -> Buffer:
        """An array on the device."""
        room = self.alloc(values.nbytes + 1024)
        self.upload(room.at(), values)
        return room

    def get(self, room: Buffer, shape: tuple[int, ...], kind: type = np.float32) -> NDArray[Any]:
        """An array from the device."""
        out = np.empty(shape, kind)
        self.download(room.at(), out)
        return out


@lru_cache
def device(streams: int, h: int, blocks: int) -> SiteDevice:
    """A device for so many streams of this width, and clusters of so many blocks."""
    return SiteDevice(streams, h, blocks)


class Case:
    """Random inputs of a site of `rows` rows; the last one is dead where the half before was a mixture."""

    def __init__(self, streams: int, h: int, rows: int, mixture: bool = False) -> None:
        rng = np.random.default_rng(100 * h + streams)
        self.streams, self.h, self.rows, self.mixture = streams, h, rows, mixture
        self.outs = (2 + streams) * streams
        self.x, self.y = rng.standard_normal((rows, streams, h)), rng.standard_normal((rows, h))
        self.fn, self.norm = rng.standard_normal((self.outs, streams * h)), rng.standard_normal(h)
        self.base, self.scale = rng.standard_normal(self.outs), rng.standard_normal(3)
        self.logits = rng.standard_normal((rows, streams + streams**2))  # of the site before
        self.pairs, self.weights = rng.standard_normal((rows, TOP_K, h)), rng.standard_normal((rows, TOP_K))
        self.ids = rng.integers(0, 4, (rows, TOP_K)).astype(np.int32)
        if mixture:
            self.ids[-1] = -1
            self.pairs[-1] = np.nan  # what a dead row has in their place is not looked at

    def expected(self, mixed: bool) -> tuple[Floats, Floats, Floats]:
        """Streams, logits and normalised input, as model spec 3 has them."""
        x = self.x
        if mixed:
            experts = np.where(self.ids >= 0, self.weights, 0)[:, :, None] * np.nan_to_num(self.pairs)
            result = self.y + experts.sum(1) * self.mixture
            post, matrix = coefficients(self.logits, self.streams)
            x = post[:, :, None] * result[:, None] + np.einsum("tjk,tjc->tkc", matrix, x)
        flat, n = x.reshape(self.rows, -1), self.streams
        logits = flat @ self.fn.T / np.sqrt((flat * flat).mean(1, keepdims=True) + EPS) * np.repeat(self.scale, [n, n, n * n]) + self.base
        collapsed = np.einsum("tj,tjc->tc", 1 / (1 + np.exp(-logits[:, :n])) + HC_EPS, x)
        return x, logits[:, n:], self.norm * collapsed / np.sqrt((collapsed * collapsed).mean(1, keepdims=True) + EPS)

    def run(self, on: SiteDevice, mixed: bool, whole: bool = True, first: int = 0, rows: int | None = None, ahead: int = 0) -> tuple[NDArray[Any], ...]:
        """The same from the device; `whole`: not only the mix; `rows` rows from `first` on; `ahead`: rows of every array before those, which are not there."""
        rows = self.rows if rows is None else rows
        some, ld = slice(first, first + rows), self.h + 8
        x, logits, y, pairs, weights = (on.put(v[some].astype(np.float32)) for v in (self.x, self.logits, self.y, self.pairs, self.weights))
        ids, *out = on.put(self.ids[some]), *(on.put(np.full((rows, ld), 0x7FC0, np.uint16)) for _ in range(2))

        def begin(room: Buffer, width: int, size: int = 4) -> int:
            return room.address - ahead * width * size

        experts = (begin(pairs, TOP_K * self.h), begin(ids, TOP_K), begin(weights, TOP_K), TOP_K) if self.mixture else ()
        returned = Returned(begin(y, self.h), *experts) if mixed else Returned()
        given = SiteGiven(begin(x, self.streams * self.h), int(mixed), begin(logits, self.logits.shape[1]), returned)
        if whole:
            given.fn, given.base, given.scale, given.norm = (on.put(v.astype(np.float32)).address for v in (self.fn, self.base, self.scale, self.norm))
        given.norm_eps, given.hc_eps, given.iterations, given.ldx = EPS, HC_EPS, ROUNDS, ld
        given.x_high, given.x_low = (begin(part, ld, 2) for part in out)
        on.launch("site", (on.blocks, rows), 256, [given], cluster=on.blocks)
        normed = sum(bf16_to_f32(on.get(part, (rows, ld), np.uint16)) for part in out)
        assert np.isnan(normed[:, self.h :]).all(), "what lies behind a row is not touched"
        return on.get(x, (rows, self.streams, self.h)), on.get(logits, (rows, self.logits.shape[1])), normed[:, : self.h]


def coefficients(logits: Floats, streams: int) -> tuple[Floats, Floats]:
    """What a result enters the streams by, and the balanced matrix."""
    matrix = logits[:, streams:].reshape(-1, streams, streams)
    matrix = np.exp(matrix - matrix.max(2, keepdims=True))
    matrix = matrix / matrix.sum(2, keepdims=True) + HC_EPS
    for turn in range(ROUNDS):
        if turn:
            matrix = matrix / (matrix.sum(2, keepdims=True) + HC_EPS)
        matrix = matrix / (matrix.sum(1, keepdims=True) + HC_EPS)
    return 2 / (1 + np.exp(-logits[:, :streams])), matrix


def check(got: tuple[NDArray[Any], ...], expected: tuple[Floats, ...]) -> None:
    """Within the rounding of float32 (the last one of bf16 pairs)."""
    for values, right in zip(got, expected, strict=True):
        assert np.abs(values - right).max() <= 3e-5 * np.abs(right).max()


@pytest.mark.parametrize(
    ("streams", "h", "blocks"),
    [(4, 8, 2), (4, 36, 2), (3, 1031, 2), (2, 100, 2), (4, 192, 4), (1, 2100, 4), (4, 100, 8), (1, 36, 8), (4, 36, 16), (2, 192, 16), (3, 1280, 16)],
)
def test_clusters_of_all_sizes_give_what_the_spec_says(streams: int, h: int, blocks: int) -> None:
    """Blocks with a few columns, with none and with more than they have threads; widths that are no multiple of four."""
    on = device(streams, h, blocks)
    for mixture in (False, True):
        case, seen = Case(streams, h, 2, mixture), []
        for on.copies_late in (True, False):
            seen.append(case.run(on, mixed=True))
            check(seen[-1], case.expected(True))
        assert all(np.array_equal(late, early) for late, early in zip(*seen, strict=True))
    check(case.run(on, mixed=False), case.expected(False))


@pytest.mark.parametrize("mixture", [False, True])
def test_a_pass_ends_with_a_mix_alone(mixture: bool) -> None:
    case = Case(4, 192, 3, mixture)
    x, logits, out = case.run(device(4, 192, 4), mixed=True, whole=False)
    check((x,), case.expected(True)[:1])
    assert np.array_equal(logits, case.logits.astype(np.float32)) and np.isnan(out).all()


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    on, case = device(4, 192, 4), Case(4, 192, 5)
    together = case.run(on, mixed=True)
    for row in range(case.rows):
        for alone, among in zip(case.run(on, True, first=row, rows=1), together, strict=True):
            assert np.array_equal(alone[0], among[row])


def test_rows_of_long_passes_lie_beyond_two_to_the_31_values() -> None:
    """Odd widths and exact models have prompts of any length here: rows so far on that their places do not fit 32 bits. In a process of its own."""
    ahead, case = 1 << 24, Case(4, 192, 2, mixture=True)
    on = SiteDevice(4, 192, 4, lambda text: text.replace("row = blockIdx.y, begin", f"row = {ahead} + blockIdx.y, begin"))
    child = os.fork()
    if not child:
        faulthandler.disable()
        outcome = 1
        try:
            check(case.run(on, mixed=True, ahead=ahead), case.expected(True))
            outcome = 0
        finally:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0


def test_a_site_has_two_blocks_at_least_and_a_block_64_columns_beyond_that() -> None:
    assert [site_blocks(h) for h in (8, 100, 127, 128, 300, 512, 1024, 4096, 16384)] == [2, 2, 2, 2, 4, 8, 16, 16, 16]


MISTAKES = {
    "a block sends before all have begun": ("        cluster_wait();\n", "", "that may not have begun"),
    "not every thread arrives": ("        cluster_arrive();\n", "        if (threadIdx.x) cluster_arrive();\n", "has not arrived"),
    "not every thread waits": ("        cluster_wait();\n", "        if (threadIdx.x) cluster_wait();\n", "that may not have begun"),
    "a block leaves the cluster": ("    LET_NEXT_START();\n", "    LET_NEXT_START();\n    if (rank == 3) return;\n", "not every thread reaches"),
    "sums are used before they are there": ("    barrier_wait_sent(&heard[0], 0);\n", "", "copies under way"),
    "a block ends before it has all": ("    barrier_wait_sent(&heard[1], 0);\n", "", "a block that has ended|copies under way"),
    "a block is not told": ("if (lane < SITE_BLOCKS) send16(", "if (lane < SITE_BLOCKS - 1) send16(", "not every thread reaches"),
    "one is told twice": ("square, &heard[1], lane);", "square, &heard[1], lane & ~1);", "copies under way|not every thread reaches"),
}  # fmt: skip
"""What is changed in the kernel's text, and what is said then."""


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_clusters_are_found(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    right, wrong, said = MISTAKES[name]

    def edit(text: str) -> str:
        site = text.index(" site(const")
        end = text.index("\n}\n", site)
        assert text[site:end].count(right) == 1
        return text[:site] + text[site:end].replace(right, wrong) + text[end:]

    on, case = SiteDevice(4, 192, 4, edit), Case(4, 192, 2)
    child = os.fork()
    if not child:
        faulthandler.disable()
        case.run(on, mixed=True)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    errors = capfd.readouterr().err
    assert any(part in errors for part in said.split("|")), errors
    assert os.WTERMSIG(ended) == signal.SIGABRT
