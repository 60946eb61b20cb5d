"""Recent outputs, as a source of drafts for sequences of the same tenant, salt and model.

Owned by `drafter.py`. What must always hold: outputs are found under their own root key alone, which stands for tenant,
salt, model and adapter; memory is bounded; nothing is left after `clear`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .draft_lookup import SEPARATOR, GrowingTokens, Tokens

MAX_TOKENS = 32_768
"""Of each root key; when there are more, the oldest half is dropped."""
MAX_KEYS = 256
"""The key that was used least recently makes room."""
_NUM_LEADING = 16
"""Tokens of a prompt's end that are kept before its output, so that its beginning can be found."""


class RecentOutputs:
    """Outputs by root key."""

    def __init__(self) -> None:
        self._by_root: OrderedDict[bytes, GrowingTokens] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_root)

    def add(self, root_key: bytes, tokens: Sequence[int], num_outputs: int) -> None:
        """Keep the outputs of a sequence that has ended, the last `num_outputs` of `tokens`."""
        if not num_outputs:
            return
        kept = tokens[max(0, len(tokens) - num_outputs - _NUM_LEADING) :][-MAX_TOKENS // 2 :]
        outputs = self._by_root.setdefault(root_key, GrowingTokens())
        self._by_root.move_to_end(root_key)
        if len(outputs) + len(kept) + 1 > MAX_TOKENS:
            outputs.drop_first(max(len(outputs) // 2, len(outputs) + len(kept) + 1 - MAX_TOKENS))
        outputs.extend([SEPARATOR, *kept])
        if len(self._by_root) > MAX_KEYS:
            self._by_root.popitem(last=False)

    def of(self, root_key: bytes) -> Tokens | None:
        """Return the outputs kept for a root key, with separators between them."""
        outputs = self._by_root.get(root_key)
        if outputs is None:
            return None
        self._by_root.move_to_end(root_key)
        return outputs.ids

    def clear(self) -> None:
        self._by_root.clear()
