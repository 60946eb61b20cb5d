"""Reading the lines of an input file, as OpenAI's batches have them.

    {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Runs in threads, on bounded pieces of a file. A file that breaks a rule is not run at all: its batch fails with an error
for each line that breaks one. What is wrong with a body is found when its line is run, and is that line's error alone.

What must always hold: no more than one line is in memory; what is not read as JSON here (a body) is checked by the
handler that serves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import BinaryIO, Final

import attrs
import msgspec

from .batch_values import BatchError, BatchLimits, Line

MAX_CUSTOM_ID_CHARS: Final = 512
MAX_ERRORS: Final = 100
"""That are listed; more lines are not read."""
MAX_ENVELOPE_BYTES: Final = 16 * 1024
"""Of a line, beside its body."""


class _RawLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Model(msgspec.Struct):
    model: str


_decode_line: Final = msgspec.json.Decoder(_RawLine).decode
_decode_model: Final = msgspec.json.Decoder(_Model).decode
_decode_any: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@attrs.frozen
class ReadLine:
    custom_id: str
    body: bytes


def read_line(data: bytes, endpoint: str) -> ReadLine:
    """Return what one line of a file says. Raises BadLine."""
    try:
        line = _decode_line(data)
    except (msgspec.DecodeError, RecursionError):
        raise _reason(data) from None
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"`custom_id` must have 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise BadLine("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_method", "`method` must be POST.", "method")
    if line.url != endpoint:
        raise BadLine("mismatched_url", "`url` must be the `endpoint` of the batch.", "url")
    body = bytes(line.body)
    if body[:1] != b"{":
        raise BadLine("invalid_type", "`body` must be an object.", "body")
    return ReadLine(line.custom_id, body)


def _reason(data: bytes) -> BadLine:
    """Return why a line cannot be read."""
    try:
        fields = _decode_any(data)
    except (msgspec.DecodeError, RecursionError):
        return BadLine("invalid_json_line", "This line is not a JSON object.")
    for name in _RawLine.__struct_fields__:
        if name not in fields:
            return BadLine("missing_required_parameter", f"`{name}` is missing.", name)
        if name != "body" and bytes(fields[name])[:1] != b'"':
            return BadLine("invalid_type", f"`{name}` must be a string.", name)
    return BadLine("invalid_json_line", "This line is not a JSON object.")


def model_of(body: bytes) -> str | None:
    """Return the model that a body names."""
    try:
        return _decode_model(body).model[:MAX_CUSTOM_ID_CHARS]
    except (msgspec.DecodeError, RecursionError):
        return None


class FileCheck:
    """Checks a file piece by piece. `lines` and `errors` are complete when `check_more` returns False."""

    def __init__(self, file: BinaryIO, batch_id: str, endpoint: str, limits: BatchLimits) -> None:
        self._file = file
        self._batch_id = batch_id
        self._endpoint = endpoint
        self._limits = limits
        self._seen: set[bytes] = set()
        self._number = 0
        self.lines: list[Line] = []
        self.errors: list[BatchError] = []
        self.model: str | None = None
        """The first line's."""

    def check_more(self, num_bytes: int) -> bool:
        """Check about so many bytes; return whether there is more to check. Raises OSError."""
        most = self._limits.max_line_bytes + MAX_ENVELOPE_BYTES
        end = self._file.tell() + num_bytes
        while self._file.tell() < end and len(self.errors) < MAX_ERRORS:
            start = self._file.tell()
            data = self._file.readline(most + 1)
            if not data:
                if not self.lines and not self.errors:
                    self._fail("empty_file", "The input file has no lines.", number=None)
                return False
            self._number += 1
            if len(data) > most:
                self._fail("line_too_long", f"A line may have {most} bytes.")
                return False
            if data.strip():
                self._check(data, start)
            if len(self.lines) > self._limits.max_lines:
                self.lines.clear()
                self._fail("too_many_lines", f"An input file may have {self._limits.max_lines} lines.")
                return False
        return len(self.errors) < MAX_ERRORS

    def _check(self, data: bytes, start: int) -> None:
        try:
            line = read_line(data, self._endpoint)
        except BadLine as error:
            self._fail(error.code, str(error), error.param)
            return
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            self._fail("duplicate_custom_id", "Another line has the same `custom_id`.", "custom_id")
            return
        self._seen.add(digest)
        if not self.lines:
            self.model = model_of(line.body)
        self.lines.append(Line(self._batch_id, self._number, line.custom_id, start, len(data)))

    def _fail(self, code: str, message: str, param: str | None = None, number: int | None = -1) -> None:
        line = self._number if number == -1 else number
        self.errors.append(BatchError(code=code, message=message, param=param, line=line))


__all__: Sequence[str] = ["BadLine", "FileCheck", "ReadLine", "model_of", "read_line"]
