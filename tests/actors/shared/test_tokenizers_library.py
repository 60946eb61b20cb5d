"""The tokenizers library: panics fail one request, and the GIL is released."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from quipu.actors.detokenizer.decoder import Decoder, WindowDecoder
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.actors.messages.prompts import ChatPrompt, TextPrompt
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.tokenizers_library import Library, LibraryPanic, catching_panics, load_library
from tests.actors.tokenizer.tokenizer_kinds import qwen_like, save, tiny
from tests.runtimes import Client, small_runtime
from tests.tiny import TINY

PANICKING = "a" * 64
"""A text for `backtracking`: there are more ways to split it than the library's regular expressions try."""


class PanicException(BaseException):
    """The exception as defined by pyo3."""


def backtracking() -> tokenizers.Tokenizer:
    """Return a tokenizer whose pattern soon gives up on `PANICKING`."""
    tokenizer = tiny()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"(a+)+b"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def backtracking_model(folder: Path) -> str:
    """Write a checkpoint with that tokenizer and return its folder."""
    save(backtracking(), folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    for name in ("config.json", "generation_config.json"):
        if (TINY / name).exists():
            (folder / name).write_bytes((TINY / name).read_bytes())
    return str(folder)


@pytest.mark.parametrize("name", ["encode", "encode_with_starts"])
def test_panic_in_rust_is_an_error(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """After a real panic the tokenizer works as before."""
    library = Library(backtracking())
    encode = getattr(library, name)
    before = encode("another text", max_tokens=100)
    with pytest.raises(LibraryPanic, match="retry-limit"):
        encode(PANICKING, max_tokens=100)
    assert encode("another text", max_tokens=100) == before
    assert "panicked" in capfd.readouterr().err  # printed by the library itself, which we cannot prevent


@pytest.mark.slow
def test_millions_of_spaces() -> None:
    """The patterns of Qwen and Llama 3 fail on eleven million spaces followed by a letter."""
    with pytest.raises(LibraryPanic):
        Library(qwen_like()).encode(" " * 11_000_000 + "a", max_tokens=1)


def test_other_exceptions_pass() -> None:
    """Cancelled, KeyboardInterrupt and ordinary errors are not converted."""
    for error in (KeyboardInterrupt(), SystemExit(), GeneratorExit(), ValueError("no"), BaseException()):
        with pytest.raises(type(error)) as raised, catching_panics():
            raise error
        assert raised.value is error
    with pytest.raises(LibraryPanic, match="at the disco"), catching_panics():
        raise PanicException("at the disco")


def test_errors_of_the_library() -> None:
    """A text on which the library fails without a panic fails one request, too."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], unk_token="<unk>"))
    with pytest.raises(LibraryPanic, match="Unk token `<unk>` not found"):
        Library(tokenizer).encode("b", max_tokens=1)


@pytest.mark.parametrize("text", ["\ud800", "a" * 5000 + "\udcff"])
async def test_text_with_half_a_character(text: str) -> None:
    """A Python string with a lone surrogate fails one request: the tokenizer goes on, and nothing else is refused."""
    library = Library(tiny())
    library.tokenizer.normalizer = tokenizers.normalizers.NFC()
    for call in (library.list_ids, library.normalize):
        with pytest.raises(LibraryPanic, match="surrogates"):
            call(text)
    async with small_runtime() as client:
        for prompt, fields in (TextPrompt(text), {}), (TextPrompt("fine"), {"bad_words": (text[-9:],)}):
            answer = await client.ask(prompt, **fields)
            assert answer.error is not None and answer.error.kind is ErrorKind.INVALID
        client.assert_at_rest()


async def test_cancellation_passes() -> None:
    """A scope that is cancelled inside `catching_panics` ends as usual."""
    with trio.CancelScope() as scope:
        scope.cancel()
        with catching_panics():
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


class PanickingTokenizer:
    """A fake of the library's tokenizer that panics whenever it decodes."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise PanicException("no such token")

    def id_to_token(self, token_id: int) -> str:
        raise PanicException("no such token")


def test_panics_in_decoding_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic is an error while decoding a window of tokens, and while decoding a single one."""
    library = Library(PanickingTokenizer())
    with pytest.raises(LibraryPanic):
        WindowDecoder(library, [1], skip_special_tokens=True).push(2)
    tokenizer = tiny()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    save(tokenizer, tmp_path, "")
    library = load_library(tmp_path)
    decoder = Decoder(library)
    monkeypatch.setattr(library, "tokenizer", PanickingTokenizer())
    with pytest.raises(LibraryPanic):
        decoder.token_text(5)


async def test_panic_fails_one_request(tmp_path: Path) -> None:
    """A text, a chat, bad words and a count are each a 400, and the next request is served."""
    async with small_runtime(model_path=backtracking_model(tmp_path)) as client:
        chat = ChatPrompt(({"role": "user", "content": PANICKING},))
        for prompt, fields in (
            (TextPrompt(PANICKING), {}),
            (TextPrompt(PANICKING), {"echo": True}),
            (TextPrompt(PANICKING * 100), {}),
            (chat, {}),
            (TextPrompt("fine"), {"bad_words": (PANICKING,)}),
        ):
            answer = await client.ask(prompt, **fields)
            assert answer.error is not None and answer.error.kind is ErrorKind.INVALID
            assert answer.record.outcome is Outcome.REJECTED
            assert (await client.ask(TextPrompt("fine"))).error is None
        client.assert_at_rest()


async def test_panic_in_decoding_fails_one_request(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If decoding panics, one request fails, and the other stream completes."""
    make_decoder = Decoder.make_decoder

    class Panicking:
        def push(self, token_id: int) -> str:
            raise LibraryPanic("no such token")

        def flush(self) -> str:
            return ""

    def make(self: Decoder, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> Any:
        if 7 in prompt_tail:
            return Panicking()
        return make_decoder(self, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail)

    monkeypatch.setattr(Decoder, "make_decoder", make)
    async with small_runtime() as client:
        answers = {}

        async def ask(client: Client, name: str, prompt: list[int]) -> None:
            answers[name] = await client.ask(prompt, max_tokens=20)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, client, "good", [1, 2, 3])
            nursery.start_soon(ask, client, "bad", [1, 2, 7])
        client.assert_at_rest()
    assert answers["good"].error is None and answers["good"].reasons == {0: "length"}
    bad = answers["bad"]
    assert bad.error is not None and bad.error.kind is ErrorKind.INTERNAL
    assert bad.record.outcome is Outcome.FAILED


@pytest.mark.parametrize("name", ["encode", "encode_with_starts"])
def test_gil_is_released(name: str) -> None:
    """While a long text is encoded, another thread keeps running."""
    library = Library(tiny())
    text = "It's a knotted cord; they kept books. " * 20_000
    encode = getattr(library, name)

    def num_wakes() -> int:
        began, num = threading.Event(), 0

        def work() -> None:
            began.set()
            encode(text, max_tokens=1)

        thread = threading.Thread(target=work)
        thread.start()
        began.wait()
        while thread.is_alive():
            time.sleep(0.001)
            num += 1
        return num

    assert any(num_wakes() > 20 for _ in range(10)), "one or two if the GIL were held"


def test_parallelism_is_off() -> None:
    """Batches run in the calling thread: with a thread pool, a short text would wait for long ones."""
    library = Library(tiny())
    before = _num_tasks()
    library.encode("a text " * 1000, max_tokens=10_000)
    assert _num_tasks() <= before and os.environ["TOKENIZERS_PARALLELISM"] == "false"


def _num_tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_windows_are_bounded() -> None:
    """Tokens without text, or that never complete a character, are not decoded over and over."""
    num_decoded = []

    class Silent:
        text = ""

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            num_decoded.append(len(token_ids))
            return self.text * (len(token_ids) > 8)

        def id_to_token(self, token_id: int) -> str:
            return f"token {token_id}"

    silent = Silent()
    for silent.text in ("", "�"):
        decoder = WindowDecoder(Library(silent), list(range(8)), skip_special_tokens=True)
        pieces = [decoder.push(token_id) for token_id in range(1000)]
        assert max(num_decoded) <= 8 + WindowDecoder.MAX_PENDING
        assert bool("".join(pieces)) == bool(silent.text)


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that cannot be loaded raises CheckpointError."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_library(tmp_path)
