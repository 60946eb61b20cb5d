"""Adapters are loaded into every engine before requests may use them, and unloaded after the last that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.messages.engine_adapters import AdapterMessage
from quipu.actors.request_desk.adapters import AdapterRefused, UnknownAdapter
from quipu.actors.request_desk.engine_pool import PooledEngine
from quipu.actors.request_desk.interface import DeskClosed
from quipu.kernels.fake import Dials
from tests.actors.engine.adapter_folders import make_folder
from tests.fake_oracle import continuation
from tests.runtimes import PAIR, Client, kill_engine, runtime_config, serving_info, small_runtime, text_of

PROMPT = list(range(100, 150))


async def loaded(client: Client) -> list[set[str]]:
    """Return the adapters of each engine, once it has done what it was told."""
    await trio.testing.wait_all_tasks_blocked()
    return [engine.executor.adapters.digests for engine in client.engines]


def digest_of(client: Client, name: str) -> str:
    return client.runtime.desk.info.adapters[name].digest


async def ask(client: Client, name: str) -> tuple[str, int | None]:
    """Ask with an adapter; return whether the text is its own, and how many tokens were cached."""
    answer = await client.ask(PROMPT, adapter=digest_of(client, name))
    assert answer.error is None and not answer.record.disputed
    return answer.texts[0], answer.record.cached_tokens


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_names_and_digests(autojump_clock: trio.abc.Clock, tmp_path: Path, num_engines: int) -> None:
    """Blocks belong to the bytes of an adapter: another name, or a reload, keeps hits; other bytes have none."""
    folder = make_folder(tmp_path / "adapter")
    async with small_runtime(max_loras=3, num_engines=num_engines) as client:
        adapters = client.runtime.desk.adapters
        first = await adapters.load("first", str(folder))
        assert await loaded(client) == [{first.digest}] * num_engines
        text = text_of(continuation(PROMPT, 8, adapter=first.digest))
        assert await ask(client, "first") == (text, 0)
        assert await ask(client, "first") == (text, 48)
        await adapters.load("second", str(folder))
        assert await ask(client, "second") == (text, 48)
        await adapters.unload("first")
        assert await loaded(client) == [{first.digest}] * num_engines, "it has another name"
        await adapters.unload("second")
        assert await loaded(client) == [set()] * num_engines
        await adapters.load("first", str(folder))
        assert await ask(client, "first") == (text, 48)
        make_folder(folder, "other bytes")
        assert await ask(client, "first") == (text, 48), "what was loaded stays as it is"
        with pytest.raises(AdapterRefused, match="loaded already"):
            await adapters.load("first", str(folder))
        other = await adapters.load("first", str(folder), in_place=True)
        assert other.digest != first.digest
        assert await loaded(client) == [{other.digest}] * num_engines
        assert await ask(client, "first") == (text_of(continuation(PROMPT, 8, adapter=other.digest)), 0)
        client.assert_at_rest()


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_unload_waits(autojump_clock: trio.abc.Clock, tmp_path: Path, num_engines: int) -> None:
    """The name is gone at once; the adapter stays until the last request that was opened with it has ended."""
    async with small_runtime(Dials(step_seconds=1.0), max_loras=1, num_engines=num_engines) as client:
        adapters = client.runtime.desk.adapters
        adapter = await adapters.load("one", str(make_folder(tmp_path / "adapter")))
        answers = []

        async def run() -> None:
            answers.append(await client.ask(PROMPT, adapter=adapter.digest, max_tokens=20))

        unloaded = trio.Event()

        async def unload() -> None:
            await adapters.unload("one")
            unloaded.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(3.5)
            nursery.start_soon(unload)
            await trio.sleep(1.0)
            assert not unloaded.is_set() and await loaded(client) == [{adapter.digest}] * num_engines
            assert not client.runtime.desk.info.adapters
            with pytest.raises(DeskClosed, match="unloaded"):
                client.open(PROMPT, adapter=adapter.digest)
            # another one may take its place meanwhile
            other = await adapters.load("two", str(make_folder(tmp_path / "other", "two")))
            await unloaded.wait()
            assert await loaded(client) == [{other.digest}] * num_engines
        (answer,) = answers
        assert answer.texts[0] == text_of(continuation(PROMPT, 20, adapter=adapter.digest))
        with pytest.raises(UnknownAdapter):
            await adapters.unload("one")


async def test_unloading_is_not_cancelled(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """A client that does not wait until an adapter is unloaded does not keep it loaded."""
    async with small_runtime(Dials(step_seconds=1.0), max_loras=1) as client:
        adapters = client.runtime.desk.adapters
        adapter = await adapters.load("one", str(make_folder(tmp_path / "adapter")))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, PROMPT)
            ticket = client.open(PROMPT, adapter=adapter.digest)
            with trio.move_on_after(2):
                await adapters.unload("one")
            assert await loaded(client) == [{adapter.digest}]
            ticket.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert await loaded(client) == [set()]


@pytest.mark.parametrize("num_checkpoints", range(10))
async def test_loaded_again_at_once(autojump_clock: trio.abc.Clock, tmp_path: Path, num_checkpoints: int) -> None:
    """An adapter whose loading was cancelled, and is begun again, is in the engine while it is served."""
    folder = str(make_folder(tmp_path / "adapter"))
    async with small_runtime(max_loras=1) as client:
        adapters = client.runtime.desk.adapters
        async with trio.open_nursery() as nursery:
            nursery.start_soon(adapters.load, "one", folder)
            for _ in range(num_checkpoints):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        adapter = await adapters.load("one", folder, in_place=True)
        assert await loaded(client) == [{adapter.digest}]
        assert await ask(client, "one") == (text_of(continuation(PROMPT, 8, adapter=adapter.digest)), 0)


@pytest.mark.parametrize("num_checkpoints", range(10))
async def test_loaded_again_while_unloaded(
    autojump_clock: trio.abc.Clock, tmp_path: Path, num_checkpoints: int
) -> None:
    """An adapter that is loaded again while the last request of its former name ends is in the engine."""
    folder = str(make_folder(tmp_path / "adapter"))
    async with small_runtime(Dials(step_seconds=1.0), max_loras=1) as client:
        adapters = client.runtime.desk.adapters
        adapter = await adapters.load("one", folder)
        ticket = client.open(PROMPT, adapter=adapter.digest, max_tokens=100)
        await trio.sleep(3.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(adapters.unload, "one")
            await trio.sleep(1.0)
            nursery.start_soon(adapters.load, "one", folder)
            for _ in range(num_checkpoints):
                await trio.lowlevel.checkpoint()
            ticket.leave()
        assert await loaded(client) == [{adapter.digest}]
        assert (await ask(client, "one"))[0] == text_of(continuation(PROMPT, 8, adapter=adapter.digest))


async def test_unloaded_while_restored(
    autojump_clock: trio.abc.Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter whose name goes while a new engine restores it takes none of the engine's places."""
    async with small_runtime(max_loras=1) as client:
        adapters = client.runtime.desk.adapters
        await adapters.load("one", str(make_folder(tmp_path / "adapter")))
        kill_engine(client)
        restore = adapters.restore
        async with trio.open_nursery() as nursery:

            def restore_and_unload(engine: PooledEngine) -> list[AdapterMessage]:
                nursery.start_soon(adapters.unload, "one")
                return restore(engine)

            monkeypatch.setattr(adapters, "restore", restore_and_unload)
            nursery.start_soon(client.ask, PROMPT)
        assert client.runtime.desk.pool.num_started == 2
        assert await loaded(client) == [set()]


async def test_restored_before_serving(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """A new engine has all adapters before it gets a request, and resumes what the old one held with them."""
    async with small_runtime(Dials(step_seconds=1.0), max_loras=2) as client:
        adapters = client.runtime.desk.adapters
        digests = [
            (await adapters.load(name, str(make_folder(tmp_path / name, name)))).digest for name in ("one", "two")
        ]
        answers = {}

        async def run(digest: str) -> None:
            answers[digest] = await client.ask(PROMPT, adapter=digest, max_tokens=20)

        async with trio.open_nursery() as nursery:
            for digest in digests:
                nursery.start_soon(run, digest)
            await trio.sleep(5)
            kill_engine(client)
            nursery.start_soon(adapters.unload, "two")  # its request is still running
        assert client.runtime.desk.pool.num_started == 2
        for digest, answer in answers.items():
            assert answer.error is None
            assert answer.texts[0] == text_of(continuation(PROMPT, 20, adapter=digest))
        await trio.testing.wait_all_tasks_blocked()
        assert await loaded(client) == [{digests[0]}]


async def test_added_engine(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """An engine that is added has all adapters before it is ready."""
    async with small_runtime(max_loras=2, lora_modules={"given": str(make_folder(tmp_path / "given"))}) as client:
        desk = client.runtime.desk
        await desk.adapters.load("one", str(make_folder(tmp_path / "one", "one")))
        (added,) = desk.control.add(1)
        while not desk.pool[added].is_ready:
            await trio.lowlevel.checkpoint()
        assert desk.pool[added].adapters == {digest_of(client, "given"), digest_of(client, "one")}
        assert await loaded(client) == [desk.pool[added].adapters] * 2


async def test_lost_adapter(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """An engine that cannot restore an adapter, whose files have changed, serves all else; its requests fail."""
    folder = make_folder(tmp_path / "adapter")
    async with small_runtime(Dials(step_seconds=1.0), max_loras=2) as client:
        adapters = client.runtime.desk.adapters
        lost = await adapters.load("lost", str(folder))
        kept = await adapters.load("kept", str(make_folder(tmp_path / "kept", "kept")))
        make_folder(folder, "other bytes")
        answers = {}

        async def run(digest: str) -> None:
            answers[digest] = await client.ask(PROMPT, adapter=digest, max_tokens=20)

        with structlog.testing.capture_logs() as lines:
            async with trio.open_nursery() as nursery:
                for digest in ("", lost.digest, kept.digest):
                    nursery.start_soon(run, digest)
                await trio.sleep(5)
                kill_engine(client)
        assert [line["adapter"] for line in lines if line["event"] == "adapter.lost"] == ["lost"]
        assert answers[lost.digest].error is not None
        assert answers[""].texts[0] == text_of(continuation(PROMPT, 20))
        assert answers[kept.digest].texts[0] == text_of(continuation(PROMPT, 20, adapter=kept.digest))
        assert client.runtime.desk.info.adapters.keys() == {"kept"}
        again = await adapters.load("lost", str(folder))
        assert again.digest != lost.digest and await loaded(client) == [{again.digest, kept.digest}]


async def test_engine_dies_while_it_loads(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """Loading goes on with the other engines; the one that comes back has it, too."""
    async with small_runtime(max_loras=1, num_engines=2) as client:
        adapters = client.runtime.desk.adapters
        for engine in client.engines:
            kill_engine(client, client.engines.index(engine))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, PROMPT)  # kills an engine, and then the other
            adapter = await adapters.load("one", str(make_folder(tmp_path / "adapter")))
        while client.runtime.desk.pool.num_ready < 2:
            await trio.sleep(0.1)
        await trio.testing.wait_all_tasks_blocked()
        assert await loaded(client) == [{adapter.digest}] * 2


async def test_refusals(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """What cannot be loaded changes nothing, in any engine."""
    async with small_runtime(max_loras=1, num_engines=2) as client:
        adapters = client.runtime.desk.adapters
        with pytest.raises(AdapterRefused, match="has no adapter_config"):
            await adapters.load("one", str(tmp_path))
        adapter = await adapters.load("one", str(make_folder(tmp_path / "one")))
        with pytest.raises(AdapterRefused, match="--max-loras"):
            await adapters.load("two", str(make_folder(tmp_path / "two", "two")))
        with pytest.raises(AdapterRefused, match="has no adapter_config"):
            await adapters.load("one", str(tmp_path), in_place=True)
        assert await loaded(client) == [{adapter.digest}] * 2
        assert list(client.runtime.desk.info.adapters) == ["one"]


async def test_modules_at_the_start(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """Adapters of the configuration are served as soon as an engine is ready, one that cannot be loaded ends the
    server."""
    modules = {"one": str(make_folder(tmp_path / "one")), "same": str(tmp_path / "one")}
    async with small_runtime(max_loras=2, lora_modules=modules, num_engines=2) as client:
        assert client.runtime.desk.info.adapters.keys() == {"one", "same"}
        assert await loaded(client) == [{digest_of(client, "one")}] * 2
        assert digest_of(client, "one") == digest_of(client, "same")
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="--lora-modules gone"), flatten_subgroups=True):
        async with small_runtime(max_loras=2, lora_modules={"gone": str(tmp_path / "gone")}, max_restarts=0):
            pytest.fail("the server must end")
    assert serving_info(runtime_config()).adapters == {}


async def test_continued_on_another_engine(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """A sequence whose prompt one engine computes, and which another continues, keeps its adapter and its blocks."""
    async with small_runtime(
        max_loras=1, num_engines=2, engine_roles=PAIR, has_peers=True, prefill_local_tokens=0
    ) as client:
        adapter = await client.runtime.desk.adapters.load("one", str(make_folder(tmp_path / "one")))
        answer = await client.ask(PROMPT, adapter=adapter.digest, max_tokens=20)
        assert answer.texts[0] == text_of(continuation(PROMPT, 20, adapter=adapter.digest))
        assert answer.record.decode_engine not in (None, answer.record.engine)
        assert answer.record.moved_tokens >= 48 and not answer.record.disputed
