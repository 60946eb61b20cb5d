"""Trap: the engine runs for a step or two after a stop string is complete, and those tokens are counted.

Here `completion_tokens` is what the client was given plus the tokens that completed the stop string.
"""

from __future__ import annotations

import pytest
import trio

from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.runtimes import small_runtime, text_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(40)
DIALS = Dials(first_token_id=35, num_token_ids=60)  # printable ASCII, one character per token
WHOLE = text_of(continuation(PROMPT, 300, DIALS))


@pytest.mark.parametrize("step_seconds", [0.0, 0.01])
@pytest.mark.parametrize("at", [1, 9, 40])
async def test_tokens_after_the_stop(autojump_clock: trio.abc.Clock, at: int, step_seconds: float) -> None:
    """Counts end with the stop string, even if several steps are done before the engine learns of the stop."""
    stop = WHOLE[at : at + 3]
    at = WHOLE.index(stop)
    dials = Dials(first_token_id=35, num_token_ids=60, step_seconds=step_seconds)
    async with small_runtime(dials) as client:
        http = over_http(client)
        _, whole = await http.post(COMPLETIONS, body(PROMPT, max_tokens=300, stop=stop))
        _, chunks = await http.stream(COMPLETIONS, body(PROMPT, max_tokens=300, stop=stop, **STREAMED))
        await settle(client)
        after = samples(client)
    assert whole["choices"][0]["text"] == WHOLE[:at]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2]) == WHOLE[:at]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert [usage["completion_tokens"] for usage in (whole["usage"], chunks[-2]["usage"])] == [at + 3, at + 3]
    assert after["generation_tokens_total"] == 2 * (at + 3)
