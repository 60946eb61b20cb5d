"""Prompts that one engine prefills and another continues, whose blocks go from mover to mover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from quipu.actors.engine.peers.named_blocks import HOLD_S
from quipu.actors.engine.peers.node_network import NodeNetwork
from quipu.actors.engine.peers.peer_link import Here, LoopLink, LoopNetwork, PeerNetwork
from quipu.actors.engine.peers.tcp_network import TcpNetwork
from quipu.actors.engine.peers.unix_link import UnixLink, UnixNetwork
from quipu.actors.fleet.processes.link_tls import LinkTls
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.peers import EndFetch, Peer
from quipu.actors.messages.scheduler import Abort
from quipu.kernels.fake import FakeBackend
from tests.actors.engine.engine_pairs import Admitted, Side, open_sides, pair_config
from tests.authorities import Authority
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import eventually
from tests.tiny import BLOCK

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 7, 8, 9]
HOST = "127.0.0.1"
NETWORKS: dict[str, Callable[[LinkTls], PeerNetwork]] = {
    "loop": lambda tls: LoopNetwork(),
    "unix": lambda tls: UnixNetwork(),
    "buffers": lambda tls: UnixNetwork(),
    "tcp": lambda tls: TcpNetwork(HOST, bytes(32)),
    "tls": lambda tls: TcpNetwork(HOST, bytes(32), tls),
    "node": lambda tls: NodeNetwork(HOST, bytes(32), tls),
}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> LinkTls:
    return Authority(tmp_path_factory.mktemp("tls") / "ours").files(HOST)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, tls: LinkTls, monkeypatch: pytest.MonkeyPatch) -> PeerNetwork:
    if request.param == "buffers":
        monkeypatch.setattr(UnixLink, "can_share", False)
    return NETWORKS[request.param](tls)


@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "afterwards"])
async def test_prefilled_elsewhere(network: PeerNetwork, *, is_ahead: bool) -> None:
    """The prompt's full blocks are moved, whether while they are computed or afterwards; the text is the same."""
    with trio.fail_after(60):
        async with open_sides(2, network) as (prefill, decode):
            first = await prefill.submit(1, PROMPT, ends_after_prefill=True)
            if is_ahead:
                await decode.fetch(1, PROMPT, prefill.peer)
            await first.over.wait()
            assert (first.error, first.ended, len(first.tokens)) == (None, [], 1)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            assert rest.admissions == [Admitted(10 * BLOCK, 10 * BLOCK, "decode", {"device": 0, "peer": 10 * BLOCK})]
            assert rest.computed[0] == (10 * BLOCK, len(PROMPT) + 1) and rest.ended == ["length"]
            await eventually(lambda: not prefill.engine.block_manager.lending.num_blocks, "nothing is lent")
            prefill.check()
            decode.check()


async def test_what_the_decode_side_holds_is_not_moved(network: PeerNetwork) -> None:
    """Only what the decode side lacks is fetched."""
    with trio.fail_after(60):
        async with open_sides(2, network) as (prefill, decode):
            await decode.serve(7, PROMPT[: 4 * BLOCK + 1], max_tokens=1)
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            (admitted,) = rest.admissions
            assert admitted.by_tier == {"device": 4 * BLOCK, "peer": 6 * BLOCK}


async def test_last_token_at_the_prefill_side() -> None:
    """A sequence that ends with its first token ends there."""
    with trio.fail_after(60):
        async with open_sides(1) as (prefill,):
            answer = await prefill.serve(1, PROMPT, max_tokens=1, ends_after_prefill=True)
            assert answer.ended == ["length"] and answer.tokens == continuation(PROMPT, 1)


async def test_peer_that_is_gone() -> None:
    """What cannot be fetched is computed."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            nowhere = Peer(0, "loop:99")
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=nowhere)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            assert rest.admissions == [Admitted(0, 0, "decode", {})]
            decode.check()


async def test_evicted_at_the_peer() -> None:
    """What the prefill side has evicted meanwhile is computed."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            for seed in range(2, 5):
                await prefill.serve(seed, prompt_of(30 * BLOCK, seed=seed), max_tokens=1)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            assert rest.admissions[0].reused == rest.admissions[0].read < 10 * BLOCK
            decode.check()


async def test_room_that_is_held_for_a_fetch(autojump_clock: trio.testing.MockClock) -> None:
    """A prompt for which a fetch leaves no room does not wait for blocks that the peer may never have."""
    with trio.fail_after(60):
        async with open_sides(configs=[pair_config(num_blocks=26)] * 2) as (prefill, decode):
            tiers = decode.engine.block_manager.tiers
            assert tiers is not None
            await decode.fetch(1, PROMPT, prefill.peer)
            await eventually(lambda: tiers.loads.num_held_ahead == 10, "room is held")
            other = prompt_of(20 * BLOCK, seed=2)
            answer = await decode.serve(2, other, max_tokens=1)
            assert answer.tokens == continuation(other, 1)
            await decode.engine.receive(EndFetch(1))


async def test_idle_engine_reports_what_it_has_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is over is reported, though no step runs: how many blocks are cached, and their keys."""
    reports: list[StepReport] = []
    monkeypatch.setattr(Side, "_note", lambda side, report: reports.append(report) if side.engine_id else None)
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            await decode.fetch(1, PROMPT, prefill.peer)
            await prefill.submit(1, PROMPT, ends_after_prefill=True)
            await eventually(lambda: bool(reports), "a report of the engine that fetched")
            assert reports[-1].num_cached_blocks == 10 and len(reports[-1].stored_keys) >= 10
            await decode.engine.receive(EndFetch(1))


async def test_idle_engine_reports_what_comes_back(autojump_clock: trio.testing.MockClock) -> None:
    """When lent blocks are free again, this is reported, though no step runs any more."""
    async with open_sides(2) as (prefill, decode):
        first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
        backend, pool = decode.engine.executor.backend, prefill.engine.block_manager.pool
        assert isinstance(backend, FakeBackend)
        backend.dials.move_seconds = 1.0
        rest = await decode.submit(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
        await trio.sleep(0.5)
        await prefill.serve(2, PROMPT[:BLOCK], max_tokens=1)
        assert prefill.num_free_blocks == pool.num_free < pool.num_blocks - 1
        await rest.over.wait()
        assert prefill.num_free_blocks == pool.num_free == pool.num_blocks - 1


async def test_never_arrives() -> None:
    """What was fetched for a sequence that does not arrive is released, and stays cached."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            await decode.fetch(1, PROMPT, prefill.peer)
            loads = decode.engine.block_manager.tiers
            assert loads is not None
            await eventually(lambda: loads.loads.are_under_way, "the fetch has begun")
            await decode.engine.receive(EndFetch(1))
            await eventually(lambda: not loads.loads.are_under_way, "the fetch is over")
            decode.check()
            prefill.check()


async def test_ends_before_the_pass_in_front_of_it() -> None:
    """A fetch that ends while it still waits for a pass is over with that pass, although its peer has nothing."""
    with trio.fail_after(10):
        async with open_sides(2) as (prefill, decode):
            backend = decode.engine.executor.backend
            assert isinstance(backend, FakeBackend)
            backend.dials.step_seconds = 0.2
            other = await decode.submit(7, PROMPT[:BLOCK], max_tokens=1)
            await eventually(lambda: decode.engine.executor.running_step is not None, "a pass is running")
            await decode.fetch(1, PROMPT, prefill.peer)
            await decode.engine.receive(EndFetch(1))
            await other.over.wait()
            loads = decode.engine.block_manager.tiers
            assert loads is not None
            await eventually(lambda: not loads.loads.are_under_way, "the fetch is over")
            decode.check()


async def test_leaves_before_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    """What waits for a peer's blocks is released with a sequence that comes to a busy engine and ends before a step."""
    async with open_sides(2) as (prefill, decode):
        await decode.fetch(1, PROMPT, prefill.peer)
        await trio.sleep(1)
        backend = decode.engine.executor.backend
        assert isinstance(backend, FakeBackend)
        backend.dials.step_seconds = 1.0
        other = await decode.submit(7, PROMPT[:BLOCK])
        await trio.sleep(0.5)
        left = await decode.submit(1, PROMPT, output_token_ids=[7], is_resumed=True, peer=prefill.peer)
        await decode.engine.receive(Abort(1))
        await other.over.wait()
        assert left.over.is_set() and not left.admissions
        decode.check()


async def test_arrives_though_its_fetch_was_ended() -> None:
    """A sequence that comes after the end of its fetch, and of another one, is served all the same."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            await decode.fetch(1, PROMPT, prefill.peer)
            await decode.engine.receive(EndFetch(1))
            await decode.fetch(1, PROMPT, prefill.peer)
            first = await prefill.submit(1, PROMPT, ends_after_prefill=True)
            tokens = continuation(PROMPT, 1)
            rest = await decode.serve(1, PROMPT, output_token_ids=tokens, is_resumed=True, peer=prefill.peer)
            assert tokens + rest.tokens == continuation(PROMPT, 6)
            await first.over.wait()
            await eventually(lambda: not prefill.engine.block_manager.lending.num_blocks, "nothing is lent")
            decode.check()
            prefill.check()


async def test_fetches_leave_room() -> None:
    """Fetches that wait for their blocks hold at most half of them, and others are served meanwhile."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            pool = decode.engine.block_manager.pool
            for sequence_id in range(1, 9):
                await decode.fetch(sequence_id, prompt_of(20 * BLOCK, seed=sequence_id), prefill.peer)
            tiers = decode.engine.block_manager.tiers
            assert tiers is not None
            await eventually(lambda: tiers.loads.num_held_ahead == pool.num_blocks // 2, "half is taken")
            answer = await decode.serve(77, prompt_of(30 * BLOCK, seed=77))
            assert answer.tokens == continuation(prompt_of(30 * BLOCK, seed=77), 6)
            for sequence_id in range(1, 9):
                await decode.engine.receive(EndFetch(sequence_id))
            await eventually(lambda: not tiers.loads.are_under_way, "the fetches are over")
            decode.check()


async def test_others_do_not_wait_for_a_fetch() -> None:
    """A prompt that begins like one that is being fetched is computed at once, and its text is right."""
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            await decode.fetch(1, PROMPT, prefill.peer)
            answer = await decode.serve(2, [*PROMPT, 5])
            assert answer.tokens == continuation([*PROMPT, 5], 6) and answer.admissions[0].reused == 0
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            decode.check()


@pytest.mark.parametrize("way", ["copy_from", "write_blocks"])
async def test_overwritten_blocks_confirm_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While fetched blocks are written, the executor has no tag of what was in their places before."""
    monkeypatch.setattr(LoopLink, "can_share", way == "copy_from")
    confirmed: list[int] = []
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            await decode.serve(7, prompt_of(38 * BLOCK, seed=7), max_tokens=1)
            await decode.serve(8, prompt_of(38 * BLOCK, seed=8), max_tokens=1)
            assert not decode.engine.block_manager.pool.num_free - decode.engine.block_manager.pool.num_cached, "full"
            write, tags = getattr(FakeBackend, way), decode.engine.executor.tags
            num_watched = 0

            def watched(backend: FakeBackend, *arguments: Any) -> None:
                nonlocal num_watched
                num_watched += 1
                blocks: Sequence[int] = arguments[2] if way == "copy_from" else arguments[0]
                confirmed.extend(block for block in blocks if tags.tag_of(block) is not None)
                write(backend, *arguments)
                confirmed.extend(block for block in blocks if way == "copy_from" and tags.tag_of(block) is not None)

            monkeypatch.setattr(FakeBackend, way, watched)
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert rest.admissions[0].by_tier["peer"] == 10 * BLOCK
            assert num_watched
    assert not confirmed


@pytest.mark.parametrize("way", ["copy_from", "read_blocks"])
@pytest.mark.parametrize("num_spoiled", [0, 1, 4])
async def test_overwritten_during_the_copy(way: str, num_spoiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the prefill side writes to while they are copied are not used, whatever bytes have come."""
    monkeypatch.setattr(LoopLink, "can_share", way == "copy_from")
    with trio.fail_after(60):
        async with open_sides(2) as (prefill, decode):
            first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
            copy, spoiled = getattr(FakeBackend, way), [0]

            def overwritten(backend: FakeBackend, *arguments: Any) -> None:
                sources: Sequence[int] = arguments[1] if way == "copy_from" else arguments[0]
                source = prefill.engine.executor.backend
                assert isinstance(source, FakeBackend)
                for block in sources[len(sources) - num_spoiled :] if num_spoiled else ():
                    prefill.engine.executor.tags.forget([block])
                    spoiled.append(block)
                    for slot in range(block * BLOCK, (block + 1) * BLOCK):
                        source.blocks.slots[slot] = 77
                copy(backend, *arguments)

            monkeypatch.setattr(FakeBackend, way, overwritten)
            rest = await decode.serve(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
            assert first.tokens + rest.tokens == continuation(PROMPT, 6)
            assert rest.admissions[0].read == (10 - num_spoiled) * BLOCK and len(set(spoiled)) == 1 + num_spoiled


async def test_held_for_a_bounded_time(autojump_clock: trio.testing.MockClock) -> None:
    """Blocks that a peer was told of, and does not copy, are held for two seconds at most, and may be used then."""

    class Stands(LoopLink):
        async def give_back(self, here: Here) -> None:
            assert here.blocks
            await trio.sleep_forever()

    class Standing(LoopNetwork):
        def make_link(self, *ends: Any) -> LoopLink:
            return Stands(*ends)

    async with open_sides(2, Standing()) as (prefill, decode):
        first = await prefill.serve(1, PROMPT, ends_after_prefill=True)
        lending, begun = prefill.engine.block_manager.lending, trio.current_time()
        await decode.submit(1, PROMPT, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer)
        await eventually(lambda: lending.num_blocks > 0, "blocks are held")
        await eventually(lambda: not lending.num_blocks, "blocks are released", within_s=10)
        assert HOLD_S - 0.1 <= trio.current_time() - begun < HOLD_S + 1
        await decode.answers[1].over.wait()
        assert first.tokens + decode.answers[1].tokens == continuation(PROMPT, 6)


@pytest.mark.parametrize(("fails", "level"), [(False, "debug"), (True, "warning")])
async def test_only_failures_are_warned_of(fails: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer no longer has is computed without a word; a copy that raises is logged as a warning."""

    def raising(*_: object) -> None:
        raise ValueError("injected fault: no such memory")

    if fails:
        monkeypatch.setattr(FakeBackend, "copy_from", raising)
    with trio.fail_after(60), structlog.testing.capture_logs() as lines:
        async with open_sides(2) as (prefill, decode):
            prompt = PROMPT if fails else [9, *PROMPT]
            await prefill.serve(1, PROMPT, ends_after_prefill=True)
            tokens = continuation(prompt, 1)
            rest = await decode.serve(1, prompt, output_token_ids=tokens, is_resumed=True, peer=prefill.peer)
            assert tokens + rest.tokens == continuation(prompt, 6)
    assert {line["log_level"] for line in lines if line["event"] == "kv_move.failed"} == {level}
