"""`cache_control` over HTTP, with Anthropic's official client: marked prefixes stay cached, others are evicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
from anthropic.types import Usage

from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.servers import BLOCK, Server, eventually, full_blocks, serving

NUM_BLOCKS = 101
USER = {"role": "user", "content": "What is tied into a quipu?"}


def usage_of(claude: anthropic.Anthropic, tag: str, ttl: str | None) -> Usage:
    """Send a request with a system prompt of its own, marked with `ttl` unless that is None; return the usage."""
    control: dict[str, Any] = {} if ttl is None else {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    system = [{"type": "text", "text": text_prompt(tag, 150), **control}]
    extra = {"temperature": 0, "ignore_eos": True}
    return claude.messages.create(model="demo", max_tokens=4, system=system, messages=[USER], extra_body=extra).usage


def fill(server: Server, tag: str) -> None:
    """Send other prompts with more blocks than the cache has."""
    for number in range(12):
        assert server.complete(token_prompt(f"{tag} {number}", 20 * BLOCK), max_tokens=1).status_code == 200


def test_marked_prefix_survives(tmp_path: Path) -> None:
    """A marked prefix survives prompts that fill the cache, an unmarked one does not; marks beyond the share of the
    pool create nothing; a prompt that needs the whole pool gets it."""
    folder = tmp_path / "pins"
    flags = ["--executor", "fake", "--fake-step-seconds", "0", "--num-blocks", str(NUM_BLOCKS)]
    with (
        serving(folder, *flags, "--max-pinned-share", "0.4") as server,
        server.anthropic_client() as claude,
    ):
        assert server.get("/server_info").json()["settings"]["max_pinned_share"] == 0.4
        cold = usage_of(claude, "marked", "1h")
        created = cold.cache_creation_input_tokens or 0
        assert created == full_blocks(created) > 5 * BLOCK
        assert cold.cache_creation is not None and cold.cache_creation.ephemeral_1h_input_tokens == created
        assert usage_of(claude, "plain", None).cache_creation_input_tokens == 0
        fill(server, "first")
        metrics = server.wait_at_rest()
        assert metrics['kv_blocks{state="pinned"}'] == created / BLOCK
        assert metrics["pins_yielded_total"] == 0
        warm = usage_of(claude, "marked", "1h")
        assert (warm.cache_read_input_tokens or 0) >= created and warm.cache_creation_input_tokens == 0
        assert (usage_of(claude, "plain", None).cache_read_input_tokens or 0) <= BLOCK, "the template's own tokens"

        refused = [usage_of(claude, f"too much {number}", "5m") for number in range(6)]
        assert refused[-1].cache_creation_input_tokens == 0 < refused[-1].input_tokens
        assert server.wait_at_rest()['kv_blocks{state="pinned"}'] <= 0.4 * (NUM_BLOCKS - 1)

        whole = server.complete(token_prompt("whole", (NUM_BLOCKS - 3) * BLOCK), max_tokens=2 * BLOCK)
        assert whole.json()["usage"]["completion_tokens"] == 2 * BLOCK
        metrics = server.wait_at_rest()
        assert metrics["pins_yielded_total"] >= 2 and metrics['kv_blocks{state="pinned"}'] == 0
        assert metrics["num_preemptions_total"] == 0 == metrics["usage_disputed_total"]
        num_yielded = metrics["pins_yielded_total"]
        eventually(
            lambda: sum(line["num_pins"] for line in server.events("pins.yielded")) == num_yielded,
            "the log says how many have yielded",
        )
