"""Matrix units, where the device has them (a software driver has not): float32 results from float16 products.

Without the validation layer: releases before mid-2023 do not know the extension.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chain_runner import Runner, chain, relative
from test_vulkan_linear import FORMATS, close, padded_rows, rows_of
from tinymodel import as_matrix, random_ids, tiny_model
from vulkan_bench import Bench

from glm53serve.model import quant
from glm53serve.model.weights import MatrixFormat
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.linear import Target, upload
from glm53serve.vulkan.pack import pack, padded


@pytest.fixture(scope="module")
def units(shared_device: Device) -> Iterator[Device]:
    if not shared_device.info.matrix_units:
        pytest.skip(f"{shared_device.info.name} has no matrix units")
    device = Device(shared_device.info.name, allow_cpu=True)
    yield device
    device.close()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "blocks"), [(9, 1), (31, 2), (70, 4), (129, 4)])
def test_product_agrees_with_float64(units: Device, fmt: MatrixFormat, rows: int, blocks: int) -> None:
    rng = np.random.default_rng(rows)
    n, k = 300, 1000
    matrix = as_matrix(rng.standard_normal((n, k)) * k**-0.5, fmt)
    x = rng.standard_normal((rows, k)) * np.exp(rng.standard_normal((rows, k)))
    bench = Bench(units, rows_of(rows))
    linear = upload(units, [("w", pack(matrix))])
    source, out = bench.buffer(padded_rows(x, padded(k))), bench.empty(rows, n + 2)
    bench.run(linear.ops(rows, Target(source, padded(k)), Target(out, n + 2, 1), tile=blocks))
    got = bench.read(out, (rows, n + 2))
    # a driver may flush the small parts' subnormals (2^-14): 7e-6 here
    assert close(got[:, 1:-1], x.astype(np.float32).astype(np.float64) @ quant.dequantise(matrix).astype(np.float64).T, 1e-5)
    assert (got[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_chain_agrees_with_the_reference(units: Device, fmt: MatrixFormat) -> None:
    model = tiny_model(seed=3, weight_format=fmt)
    ids = random_ids(model.config, 70)
    reference = model.reference(np.float64)
    want = reference.forward(ids, reference.new_state())
    for rows in (16, 64):
        runner = Runner(reference, chain(units, model, rows=rows))
        got = runner.logits(runner.pieces(ids, (3, 67)))
        assert relative(got, want) <= 1e-4 and np.array_equal(got.argmax(1), want.argmax(1))
