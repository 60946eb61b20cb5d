"""How one prompt becomes token ids: refused by its length, rendered, tokenised in the right place.

Used by the tokenizer. What cannot fit the context is refused as early as that can be told: token ids at once, a text by
its length (`tokenizer/text_bound.py`), a chat while its template writes.

What must always hold: nothing that grows with a prompt runs on the event loop, but for `INLINE_CHARACTERS` of text, a
checkpoint between two of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import attrs

from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import Breakpoint, ChatPrompt, Prompt, PromptText, TextPrompt, TokenPrompt
from ..messages.tokenizer import Encode
from ..shared.tokenizers_library import LibraryPanic
from ..tokenizer.chat_template import TemplateError, TooMuchText
from ..tokenizer.context_length import too_long
from ..tokenizer.encoder import EncodedChat, TooMany
from ..tokenizer.segment_cache import SegmentCache
from ..tokenizer.vocabulary import Vocabulary
from .encode_processes import CannotStart
from .fair_queue import Crowded
from .lanes import SHORT_BYTES, Inline, Lanes, Place
from .renderer import MAX_CHARACTERS, Renderer

INLINE_CHARACTERS = 2048
"""So much text is encoded in the loop: a round trip to a thread costs as much. The worst text takes 2.5 ms."""
INLINE_TOKENS = 16384
"""So many token ids are taken over in the loop."""
INLINE_ECHOED_TOKENS = 512
"""So many are put back into text there."""
TOKEN_BYTES = 8
"""What an id counts for, where ids are put back into text."""
INLINE_SEQUENCES = 16
INLINE_BAD_WORDS = 32

BUSY = RequestError(ErrorKind.OVERLOADED, "too many prompts are waiting to be tokenised")


@attrs.frozen
class EncodedPrompt:
    token_ids: list[int]
    breakpoints: tuple[Breakpoint, ...] = ()
    echo: PromptText | None = None


@attrs.frozen
class Asked:
    """What of a request decides how its prompts are encoded."""

    tenant: str
    prompt_param: str
    system_param: str = ""
    echo: bool = False
    skip_special_tokens: bool = True
    owner: str | None = None
    """Whose segments may be kept and found; None: nobody's."""


class PromptEncoder:
    def __init__(self, vocabulary: Vocabulary, renderer: Renderer, lanes: Lanes, segments: SegmentCache) -> None:
        self._vocabulary = vocabulary
        self._lengths = vocabulary.encoder
        """For what is told of a text without encoding it."""
        self._renderer = renderer
        self._lanes = lanes
        self._segments = segments

    async def encode_bad_words(self, words: Sequence[str], place: Place) -> list[tuple[int, ...]]:
        """Ids of words that no output may hold. Raises LibraryPanic."""
        encoded: list[tuple[int, ...]] = []
        for start in range(0, len(words), INLINE_BAD_WORDS):
            encoded += await place.run(self._encode_words, words[start : start + INLINE_BAD_WORDS])
            await place.pause()
        return encoded

    def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return [ids for word in words for ids in self._vocabulary.encode_bad_word(word)]

    def is_short(self, request: Encode) -> bool:
        """Whether all of a request may be encoded in the loop."""
        prompts, bad_words = request.prompts, request.bad_words
        if len(prompts) * request.num_choices > INLINE_SEQUENCES or len(bad_words) > INLINE_BAD_WORDS:
            return False
        num_characters = sum(map(len, bad_words))
        num_tokens = 0
        for prompt in prompts:
            match prompt:
                case TextPrompt():
                    num_characters += len(prompt.text)
                case TokenPrompt():
                    num_tokens += len(prompt.token_ids)
                case ChatPrompt():
                    return False
        most_tokens = INLINE_ECHOED_TOKENS if request.echo else INLINE_TOKENS
        return num_characters <= INLINE_CHARACTERS and num_tokens <= most_tokens

    def inline(self, *, is_short: bool = False) -> Inline:
        """The loop itself, for a request of which all that is encoded is short (`is_short`: all of it)."""
        return Inline(self._vocabulary.encoder, is_short=is_short)

    def place(self, tenant: str, *texts: str) -> Place:
        """Where texts are encoded together; to be left. Raises Crowded."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self.inline()
        return self._lanes.enter(tenant, sum(map(_size, texts)))

    def place_of(self, asked: Asked, prompts: Iterable[Prompt], words: Sequence[str]) -> Place:
        """Where a request's prompts are encoded, and its bad words; to be left. Raises Crowded."""
        texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
        if asked.echo:
            num_echoed = sum(len(prompt.token_ids) for prompt in prompts if isinstance(prompt, TokenPrompt))
            if num_echoed > INLINE_ECHOED_TOKENS:
                num_bytes = num_echoed * TOKEN_BYTES
                return self._lanes.enter(asked.tenant, num_bytes + sum(map(_size, (*texts, *words))))
        return self.place(asked.tenant, *texts, *words)

    def misfit(self, prompt: Prompt, asked: Asked, longest: int) -> RequestError | None:
        """Why a prompt cannot fit the context, where its length alone says so."""
        match prompt:
            case TokenPrompt() if len(prompt.token_ids) >= longest:
                return too_long(asked.prompt_param, len(prompt.token_ids), longest)
            case TextPrompt() if (told := self._lengths.told_by_length(prompt.text, most=longest - 1)) is not None:
                return _too_many(asked.prompt_param, told, longest)
            case _:
                return None

    async def encode(self, prompt: Prompt, asked: Asked, place: Place, longest: int) -> EncodedPrompt | RequestError:
        """Encode one prompt in `place`; a chat finds its own. `longest`: tokens of the context.

        Raises TemplateError, LibraryPanic, CannotStart and Crowded.
        """
        if (error := self.misfit(prompt, asked, longest)) is not None:
            return error
        match prompt:
            case TokenPrompt():
                echo = await place.run(self._read_back, prompt, asked) if asked.echo and prompt.token_ids else None
                return EncodedPrompt(list(prompt.token_ids), echo=echo)
            case TextPrompt():
                text, with_echo = prompt.text, asked.echo
                encoded = await place.encode(
                    lambda encoder: encoder.encode_text(text, most=longest - 1, with_echo=with_echo)
                )
                if isinstance(encoded, TooMany):
                    return _too_many(asked.prompt_param, encoded, longest)
                return EncodedPrompt(encoded.token_ids, echo=encoded.echo)
            case ChatPrompt():
                return await self._encode_chat(prompt, asked, longest)

    async def count(self, prompt: Prompt, asked: Asked, longest: int) -> int | RequestError:
        """How many tokens a prompt has, also where the context has no room for them, unless it is refused untokenised.

        Raises as `encode`.
        """
        counted: int | TooMany | EncodedChat
        match prompt:
            case TokenPrompt():
                return len(prompt.token_ids)
            case TextPrompt():
                counted = await self._count(prompt.text, asked, longest - 1)
            case ChatPrompt():
                counted = await self._render_and_encode(prompt, asked, longest)
        if isinstance(counted, TooMany):
            return counted.num_tokens if counted.is_exact else _too_many(asked.prompt_param, counted, longest)
        return counted if isinstance(counted, int) else len(counted.token_ids)

    def _read_back(self, prompt: TokenPrompt, asked: Asked) -> PromptText:
        return self._vocabulary.read_back(prompt.token_ids, skip_special_tokens=asked.skip_special_tokens)

    # ------------------------------------------------------------ chats

    async def _encode_chat(self, chat: ChatPrompt, asked: Asked, longest: int) -> EncodedPrompt | RequestError:
        encoded = await self._render_and_encode(chat, asked, longest)
        if not isinstance(encoded, TooMany):
            return EncodedPrompt(encoded.token_ids, encoded.breakpoints)
        first = chat.messages[0]
        if asked.system_param and first["role"] == "system":
            # in the name of its own field, where the system message alone is too long
            alone = await self._count(str(first["content"]), asked, longest - 1)
            if isinstance(alone, TooMany):
                return _too_many(asked.system_param, alone, longest)
        return _too_many(asked.prompt_param, encoded, longest)

    async def _render_and_encode(self, chat: ChatPrompt, asked: Asked, longest: int) -> EncodedChat | TooMany:
        lengths, most = self._lengths, longest - 1
        limit = lengths.longest_chat(most=most)
        try:
            most_characters = MAX_CHARACTERS if limit is None else min(MAX_CHARACTERS, limit - 1)
            rendered = await self._renderer.render(chat, asked.tenant, most_characters)
        except TooMuchText as error:
            if limit is None or error.num_characters < limit:
                raise TemplateError(f"the chat template writes more than {MAX_CHARACTERS} characters") from error
            return TooMany(lengths.bound.tokens_of_length(error.num_characters), is_exact=False)
        if (told := lengths.told_by_length(rendered.text, most=most)) is not None:
            return told
        marks = chat.marks
        del chat
        place = self.place(asked.tenant, rendered.text)
        try:
            cache, owner = None if asked.owner is None else self._segments, asked.owner or ""
            return await place.encode(lambda encoder: encoder.encode_chat(rendered, marks, cache, owner, most=most))
        finally:
            place.leave()

    async def _count(self, text: str, asked: Asked, most: int) -> int | TooMany:
        """How many tokens a text has."""
        if (told := self._lengths.told_by_length(text, most=most)) is not None:
            return told
        place = self.place(asked.tenant, text)
        try:
            return await place.encode(lambda encoder: encoder.count(text, most=most))
        finally:
            place.leave()


def _size(text: str) -> int:
    """Bytes of a text: in UTF-8, or in memory those of a long one, which are known at once."""
    return len(text.encode("utf-8", "replace")) if len(text) < SHORT_BYTES else sys.getsizeof(text)


def _too_many(param: str, counted: TooMany, longest: int) -> RequestError:
    return too_long(param, counted.num_tokens, longest, is_exact=counted.is_exact)


def failure_of(error: Exception, prompt_param: str) -> RequestError | None:
    """What a client is told of an exception of `encode`; None: nobody expected it."""
    match error:
        case TemplateError():
            return RequestError(ErrorKind.INVALID, str(error), prompt_param)
        case LibraryPanic():
            message = f"the tokenizer of this model gives up on {prompt_param}"
            return RequestError(ErrorKind.INVALID, message, prompt_param)
        case Crowded() | CannotStart():
            return BUSY
        case _:
            return None
