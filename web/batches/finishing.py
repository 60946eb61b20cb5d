"""The end of a batch: its results, from the database into the files that its client downloads.

What must always hold: each line is in exactly one file, once; the files are complete before the batch says so; a server
that is killed amid this does it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from .batch_store import BatchStore
from .batch_values import Api, Batch, Status, StoredFile, copy_of, new_id
from .result_lines import end_of, kind_of_rest, line_of
from .store_database import OutputRow

ROWS_AT_ONCE: Final = 64
DELETED_AT_ONCE: Final = 256

CallStore = Callable[..., Awaitable[Any]]
"""Calls the store in a thread, until the disk does not refuse."""


async def finish(batch: Batch, store: BatchStore, call: CallStore, now: int, file_ttl_s: int) -> Batch:
    """Write the files of a batch of which no line runs, and return it with its end, which is stored."""
    batch.status = Status.FINALIZING
    batch.finalizing_at = batch.finalizing_at or now
    await call(store.save, batch)
    batch = copy_of(batch)  # nobody sees its end before it is stored
    folder = store.folder
    output, errors = await call(folder.new), await call(folder.new)
    rest = kind_of_rest(batch)
    num_bytes = {output: 0, errors: 0}
    last = num_rest = 0
    while rows := await call(store.outputs, batch.id, last, ROWS_AT_ONCE):
        last = rows[-1].number
        num_rest += sum(row.kind is None for row in rows)
        for path, data in _lines_of(batch, rows, output, errors).items():
            await call(_append, path, num_bytes[path], data)
            num_bytes[path] += len(data)
    for _ in range(num_rest):
        batch.count(rest)
    ttl_s = file_ttl_s if batch.output_ttl_s is None else min(batch.output_ttl_s, file_ttl_s)
    files: list[StoredFile] = []
    for path, what in ((output, "output"), (errors, "error")):
        if not num_bytes[path]:
            await call(folder.erase_path, path)
            continue
        file = StoredFile(
            id=new_id("file-"),
            tenant=batch.tenant,
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            num_bytes=num_bytes[path],
            created_at=now,
            expires_at=now + ttl_s,
            batch_id=batch.id,
            is_hidden=batch.api is Api.ANTHROPIC,
        )
        await call(folder.keep, path, file.id)
        files.append(file)
        setattr(batch, f"{what}_file_id", file.id)
    batch.status = end_of(batch)
    setattr(batch, f"{batch.status.value}_at", now)
    await call(store.end, batch, files)
    return batch


async def clear(batch: Batch, store: BatchStore, call: CallStore) -> None:
    """Delete what a batch that has ended no longer needs."""
    while await call(store.delete_lines, batch.id, DELETED_AT_ONCE):
        pass
    if batch.api is Api.ANTHROPIC:  # its client cannot see or delete the file that its requests were put into
        await call(store.delete_files, [batch.input_file_id])
    await call(store.forget)


async def delete_expired(store: BatchStore, call: CallStore, now: int, file_ttl_s: int) -> None:
    """Delete files, and batches that have ended, whose time is over."""
    for file in await call(store.expired_files, now):
        await call(store.delete_unless_needed, file.id, file.tenant)
    for batch in await call(store.ended_before, now - file_ttl_s):
        await call(store.delete_batch, batch)


def _lines_of(batch: Batch, rows: list[OutputRow], output: Path, errors: Path) -> dict[Path, bytes]:
    parts: dict[Path, list[bytes]] = {}
    for row in rows:
        line, is_error = line_of(batch, row)
        parts.setdefault(errors if is_error else output, []).append(line)
    return {path: b"".join(lines) for path, lines in parts.items()}


def _append(path: Path, at: int, data: bytes) -> None:
    """Write data at a position, so that an attempt that the disk cut short can be repeated."""
    with path.open("r+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
