"""What all tests share. Being here also puts this folder on the import path of the folders below."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np  # noqa: F401 - its BLAS must be loaded before it can be limited
import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread() -> Iterator[None]:
    """The products here are small: a second BLAS thread only spins, and on a busy machine everything takes four times as long."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """For tests that look at what a start prints: a start that must compile the CPU kernels first says so."""
    with contextlib.suppress(ImportError):
        from glm53serve.cpu.warm import compile_all

        compile_all()
