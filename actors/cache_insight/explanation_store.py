"""The explanations of the last requests, and whose their sequences were. For `GET /v1/cache/explain`.

Part of the entry store, written by the accountant. Thousands are kept for hours and few are ever asked for. As objects
they would be most of what a full garbage collection walks, with the event loop waiting; so they are kept as bytes, and
names as plain tuples, which it does not track.

What must always hold: the number of explanations and their size are bounded, the oldest going first; the tenant of a
request is compared before anything is made of it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from operator import itemgetter

import attrs
import msgspec

from ..messages.accountant import Prompted
from ..messages.explanations import ExplainedPrompt, Explanation, NamedRequest

MAX_BYTES = 64 << 20
"""Of all explanations together, about."""
EXPLANATION_BYTES = 500
"""Overhead of each: its place, its ids and those of its sequences."""
PROMPT_BYTES = 50

_Range = tuple[int, int, str, str]
"""The consecutive sequence ids of one request: the first one, the end, the request and its tenant."""


class _Kept(msgspec.Struct, frozen=True, gc=False):
    tenant: str
    has_reasoning: bool
    totals: bytes
    """The explanation without its prompts."""
    prompts: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return EXPLANATION_BYTES + len(self.totals) + sum(PROMPT_BYTES + len(packed) for packed in self.prompts)


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Explanation).decode
_unpack_prompt = msgspec.msgpack.Decoder(ExplainedPrompt).decode


class ExplanationStore:
    def __init__(self, max_requests: int = 10_000, max_bytes: int = MAX_BYTES) -> None:
        """Keep `max_requests` at most; 0 keeps none."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._ranges: list[_Range] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def name_sequences(self, prompted: Prompted, tenant: str) -> None:
        if not self._max_requests or not prompted.sequence_ids:
            return
        ids = prompted.sequence_ids
        insort(self._ranges, (min(ids), max(ids) + 1, prompted.request_id, tenant))
        if len(self._ranges) > 2 * self._max_requests:
            del self._ranges[: -self._max_requests]

    def name_of(self, sequence_id: int) -> NamedRequest | None:
        """Return the request of a sequence; None if it is no longer known."""
        place = bisect_right(self._ranges, sequence_id, key=itemgetter(0)) - 1
        if place < 0:
            return None
        _, end, request_id, tenant = self._ranges[place]
        return NamedRequest(request_id, tenant) if sequence_id < end else None

    def keep(self, explanation: Explanation) -> None:
        """Keep the explanation of a closed request, and drop the oldest to make room."""
        if not self._max_requests:
            return
        if (previous := self._kept.pop(explanation.request_id, None)) is not None:
            self.num_bytes -= previous.num_bytes
        kept = _Kept(
            explanation.tenant,
            explanation.has_reasoning,
            _pack(attrs.evolve(explanation, prompts=())),
            tuple(map(_pack, explanation.prompts)),
        )
        self._kept[explanation.request_id] = kept
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._max_requests or self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def had_reasoning(self, request_id: str) -> bool:
        """Return whether the answer to a closed request is known to have contained reasoning."""
        kept = self._kept.get(request_id)
        return kept is not None and kept.has_reasoning

    def find(self, request_id: str, tenant: str | None) -> Explanation | None:
        """Return the explanation of a closed request of this tenant; None: of any tenant."""
        kept = self._kept.get(request_id)
        if kept is None or tenant not in (None, kept.tenant):
            return None
        return attrs.evolve(_unpack(kept.totals), prompts=tuple(map(_unpack_prompt, kept.prompts)))

    def prompt(self, request_id: str, index: int) -> ExplainedPrompt | None:
        """Return the explanation of one prompt of a closed request; None if it is no longer kept."""
        kept = self._kept.get(request_id)
        return _unpack_prompt(kept.prompts[index]) if kept is not None and index < len(kept.prompts) else None
