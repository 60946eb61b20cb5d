"""Files, batches and their lines, as they are stored.

Used by everything in this package and by the endpoints. What must always hold: a value that is stored can be read by
later versions, so fields are only added, with defaults.
"""

from __future__ import annotations

import secrets
from enum import IntEnum, StrEnum
from typing import Final

import attrs
import msgspec

DAY_S: Final = 86_400


class Api(StrEnum):
    """Whose shapes a batch has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Status(StrEnum):
    """Where a batch is, in the words of OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


class LineState(IntEnum):
    PENDING = 0
    """To be run, or running."""
    KEPT = 1
    """It has a result, which counts if its usage record is written."""
    DONE = 2


class ResultKind(StrEnum):
    """How a line ended, in the words of Anthropic's API."""

    SUCCEEDED = "succeeded"
    ERRORED = "errored"
    CANCELED = "canceled"
    EXPIRED = "expired"


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    """Unix seconds, as all times here."""
    expires_at: int | None = None
    batch_id: str | None = None
    """The batch whose results it has. None: a client has uploaded it."""
    is_hidden: bool = False
    """It belongs to a batch and is not shown as a file."""


class BatchError(msgspec.Struct, kw_only=True):
    """Why an input file cannot be run."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class Usage(msgspec.Struct, kw_only=True):
    """Sums over the lines that have a result."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: Usage) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Batch(msgspec.Struct, kw_only=True):
    id: str
    api: Api
    tenant: str
    key_id: str | None
    endpoint: str
    input_file_id: str
    status: Status = Status.VALIDATING
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    errors: list[BatchError] = []
    created_at: int
    expires_at: int
    output_ttl_s: int | None = None
    """After how long the files of its results are deleted, if its client has said so."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    model: str | None = None
    """The model of its first line."""
    num_lines: int = 0
    num_succeeded: int = 0
    num_errored: int = 0
    num_canceled: int = 0
    num_expired: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_at(self) -> int | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    def count(self, kind: ResultKind) -> None:
        name = f"num_{kind.value}"
        setattr(self, name, getattr(self, name) + 1)

    def uncount(self, kind: ResultKind, usage: Usage) -> None:
        """Take a result back."""
        name = f"num_{kind.value}"
        setattr(self, name, getattr(self, name) - 1)
        for counted in usage.__struct_fields__:
            setattr(self.usage, counted, getattr(self.usage, counted) - getattr(usage, counted))


@attrs.frozen
class Line:
    """Where a line is in its batch's input file."""

    batch_id: str
    number: int
    """From 1."""
    custom_id: str
    start: int
    """In bytes, like..."""
    length: int


@attrs.frozen
class LineResult:
    """How a line ended."""

    batch_id: str
    number: int
    kind: ResultKind
    payload: bytes
    """What its line in the output says of it, as JSON."""
    request_id: str | None
    """The request whose usage record says whether this counts. None: there was none, and it counts."""
    usage: Usage


@attrs.frozen(kw_only=True)
class BatchLimits:
    """What the operator allows."""

    concurrency: int = 16
    """Lines that run at once, of all batches."""
    max_file_bytes: int = 200 << 20
    max_lines: int = 50_000
    max_line_bytes: int = 8 << 20
    max_tenant_bytes: int = 10 << 30
    """Files and results of one tenant together."""
    max_files: int = 10_000
    """Of one tenant."""
    max_open_batches: int = 100
    """Batches of one tenant that have not ended."""
    file_ttl_s: int = 30 * DAY_S
    """After how long files, and batches that have ended, are deleted."""


def copy_of(batch: Batch) -> Batch:
    """Return a copy that no later result changes."""
    return msgspec.structs.replace(batch, usage=msgspec.structs.replace(batch.usage))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"
