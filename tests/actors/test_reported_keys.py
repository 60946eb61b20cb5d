"""What the web side learns about an engine's cache: random requests, resets and failing steps in a whole runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.engine.engine import Engine, LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.scheduler import Granted
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from quipu.kernels.fake import Dials
from tests.actors.key_reader import KeyReader, committed_in
from tests.fake_oracle import continuation
from tests.links import with_deliver
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, small_runtime

POISON = 5


class WatchedHost(LoopHost):
    """Compares what reports say, as they reach the web side, with the committed keys at the time of their grants."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reader = KeyReader()
        self.expected: deque[set[bytes]] = deque()
        """The committed keys at the time of each grant that changed them, if no report was received since."""
        self._watched: Engine | None = None

    async def run(self, link: EngineLink) -> Death:
        deliver = link.deliver

        async def deliver_watched(messages: Iterable[object]) -> None:
            messages = list(messages)
            if self.engine is not None and self.engine is not self._watched:
                self._watched = self.engine
                self._watch(self.engine)
            for message in messages:
                if isinstance(message, StepReport):
                    self._read(message)
            await deliver(messages)

        return await super().run(with_deliver(link, deliver_watched))

    def _watch(self, engine: Engine) -> None:
        grant: Callable[[Reserve, float], Granted] = engine.block_manager.grant

        def grant_watched(reserve: Reserve, now: float) -> Granted:
            granted = grant(reserve, now)
            if granted.stored_keys or granted.removed_keys or granted.is_cleared:
                self.expected.append(committed_in(engine.block_manager.pool))
            return granted

        setattr(engine.block_manager, "grant", grant_watched)  # noqa: B010 - mypy lets no method be assigned

    def _read(self, report: StepReport) -> None:
        if report.stored_keys or report.removed_keys or report.is_cleared:
            self.reader.apply(report)
            assert self.reader.keys == self.expected.popleft()


@attrs.frozen
class Ask:
    trunk: int
    num_shared: int
    num_own: int
    max_tokens: int
    is_poisoned: bool
    delay: float

    @property
    def prompt(self) -> list[int]:
        prompt = prompt_of(self.num_shared, seed=self.trunk) + prompt_of(self.num_own, seed=100 + self.num_own)
        return [POISON if self.is_poisoned and at == len(prompt) - 1 else t for at, t in enumerate(prompt)]


ASKS = st.builds(
    Ask,
    st.integers(0, 2),
    st.integers(0, 5 * BLOCK),
    st.integers(1, 3 * BLOCK),
    st.integers(1, 2 * BLOCK),
    st.sampled_from([False, False, False, True]),
    st.floats(0, 0.3),
)


RESETS = st.lists(st.floats(0, 0.5), max_size=2)
"""When the cache is reset, in seconds."""


def keys_of(client: Client, asks: list[Ask]) -> set[bytes]:
    """Return the keys of all blocks that the prompts and the whole outputs fill."""
    keys: set[bytes] = set()
    for ask in asks:
        whole = ask.prompt + continuation(ask.prompt, ask.max_tokens)
        keys.update(chain_keys(root_key_of(client.encode(ask.prompt), client.config), whole, BLOCK))
    return keys


async def reports_follow_the_cache(asks: list[Ask], resets: list[float], num_blocks: int, most_tokens: int) -> None:
    dials = Dials(step_seconds=0.01, poison_token_id=POISON, most_tokens=most_tokens)
    async with small_runtime(dials, make_host=WatchedHost, num_blocks=num_blocks, max_model_len=200) as client:
        host = client.runtime.host
        assert isinstance(host, WatchedHost)
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                for ask in asks:
                    nursery.start_soon(one_request, client, ask)
                for delay in resets:
                    nursery.start_soon(one_reset, client, delay)
            while host.expected or client.runtime.desk.num_live_sequences:
                await trio.sleep(0.01)
        assert host.reader.keys == committed_in(client.engine.block_manager.pool)
        assert keys_of(client, asks).issuperset(client.engine.block_manager.pool.state().committed_keys())
        client.assert_at_rest()


async def one_request(client: Client, ask: Ask) -> None:
    await trio.sleep(ask.delay)
    await client.ask(ask.prompt, max_tokens=ask.max_tokens)


async def one_reset(client: Client, delay: float) -> None:
    await trio.sleep(delay)
    client.runtime.desk.reset_prefix_cache()


def test_reports_follow_the_cache() -> None:
    """After each report its reader has the keys that were committed at the time of its grant, and at rest all of them;
    all are keys of tokens that were kept."""

    @settings(max_examples=max(25, settings.default.max_examples // 4))
    @given(st.lists(ASKS, min_size=1, max_size=8), RESETS, st.sampled_from([14, 24, 64]), st.sampled_from([1, 4]))
    def try_asks(asks: list[Ask], resets: list[float], num_blocks: int, most_tokens: int) -> None:
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(reports_follow_the_cache, asks, resets, num_blocks, most_tokens, clock=clock)

    try_asks()


async def test_reset_of_an_idle_engine(autojump_clock: trio.abc.Clock) -> None:
    """A reset is reported at once, although the engine has nothing else to report."""
    async with small_runtime(make_host=WatchedHost) as client:
        host = client.runtime.host
        assert isinstance(host, WatchedHost)
        await client.ask(prompt_of(3 * BLOCK))
        assert len(host.reader.keys) == 3
        client.runtime.desk.reset_prefix_cache()
        await trio.testing.wait_all_tasks_blocked()
        assert host.reader.keys == set()
