"""Results of grammars that have been checked, by tenant.

`grammar_pool.py` looks here first. What must always hold: a grammar that its tenant has had checked before costs
nothing; what others have had checked is not told by the time that a request takes; nothing grows without bound.
"""

from __future__ import annotations

import attrs

from ..messages.grammar import GrammarKind, GrammarSpec
from ..messages.outcomes import RequestError
from ..shared.tenant_cache import TenantCache
from ..tokenizer.grammar_check import too_long

MAX_KNOWN = 256
"""Grammars whose result is kept, each of at most `--max-grammar-bytes`."""


class KnownGrammars:
    """The results of the last grammars that were checked."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._results: TenantCache[tuple[GrammarKind, str], str | RequestError] = TenantCache(MAX_KNOWN)

    def find(self, spec: GrammarSpec, tenant: str) -> str | RequestError | None:
        """Return the result of a grammar, under the name of the field that asks. None: it is to be checked."""
        # most characters take a byte; the rest are counted where it is checked
        if len(spec.source) > self._max_bytes:
            return too_long(spec, self._max_bytes)
        result = self._results.get(tenant, (spec.kind, spec.source))
        if not isinstance(result, RequestError) or result.param == spec.param:
            return result
        message = result.message.replace(f"`{result.param}`", f"`{spec.param}`", 1)
        return attrs.evolve(result, message=message, param=spec.param)

    def keep(self, spec: GrammarSpec, tenant: str, result: str | RequestError) -> None:
        """Remember the result of a check."""
        self._results.put(tenant, (spec.kind, spec.source), result)
