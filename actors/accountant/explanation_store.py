"""The explanations of the last requests, and whose their sequences were.

Part of the entry store, written by the accountant; read by the request desk for `GET /v1/cache/explain`. Synchronous.

What must always hold: the number of explanations and their size are bounded, the oldest going first; the tenant of a
request is compared before anything is made of it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence

import attrs

from ..messages.accountant import Prompted
from ..messages.explanations import ExplainedPrompt, Explanation, NamedRequest

MAX_BYTES = 64 << 20
"""Of all explanations together, about."""
EXPLANATION_BYTES = 500
PROMPT_BYTES = 600
SPAN_BYTES = 120


@attrs.frozen(order=True)
class _Range:
    """The consecutive sequence ids of one request."""

    first: int
    end: int = attrs.field(order=False)
    name: NamedRequest = attrs.field(order=False)


class ExplanationStore:
    def __init__(self, max_requests: int = 10_000, max_bytes: int = MAX_BYTES) -> None:
        """Keep `max_requests` at most; 0 keeps none."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Explanation] = OrderedDict()
        self._ranges: list[_Range] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def name_sequences(self, prompted: Prompted, tenant: str) -> None:
        """Remember whose sequences these are."""
        if not self._max_requests or not prompted.sequence_ids:
            return
        ids = prompted.sequence_ids
        insort(self._ranges, _Range(min(ids), max(ids) + 1, NamedRequest(prompted.request_id, tenant)))
        if len(self._ranges) > 2 * self._max_requests:
            del self._ranges[: -self._max_requests]

    def name_of(self, sequence_id: int) -> NamedRequest | None:
        """Return whose a sequence is or was; None if that is not known any more."""
        place = bisect_right(self._ranges, sequence_id, key=lambda known: known.first) - 1
        known = self._ranges[place] if place >= 0 else None
        return known.name if known is not None and sequence_id < known.end else None

    def keep(self, explanation: Explanation) -> None:
        """Keep the explanation of a closed request, and drop the oldest ones that there is no room for."""
        if not self._max_requests:
            return
        if (previous := self._kept.pop(explanation.request_id, None)) is not None:
            self.num_bytes -= _size_of(previous)
        self._kept[explanation.request_id] = explanation
        self.num_bytes += _size_of(explanation)
        while len(self._kept) > self._max_requests or self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= _size_of(oldest)

    def had_reasoning(self, request_id: str) -> bool:
        """Return whether the answer to a closed request is known to have contained reasoning."""
        kept = self._kept.get(request_id)
        return kept is not None and kept.has_reasoning

    def find(self, request_id: str, tenant: str | None) -> Explanation | None:
        """Return the explanation of a closed request of this tenant; None: of any tenant."""
        kept = self._kept.get(request_id)
        return kept if kept is not None and tenant in (None, kept.tenant) else None

    def prompt(self, request_id: str, index: int) -> ExplainedPrompt | None:
        """Return what became of one prompt of a closed request; None if that is not known any more."""
        kept = self._kept.get(request_id)
        return kept.prompts[index] if kept is not None and index < len(kept.prompts) else None


def _size_of(explanation: Explanation) -> int:
    return EXPLANATION_BYTES + sum(map(_size_of_prompt, explanation.prompts))


def _size_of_prompt(prompt: ExplainedPrompt) -> int:
    details: Sequence[object] = (*prompt.blocks, *prompt.advice)
    return PROMPT_BYTES + SPAN_BYTES * len(details) + prompt.outline.num_bytes
