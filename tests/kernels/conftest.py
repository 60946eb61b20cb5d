"""One set of small checkpoints a session, one thread, no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face import: no test may reach for the network

import pytest
import torch

from tests.kernels.kernel_checkpoints import CONFIGS, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A float32 checkpoint for each entry of CONFIGS; `qwen3-tied` comes in shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(root / name, name, max_shard_size="60KB" if name == "qwen3-tied" else "1GB")
        for name in CONFIGS
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and beside a busy neighbour lose twentyfold by it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
