"""Bodies that are not taken into memory: batches of messages, and files that clients upload, as forms (RFC 7578).

`StreamedBody` replaces the body of requests to `UPLOAD_PATHS`: what arrives waits for who reads it, and its sender for
that. `read_form` passes on the contents of the form's file piece by piece.

What must always hold: no more than a few pieces of a body are in memory; every part but the file is small; a client
that sends nothing is not waited for longer than the limit for bodies.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, cast

import trio
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from ..http.connection import Connection
from ..request.errors import bad_value, invalid
from ..request.request_context import current_request_context
from .fields import missing

UPLOAD_PATHS: Final = frozenset({"/v1/files", "/v1/messages/batches"})
MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4096
MAX_HEAD_BYTES: Final = 16 * 1024
"""Of the form beside the contents of its file."""
PIECE_BYTES: Final = 256 * 1024
"""Of a file, that are passed on at once."""
_MAX_BOUNDARY_CHARS: Final = 200


class StreamedBody:
    """The body of one request, piece by piece. Has the methods that Quart calls."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[bytes](2)

    async def feed(self, data: bytes) -> None:
        """Pass a piece on, once there is room for it."""
        if data:
            await self._send.send(data)

    def set_complete(self) -> None:
        self._send.close()

    def disconnect(self) -> None:
        """Do nothing: whoever reads the body is cancelled with the request."""

    async def pieces(self, connection: Connection | None, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises RequestTimeout."""
        if connection is not None:
            await connection.ask_for_body()
        while True:
            piece: bytes | None = None
            with trio.move_on_after(math.inf if idle_s is None else idle_s) as waiting:
                try:
                    piece = await self._receive.receive()
                except trio.EndOfChannel:
                    return
            if piece is None or waiting.cancelled_caught:
                raise RequestTimeout()
            yield piece


Take = Callable[[bytes], Awaitable[None]]


class UploadedForm:
    """The fields of a form with one file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None


async def read_form(file_field: str, take: Take) -> UploadedForm:
    """Read the form of the current request; `take` is given the contents of its file. Raises APIError and its like."""
    kind, options = parse_options_header(request.headers.get("Content-Type", ""))
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS:
        raise invalid("The body must be a form (multipart/form-data).", "Content-Type", "invalid_content_type")
    reader = _FormReader(MultipartDecoder(boundary.encode("latin1", "replace")), file_field, take)
    body = cast(StreamedBody, cast(object, request.body))
    connection = current_request_context().connection
    async with aclosing(body.pieces(connection, request.body_timeout)) as pieces:
        async for piece in pieces:
            await reader.feed(piece)
    return await reader.finish()


class _FormReader:
    def __init__(self, decoder: MultipartDecoder, file_field: str, take: Take) -> None:
        self._decoder = decoder
        self._file_field = file_field
        self._take = take
        self._form = UploadedForm()
        self._name: str | None = None
        """The field that is being read; None: the file."""
        self._value = bytearray()
        self._waiting = bytearray()
        """Contents of the file that are to be passed on."""
        self._num_other_bytes = 0
        self._has_ended = False

    async def feed(self, piece: bytes) -> None:
        self._decoder.receive_data(piece)
        self._num_other_bytes += len(piece)
        await self._read()
        if self._num_other_bytes > MAX_HEAD_BYTES + MAX_FIELDS * MAX_FIELD_BYTES + PIECE_BYTES:
            raise invalid("The form has too much beside its file.", code="invalid_form")

    async def finish(self) -> UploadedForm:
        self._decoder.receive_data(None)
        await self._read()
        if not self._has_ended:
            raise invalid("The form is incomplete.", code="invalid_form")
        await self._pass_on()
        if self._form.filename is None:
            raise missing(self._file_field)
        return self._form

    async def _read(self) -> None:
        while True:
            try:
                event = self._decoder.next_event()
            except (ValueError, RequestEntityTooLarge):
                raise invalid("The form cannot be read.", code="invalid_form") from None
            match event:
                case File():
                    if event.name != self._file_field or self._form.filename is not None:
                        raise bad_value(str(event.name)[:64], f"must be one file, as `{self._file_field}`")
                    self._name, self._form.filename = None, event.filename
                case Field():
                    self._begin_field(event.name)
                case Data():
                    await self._add(event)
                case Epilogue():
                    self._has_ended = True
                    return
                case NeedData():
                    return

    def _begin_field(self, name: str | None) -> None:
        if name is None or len(name) > MAX_FIELD_BYTES or len(self._form.fields) >= MAX_FIELDS:
            raise invalid("The form has too many fields, or one without a name.", code="invalid_form")
        if name == self._file_field:
            raise bad_value(name, "must be a file, with a name")
        self._name, self._value = name, bytearray()

    async def _add(self, data: Data) -> None:
        if self._name is not None:
            self._value += data.data
            if len(self._value) > MAX_FIELD_BYTES:
                raise bad_value(self._name[:64], f"must have at most {MAX_FIELD_BYTES} bytes")
            if not data.more_data:
                self._form.fields[self._name] = self._value.decode("utf-8", "replace")
            return
        self._waiting += data.data
        self._num_other_bytes -= len(data.data)
        if len(self._waiting) >= PIECE_BYTES:
            await self._pass_on()

    async def _pass_on(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, bytearray()
            await self._take(bytes(waiting))


def is_upload(method: str, path: str) -> bool:
    return method == "POST" and path in UPLOAD_PATHS
