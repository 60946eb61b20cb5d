"""Groups of errors that nurseries raise: what the engine, the server and the commands name of them in messages."""

from __future__ import annotations


def first_leaf(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
