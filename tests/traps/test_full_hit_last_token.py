"""Trap: a prompt that is cached to its last token leaves nothing to compute, or is reported as cached except for one.

The last position must be computed, since the first output is sampled from it. Other servers crashed, hung, or reported
`prompt - 1`, which is not a block boundary, and wrote into a block that others were reading. Here the last full block
is not billed as cached, `cached <= floor((prompt - 1) / block_size) * block_size`, and belongs to the request: it is
copied, and its last token computed. The account distinguishes copied from computed tokens.
"""

from __future__ import annotations

import pytest
import trio

from tests.fake_oracle import continuation
from tests.runtimes import BLOCK, full_blocks, small_runtime, text_of
from tests.traps.wire import prompt_of, settle


@pytest.mark.parametrize(
    ("length", "cached"), [(BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK, 2 * BLOCK), (50, full_blocks(50))]
)
async def test_same_prompt_again(autojump_clock: trio.abc.Clock, length: int, cached: int) -> None:
    """At least one token is computed, the count ends at a block boundary, and the text is right; also the
    third time."""
    prompt = prompt_of(length)
    async with small_runtime() as client:
        first = await client.ask(prompt)
        again = [await client.ask(prompt) for _ in range(2)]
        await settle(client)
    assert first.record.cached_tokens == 0
    for answer in again:
        assert answer.error is None
        assert answer.record.cached_tokens == cached
        copied = BLOCK - 1 if length % BLOCK == 0 else 0
        assert answer.record.restored_tokens == copied
        assert answer.record.computed_tokens == length - cached - copied >= 1
        assert answer.record.cache_write_tokens == 0
        assert answer.texts[0] == text_of(continuation(prompt, 8))
        assert not answer.record.disputed
