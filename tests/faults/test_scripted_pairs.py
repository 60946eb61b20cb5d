"""Books of a pair of scripted engines, in the order of its messages: deaths on each side, cut transfers, aborts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.ledger.reconciling import parse_metrics, reconcile
from quipu.actors.ledger.service import LedgerConfig, open_ledger
from quipu.actors.messages.accountant import Side
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.peers import EndFetch, Fetch
from quipu.actors.messages.scheduler import Submit
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.health import DrainMode
from tests.actors.ledger.ledgers import SEGMENT
from tests.journals import KeptJournal
from tests.pair_books import check_books
from tests.prompts import prompt_of
from tests.runtimes import Answer, read_answer
from tests.scripted_engine import (
    Admit,
    Compute,
    Die,
    Leave,
    ScriptedEntry,
    ScriptedHost,
    Token,
    Write,
    scripted_pair,
    scripted_runtime,
    settle_scripted,
    tokens,
)

PROMPT = prompt_of(70)
BLOCKS = 64
"""Tokens of the prompt's full blocks."""
NUM_TOKENS = 4


@attrs.define
class Pair:
    """A script for both engines, and when they die."""

    cached: int = 0
    """Tokens that the first engine has of each prompt."""
    held: int = 0
    """Tokens that the second one has, when a sequence comes to it..."""
    came: int = BLOCKS
    """...and up to where blocks have come from the other engine."""
    has_fetched: bool = True
    """Whether they have come although no engine is named from which they could be fetched now."""
    deaths: dict[int, list[int]] = attrs.field(factory=dict)
    """By engine (0 or 1), before which of its reports it dies, in its first life, its second…"""
    submits: list[Submit] = attrs.field(factory=list)

    def __call__(self, submit: Submit) -> Sequence[Sequence[ScriptedEntry]]:
        self.submits.append(submit)
        size, outputs = len(submit.prompt_token_ids), submit.output_token_ids
        if submit.ends_after_prefill:
            half = max(self.cached, BLOCKS // 2)
            reports: list[list[ScriptedEntry]] = [
                [Admit(self.cached, {"device": self.cached}), Compute(self.cached, half)],
                [Compute(half, size), Write(self.cached, BLOCKS), Token(), Leave()],
            ]
            engine = 0
        else:
            found, known = max(self.held, self.came), size + len(outputs)
            held = found if submit.peer is None and not self.has_fetched else self.held
            moved = {"peer": [held, found]} if found > held else {}
            admitted = Admit(
                found,
                {"device": held, "peer": found - held},
                side=Side.PREFILL if submit.peer is None else Side.DECODE,
                tier_spans=moved,
            )
            rest = tokens(NUM_TOKENS - len(outputs))
            reports = [[admitted, Compute(found, known), *rest[0]], *rest[1:]]
            engine = 1
        deaths = self.deaths.get(engine)
        return [*reports[: deaths.pop(0)], [Die()]] if deaths else reports


async def ask_pair(pair: Pair, *prompts: list[int], n: int = 1, **options: Any) -> Answer:
    """Serve one request, and check the books of everything."""
    journal = KeptJournal()
    async with scripted_pair(pair, journal=journal, **options) as client:
        with trio.fail_after(60):
            answer = await client.ask(*(prompts or (PROMPT,)), n=n, max_tokens=NUM_TOKENS)
        await settle_scripted(client)
        check_books(client, journal.closed)
    assert answer.error is None and journal.closed == [answer.record]
    return answer


def work(record: UsageRecord) -> tuple[int, int, int, int]:
    """Return what was computed, restored, computed again and moved."""
    return (record.computed_tokens, record.restored_tokens, record.recomputed_tokens, record.moved_tokens)


@pytest.mark.parametrize("cached", [0, 32])
async def test_cold_and_warm(autojump_clock: trio.abc.Clock, cached: int) -> None:
    """The client hears of the first engine's cache, at once, and of nothing else."""
    answer = await ask_pair(Pair(cached=cached))
    record = answer.record
    assert [started.cached_tokens for started in answer.started] == [cached] * len(answer.started)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (70, cached, NUM_TOKENS)
    assert record.cache_write_tokens == BLOCKS - cached
    assert work(record) == (70 - cached, 0, 6, BLOCKS)
    assert (record.engine, record.decode_engine, record.num_engine_deaths) == (0, 1, 0)


@pytest.mark.parametrize(("held", "came"), [(48, BLOCKS), (BLOCKS, 0), (0, 32), (16, 32), (0, 0)])
async def test_partly_held_and_cut_transfers(autojump_clock: trio.abc.Clock, held: int, came: int) -> None:
    """What the second engine had is nothing, what came is moved, and the rest is computed again."""
    record = (await ask_pair(Pair(held=held, came=came))).record
    assert work(record) == (70, 0, 70 - max(held, came), max(0, came - held))
    assert record.cached_tokens == 0


async def test_choices(autojump_clock: trio.abc.Clock) -> None:
    """Three choices: the prompt is counted once, what moved is the sum over all of them."""
    record = (await ask_pair(Pair(cached=16), n=3)).record
    assert (record.prompt_tokens, record.cached_tokens) == (70, 16)
    assert record.completion_tokens == 3 * NUM_TOKENS
    assert work(record) == (3 * 54, 0, 3 * 6, 3 * BLOCKS)


async def test_list_of_prompts(autojump_clock: trio.abc.Clock) -> None:
    """Of a list, all numbers are sums."""
    record = (await ask_pair(Pair(cached=16), PROMPT, prompt_of(71, seed=1), prompt_of(72, seed=2))).record
    assert (record.prompt_tokens, record.cached_tokens) == (213, 48)
    assert work(record) == (213 - 48, 0, 6 + 7 + 8, 3 * BLOCKS)


@pytest.mark.parametrize("came", [0, 48])
async def test_first_engine_dies_unheard(autojump_clock: trio.abc.Clock, came: int) -> None:
    """Its prompt is the second one's then, whose own cache is the number, and not what it has fetched by then."""
    pair = Pair(cached=32, held=16, came=came, deaths={0: [0]})
    record = (await ask_pair(pair)).record
    assert [submit.peer for submit in pair.submits] == [None, None]
    assert (record.cached_tokens, record.engine, record.decode_engine) == (16, 1, None)
    found = max(16, came)
    assert (record.computed_tokens, record.restored_tokens, record.recomputed_tokens) == (70 - found, found - 16, 0)
    assert record.moved_tokens == found - 16


async def test_first_engine_dies_heard(autojump_clock: trio.abc.Clock) -> None:
    """After its first report the client's number stands, and what is covered again is moved or recomputed."""
    pair = Pair(cached=16, came=48, deaths={0: [1]})
    record = (await ask_pair(pair)).record
    assert [submit.peer for submit in pair.submits] == [None, None]
    assert (record.cached_tokens, record.engine, record.decode_engine) == (16, 0, 1)
    assert (record.num_engine_deaths, *work(record)) == (1, 16 + 22, 16, 0, 48)


@pytest.mark.parametrize("is_heard", [False, True])
async def test_third_engine_goes_on(autojump_clock: trio.abc.Clock, is_heard: bool) -> None:
    """After the second one's death a third is given the blocks; what the second one did counts if it was heard of."""
    pair = Pair(cached=16, deaths={1: [int(is_heard)]})
    roles = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.DECODE)
    record = (await ask_pair(pair, num_engines=3, engine_roles=roles)).record
    assert [submit.peer is None for submit in pair.submits] == [True, False, False]
    assert (record.cached_tokens, record.engine, record.num_engine_deaths) == (16, 0, 1)
    assert record.decode_engine in (1, 2)
    assert work(record) == (54, 0, 6 + 7 * is_heard, BLOCKS * (1 + is_heard))


@pytest.mark.parametrize("is_heard", [False, True])
async def test_second_engine_is_gone(autojump_clock: trio.abc.Clock, is_heard: bool) -> None:
    """The first one goes on instead, from its own cache: the record still names the other one if it was heard of."""
    pair = Pair(cached=16, deaths={1: [int(is_heard)]}, has_fetched=False)
    record = (await ask_pair(pair)).record
    assert [submit.peer is None for submit in pair.submits] == [True, False, True]
    assert (record.cached_tokens, record.engine, record.num_engine_deaths) == (16, 0, 1)
    assert record.decode_engine == (1 if is_heard else None)
    assert work(record) == (54, 0, 70 + 7 * is_heard, BLOCKS * is_heard)


async def test_aborts_at_every_message(autojump_clock: trio.abc.Clock) -> None:
    """A client that leaves at any moment leaves one record that adds up, and nothing that is still fetched."""
    outcomes = set()
    for moment in range(14):
        journal, pair = KeptJournal(), Pair(cached=16)
        async with scripted_pair(pair, journal=journal) as client:
            ticket = client.open(PROMPT, max_tokens=NUM_TOKENS)
            with trio.move_on_after(0.005 * moment):
                await ticket.start()
                await read_answer(ticket)
            ticket.leave()
            await settle_scripted(client)
            check_books(client, journal.closed)
            engines = client.runtime.desk.pool
            assert not any(len(engine.queue) for engine in engines)
            host = client.runtime.hosts[1]
            assert isinstance(host, ScriptedHost)
            sent = [type(message) for message in host.taken]
        assert sent.count(EndFetch) <= sent.count(Fetch) <= 1
        (record,) = journal.closed
        assert record.cached_tokens in (None, 16) and record.computed_tokens <= 54
        outcomes.add((record.outcome, record.decode_engine))
    assert outcomes >= {(Outcome.CANCELLED, None), (Outcome.CANCELLED, 1), (Outcome.FINISHED, 1)}


async def test_ledger_and_reconcile(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """The ledger has both engines and the moved tokens, and `reconcile` agrees with the counters."""
    async with open_ledger(LedgerConfig(data_dir=tmp_path, segment_bytes=SEGMENT, version="test")) as ledger:
        async with scripted_pair(Pair(cached=32), journal=ledger.journal) as client:
            desk = client.runtime.desk
            ledger.counters = lambda: parse_metrics(desk.render_metrics().decode())
            answers = [await client.ask(prompt_of(70, seed=seed), max_tokens=NUM_TOKENS) for seed in range(3)]
            await settle_scripted(client)
            counters = ledger.counters()
        ledger.counters = lambda: counters
    (account,) = reconcile(data_dir=tmp_path)
    assert account.agrees and account.ended == "stopped"
    (moved,) = [line for line in account.lines if line.name == "moved_tokens_total"]
    assert moved.ledger == moved.counter == 3 * BLOCKS == sum(answer.record.moved_tokens for answer in answers)


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_moved_before_its_first_token(autojump_clock: trio.abc.Clock, is_admitted: bool) -> None:
    """A sequence that leaves before it was admitted takes no blocks with it: the next engine's cache is the number."""
    submits: list[Submit] = []

    def script(submit: Submit) -> Sequence[Sequence[ScriptedEntry]]:
        submits.append(submit)
        if len(submits) == 1:
            return [[Admit(16, {"device": 16}), Compute(16, 32)]] if is_admitted else []
        side, found = (Side.PREFILL, 48) if submit.peer is None else (Side.DECODE, 64)
        admitted = Admit(found, {"device": 48, "peer": found - 48}, side=side, tier_spans={"peer": [48, found]})
        return [[admitted, Compute(found, 70), Token()], *tokens(NUM_TOKENS - 1)]

    journal, answers = KeptJournal(), list[Answer]()
    async with scripted_runtime(script, journal=journal, num_engines=2) as client:

        async def ask() -> None:
            answers.append(await client.ask(PROMPT, max_tokens=NUM_TOKENS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            desk = client.runtime.desk
            (engine_id,) = [its.engine_id for its in desk.pool if desk.sequences.requests_on(its)]
            desk.control.drain(engine_id, DrainMode.MOVE)
        await settle_scripted(client)
        check_books(client, journal.closed)
    (answer,) = answers
    assert (submits[1].peer is not None) is is_admitted
    assert answer.record.cached_tokens == (16 if is_admitted else 48)
    assert work(answer.record) == ((22, 32, 0, 16) if is_admitted else (22, 0, 0, 0))
