"""Keeps the results of grammar checks by their owner: a tenant, and a cache salt within it.

`grammar_pool.py` looks here first. What must always hold: an owner's grammar is checked once; the time that a request
takes does not reveal which grammars others use; nothing grows without bound.
"""

from __future__ import annotations

import attrs

from ..grammars.grammar_check import too_long
from ..messages.grammar import GrammarKind, GrammarSpec
from ..messages.outcomes import RequestError
from ..shared.tenant_cache import TenantCache
from ..tokenizer.prompt_encoder import EncodingOptions

MAX_KNOWN = 256
"""Grammars whose result is kept, each of at most `--max-grammar-bytes`."""

_Key = tuple[str | None, GrammarKind, str]
"""The owner within a tenant, and the grammar."""


class KnownGrammars:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._results: TenantCache[_Key, str | RequestError] = TenantCache(MAX_KNOWN)

    def find(self, spec: GrammarSpec, options: EncodingOptions) -> str | RequestError | None:
        """Return a cached result, with the field of its error renamed. None: the grammar has to be checked."""
        # a lower bound of its bytes, which the check counts
        if len(spec.source) > self._max_bytes:
            return too_long(spec, self._max_bytes)
        result = self._results.get(options.tenant, (options.owner, spec.kind, spec.source))
        if not isinstance(result, RequestError) or result.param == spec.param:
            return result
        message = result.message.replace(f"`{result.param}`", f"`{spec.param}`", 1)
        return attrs.evolve(result, message=message, param=spec.param)

    def keep(self, spec: GrammarSpec, options: EncodingOptions, result: str | RequestError) -> None:
        self._results.put(options.tenant, (options.owner, spec.kind, spec.source), result)
