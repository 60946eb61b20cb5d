"""Long texts encoded in processes of their own: the same ids, and processes that end when they should.

With real processes and the real clock: what must end, ends within generous deadlines.
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

from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.prompts import CacheTtl, ChatPrompt, ContentMark, TextPrompt
from quipu.actors.processes import child
from quipu.actors.shared.checkpoint import DEMO
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
from tests.vocabularies import Vocabulary

VOCABULARY = Vocabulary(DEMO)
WORDS = "It's a knotted cord; they kept bøøks ✓ 🦙🦙.\n\n  "
LONG = WORDS * (2 * SHORT_BYTES // len(WORDS))
FOREVER = WORDS * 80_000
"""Takes seconds to encode."""
MARK = CacheTtl.FIVE_MINUTES


def processes_of(vocabulary: Vocabulary) -> EncodeProcesses:
    return EncodeProcesses(vocabulary.encoder, vocabulary.library.source)


@pytest.fixture
def processes() -> Iterator[EncodeProcesses]:
    them = processes_of(VOCABULARY)
    yield them
    them.close()
    assert them.process_ids == []


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("text", ["", "a", WORDS, LONG, "\0\x7f\n" * 100, "🦙" * (encode_process.PIECE_CHARACTERS + 1)])
def test_ids_are_the_same(processes: EncodeProcesses, text: str) -> None:
    """Of plain texts, with what it takes to give them back, and where only their number is wanted."""
    here = VOCABULARY.encoder

    def compare(there: TextEncoder) -> None:
        for with_echo in (False, True):
            expected = here.encode_text(text, max_tokens=10**7, with_echo=with_echo)
            assert there.encode_text(text, max_tokens=10**7, with_echo=with_echo) == expected
            assert isinstance(expected, EncodedText)
            too_few = len(expected.token_ids) - 1
            told = there.encode_text(text, max_tokens=too_few, with_echo=with_echo)
            assert told == TooManyTokens(too_few + 1, is_exact=True)
        assert there.count(text, max_tokens=10**7) == here.count(text, max_tokens=10**7) == len(VOCABULARY.encode(text))

    processes.run(compare, Lease())


def test_chats_are_the_same(processes: EncodeProcesses) -> None:
    """Their ids and the places of their marks."""
    said = "".join(f"<|im_start|>user\n{WORDS * 20}<|im_end|>\n" for _ in range(3))
    rendered = RenderedChat(said, (len(said) // 3, len(said) // 2, len(said)))
    marks = tuple(ContentMark(MARK, 0, 0) for _ in rendered.mark_ends)
    expected = VOCABULARY.encoder.encode_chat(rendered, marks)
    assert isinstance(expected, EncodedChat)
    assert processes.run(lambda there: there.encode_chat(rendered, marks), Lease()) == expected


def test_a_panic_is_an_error_and_no_more(tmp_path: Path) -> None:
    """The process goes on, and is used again."""
    vocabulary = Vocabulary(Path(backtracking_model(tmp_path)))
    them = processes_of(vocabulary)
    try:
        with pytest.raises(LibraryPanic, match="retry-limit"):
            them.run(lambda there: there.encode_text(PANICKING, max_tokens=100), Lease())
        before = them.process_ids
        expected = vocabulary.encoder.count("fine", max_tokens=9)
        assert them.run(lambda there: there.count("fine", max_tokens=100), Lease()) == expected
        assert them.process_ids == before
    finally:
        them.close()


def test_a_tokenizer_that_changes_on_disk(tmp_path: Path) -> None:
    """A process that is started later encodes with the one that the server was started with."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    vocabulary = Vocabulary(folder)
    them = processes_of(vocabulary)
    (folder / "tokenizer.json").write_text("{}")
    try:
        assert them.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease()) == len(VOCABULARY.encode(WORDS))
    finally:
        them.close()


# ---------------------------------------------------------------- how processes end


def encode_for_long(processes: EncodeProcesses, lease: Lease) -> tuple[threading.Thread, int, list[Exception]]:
    """A thread whose process is in the middle of a long text, that process, and what the thread will have raised."""
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


def test_a_stopped_loan_ends(processes: EncodeProcesses) -> None:
    """While its text is encoded: at once, with the process. One that was stopped before takes none."""
    lease = Lease()
    thread, pid, raised = encode_for_long(processes, lease)
    lease.cancel()
    thread.join(PATIENCE_S)
    assert raised and has_ended(pid) and processes.process_ids == []
    with pytest.raises(WorkerUnavailable):
        processes.run(lambda there: pytest.fail("it was served"), lease)


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[11:13]))


def test_a_process_that_dies(processes: EncodeProcesses) -> None:
    """Under a text: that text's error. While nobody uses it: nobody's, however soon the next text comes."""

    def kill_and_count(there: TextEncoder) -> object:
        assert isinstance(there.backend, EncodeProcess)
        os.kill(there.backend.pid, signal.SIGKILL)
        return there.count(LONG, max_tokens=10**7)

    for _ in range(2):  # the second time it is a process that was idle, and another one is tried
        with pytest.raises(LibraryPanic, match="has died"):
            processes.run(kill_and_count, Lease())
        processes.warm_up()
    expected = VOCABULARY.encoder.count(LONG, max_tokens=10**7)
    assert processes.run(lambda there: there.count(LONG, max_tokens=10**7), Lease()) == expected
    (pid,) = processes.process_ids
    os.kill(pid, signal.SIGKILL)
    assert processes.run(lambda there: there.count(LONG, max_tokens=10**7), Lease()) == expected
    assert pid not in processes.process_ids


def test_memory_is_given_back(processes: EncodeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has grown too large is not used again; what a small text took is no growth."""
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    (kept,) = processes.process_ids
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    assert processes.process_ids == [kept]
    monkeypatch.setattr(encode_processes, "MAX_GROWTH_BYTES", -(1 << 40))
    processes.run(lambda there: there.count(WORDS, max_tokens=10**7), Lease())
    assert processes.process_ids == [] and has_ended(kept)


def test_spare_ones_end(processes: EncodeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were needed at one time only, but for one."""
    processes.run(lambda _: processes.run(lambda there: there.count("a", max_tokens=9), Lease()), Lease())
    assert len(processes.process_ids) == 2
    processes.end_idle()
    assert len(processes.process_ids) == 2, "they have just been used"
    monkeypatch.setattr(encode_processes, "IDLE_S", -1.0)
    processes.end_idle()
    processes.end_idle()
    assert len(processes.process_ids) == 1


def test_close_ends_all() -> None:
    """Those that encode, too; and no other is started."""
    them = processes_of(VOCABULARY)
    thread, pid, raised = encode_for_long(them, Lease())
    them.close()
    thread.join(PATIENCE_S)
    assert raised and has_ended(pid) and them.process_ids == []
    with pytest.raises(WorkerUnavailable):
        them.run(lambda there: None, Lease())


def test_a_parent_that_is_killed() -> None:
    """Its processes end with it, whatever they are doing."""
    code = (
        "from tests.actors.text_workers.test_encode_processes import *\n"
        "them = processes_of(VOCABULARY)\nthem.warm_up()\nprint(*them.process_ids, flush=True)\n"
        "them.run(lambda there: there.count(FOREVER, max_tokens=10**9), Lease())\n"
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


def test_how_a_child_runs(processes: EncodeProcesses) -> None:
    """Behind everything else, in a process group of its own, and scheduled with the server: see `child.OWN_GROUP`."""
    processes.warm_up()
    (pid,) = processes.process_ids
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + child.NICENESS
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"Max address space         {4 << 30}" in limits


# ---------------------------------------------------------------- in a server


async def processes_in(client: Client) -> EncodeProcesses:
    """The runtime's own, once the first is ready."""
    them = client.runtime.encode_processes
    assert them is not None
    with trio.fail_after(PATIENCE_S):
        while not them.num_idle:
            await trio.sleep(0.01)
    return them


async def test_a_house_encodes_apart() -> None:
    """A long text, a long chat and a count: the same numbers as in this process, and nothing left at the end."""
    async with small_runtime(encode_apart=True, num_blocks=8000, max_model_len=100_000) as client:
        them = await processes_in(client)
        expected = len(VOCABULARY.encode(LONG))
        answer = await client.ask(TextPrompt(LONG), max_tokens=1)
        assert answer.error is None and answer.record.prompt_tokens == expected
        answer = await client.ask(ChatPrompt(({"role": "user", "content": LONG},)), max_tokens=1)
        assert answer.error is None and (answer.record.prompt_tokens or 0) > expected
        assert await client.runtime.desk.count_tokens(TextPrompt(LONG), "messages") == expected
        pids = them.process_ids
        client.assert_at_rest()
    assert pids and all(map(has_ended, pids))


async def test_a_client_that_leaves_ends_its_process() -> None:
    """Nothing of its text is encoded a moment later, and the next one is served."""
    async with small_runtime(encode_apart=True, num_blocks=80_000, max_model_len=1_200_000) as client:
        them = await processes_in(client)
        ticket = client.open(TextPrompt(FOREVER))
        await ticket.start()
        (pid,) = them.process_ids
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


async def test_no_process_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Come back later; short texts are served, and long ones as soon as a process can be started."""
    nobody = "/nowhere/python"
    async with small_runtime(encode_apart=True, num_blocks=8000, max_model_len=100_000) as client:
        them = await processes_in(client)
        (pid,) = them.process_ids
        monkeypatch.setattr(encode_process, "command_of", lambda module: [nobody])
        os.kill(pid, signal.SIGKILL)
        answer = await client.ask(TextPrompt(LONG), max_tokens=1)
        assert answer.error is not None and answer.error.kind is ErrorKind.OVERLOADED
        assert answer.record.outcome is Outcome.REJECTED
        assert (await client.ask(TextPrompt("short"), max_tokens=1)).error is None
        monkeypatch.undo()
        assert (await client.ask(TextPrompt(LONG), max_tokens=1)).error is None
        client.assert_at_rest()
