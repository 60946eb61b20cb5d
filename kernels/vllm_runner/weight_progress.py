"""Shows how far vLLM has read a checkpoint, as other executors do: a bar on a terminal, else a log line now and then.

`rank_loading.py` asks for it around the loading of rank 0; the other ranks read the same files.

What must always hold: bytes are counted as vLLM takes the tensors from its files; without files to read, nothing is
shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoints.progress import LoadProgress

_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
"""What vLLM reads of a folder: the files of the first of these of which there are any."""


@contextmanager
def shown_progress(folder: Path) -> Iterator[None]:
    """Show the progress of vLLM's default loader while the block runs; vLLM must be installed."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    num_bytes = num_stored(folder)
    if num_bytes == 0:
        yield
        return
    progress, read = LoadProgress(num_bytes), DefaultModelLoader.get_all_weights

    def counted(loader: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in read(loader, *args, **options):
            yield name, tensor
            progress.advance(tensor.nbytes)
        progress.close()

    DefaultModelLoader.get_all_weights = counted
    try:
        yield
    finally:
        DefaultModelLoader.get_all_weights = read
        progress.remove()


def num_stored(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    found = (sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in _PATTERNS)
    return next((num_bytes for num_bytes in found if num_bytes), 0)
