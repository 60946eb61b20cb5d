"""Datasets that are read from a file of JSON lines: custom rows, and traces.

An invalid row is refused with its line number, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from .generated import Kind
from .prompts import Wording, draw_ids
from .workload import Ask, Workload, WorkloadError, single_turns

Row = TypeVar("Row")


class CustomRow(msgspec.Struct):
    """A prompt or messages. Other fields of a row are ignored."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    output_len: int | None = None
    output_tokens: int | None = None


class TraceRow(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


@attrs.frozen
class CustomFile:
    path: Path
    wording: Wording
    output_len: int

    def workload(self, limit: int | None) -> Workload:
        asks = [self._ask(row, where) for row, where in read_rows(self.path, CustomRow, limit)]
        return single_turns(len(asks), asks.__getitem__)

    def _ask(self, row: CustomRow, where: str) -> Ask:
        if (row.prompt is None) == (row.messages is None):
            raise WorkloadError(f"{where}: a row must have either `prompt` or `messages`")
        lengths = (row.max_tokens, row.output_len, row.output_tokens)
        max_tokens = next((length for length in lengths if length is not None), self.output_len)
        if max_tokens < 1:
            raise WorkloadError(f"{where}: an output length of {max_tokens} is not positive")
        fields: dict[str, Any] = {"max_tokens": max_tokens}
        if self.wording.is_chat:
            if isinstance(row.prompt, list):
                raise WorkloadError(f"{where}: token ids in `prompt` are for /v1/completions only")
            fields["messages"] = row.messages or [{"role": "user", "content": row.prompt}]
            fields |= {"tools": row.tools} if row.tools is not None else {}
            fields |= {"tool_choice": row.tool_choice} if row.tool_choice is not None else {}
            return Ask(fields)
        for name, value in (("messages", row.messages), ("tools", row.tools), ("tool_choice", row.tool_choice)):
            if value is not None:
                raise WorkloadError(f"{where}: `{name}` needs --endpoint /v1/chat/completions")
        return Ask({**fields, "prompt": row.prompt})


@attrs.frozen
class TraceFile:
    """Requests with their times, lengths and hash ids. Equal hash ids give equal blocks of tokens."""

    path: Path
    wording: Wording
    seed: int
    block_tokens: int
    speed: float
    """Replay speed, relative to the recording."""
    scale: float
    """Factor for lengths and blocks, for servers with less memory than the recorded one."""

    def workload(self, limit: int | None) -> Workload:
        rows: list[TraceRow] = []
        for row, where in read_rows(self.path, TraceRow, limit):
            self._check(row, where)
            if rows and row.timestamp < rows[-1].timestamp:
                raise WorkloadError(f"{where}: `timestamp` decreases; sort the file by it")
            rows.append(row)
        start = rows[0].timestamp
        arrivals_s = [(row.timestamp - start) / 1000 / self.speed for row in rows]
        return single_turns(len(rows), lambda place: self.ask(rows[place]), arrivals_s)

    def ask(self, row: TraceRow) -> Ask:
        block_tokens = max(1, round(self.block_tokens * self.scale))
        num_full, rest = divmod(row.input_length, self.block_tokens)
        num_tokens = max(1, num_full * block_tokens + math.ceil(rest * block_tokens / self.block_tokens))
        ids: list[int] = []
        for hash_id in row.hash_ids:
            ids += draw_ids(self.wording.tokens, block_tokens, self.seed, Kind.TRACE_BLOCK, hash_id)
        max_tokens = max(1, round(row.output_length * self.scale))
        return Ask({**self.wording.fields(ids[:num_tokens]), "max_tokens": max_tokens})

    def _check(self, row: TraceRow, where: str) -> None:
        if row.input_length < 1 or row.output_length < 0 or not math.isfinite(row.timestamp):
            raise WorkloadError(f"{where}: lengths must be positive and `timestamp` finite")
        wanted = math.ceil(row.input_length / self.block_tokens)
        if len(row.hash_ids) != wanted:
            raise WorkloadError(
                f"{where}: {row.input_length} tokens are {wanted} blocks of {self.block_tokens}, and `hash_ids` has "
                f"{len(row.hash_ids)}; see --trace-block-tokens"
            )
        if min(row.hash_ids) < 0:
            raise WorkloadError(f"{where}: a hash id is negative")


def read_rows(path: Path, kind: type[Row], limit: int | None) -> Iterator[tuple[Row, str]]:
    """Yield the first `limit` rows, each with its location for messages. Raises WorkloadError, also without rows."""
    decoder = msgspec.json.Decoder(kind)
    num_rows = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if num_rows == limit:
                    return
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise WorkloadError(f"{where}: {error}") from error
                num_rows += 1
                yield row, where
    except OSError as error:
        raise WorkloadError(f"--dataset-path {path}: {error.strerror}") from error
    if not num_rows:
        raise WorkloadError(f"--dataset-path {path}: the file has no rows")
