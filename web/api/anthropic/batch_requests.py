"""Reading the body of a new batch of messages while it arrives, which may be as large as a file.

    pieces of the body ─▶ `RequestCutter`: its requests, one after another ─▶ lines of an input file

What must always hold: no more than one request is in memory, and it counts as a body does; what is beside `requests`
is small. What is in a request's `params` is checked when its line is run.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from enum import Enum, auto
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
import trio

from quipu.actors.config.declarations import MESSAGES
from quipu.actors.threads import run_in_thread

from ...batches.batch_values import BatchLimits
from ...batches.line_check import MAX_ENVELOPE_BYTES
from ...request.errors import bad_value, invalid
from ...request.request_context import current_request_context
from ..bodies import stream_body
from ..fields import Fields, missing, parse_object, wrong_type
from ..ignored_fields import ignored_fields
from ..json_structure import COMMA, StructureScan, depth_changes
from .message_batch_schemas import CREATED, CUSTOM_ID_PATTERN

PIECE_BYTES: Final = 16 * 1024
"""That are cut in one go, within a millisecond or so, as when files are checked (`web/batches/file_checking.py`)."""
MAX_OTHER_BYTES: Final = 16 * 1024
"""Of a body beside its requests."""
_cuts: Final = trio.CapacityLimiter(1)
_BLANKS: Final = b" \t\n\r"
OPENS_REQUESTS: Final = re.compile(rb'(?<!\\)"requests"[ \t\n\r]*+:[ \t\n\r]*+\[')
_NAME_BYTES: Final = 1024
"""Before a piece, in which the name of the list is looked for."""
_CUSTOM_ID: Final = re.compile(CUSTOM_ID_PATTERN)
_LINE: Final = b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n'


class _Place(Enum):
    BEFORE = auto()
    REQUESTS = auto()
    BEHIND = auto()


async def write_requests(write: Callable[[bytes], Awaitable[None]], limits: BatchLimits) -> int:
    """Write the requests of the current request's body as the lines of an input file; return their number.

    Raises APIError and RequestTimeout. Unknown fields beside `requests` are reported as ignored.
    """
    pieces, share = stream_body()
    cutter, waiting, num_kept = RequestCutter(limits), bytearray(), 0

    async def take(num_bytes: int) -> None:
        nonlocal num_kept
        lines = await run_in_thread(cutter.feed, bytes(waiting[:num_bytes]), limiter=_cuts)
        del waiting[:num_bytes]
        if cutter.num_kept > num_kept:
            share.grow(cutter.num_kept - num_kept)
            num_kept = cutter.num_kept
        if lines:
            await write(lines)

    async with aclosing(pieces):
        async for piece in pieces:
            waiting += piece
            while len(waiting) >= PIECE_BYTES:
                await take(PIECE_BYTES)
    if waiting:
        await take(PIECE_BYTES)
    rest = await parse_object(cutter.other)
    current_request_context().ignored_fields = (await ignored_fields(rest, CREATED)).header
    if not cutter.num_requests or rest.get("requests") != []:
        _refuse_rest(Fields(rest, declared=CREATED))
    return cutter.num_requests


def _refuse_rest(fields: Fields) -> None:
    """Raise APIError for a body in which no list of requests was found."""
    for _ in fields.objects("requests", "a list of objects", lambda *_: None, is_required=True):
        break
    raise bad_value("requests", "must be there once, and its name must not be written with escapes")


class RequestCutter:
    """Cuts a body into its requests, piece by piece. Called in threads, one piece at a time."""

    def __init__(self, limits: BatchLimits) -> None:
        self._max_bytes = limits.max_line_bytes + MAX_ENVELOPE_BYTES
        self._max_requests = limits.max_lines
        self._scan = StructureScan()
        self._depth = 0
        self._place = _Place.BEFORE
        self._begun = bytearray()
        """The first part of a request that has not ended."""
        self._seen: set[bytes] = set()
        self.other = bytearray()
        """The body without its requests, with an empty list in their place."""
        self.num_requests = 0

    @property
    def num_kept(self) -> int:
        return len(self._begun) + len(self.other)

    def feed(self, piece: bytes) -> bytes:
        """Return the lines of the requests that end in the next piece. Raises APIError."""
        lines = bytearray()
        start = 0
        for end, is_last in self._ends(piece):
            if self._place is _Place.BEFORE:
                self.other += piece[start : end + 1]
                self._place = _Place.REQUESTS
            else:
                self._begun += piece[start:end]
                self._check_size()
                if not is_last or self.num_requests or self._begun.strip(_BLANKS):
                    lines += self._line(bytes(self._begun))
                self._begun.clear()
                if is_last:
                    self._place = _Place.BEHIND
                    self.other += piece[end : end + 1]
            start = end + 1
        (self._begun if self._place is _Place.REQUESTS else self.other).extend(memoryview(piece)[start:])
        self._check_size()
        return bytes(lines)

    def _ends(self, piece: bytes) -> Iterator[tuple[int, bool]]:
        """Yield where the list of requests begins and where each request ends, and whether it is the last."""
        part = np.frombuffer(piece, np.uint8)
        at = self._scan.find(part)
        kinds = part[at]
        depths = np.cumsum(depth_changes(kinds), dtype=np.int32) + self._depth
        if len(depths):
            self._depth = int(depths[-1])
        if self._place is _Place.BEHIND:
            return
        first = 0
        if self._place is _Place.BEFORE:
            opening = np.flatnonzero((kinds == ord("[")) & (depths == 2) & np.isin(at, self._named(piece)))
            if not len(opening) or len(self.other) + at[opening[0]] > MAX_OTHER_BYTES:
                return
            yield int(at[opening[0]]), False
            first = int(opening[0]) + 1
        for index in first + np.flatnonzero((((kinds == COMMA) & (depths == 2)) | (depths < 2))[first:]):
            is_last = bool(depths[index] < 2)
            yield int(at[index]), is_last
            if is_last:
                return

    def _named(self, piece: bytes) -> list[int]:
        """Return where in a piece there are brackets behind the name of the list, at any depth."""
        tail = bytes(self.other[-_NAME_BYTES:])
        return [match.end() - 1 - len(tail) for match in OPENS_REQUESTS.finditer(tail + piece)]

    def _check_size(self) -> None:
        if len(self._begun) > self._max_bytes:
            raise bad_value(self._param(), f"must have at most {self._max_bytes} bytes")
        if len(self.other) > MAX_OTHER_BYTES:
            message = f"The body may have {MAX_OTHER_BYTES} bytes beside its `requests`."
            raise invalid(message, code="body_too_complex")

    def _line(self, data: bytes) -> bytes:
        """Return the line of one request. Raises APIError."""
        if self.num_requests >= self._max_requests:
            raise bad_value("requests", f"must have at most {self._max_requests} requests")
        custom_id, params = self._read(data)
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise bad_value(f"{self._param()}.custom_id", "another request has the same one")
        self._seen.add(digest)
        self.num_requests += 1
        return _LINE % (custom_id.encode(), MESSAGES.encode(), params.replace(b"\n", b" "))

    def _read(self, data: bytes) -> tuple[str, bytes]:
        """Return the `custom_id` and the `params` of one request. Raises APIError."""
        param = self._param()
        try:
            fields = _decode_request(data)
            custom_id = None if _is_absent(fields.custom_id) else _decode_any(fields.custom_id)
            is_streamed = b'"stream"' in data and not _is_absent(fields.params) and _is_streamed(fields.params)
        except msgspec.ValidationError:
            raise wrong_type(param, "an object") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise invalid(f"`{param}` is not valid JSON.", param, "invalid_json") from None
        if custom_id is None:
            raise missing(f"{param}.custom_id")
        if type(custom_id) is not str:
            raise wrong_type(f"{param}.custom_id", "a string")
        if not _CUSTOM_ID.fullmatch(custom_id):
            raise bad_value(f"{param}.custom_id", "must be 1 to 64 letters, digits, `_` or `-`")
        if _is_absent(fields.params):
            raise missing(f"{param}.params")
        if bytes(memoryview(fields.params)[:1]) != b"{":
            raise wrong_type(f"{param}.params", "an object")
        if is_streamed:
            raise bad_value(f"{param}.params.stream", "the answers of a batch are not streamed")
        return custom_id, bytes(fields.params)

    def _param(self) -> str:
        return f"requests[{self.num_requests}]"


class _Request(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")
    params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"null")


_decode_request: Final = msgspec.json.Decoder(_Request).decode
_decode_params: Final = msgspec.json.Decoder(_Params).decode
_decode_any: Final = msgspec.json.Decoder().decode


def _is_absent(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:5]) == b"null"


def _is_streamed(params: msgspec.Raw) -> bool:
    """Return whether a body asks for a stream."""
    if bytes(memoryview(params)[:1]) != b"{":
        return False
    return bytes(_decode_params(params).stream) not in (b"null", b"false")
