"""How requests end and whose fault an error is: vocabulary that all actors share."""

from __future__ import annotations

from enum import StrEnum

import attrs


class Outcome(StrEnum):
    """How a request ended: always exactly one of these."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Fault(StrEnum):
    """How the server itself failed a request. Reports count no tokens for such a request, but its record has them."""

    ENGINE_DIED = "engine_died"
    STEP_FAILED = "step_failed"
    RECOVERED = "recovered"  # the server died, and a later one closed the record; or it stopped amid a batch's line


class FinishReason(StrEnum):
    """Why a choice stopped, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class ErrorKind(StrEnum):
    """Whose fault an error is. The web layer derives status and error type from it."""

    INVALID = "invalid"  # the request is invalid (400)
    OVERLOADED = "overloaded"  # retry later (503 with Retry-After)
    TIMEOUT = "timeout"  # its deadline has passed (504)
    INTERNAL = "internal"  # the server's fault (500)
    UPSTREAM = "upstream"  # the fault of a server to which it was passed on (502)


@attrs.frozen
class RequestError:
    """What a client is told when its request fails. `param` names the invalid field, if there is one."""

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
