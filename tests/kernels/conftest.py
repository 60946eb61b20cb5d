"""Fixtures for all kernel tests: small checkpoints, made when first needed, and a single torch thread. No network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face import: no test may use the network

import pytest
import torch

from tests.kernels.kernel_checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Path]:
    """Have a float32 checkpoint for each entry of CONFIGS, which no test changes; all workers have the same."""
    own = tmp_path_factory.getbasetemp()
    return Checkpoints((own.parent if hasattr(pytestconfig, "workerinput") else own) / "checkpoints")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread: with matrices this small a second one gains nothing, and on a busy machine costs 20x."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
