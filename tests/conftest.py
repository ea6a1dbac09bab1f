"""What all tests share. Being here also puts this folder on the import path of the folders below."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np  # noqa: F401 - its BLAS must be loaded before it can be limited
import pytest
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from tests.served import Fresh

# How long an example takes, or drawing it, says nothing on a busy machine. The examples are the same in every run, so that a run
# judges a change and not a draw; `pytest --hypothesis-profile=explore` draws others each time.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model in a folder of its own, for tests that serve it (see `tests.served`)."""
    from tests.served import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def fresh(model: Path) -> Fresh:
    """What an engine that has seen nothing before says of the same model."""
    from tests.served import Fresh, load_tiny

    return Fresh(load_tiny(model, 1))
