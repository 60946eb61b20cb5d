"""vLLM's executor with one worker, as one rank of several: how the ranks meet, and what they leave behind.

`rank_loading.py` gives the class to vLLM. Each rank runs the same code in a process of its own, as under torchrun. They
meet in memory that rank 0 has created and the others inherit (`followers.py`), so neither a port nor a file is needed.

What must always hold: nothing of a group of ranks outlives its processes. The segments of shared memory through which
ranks reduce on a CPU lose their names as soon as all have mapped them; vLLM's queue between ranks, which would make
another, and a socket, is not made, because nothing that runs here uses it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .rank_messages import RankPlace

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system keeps segments that have names
_MEETING = timedelta(seconds=600)
"""How long ranks wait for one another: as long as one may take to read its weights. One that has died ends them all
before (`followers.py`)."""


def executor_class(place: RankPlace) -> Any:
    """Return the `Executor` for this rank; vLLM must be installed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class RankExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM is not installed where types are checked
        def _init_executor(self) -> None:
            dist.init_process_group(
                current_platform.dist_backend,
                store=_store(place),
                rank=place.rank,
                world_size=place.size,
                timeout=_MEETING,
            )
            make_queue = MessageQueue.create_from_process_group
            MessageQueue.create_from_process_group = lambda *args, **options: None
            try:
                super()._init_executor()
            finally:
                MessageQueue.create_from_process_group = make_queue
            if place.leads:
                remove_names(place.name)

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"quipu:{place.name}", place.rank, place.rank

    return RankExecutor


def remove_names(name: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove the names of a group's segments of shared memory. Who has mapped them keeps them."""
    for path in folder.glob(f"*{name}*"):
        with suppress(OSError):
            path.unlink()


def _store(place: RankPlace) -> Any:
    """Return where ranks find one another."""
    if place.store is None:
        return dist.HashStore()  # type: ignore[attr-defined] # documented, but not in torch's list of exports
    return dist.FileStore(  # type: ignore[attr-defined] # as HashStore: documented, not exported
        f"/proc/self/fd/{place.store}", place.size
    )
