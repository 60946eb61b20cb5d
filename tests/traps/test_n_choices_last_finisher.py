"""Trap: with n > 1 the cached count is that of the last choice, which found the blocks of the first.

Here it is the first choice's, whenever the others are admitted; what they share with it is not billed as cached.
"""

from __future__ import annotations

import pytest
import trio

from tests.runtimes import full_blocks, small_runtime
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, settle


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
async def test_first_choice_decides(autojump_clock: trio.abc.Clock, max_num_seqs: int) -> None:
    """Choices admitted one after the other find the first one's blocks; a cold prompt is reported as cold."""
    async with small_runtime(max_num_seqs=max_num_seqs) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(prompt_of(50, 1), n=4, temperature=1, seed=1))
        _, chunks = await http.stream(COMPLETIONS, body(prompt_of(50, 2), n=4, temperature=1, seed=1, **STREAMED))
        await settle(client)
    for usage in (whole["usage"], chunks[-2]["usage"]):
        assert usage["prompt_tokens"] == 50
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert usage["prompt_tokens_details"]["cache_write_tokens"] == full_blocks(50)
        assert usage["completion_tokens"] == 32
