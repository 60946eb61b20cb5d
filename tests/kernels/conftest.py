"""Fixtures for all kernel tests: small checkpoints, made once per session, and a single torch thread. No network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face import: no test may use the network

import pytest
import torch

from tests.kernels.kernel_checkpoints import CONFIGS, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a float32 checkpoint for each entry of CONFIGS; `qwen3-tied` is sharded."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(root / name, name, max_shard_size="60KB" if name == "qwen3-tied" else "1GB")
        for name in CONFIGS
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread: with matrices this small a second one gains nothing, and on a busy machine costs 20x."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
