"""Requests on their way to the tokenizer or held by it. Used by `desk.py`.

A request that has left is still in here while the tokenizer holds it, since a thread may be reading its texts.
"""

from __future__ import annotations

import trio

from ..channel import Sender
from ..messages.tokenizer import Encode, PromptQuestion
from .open_requests import OpenRequest


class EncodingRequests:
    def __init__(self, encoder: Sender[Encode | PromptQuestion]) -> None:
        self._encoder = encoder
        self._requests: dict[str, OpenRequest] = {}

    async def send(self, opened: OpenRequest, request: Encode) -> None:
        """Send a request to the tokenizer; return without having sent it if it leaves or fails while it waits."""
        opened.is_encoding = True
        self._requests[request.request_id] = opened
        with trio.CancelScope() as scope:
            opened.when_stopped(scope.cancel)
            try:
                await self._encoder.send(request)
                opened.on_stopped = None
            except BaseException:
                self.remove(request.request_id)
                raise

    def find(self, request_id: str) -> OpenRequest | None:
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> None:
        """Note that the tokenizer holds nothing of a request's prompts any more."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.is_encoding = False
            request.on_stopped = None
            request.mark_encoded()
