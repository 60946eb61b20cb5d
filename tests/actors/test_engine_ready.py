"""The server serves with what a ready engine reports: number of blocks, maximum length, backend."""

from __future__ import annotations

import attrs
import trio

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import LoopHost
from quipu.actors.engine.executor.loading import numerics_of
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.outcomes import ErrorKind
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.interface import describe_pool
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.backend import Capabilities
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info, small_runtime


class LateHost(LoopHost):
    """Starts no engine before the test allows it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may_start = trio.Event()

    async def run(self, link: EngineLink) -> Death:
        await self.may_start.wait()
        return await super().run(link)


async def test_number_of_blocks_from_the_engine(autojump_clock: trio.abc.Clock) -> None:
    """If the number of blocks is not configured, the desk and the metrics get it from the engine."""
    config = runtime_config(num_blocks=None, max_model_len=1008)
    info = serving_info(config)
    assert info.num_blocks is None
    host = LateHost(config.engine)
    async with open_with_kept_vocabulary(config, info, lambda _: host, make_renderer=InlineRenderer) as runtime:
        assert runtime.desk.num_usable_blocks_of(0) == 0 and runtime.desk.info.engine is None
        host.may_start.set()
        while not runtime.desk.health().is_ready:
            await trio.lowlevel.checkpoint()
        num_usable = 16 * 63
        assert runtime.desk.num_usable_blocks_of(0) == num_usable
        assert runtime.desk.info.num_blocks == num_usable + 1
        assert runtime.desk.info.engine is not None and runtime.desk.info.engine.backend == "fake"
        assert f'state="free"}} {num_usable}.0' in runtime.metrics.render().decode()
        assert host.engine is not None and host.engine.block_manager.pool.num_free == num_usable


async def test_maximum_length_from_the_engine(autojump_clock: trio.abc.Clock) -> None:
    """Prompts are checked against what the engine has room for, not against the configured length."""
    async with small_runtime() as client:
        desk = client.runtime.desk
        desk.info = attrs.evolve(desk.info, max_model_len=32)
        refused = await client.ask(list(range(32)))
        assert refused.error is not None and refused.error.kind is ErrorKind.INVALID
        assert "maximum context length is 32 tokens" in refused.error.message
        assert (await client.ask(list(range(20)))).error is None


def test_numerics() -> None:
    """The digest of an engine's numerics depends on the dtypes of weights and KV cache, not on its threads."""
    plain = Capabilities(name="cpu", dtype="bfloat16", invariant=True, kv_cache_dtype="bfloat16")
    others = [attrs.evolve(plain, kv_cache_dtype="int8"), attrs.evolve(plain, dtype="int8")]
    assert numerics_of(plain) == numerics_of(attrs.evolve(plain, num_threads=3))
    assert len({numerics_of(each) for each in (plain, *others)}) == 3


def test_describe_pool() -> None:
    """The description has the number of tokens without the null block, and how many full contexts fit."""
    engine = EngineReady(1, 101, 16, "cpu", "bfloat16", max_model_len=640)
    assert describe_pool(engine) == {"num_tokens": 1600, "max_concurrency": 2.5}
