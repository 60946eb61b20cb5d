"""How requests end, and whose fault an error is: the vocabulary that every actor shares."""

from __future__ import annotations

from enum import StrEnum

import attrs


class Outcome(StrEnum):
    """How a request ended, exactly one of these."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Fault(StrEnum):
    """Why the server itself failed a request. Such a request counts no tokens in any report; its record has them."""

    ENGINE_DIED = "engine_died"
    STEP_FAILED = "step_failed"
    RECOVERED = "recovered"  # the server died, and a later one closed the record


class FinishReason(StrEnum):
    """Why a choice stopped, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class ErrorKind(StrEnum):
    """Whose fault an error is; the web layer chooses status and shape from it."""

    INVALID = "invalid"  # the request cannot be served as it stands (400)
    OVERLOADED = "overloaded"  # come back later (503 with Retry-After)
    TIMEOUT = "timeout"  # its deadline has passed (504)
    INTERNAL = "internal"  # ours (500)


@attrs.frozen
class RequestError:
    """What a client is told when its request fails. `param` names the field at fault, where one is."""

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
