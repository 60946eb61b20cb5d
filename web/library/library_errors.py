"""What the Python API raises."""

from __future__ import annotations


class RequestError(Exception):
    """A request that was refused or failed. `param` names the field, where one is at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        """What a server would have answered: 400 for invalid fields, 503 if it is overloaded, and so on."""


class EngineError(Exception):
    """The engine could not be started, or has stopped. The message says why."""
