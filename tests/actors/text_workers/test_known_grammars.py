"""Results of checked grammars are kept for their tenant, and for nobody else."""

from __future__ import annotations

import attrs

from quipu.actors.messages.outcomes import ErrorKind, RequestError
from quipu.actors.text_workers.known_grammars import MAX_KNOWN, KnownGrammars
from quipu.actors.tokenizer.prompt_encoder import EncodingOptions
from tests.grammars import PARAM, regex


def asker(tenant: str) -> EncodingOptions:
    return EncodingOptions(tenant, PARAM)


GOOD, BAD = regex("a"), regex("b")
ERROR = RequestError(ErrorKind.INVALID, f"Invalid value for `{PARAM}`: no.", PARAM)


def test_results_are_kept() -> None:
    """A result is found again, an error with the name of the field that asks; the least recently used are forgotten."""
    known = KnownGrammars(9999)
    for spec, result in ((GOOD, "text"), (BAD, ERROR)):
        assert known.find(spec, asker("tenant")) is None
        known.keep(spec, asker("tenant"), result)
    assert known.find(BAD, asker("tenant")) == ERROR
    error = known.find(attrs.evolve(BAD, param="tools"), asker("tenant"))
    assert isinstance(error, RequestError) and error.param == "tools" and "`tools`" in error.message
    assert known.find(GOOD, asker("tenant")) == "text" and known.find(GOOD, asker("another")) is None
    for index in range(MAX_KNOWN - 1):
        known.keep(regex(str(index)), asker("tenant"), "")
    assert known.find(GOOD, asker("tenant")) is not None and known.find(BAD, asker("tenant")) is None


def test_long_grammars_are_refused_at_once() -> None:
    """A grammar over the limit is refused without a process."""
    refused = KnownGrammars(9999).find(regex("x" * 10_000), asker("tenant"))
    assert isinstance(refused, RequestError) and "at most 9999 bytes" in refused.message


def test_one_tenant_does_not_push_out_another() -> None:
    """When there are too many results, the tenant with the most of them loses one."""
    known = KnownGrammars(9999)
    known.keep(GOOD, asker("few"), "text")
    for index in range(2 * MAX_KNOWN):
        known.keep(regex(str(index)), asker("many"), "")
    assert known.find(GOOD, asker("few")) == "text" and known.find(regex("0"), asker("many")) is None
