"""Weight formats against naive definitions written from model spec 9."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53serve.model import quant
from glm53serve.model.errors import ModelError
from glm53serve.model.weights import Matrix

shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def random_matrix(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Normal values whose size varies a lot over blocks."""
    rng = np.random.default_rng(seed)
    grow = np.exp(rng.normal(0, 2, (-(-rows // 16), -(-cols // 16)))).repeat(16, 0).repeat(16, 1)[:rows, :cols]
    return (rng.standard_normal((rows, cols)) * grow).astype(np.float32)


def e4m3_value(byte: int) -> float:
    """By the definition: sign, exponent with bias 7, mantissa; exponent 0 is subnormal."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 0x80 else size


def test_e4m3_table() -> None:
    table = quant.e4m3_table()
    np.testing.assert_array_equal(table, np.array([e4m3_value(b) for b in range(256)], np.float32))
    assert table[0x7E] == 448 and np.isnan(table[[0x7F, 0xFF]]).all() and np.signbit(table[0x80])


def test_e4m3_encodes_its_own_values() -> None:
    np.testing.assert_array_equal(quant.f32_to_e4m3(quant.e4m3_table())[:255], np.arange(255))


@settings(max_examples=300)
@given(st.floats(-600, 600, width=32) | st.sampled_from([0.0, -0.0, 2.0**-10, 3 * 2.0**-10, 464.0, 1e38, -1e38]))
def test_e4m3_encodes_to_the_nearest_even(value: float) -> None:
    byte = int(quant.f32_to_e4m3(np.array([value], np.float32))[0])
    finite = [b for b in range(256) if b & 0x7F != 0x7F and bool(b & 0x80) == (math.copysign(1, value) < 0)]
    clipped = max(-448.0, min(448.0, value))
    # distance, then even mantissa
    assert byte == min(finite, key=lambda b: (abs(Fraction(e4m3_value(b)) - Fraction(clipped)), b & 1))


@settings(max_examples=300)
@given(floats)
def test_bf16_rounds_to_the_nearest_even(value: float) -> None:
    (bits,) = quant.f32_to_bf16(np.array([value], np.float32))
    pattern = int(np.float32(value).view(np.uint32))
    lower, rest = pattern >> 16, pattern & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and lower & 1)
    assert bits == lower + up


def test_bf16_specials_and_exact_return() -> None:
    values = np.array([np.inf, -np.inf, np.nan, -np.nan, 3.4e38], np.float32)
    back = quant.bf16_to_f32(quant.f32_to_bf16(values))
    assert np.isinf(back[[0, 1, 4]]).all() and np.isnan(back[[2, 3]]).all()
    every = np.arange(65536, dtype=np.uint16)
    again = quant.f32_to_bf16(quant.bf16_to_f32(every))
    number = ~np.isnan(quant.bf16_to_f32(every))
    np.testing.assert_array_equal(again[number], every[number])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 128), (136, 40), (129, 257), (300, 130)])
def test_fp8_blocks_with_ragged_edges(rows: int, cols: int) -> None:
    data = np.random.default_rng(1).integers(0, 127, (rows, cols), np.uint8)
    scale = np.random.default_rng(2).random((-(-rows // 128), -(-cols // 128)), np.float32)
    expected = np.array([[np.float32(e4m3_value(int(data[o, i]))) * scale[o // 128, i // 128] for i in range(cols)] for o in range(rows)])
    np.testing.assert_array_equal(quant.dequantise_fp8(data, scale), expected)
    np.testing.assert_array_equal(quant.dequantise(Matrix("fp8", rows, cols, data, scale)), expected)


@settings(max_examples=30)
@given(shapes, st.integers(0, 99))
def test_fp8_round_trip(shape: tuple[int, int], seed: int) -> None:
    w = random_matrix(*shape, seed)
    data, scale = quant.quantise_fp8(w)
    back = quant.dequantise_fp8(data, scale)
    step = scale.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    # half a unit in the last of 4 bits, or half a subnormal step
    assert (np.abs(back - w) <= np.maximum(np.abs(w) / 16, step * 2.0**-10) * 1.0001).all()


def naive_int4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed, scales, values) one number at a time."""
    rows, cols = w.shape
    packed = np.zeros((rows, -(-cols // 2)), np.uint8)
    scales = np.zeros((rows, -(-cols // 64)), np.float32)
    values = np.zeros_like(w)
    for o in range(rows):
        for g in range(scales.shape[1]):
            scales[o, g] = max(np.abs(w[o, g * 64 : g * 64 + 64]).max() / np.float32(7), np.float32(1e-8))
        for c in range(cols):
            level = int(min(7, max(-8, np.rint(w[o, c] / scales[o, c // 64]))))
            packed[o, c // 2] |= (level + 8) << (4 * (c % 2))
            values[o, c] = np.float32(level) * scales[o, c // 64]
        if cols % 2:
            packed[o, -1] |= 8 << 4
    return packed, scales, values


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 99))
def test_int4_equals_the_naive_one(rows: int, cols: int, seed: int) -> None:
    w = random_matrix(rows, cols, seed)
    packed, scales, values = naive_int4(w)
    data, scale = quant.quantise_int4(w)
    np.testing.assert_array_equal(data, packed)
    np.testing.assert_array_equal(scale, scales)
    np.testing.assert_array_equal(quant.dequantise_int4(data, scale, cols), values)


def test_int4_reads_level_minus_eight_and_zero_rows() -> None:
    assert quant.dequantise_int4(np.array([[0x0F]], np.uint8), np.array([[0.5]], np.float32), 2).tolist() == [[3.5, -4.0]]
    data, scale = quant.quantise_int4(np.zeros((1, 3), np.float32))
    assert data.tolist() == [[0x88, 0x88]] and scale.tolist() == [[np.float32(1e-8)]]


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 99))
def test_int8_equals_the_naive_one(rows: int, cols: int, seed: int) -> None:
    w = random_matrix(rows, cols, seed)
    data, scale = quant.quantise_int8(w)
    for o in range(rows):
        assert scale[o] == max(np.abs(w[o]).max() / np.float32(127), np.float32(1e-8))
        assert data[o].tolist() == [int(min(127, max(-128, np.rint(v / scale[o])))) for v in w[o]]
    np.testing.assert_array_equal(quant.dequantise_int8(data, scale), data.astype(np.float32) * scale[:, None])


def every_format(w: np.ndarray) -> list[Matrix]:
    """One matrix stored in every format."""
    rows, cols = w.shape
    return [
        Matrix("f32", rows, cols, w),
        Matrix("bf16", rows, cols, quant.f32_to_bf16(w)),
        Matrix("fp8", rows, cols, *quant.quantise_fp8(w)),
        Matrix("int8", rows, cols, *quant.quantise_int8(w)),
        Matrix("int4", rows, cols, *quant.quantise_int4(w)),
    ]


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_requantise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each width: formats not wider stay, the others become what quantising their float32 values gives, block by block or at once."""
    monkeypatch.setattr(quant, "BLOCK_ELEMENTS", 1)  # blocks of 128 rows
    for matrix in every_format(random_matrix(300, 71)):
        result = quant.requantise(matrix, bits)
        plain = quant.dequantise(matrix)
        if bits == 32:
            assert result.format == "f32"
            np.testing.assert_array_equal(result.data, plain)
        elif matrix.format in {4: ("int4",), 8: ("int4", "int8"), 16: ("int4", "int8", "bf16")}[bits]:
            assert result is matrix
        elif bits == 16:
            assert result.format == "bf16"
            np.testing.assert_array_equal(result.data, quant.f32_to_bf16(plain))
        else:
            data, scale = (quant.quantise_int4 if bits == 4 else quant.quantise_int8)(plain)
            assert result.format == f"int{bits}"
            np.testing.assert_array_equal(result.data, data)
            np.testing.assert_array_equal(result.scale, scale)
            assert quant.stored_bytes(300, 71, bits) == result.nbytes
        assert quant.dequantise(result).shape == (300, 71)


def test_requantise_refuses() -> None:
    with pytest.raises(ValueError, match="bits is 5"):
        quant.requantise(Matrix("f32", 1, 1, np.ones((1, 1), np.float32)), 5)
    for bits in (4, 8):
        with pytest.raises(ModelError, match="not a finite number"):
            quant.requantise(Matrix("f32", 1, 2, np.array([[1, np.nan]], np.float32)), bits)
    nan = Matrix("fp8", 1, 1, np.array([[0x7F]], np.uint8), np.ones((1, 1), np.float32))
    with pytest.raises(ModelError, match="not a finite number"):
        quant.requantise(nan, 4)


def test_unaligned_views() -> None:
    """Views of a file need not be aligned."""
    for matrix in every_format(random_matrix(130, 64)):

        def shift(a: np.ndarray) -> np.ndarray:
            raw = np.frombuffer(b"\0" + a.tobytes(), np.uint8)
            return raw[1:].view(a.dtype).reshape(a.shape)

        moved = Matrix(matrix.format, matrix.rows, matrix.cols, shift(matrix.data), None if matrix.scale is None else shift(matrix.scale))
        np.testing.assert_array_equal(quant.dequantise(moved), quant.dequantise(matrix))
