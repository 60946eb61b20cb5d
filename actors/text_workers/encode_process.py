"""One process that encodes long texts, seen from the thread that leases it.

Used by `encode_processes.py`. The process runs `encode_worker.py`, which documents the messages. What must always hold:
an exchange is complete, or the process is not used again.
"""

from __future__ import annotations

import socket
import subprocess
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from ..fleet.processes.child import OWN_GROUP, command_of
from ..shared.tokenizers_library import NO_TEXT, LibraryPanic
from .encode_worker import ANSWER, JOB, LENGTH, PIECE_LENGTH, AnswerKind, Operation

MODULE = "quipu.actors.text_workers.encode_worker"
START_S = 60.0
"""How long an interpreter may take to start and load a tokenizer, on a busy machine."""
PIECE_CHARACTERS = 1 << 18
"""Characters encoded to UTF-8 at once: 1 ms at worst."""
PIECE_BYTES = 1 << 20
"""Bytes of ids received at once."""


class ProcessDied(LibraryPanic):
    """The process was killed or ran out of memory while it was encoding."""


class EncodeProcess:
    """An `EncodingBackend`."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 -- our own module
                command_of(MODULE),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=OWN_GROUP,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.was_idle = False
        """It was idle before this lease, so it may have died unnoticed."""
        self._is_broken = False
        self._base_bytes = 0
        self.growth_bytes = 0
        """Memory that it has taken since it started."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it is running, and its last exchange was complete."""
        return not self._is_broken and self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill the process and release everything it holds."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def load(self, source: bytes) -> None:
        """Send the tokenizer. Raises OSError and LibraryPanic."""
        self._socket.settimeout(START_S)
        self._socket.sendall(LENGTH.pack(len(source)))
        self._socket.sendall(source)
        self._receive_answer()
        self._socket.settimeout(None)
        self._base_bytes += self.growth_bytes
        self.growth_bytes = 0

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> array[int] | int:
        kind, number = self._request(Operation.ENCODE, text, max_tokens, add_special_tokens=add_special_tokens)
        return number if kind is AnswerKind.NUMBER else self._receive_ids(number)

    def encode_with_starts(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True
    ) -> tuple[array[int], array[int]] | int:
        operation = Operation.ENCODE_WITH_STARTS
        kind, number = self._request(operation, text, max_tokens, add_special_tokens=add_special_tokens)
        return number if kind is AnswerKind.NUMBER else (self._receive_ids(number), self._receive_ids(number))

    def num_tokens_before(self, text: str, end: int) -> int:
        return self._request(Operation.NUM_TOKENS_BEFORE, text, end=end)[1]

    def _request(
        self, operation: Operation, text: str, max_tokens: int = 0, *, end: int = 0, add_special_tokens: bool = True
    ) -> tuple[AnswerKind, int]:
        with self._exchanging():
            self._socket.sendall(JOB.pack(operation, add_special_tokens, max_tokens, end))
            for start in range(0, len(text), PIECE_CHARACTERS):
                piece = text[start : start + PIECE_CHARACTERS].encode()
                self._socket.sendall(PIECE_LENGTH.pack(len(piece)))
                self._socket.sendall(piece)
            self._socket.sendall(PIECE_LENGTH.pack(0))
            return self._receive_answer()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Do not use the process again unless the block ends, or with what the process has reported."""
        try:
            yield
        except LibraryPanic:
            raise
        except OSError as error:
            self._is_broken = True  # its end of the socket closes a moment before it can be waited for
            raise ProcessDied("the encoding process has died") from error
        except UnicodeEncodeError:
            self._is_broken = True
            raise LibraryPanic(NO_TEXT) from None
        except BaseException:
            self._is_broken = True
            raise

    def _receive_answer(self) -> tuple[AnswerKind, int]:
        """Raises OSError and LibraryPanic."""
        kind, number, resident_bytes = ANSWER.unpack(self._receive(ANSWER.size))
        self.growth_bytes = resident_bytes - self._base_bytes
        if kind == AnswerKind.PANIC:
            raise LibraryPanic(self._receive(number).decode())
        return AnswerKind(kind), number

    def _receive_ids(self, number: int) -> array[int]:
        ids: array[int] = array("I")
        num_bytes = number * ids.itemsize
        with self._exchanging():
            for start in range(0, num_bytes, PIECE_BYTES):
                ids.frombytes(self._receive(min(PIECE_BYTES, num_bytes - start)))
        return ids

    def _receive(self, num_bytes: int) -> bytearray:
        """Receive exactly `num_bytes`. Raises OSError."""
        data = bytearray(num_bytes)
        with memoryview(data) as rest:
            while num_bytes:
                received = self._socket.recv_into(rest[-num_bytes:])
                if not received:
                    raise ConnectionResetError
                num_bytes -= received
        return data
