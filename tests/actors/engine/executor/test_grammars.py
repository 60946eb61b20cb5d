"""Processes that follow grammars: which tenant they belong to, and what happens if one hangs, dies or is not needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import attrs
import pytest
import trio

from quipu.actors.engine.executor import grammar_entry, grammar_follower, grammar_turns, grammars
from quipu.actors.engine.executor.grammar_entry import MAX_DEATHS, MAX_LOSSES, Mask, MaskLimits
from quipu.actors.engine.executor.grammar_follower import GrammarFollower
from quipu.actors.engine.executor.grammar_turns import MAX_AHEAD_PER_TENANT
from quipu.actors.engine.executor.grammars import GrammarMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.fleet.forks.fork_server import Fork, ForkServer
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.sampling import OutputGrammar
from quipu.actors.messages.scheduler import GRAMMAR_LOST
from tests.grammars import EOS, PERSON, endless_later, regex, schema
from tests.processes import eventually, has_ended
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

SOURCE = (TINY / "tokenizer.json").read_bytes()
LIBRARY = Vocabulary(TINY).library
LETTER = LIBRARY.list_ids("t", add_special_tokens=False)
SEVEN = LIBRARY.list_ids("7", add_special_tokens=False)
DIGITS = grammar_text(regex("[0-9]+"))
ENDLESS = grammar_text(endless_later())


@attrs.define
class Made:
    """Processes that were forked, with their grammars."""

    processes: list[GrammarFollower] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()

    class Noted(GrammarFollower):
        def __init__(self, server: ForkServer, text: str, max_rows: int) -> None:
            super().__init__(server, text, max_rows)
            made.processes.append(self)
            made.texts.append(text)

    monkeypatch.setattr(grammar_entry, "GrammarFollower", Noted)
    return made


@pytest.fixture
def masks(made: Made) -> Iterator[GrammarMasks]:
    masks = GrammarMasks(SOURCE, (EOS,))
    yield masks
    masks.close()
    eventually(lambda: all(has_ended(pid) for pid in made.pids), "every process has ended")


def sequence(text: str, outputs: list[int] | None = None, tenant: str = "") -> SequenceGrammar:
    return SequenceGrammar(OutputGrammar(text, tenant=tenant, owner=tenant), outputs or [], ends_early=True)


def masks_of(masks: GrammarMasks, *sequences: SequenceGrammar) -> list[Mask]:
    return list(masks.begin(list(sequences))())


def test_endless_grammars_end_their_own_sequences(masks: GrammarMasks, made: Made) -> None:
    """Six grammars that never finish computing fail in the step that waits for them, the others in that step get the
    same masks as alone, and no computation is left running.
    """
    good = sequence(DIGITS), sequence(grammar_text(schema(PERSON)))
    alone = masks_of(masks, *good)
    endless = [sequence(grammar_text(endless_later(f"[a-z ]{{{length}}}")), LETTER * length) for length in range(1, 7)]
    found = masks_of(masks, good[0], *endless, good[1])
    assert [found[0], found[-1]] == alone
    for reason in found[1:-1]:
        assert isinstance(reason, str) and "cannot match its grammar any more: it takes too long" in reason
    assert len(made.processes) == 8
    assert all(has_ended(pid) for pid in made.pids[2:]) and not any(has_ended(pid) for pid in made.pids[:2])


def test_other_sequences_of_a_grammar_that_had_to_be_ended(masks: GrammarMasks, made: Made) -> None:
    """Another process follows them anew, with the same masks; a grammar that kills that one as well gets no third."""
    begun, fresh = sequence(ENDLESS, LETTER * 2), sequence(ENDLESS)
    alone = masks_of(masks, begun, fresh)
    stuck = sequence(ENDLESS, LETTER * 4)
    first, reason, last = masks_of(masks, begun, stuck, fresh)
    assert [first, last] == alone and isinstance(reason, str)
    assert len(made.processes) == 2
    for _ in range(MAX_DEATHS - 1):
        masks_of(masks, sequence(ENDLESS, LETTER * 4))
    assert masks_of(masks, fresh) == ["The grammar cannot be followed: it takes too long."]
    assert masks_of(masks, sequence(ENDLESS)) == ["The grammar cannot be followed: it takes too long."]
    assert len(made.processes) == MAX_DEATHS and masks.prepare(OutputGrammar(ENDLESS)).done()
    assert isinstance(masks_of(masks, sequence(ENDLESS, tenant="another"))[0], bytes)


def test_draft_that_takes_too_long(masks: GrammarMasks, made: Made) -> None:
    """A draft whose masks kill the process costs neither its sequence nor the grammar anything: no later one is
    followed."""
    followed = sequence(ENDLESS)
    (before,) = masks_of(masks, followed)
    for _ in range(2 * MAX_DEATHS):
        first, *after = masks.begin([followed], [LETTER * 4])()
        assert first == before and len(after) == len(LETTER * 4)
        assert all(isinstance(mask, bytes) and len(mask) == 1 for mask in after[1:]), "nothing is known of it"
    assert len(made.processes) == 2 and masks_of(masks, followed) == [before]


def test_tenants_share_no_process(masks: GrammarMasks, made: Made) -> None:
    """A grammar that one tenant has compiled is compiled again for another, so that its timing tells nothing."""
    for tenant in ("a", "b", "a"):
        grammar = OutputGrammar(DIGITS, tenant=tenant, owner=tenant)
        masks.prepare(grammar).result(60)
        masks_of(masks, sequence(DIGITS, tenant=tenant))
    assert len(made.processes) == 2


@pytest.mark.parametrize("is_idle", [True, False])
def test_process_that_something_else_has_killed(masks: GrammarMasks, made: Made, *, is_idle: bool) -> None:
    """A killed process's sequences are followed anew, with the same masks."""
    followed = sequence(DIGITS, SEVEN * 3)
    before = masks_of(masks, followed)
    if is_idle:
        os.kill(made.pids[0], signal.SIGKILL)
        assert masks_of(masks, followed) == before
    else:
        os.kill(made.pids[0], signal.SIGSTOP)
        wait = masks.begin([followed])
        os.kill(made.pids[0], signal.SIGKILL)
        assert wait() == before
    assert len(made.processes) == 2


def test_process_that_ends_with_its_last_mask(masks: GrammarMasks, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed once it has found every mask, before it has said so, costs its grammar nothing."""
    followed = sequence(DIGITS, SEVEN * 3)
    before = masks_of(masks, followed)
    receive = GrammarFollower._receive  # noqa: SLF001 (where a process is lost; nothing public ends between two frames)

    def receive_and_kill(process: GrammarFollower) -> bytes | None:
        receive(process)
        os.kill(process.pid, signal.SIGPROF)
        return receive(process)

    for _ in range(MAX_DEATHS + 1):
        with monkeypatch.context() as patches:
            patches.setattr(GrammarFollower, "_receive", receive_and_kill)
            assert masks_of(masks, followed) == before
        assert masks_of(masks, followed) == before
    assert len(made.processes) == MAX_DEATHS + 2


def test_process_that_hangs(masks: GrammarMasks, made: Made) -> None:
    """A process that uses no CPU time and does not answer is killed, and replaced by another."""
    followed = sequence(DIGITS, SEVEN * 3)
    before = masks_of(masks, followed)
    link = made.processes[0]._link.fork.link  # noqa: SLF001 (nothing public has the timeout of one process)
    assert link.gettimeout() == grammar_follower.ANSWER_S
    link.settimeout(0.5)  # only for this process: the next one may be slow to start
    os.kill(made.pids[0], signal.SIGSTOP)
    assert masks_of(masks, followed) == before and has_ended(made.pids[0])


def test_grammar_whose_processes_are_always_killed(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step gives up on a grammar whose processes keep being killed."""
    receive = GrammarFollower.wait_until_compiled

    def kill_and_wait(process: GrammarFollower) -> str | None:
        refusal = receive(process)
        os.kill(process.pid, signal.SIGKILL)
        return refusal

    monkeypatch.setattr(GrammarFollower, "wait_until_compiled", kill_and_wait)
    assert masks_of(masks, sequence(DIGITS)) == [GRAMMAR_LOST]


def test_processes_killed_while_they_compile(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step gives up on a grammar whose processes are killed before they have compiled it, and the next one has its
    masks: what a process says about compiling is not taken for masks."""
    fork, killed = ForkServer.fork, list[int]()

    def fork_and_kill(server: ForkServer, *shared: int) -> Fork:
        forked = fork(server, *shared)
        if len(killed) < MAX_LOSSES:
            killed.append(forked.pid)
            os.kill(forked.pid, signal.SIGKILL)
        return forked

    monkeypatch.setattr(ForkServer, "fork", fork_and_kill)
    assert masks_of(masks, sequence(DIGITS)) == [GRAMMAR_LOST]
    assert len(killed) == MAX_LOSSES
    assert isinstance(masks_of(masks, sequence(DIGITS))[0], bytes)


def test_process_that_forks_is_killed(masks: GrammarMasks, made: Made) -> None:
    """Its children continue, and a new process forks for later grammars."""
    followed = sequence(DIGITS)
    before = masks_of(masks, followed)
    assert masks.server_pid is not None
    os.kill(masks.server_pid, signal.SIGKILL)
    eventually(lambda: has_ended(masks.server_pid or 0), "the process that forks has ended")
    assert masks_of(masks, followed) == before and len(made.processes) == 1
    assert isinstance(masks_of(masks, sequence(grammar_text(regex("[a-c]+"))))[0], bytes)
    assert not has_ended(made.pids[1])


def test_sequences_that_never_begin(masks: GrammarMasks, made: Made) -> None:
    """Grammars whose sequences have ended before they began take no place and no turn from others, and those of which
    one is left keep theirs."""
    texts = [grammar_text(regex(f"[a-c]{{{number}}}")) for number in range(1, 2 * MAX_AHEAD_PER_TENANT + 1)]
    wanted = [OutputGrammar(text) for text in texts]
    twins = wanted[0], OutputGrammar(texts[0])
    prepared = [masks.prepare(grammar) for grammar in (*wanted, twins[1])]
    for future in prepared[:MAX_AHEAD_PER_TENANT]:
        future.result(60)
    queued = prepared[MAX_AHEAD_PER_TENANT:-1]
    assert not any(future.done() for future in queued)
    last = wanted[-1]
    wanted = [last]  # all others of those queued are given up
    masks.prepare(last).result(60)
    assert all(future.done() for future in queued) and made.texts == [*texts[:MAX_AHEAD_PER_TENANT], texts[-1]]
    again = OutputGrammar(texts[0]), OutputGrammar(texts[-2])
    for grammar in again:
        masks.prepare(grammar).result(60)
    assert made.texts[MAX_AHEAD_PER_TENANT + 1 :] == [texts[-2]], "what was given up in its turn is compiled after all"


def test_more_grammars_than_may_wait(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar for which there is no turn is never compiled by a step: its sequences get a 503, and later ones a
    turn."""
    monkeypatch.setattr(grammar_turns, "MAX_WAITING", 2)  # half of them one tenant's
    masks = GrammarMasks(SOURCE, (EOS,))
    texts = [grammar_text(regex(f"[a-c]{{{number}}}")) for number in range(1, MAX_AHEAD_PER_TENANT + 3)]
    wanted = [OutputGrammar(text) for text in texts]
    for grammar in wanted[:-2]:
        masks.prepare(grammar).result(60)
    assert not masks.prepare(wanted[-2]).done() and masks.prepare(wanted[-1]).done()
    for _ in range(2):
        assert masks_of(masks, sequence(texts[-1])) == [GRAMMAR_LOST]
    assert masks.prepare(wanted[-1]).done() and len(made.processes) == MAX_AHEAD_PER_TENANT
    del grammar
    wanted.clear()
    masks.prepare(last := OutputGrammar(texts[-1])).result(60)
    assert isinstance(masks_of(masks, sequence(last.text))[0], bytes)
    masks.close()


def test_more_grammars_than_are_kept(masks: GrammarMasks, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many grammars one step has, each is compiled once; of those without sequences, a limited number is
    kept."""
    monkeypatch.setattr(grammars, "MAX_KEPT", 64)
    texts = [grammar_text(regex(f"[0-9]{{{number}}}")) for number in range(1, 101)]
    sequences = [sequence(text) for text in texts]
    for _ in range(3):
        assert all(isinstance(mask, bytes) for mask in masks_of(masks, *sequences))
    assert sorted(made.texts) == sorted(texts)
    sequences.clear()
    masks_of(masks, sequence(DIGITS))
    kept = [process for process in made.processes if process.lost is None]
    assert len(kept) == 64 + 1


def test_step_that_needed_no_mask(masks: GrammarMasks) -> None:
    """A step that fails before it samples leaves its masks unread: the next step does not take them for its own."""
    followed, other = sequence(DIGITS), sequence(DIGITS)
    alone = masks_of(masks, followed)
    masks.begin([other, followed])
    followed.add_output(SEVEN[0])
    after = masks_of(masks, followed)
    assert after == masks_of(masks, sequence(DIGITS, SEVEN)) and after != alone


def test_limit_of_a_tenant_that_has_ended_processes() -> None:
    """Each kill halves the time for a tenant's masks, down to what is enough for most, until a minute has passed."""
    now = [0.0]
    limits = MaskLimits(lambda: now[0])
    for expected in (0.1, 0.05, 0.025, 0.02, 0.02):
        assert limits.of("a") == pytest.approx(expected)
        limits.lower("a")
    assert limits.of("b") == MaskLimits.FULL_S
    now[0] = MaskLimits.RECOVERY_S + 1
    limits.lower("b")
    assert limits.of("a") == MaskLimits.FULL_S and limits.of("b") == MaskLimits.FULL_S / 2


async def test_no_process_can_be_started(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences fail until a process can be started, and no request waits for ever."""

    def refuse(*_: object) -> None:
        raise OSError("no descriptor is left")

    with monkeypatch.context() as patches:
        patches.setattr(grammar_entry, "GrammarFollower", refuse)
        grammar = OutputGrammar(DIGITS)
        prepared = masks.prepare(grammar)
        with trio.fail_after(60):
            while not prepared.done():
                await trio.sleep(0.01)
        assert masks_of(masks, sequence(DIGITS)) == [GRAMMAR_LOST]
    assert isinstance(masks_of(masks, sequence(DIGITS))[0], bytes)


def test_tokenizer_that_cannot_be_followed() -> None:
    """If the library cannot derive the bytes of tokens, sequences with grammars fail, and the reason says so."""
    words = (
        b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":'
        b'{"type":"BertPreTokenizer"},"post_processor":null,"decoder":{"type":"WordPiece","prefix":"##","cleanup":true},'
        b'"model":{"type":"WordPiece","unk_token":"u","continuing_subword_prefix":"##","max_input_chars_per_word":9,'
        b'"vocab":{"u":0,"a":1,"##b":2}}}'
    )
    masks = GrammarMasks(words, (0,))
    grammar = OutputGrammar(DIGITS)
    masks.prepare(grammar).result(60)
    assert masks_of(masks, sequence(DIGITS)) == [grammar_entry.NO_TOKENIZER]
    masks.close()
