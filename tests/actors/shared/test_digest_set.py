"""Sets of digests: what a set does, within a bound."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.shared.digest_set import DigestSet

DIGESTS = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(20)]


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=8, max_size=8) | st.sampled_from(DIGESTS[:6]))))
def test_set_is_a_set(changes: list[tuple[bool, bytes]]) -> None:
    """Adding and discarding digests in any order gives what a set gives."""
    digests, model = DigestSet(1000), set[bytes]()
    for is_added, digest in changes:
        (digests.add if is_added else digests.discard)(digest)
        (model.add if is_added else model.discard)(digest)
        assert len(digests) == len({digest[:8] for digest in model})
        assert digest in digests or not is_added
    assert all(digest in digests for digest in model)
    assert not any(digest in digests for digest in DIGESTS[6:])


def test_full_set_takes_nothing_more() -> None:
    """A set has a bound; what it has stays, and room that is made can be used again."""
    digests = DigestSet(3)
    for digest in DIGESTS[:5]:
        digests.add(digest)
    assert [digest in digests for digest in DIGESTS[:5]] == [True, True, True, False, False]
    digests.discard(DIGESTS[0])
    digests.add(DIGESTS[4])
    assert len(digests) == 3
    assert DIGESTS[4] in digests
