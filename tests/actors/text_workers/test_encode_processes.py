"""Long texts encoded in processes: the same ids, and processes that end when they should.

The tests use real processes and the real clock, so deadlines are generous.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from quipu.actors.fleet.processes import child
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.prompts import CacheTtl, ChatPrompt, ContentMark, TextPrompt
from quipu.actors.shared.tokenizers_library import LibraryPanic
from quipu.actors.text_workers import encode_process, encode_processes
from quipu.actors.text_workers.encode_process import EncodeProcess
from quipu.actors.text_workers.encode_processes import EncodeProcesses, Lease
from quipu.actors.tokenizer.chat_template import RenderedChat
from quipu.actors.tokenizer.encoder import EncodedChat, EncodedText, TextEncoder, TooManyTokens
from quipu.actors.tokenizer.encoding_errors import WorkerUnavailable
from quipu.actors.tokenizer.prompt_sizes import SHORT_BYTES
from tests.actors.shared.test_tokenizers_library import PANICKING, backtracking_model
from tests.processes import PATIENCE_S, eventually, has_ended
from tests.runtimes import Client, small_runtime
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

VOCABULARY = Vocabulary(TINY)
WORDS = "It's a knotted cord; they kept bøøks ✓ 🦙🦙.\n\n  "
LONG = WORDS * (2 * SHORT_BYTES // len(WORDS))
PIECE_CHARACTERS = 4096
PIECES = "🦙" * (PIECE_CHARACTERS + 1)
"""Sent to a process in two pieces; its ids come back in several."""
FOREVER = WORDS * 80_000
"""Takes seconds to encode."""
MARK = CacheTtl.FIVE_MINUTES


def processes_of(vocabulary: Vocabulary) -> EncodeProcesses:
    return EncodeProcesses(vocabulary.encoder, vocabulary.library.source)


@pytest.fixture
def processes() -> Iterator[EncodeProcesses]:
    pool = processes_of(VOCABULARY)
    yield pool
    pool.close()
    assert pool.process_ids == []


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("text", ["", "a", WORDS, LONG, "\0\x7f\n" * 100, PIECES])
def test_ids_are_the_same(processes: EncodeProcesses, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are the same for plain texts, with and without an echo, and counts are the same, too."""
    here = VOCABULARY.encoder
    monkeypatch.setattr(encode_process, "PIECE_CHARACTERS", PIECE_CHARACTERS)
    monkeypatch.setattr(encode_process, "PIECE_BYTES", PIECE_CHARACTERS)

    def compare(there: TextEncoder) -> None:
        for with_echo in (False, True):
            expected = here.encode_text(text, max_tokens=10**7, with_echo=with_echo)
            assert there.encode_text(text, max_tokens=10**7, with_echo=with_echo) == expected
            assert isinstance(expected, EncodedText)
            too_few = len(expected.token_ids) - 1
            result = there.encode_text(text, max_tokens=too_few, with_echo=with_echo)
            assert result == TooManyTokens(too_few + 1, is_exact=True)
        assert there.count(text, max_tokens=10**7) == here.count(text, max_tokens=10**7) == len(VOCABULARY.encode(text))

    processes.run(compare, Lease())


def test_chats_are_the_same(processes: EncodeProcesses) -> None:
    """Ids and positions of marks are the same as in this process."""
    rendered_text = "".join(f"<|im_start|>user\n{WORDS * 20}<|im_end|>\n" for _ in range(3))
    rendered = RenderedChat(rendered_text, (len(rendered_text) // 3, len(rendered_text) // 2, len(rendered_text)))
    marks = tuple(ContentMark(MARK, 0, 0) for _ in rendered.mark_ends)
    expected = VOCABULARY.encoder.encode_chat(rendered, marks)
    assert isinstance(expected, EncodedChat)
    assert processes.run(lambda there: there.encode_chat(rendered, marks), Lease()) == expected


def test_panic_does_not_end_the_process(tmp_path: Path) -> None:
    """A panic raises LibraryPanic, and the process is used again."""
    vocabulary = Vocabulary(Path(backtracking_model(tmp_path)))
    pool = processes_of(vocabulary)
    try:
        with pytest.raises(LibraryPanic, match="retry-limit"):
            pool.run(lambda there: there.encode_text(PANICKING, max_tokens=100), Lease())
        before = pool.process_ids
        expected = vocabulary.encoder.count("fine", max_tokens=9)
        assert pool.run(lambda there: there.count("fine", max_tokens=100), Lease()) == expected
        assert pool.process_ids == before
    finally:
        pool.close()


def test_tokenizer_that_changes_on_disk(tmp_path: Path) -> None:
    """A process that is started later uses the tokenizer that the server loaded."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    vocabulary = Vocabulary(folder)
    pool = processes_of(vocabulary)
    (folder / "tokenizer.json").write_text("{}")
    try:
        assert pool.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease()) == len(VOCABULARY.encode(WORDS))
    finally:
        pool.close()


# ---------------------------------------------------------------- how processes end


def encode_for_long(processes: EncodeProcesses, lease: Lease) -> tuple[threading.Thread, int, list[Exception]]:
    """Return a thread that is encoding a long text, its process id, and the list of what the thread raises."""
    processes.warm_up()
    (pid,) = processes.process_ids
    before = _cpu_ticks(pid)
    raised: list[Exception] = []

    def work() -> None:
        try:
            processes.run(lambda there: there.count(FOREVER, max_tokens=10**9), lease)
        except (LibraryPanic, WorkerUnavailable) as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: _cpu_ticks(pid) > before + 10, "it encodes")
    return thread, pid, raised


def test_cancelled_lease_ends(processes: EncodeProcesses) -> None:
    """Cancelling a lease kills its process at once. A lease that is already cancelled gets none."""
    lease = Lease()
    thread, pid, raised = encode_for_long(processes, lease)
    lease.cancel()
    thread.join(PATIENCE_S)
    assert raised and has_ended(pid) and processes.process_ids == []
    with pytest.raises(WorkerUnavailable):
        processes.run(lambda there: pytest.fail("a cancelled lease must get no process"), lease)


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[11:13]))


def test_process_that_dies(processes: EncodeProcesses) -> None:
    """If a process dies while encoding, that text fails. If it dies while idle, nothing fails."""

    def kill_and_count(there: TextEncoder) -> object:
        assert isinstance(there.backend, EncodeProcess)
        os.kill(there.backend.pid, signal.SIGKILL)
        return there.count(LONG, max_tokens=10**7)

    for _ in range(2):  # the second time the process was idle before, so another one is used
        with pytest.raises(LibraryPanic, match="has died"):
            processes.run(kill_and_count, Lease())
        processes.warm_up()
    expected = VOCABULARY.encoder.count(LONG, max_tokens=10**7)
    assert processes.run(lambda there: there.count(LONG, max_tokens=10**7), Lease()) == expected
    (pid,) = processes.process_ids
    os.kill(pid, signal.SIGKILL)
    assert processes.run(lambda there: there.count(LONG, max_tokens=10**7), Lease()) == expected
    assert pid not in processes.process_ids


def test_exchange_that_breaks_off(processes: EncodeProcesses) -> None:
    """A process that has a part of a text is not used again: it would take the next request for the rest."""
    processes.warm_up()
    before = processes.process_ids
    with pytest.raises(LibraryPanic, match="surrogates"):
        processes.run(lambda there: there.count(f"{LONG}\ud800", max_tokens=10**7), Lease())
    expected = VOCABULARY.encoder.count(LONG, max_tokens=10**7)
    assert processes.run(lambda there: there.count(LONG, max_tokens=10**7), Lease()) == expected
    assert not set(before) & set(processes.process_ids)


def test_grown_process_is_replaced(processes: EncodeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has grown too much is not reused; small texts do not make it grow."""
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    (kept,) = processes.process_ids
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    assert processes.process_ids == [kept]
    monkeypatch.setattr(encode_processes, "MAX_GROWTH_BYTES", -(1 << 40))
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    assert processes.process_ids == [] and has_ended(kept)


def test_idle_processes_end(processes: EncodeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one of the processes that have been idle for long are ended."""
    processes.run(lambda _: processes.run(lambda there: there.count("a", max_tokens=9), Lease()), Lease())
    assert len(processes.process_ids) == 2
    processes.end_idle()
    assert len(processes.process_ids) == 2, "recently used processes must be kept"
    monkeypatch.setattr(encode_processes, "IDLE_S", -1.0)
    processes.end_idle()
    processes.end_idle()
    assert len(processes.process_ids) == 1


def test_close_ends_all_processes() -> None:
    """Closing ends even processes that are encoding; no other is started afterwards."""
    pool = processes_of(VOCABULARY)
    thread, pid, raised = encode_for_long(pool, Lease())
    pool.close()
    thread.join(PATIENCE_S)
    assert raised and has_ended(pid) and pool.process_ids == []
    with pytest.raises(WorkerUnavailable):
        pool.run(lambda there: None, Lease())


def test_processes_end_with_a_killed_parent() -> None:
    """Processes end when their parent is killed, whatever they are doing."""
    code = (
        "from tests.actors.text_workers.test_encode_processes import *\n"
        "pool = processes_of(VOCABULARY)\npool.warm_up()\nprint(*pool.process_ids, flush=True)\n"
        "pool.run(lambda there: there.count(FOREVER, max_tokens=10**9), Lease())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            eventually(lambda: _cpu_ticks(pid) > 30, "it encodes")
        finally:
            parent.kill()
    eventually(lambda: has_ended(pid), "it ends")


def test_priority_group_and_limits_of_a_process(processes: EncodeProcesses) -> None:
    """A process has a low priority and its own process group, but the server's session (see `child.OWN_GROUP`)."""
    processes.warm_up()
    (pid,) = processes.process_ids
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + child.NICENESS
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"Max address space         {4 << 30}" in limits


# ---------------------------------------------------------------- in a server


async def processes_in(client: Client) -> EncodeProcesses:
    """Return the runtime's processes once the first is ready."""
    pool = client.runtime.encode_processes
    assert pool is not None
    with trio.fail_after(PATIENCE_S):
        while not pool.num_idle:
            await trio.sleep(0.01)
    return pool


async def test_runtime_with_processes() -> None:
    """A long text, a long chat and a count give the same numbers as in this process; no process is left at the end."""
    async with small_runtime(encode_apart=True, num_blocks=8000, max_model_len=100_000) as client:
        pool = await processes_in(client)
        expected = len(VOCABULARY.encode(LONG))
        answer = await client.ask(TextPrompt(LONG), max_tokens=1)
        assert answer.error is None and answer.record.prompt_tokens == expected
        answer = await client.ask(ChatPrompt(({"role": "user", "content": LONG},)), max_tokens=1)
        assert answer.error is None and (answer.record.prompt_tokens or 0) > expected
        assert await client.runtime.desk.count_tokens(TextPrompt(LONG), "messages") == expected
        pids = pool.process_ids
        client.assert_at_rest()
    assert pids and all(map(has_ended, pids))


async def test_leaving_client_ends_its_process() -> None:
    """The process that encodes for a client that leaves is killed soon after, and the next request is served."""
    async with small_runtime(encode_apart=True, num_blocks=80_000, max_model_len=1_200_000) as client:
        pool = await processes_in(client)
        ticket = client.open(TextPrompt(FOREVER))
        await ticket.start()
        (pid,) = pool.process_ids
        before = _cpu_ticks(pid)
        with trio.fail_after(PATIENCE_S):
            while _cpu_ticks(pid) < before + 10:
                await trio.sleep(0.01)
            ticket.leave()
            while not has_ended(pid):
                await trio.sleep(0.01)
        answer = await client.ask(TextPrompt(LONG), max_tokens=1)
        assert answer.error is None
        client.assert_at_rest()


async def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts get a 503 until a process can be started; short ones are served."""
    missing_command = "/nowhere/python"
    async with small_runtime(encode_apart=True, num_blocks=8000, max_model_len=100_000) as client:
        pool = await processes_in(client)
        (pid,) = pool.process_ids
        monkeypatch.setattr(encode_process, "command_of", lambda module: [missing_command])
        os.kill(pid, signal.SIGKILL)
        answer = await client.ask(TextPrompt(LONG), max_tokens=1)
        assert answer.error is not None and answer.error.kind is ErrorKind.OVERLOADED
        assert answer.record.outcome is Outcome.REJECTED
        assert (await client.ask(TextPrompt("short"), max_tokens=1)).error is None
        monkeypatch.undo()
        assert (await client.ask(TextPrompt(LONG), max_tokens=1)).error is None
        client.assert_at_rest()
