"""Products of few rows on the emulated device: every order in which warps and copies may come gives the same bits, and a wait that is missing shows."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

CUDA_TESTS = Path(__file__).parent / "cuda"
sys.path[:0] = [str(CUDA_TESTS), str(CUDA_TESTS / "emulator")]

from emulated_device import EmulatedDevice, build, compiler  # noqa: E402

from glm53serve.cuda import products  # noqa: E402
from glm53serve.cuda.model import defines  # noqa: E402
from glm53serve.cuda.products import MAP_PAIR, MAP_TOKEN, ExpertGroups, product, run_products  # noqa: E402
from glm53serve.cuda.scratch import SplitRows, padded  # noqa: E402
from glm53serve.cuda.upload import Uploader  # noqa: E402
from glm53serve.model.config_file import parse_config  # noqa: E402
from glm53serve.model.quant import bf16_to_f32, f32_to_bf16  # noqa: E402
from glm53serve.model.shapes import shape_config  # noqa: E402
from glm53serve.model.weights import Matrix, MatrixFormat  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None or sys.platform != "linux", reason="needs a C++ compiler on Linux to build the emulated kernels")
CONFIG = parse_config(shape_config("flash", 4, 8, fp8=False))
SIZES = {**defines(CONFIG, {"bf16", "int8"}), "HIDDEN": 256}
WAITS = {
    "sums that are not all there": "    barrier_wait(&room.gates->sums_full[buffer], turn >> 1 & 1);\n",
    "sums over others that are still wanted": "    if (at.turn > 1) barrier_wait(&room.gates->sums_empty[buffer], (at.turn >> 1) - 1 & 1);\n",
    "activations that have not come": "            barrier_wait(&room.gates->x_full[place], at.loads >> place & 1);\n",
    "activations over others that are still wanted": "            barrier_wait(&room.gates->x_empty[before], (at.releases >> before & 1) ^ 1);\n",
    "what the first thread prepares": "    __syncthreads();  // zeros, gates and groups are there\n",
    "new activations over the old ones": "        __syncthreads();  // nobody reads what lies there\n",
}
"""Waits of gemv.cu by what happens without them."""


class OneWaitLess(EmulatedDevice):
    """The emulated device; `leave_out(name)` switches one of WAITS off, None all of them on."""

    def _build(self, defines: Mapping[str, int]) -> Path:
        return build(defines, edit=_switchable)

    def leave_out(self, name: str | None) -> None:
        self._library.leave_out(ctypes.c_int(-1 if name is None else list(WAITS).index(name)))


def _switchable(text: str) -> str:
    for i, wait in enumerate(WAITS.values()):
        assert text.count(wait) == 1, wait
        text = text.replace(wait, f"if (left_out != {i}) {{ {wait.partition('  //')[0].strip()} }}\n")
    return f'static int left_out = -1;\nextern "C" void leave_out(int which) {{ left_out = which; }}\n{text}'


class Bench:
    """Three matrices in one launch, each over the activations [rows, cols] of its number in `over`: two over the same, unless told."""

    def __init__(self, device: EmulatedDevice, rows: int, cols: int, *formats: MatrixFormat, over: tuple[int, int, int] = (0, 1, 0)) -> None:
        self.device, self.rows, self.over = device, rows, over
        random = np.random.default_rng(rows)
        self.matrices = [_matrix(random, formats[i % len(formats)], out, cols) for i, out in enumerate((200, 72, 136))]
        self.on_device = [Uploader(device, CONFIG).matrix(m) for m, _ in self.matrices]  # type: ignore[arg-type]
        self.x = [random.standard_normal((rows, cols)).astype(np.float32) for _ in range(2)]
        self.inputs = [self._pairs(x) for x in self.x]
        self.outputs = [device.alloc(4 * rows * m.rows) for m in self.on_device]

    def _pairs(self, x: NDArray[np.float32]) -> SplitRows:
        ld = padded(x.shape[1])
        wide = np.zeros((len(x), ld), np.float32)
        wide[:, : x.shape[1]] = x
        high = f32_to_bf16(wide)
        split = SplitRows(self.device.alloc(high.nbytes), self.device.alloc(high.nbytes), ld)
        assert split.low
        self.device.upload(split.high.at(), high)
        self.device.upload(split.low.at(), f32_to_bf16(wide - bf16_to_f32(high)))
        return split

    def run(self) -> list[NDArray[np.float32]]:
        """Results [rows, out] of the three matrices."""
        for y in self.outputs:
            self.device.upload(y.at(), np.full(y.nbytes // 4, np.nan, np.float32))
        jobs = [product(m, self.inputs[x], y, m.rows) for m, x, y in zip(self.on_device, self.over, self.outputs, strict=True)]
        run_products(self.device, self.rows, jobs, 64)
        out = []
        for m, y in zip(self.on_device, self.outputs, strict=True):
            out.append(np.empty((self.rows, m.rows), np.float32))
            self.device.download(y.at(), out[-1])
        return out

    def expected(self) -> list[NDArray[np.float64]]:
        return [self.x[x].astype(np.float64) @ values.T for x, (_, values) in zip(self.over, self.matrices, strict=True)]


class Mixture(Bench):
    """Three experts of two tokens each, as the whole of a launch, beside activations in the order of the tokens."""

    def __init__(self, device: EmulatedDevice, rows: int, cols: int, fmt: MatrixFormat) -> None:
        super().__init__(device, rows, cols, fmt)
        random = np.random.default_rng(cols)
        self.matrices = [_matrix(random, fmt, 72, cols) for _ in range(3)]
        self.on_device = [Uploader(device, CONFIG).matrix(m) for m, _ in self.matrices]  # type: ignore[arg-type]
        self.pairs = np.array([row * 3 + expert for expert in range(3) for row in (expert, expert + 1)], np.int32)  # of 3 experts a token
        groups = np.zeros((rows * 3 + 1, 4), np.int32)
        groups[0, 0], groups[1:4, 0], groups[1:4, 1], groups[1:4, 2] = 3, (0, 1, 2), (0, 2, 4), 2
        table = np.zeros((3, 4), np.uint64)
        table[:, :2] = [(m.data.address, m.scale.address if m.scale else 0) for m in self.on_device]
        pairs, groups_at, *self.tables = (device.alloc(a.nbytes) for a in (self.pairs, groups, table, table))
        for room, values in zip((pairs, groups_at, *self.tables), (self.pairs, groups, table[::-1], table), strict=True):
            device.upload(room.at(), values)
        self.experts = ExpertGroups(pairs, groups_at, 3, 3)
        self.output = device.alloc(4 * rows * 3 * 72)

    def run(self) -> list[NDArray[np.float32]]:
        """Results [pairs, out]; other experts are run before, so that nothing of these is left in shared memory."""
        out = np.full((self.rows * 3, 72), np.nan, np.float32)
        self.device.upload(self.output.at(), out)
        for table in self.tables:
            job = product(self.on_device[0], self.inputs[0], self.output, 72, table=table, x_map=MAP_TOKEN, y_map=MAP_PAIR)
            run_products(self.device, self.rows, [job], 64, self.experts)
        self.device.download(self.output.at(), out)
        return [out[self.pairs]]

    def expected(self) -> list[NDArray[np.float64]]:
        return [np.stack([self.x[0][pair // 3].astype(np.float64) @ self.matrices[pair % 3][1].T for pair in self.pairs])]


def _matrix(random: np.random.Generator, fmt: MatrixFormat, rows: int, cols: int) -> tuple[Matrix, NDArray[np.float64]]:
    """A stored matrix and its values."""
    if fmt == "int8":
        levels, scale = random.integers(-127, 128, (rows, cols)).astype(np.int8), random.uniform(0.001, 0.002, rows).astype(np.float32)
        return Matrix("int8", rows, cols, levels, scale), levels * scale.astype(np.float64)[:, None]
    bits = f32_to_bf16(random.standard_normal((rows, cols)).astype(np.float32) / 16)
    return Matrix("bf16", rows, cols, bits), bf16_to_f32(bits).astype(np.float64)


def in_every_order(device: EmulatedDevice, run: Callable[[], list[NDArray[np.float32]]]) -> list[list[NDArray[np.float32]]]:
    """The results of `run` with copies late and early, and with warps side by side and one ahead of the others, the first or the last."""
    results = []
    for device.copies_late in (True, False):
        for device.warps_run_ahead, device.last_warp_first in ((False, False), (True, False), (True, True)):
            results.append(run())
    device.copies_late, device.warps_run_ahead, device.last_warp_first = True, False, False
    return results


@pytest.fixture(scope="module")
def device() -> OneWaitLess:
    return OneWaitLess(SIZES)


@pytest.fixture(autouse=True)
def _two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks, which do many rounds each."""
    monkeypatch.setattr(products, "MULTIPROCESSORS", 1)


@pytest.mark.parametrize("fmt", ["int8", "bf16"])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 13])
def test_every_order_gives_the_same_bits(device: OneWaitLess, rows: int, fmt: MatrixFormat) -> None:
    device.leave_out(None)
    bench = Bench(device, rows, 2304, fmt)
    results = in_every_order(device, bench.run)
    for got, wanted in zip(results[0], bench.expected(), strict=True):
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("rows", "cols"), [(1, 192), (4, 2368), (4, 4160), (8, 3000), (13, 1000)])
def test_formats_over_the_same_activations(device: OneWaitLess, rows: int, cols: int) -> None:
    """What is there for the narrower granules of one is all that the wider ones of the next take, also behind the last whole one."""
    device.leave_out(None)
    for formats in (("bf16", "int8"), ("int8", "bf16")):
        bench = Bench(device, rows, cols, *formats, over=(0, 0, 0))
        for got, wanted in zip(bench.run(), bench.expected(), strict=True):
            assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_a_rows_bits_do_not_depend_on_its_company(device: OneWaitLess) -> None:
    """One row by itself, among four, eight and sixteen: three kernels, one order of summation."""
    device.leave_out(None)
    many = Bench(device, 16, 2304, "int8")
    for rows in (1, 2, 4, 8):
        few = Bench(device, rows, 2304, "int8")
        few.on_device, few.inputs = many.on_device, many.inputs
        assert all(np.array_equal(a, b[:rows]) for a, b in zip(few.run(), many.run(), strict=True))


def noticed(device: OneWaitLess, name: str, bench: Bench) -> bool:
    """Without that wait some order of warps and copies gives something else, or the emulated device gives up; tried in a process of its own."""
    device.leave_out(None)
    right = bench.run()
    for got, wanted in zip(right, bench.expected(), strict=True):
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()
    child = os.fork()
    if child == 0:
        outcome = 2
        try:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            device.leave_out(name)
            outcome = int(any(not np.array_equal(a, b) for other in in_every_order(device, bench.run) for a, b in zip(right, other, strict=True)))
        finally:
            os._exit(outcome)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert end in (0, 1, -signal.SIGABRT)
    return end != 0


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_shows(device: OneWaitLess, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any one wait left out is noticed: where activations stay, or where they pass through, or by experts, whose weights are known last."""
    monkeypatch.setattr(products, "PAIRED_BYTES", 100 << 10)
    monkeypatch.setattr(products, "BLOCK_BYTES", 100 << 10)
    benches = (lambda: Bench(device, 1, 2304, "int8"), lambda: Bench(device, 1, 12 * 1024 + 256, "int8"), lambda: Mixture(device, 4, 1152, "int8"))
    assert any(noticed(device, name, make()) for make in benches)
