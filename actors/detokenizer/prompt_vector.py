"""The vector or score of one prompt, on its way from the engine to the client.

Used by the detokenizer like a `PromptAssembler`, whose place it takes for prompts that have no output.

What must always hold: a prompt's vector is kept once, whatever an engine sends again.
"""

from __future__ import annotations


class PromptVector:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.text = ""
        self.vector: bytes | None = None

    @property
    def is_complete(self) -> bool:
        return self.vector is not None

    def add(self, _end: int, payload: bytes) -> None:
        """Take the vector, unless there is one."""
        if self.vector is None:
            self.vector = payload
