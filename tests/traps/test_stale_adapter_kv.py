"""Trap: an adapter is loaded again under its old name, and prompts hit the KV of the bytes that it had before.

Other servers key blocks by an adapter's name or number. Here keys contain the digest of its bytes.
"""

from __future__ import annotations

from pathlib import Path

import trio

from tests.actors.engine.adapter_folders import make_folder
from tests.fake_oracle import continuation
from tests.runtimes import full_blocks, small_runtime, text_of
from tests.traps.wire import prompt_of


async def test_reloaded_under_its_name(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """A prompt finds nothing of other bytes, and all of its blocks once the first bytes are back."""
    prompt, folder = prompt_of(50), tmp_path / "adapter"
    async with small_runtime(max_loras=1) as client:
        adapters = client.runtime.desk.adapters
        cached = []
        for text in ("first", "other", "first"):
            adapter = await adapters.load("name", str(make_folder(folder, text)), in_place=True)
            answer = await client.ask(prompt, adapter=adapter.digest)
            assert answer.texts[0] == text_of(continuation(prompt, 8, adapter=adapter.digest))
            assert not answer.record.disputed
            cached.append(answer.record.cached_tokens)
    assert cached == [0, 0, full_blocks(50)]
