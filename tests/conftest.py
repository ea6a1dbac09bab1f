"""What all tests share. Being here also puts this folder on the import path of the folders below."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np  # noqa: F401 - its BLAS must be loaded before it can be limited
import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread() -> Iterator[None]:
    """The products here are small: a second BLAS thread only spins, and on a busy machine everything takes four times as long."""
    with threadpool_limits(1, user_api="blas"):
        yield
