"""Encodes prompts with threads and processes (the tokenizer's `PromptEncoder`), with outlines of chats and advice.

Each prompt is refused as early as possible if it cannot fit the context: token ids at once, a text by its length
(`tokenizer/text_bound.py`), a chat while its template is still writing.

What must always hold: nothing that grows with a prompt runs on the event loop, except for what `prompt_sizes.py` calls
small, with a checkpoint between two prompts, and advice, in slices of about a millisecond; an error in advice costs the
advice only.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import structlog
import trio

from ..cache_insight.advisor import Advisor
from ..messages.explanations import Advice
from ..messages.handler import PromptRead
from ..messages.outcomes import ErrorKind, RequestError
from ..messages.prompts import ChatPrompt, InfillPrompt, Prompt, PromptText, TextPrompt, TokenPrompt
from ..messages.tokenizer import Encode, ReadPrompt
from ..shared.token_decoding import Decoding
from ..tokenizer.chat_template import ChatTooLong, TemplateError
from ..tokenizer.context_length import TOO_LONG, PromptLimit, output_budget, param_of
from ..tokenizer.encoder import EncodedChat, TextEncoder, TooManyTokens
from ..tokenizer.infill import encode_infill, no_infill
from ..tokenizer.outlines import outline_of, part_ends
from ..tokenizer.prompt_decoding import decode_prompt
from ..tokenizer.prompt_encoder import MAX_READ_TOKENS, EncodedPrompt, EncodingOptions, EncodingSlot, options_of
from ..tokenizer.prompt_sizes import INLINE_BAD_WORDS, exceeds_context, num_bytes_to_encode, num_text_bytes, too_many
from ..tokenizer.segment_cache import SegmentCache
from ..tokenizer.truncation import shortened_chat, shortened_ids, shortened_text
from .image_pool import ImagePool
from .lanes import InlineSlot, Lanes
from .renderer import MAX_CHARACTERS, Renderer

log = structlog.get_logger()

NAMES_AT_ONCE = 512
"""Tokens whose names are looked up between two checkpoints: about a millisecond."""


@attrs.frozen(eq=False)
class PooledEncoder:
    _encoder: TextEncoder
    """Encodes short texts, in this process."""
    _decoder: Decoding
    _renderer: Renderer
    _lanes: Lanes
    _segments: SegmentCache
    _vocab_size: int | None = None
    """The model's, if the tokenizer has tokens that the model does not have."""
    _advisor: Advisor | None = None
    """None: chats get neither outlines nor advice."""
    _images: ImagePool = attrs.field(factory=ImagePool)

    def inline_slot(self) -> EncodingSlot:
        return InlineSlot(self._encoder, is_whole_request=True)

    def enter(self, tenant: str, num_bytes: int) -> EncodingSlot:
        return self._lanes.enter(tenant, num_bytes) if num_bytes else InlineSlot(self._encoder)

    async def encode_bad_words(self, words: Sequence[str], slot: EncodingSlot) -> list[tuple[int, ...]]:
        encoded: list[tuple[int, ...]] = []
        for start in range(0, len(words), INLINE_BAD_WORDS):
            encoded += await slot.run(self._encode_words, words[start : start + INLINE_BAD_WORDS])
            await slot.pause()
        return encoded

    def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return [ids for word in words for ids in self._encoder.encode_bad_word(word)]

    async def encode_prediction(self, text: str, slot: EncodingSlot, max_model_len: int) -> tuple[int, ...]:
        if not text:
            return ()
        encoded = await slot.encode(
            lambda encoder: encoder.encode_text(text, max_tokens=max_model_len, with_echo=False)
        )
        if isinstance(encoded, TooManyTokens):
            return ()
        token_ids = tuple(i for i in encoded.token_ids if i not in self._encoder.special_token_ids)
        return token_ids if self._vocab_size is None or max(token_ids, default=0) < self._vocab_size else ()

    async def encode(
        self, prompt: Prompt, options: EncodingOptions, slot: EncodingSlot, max_model_len: int
    ) -> EncodedPrompt | RequestError:
        advisor = self._advisor if options.truncation is None else None
        encoded = await self._encode(prompt, options, slot, max_model_len, outlines=advisor is not None)
        if advisor is None or not isinstance(prompt, ChatPrompt) or isinstance(encoded, RequestError):
            return encoded
        return attrs.evolve(encoded, advice=await self._advise(advisor, prompt, options))

    async def _advise(self, advisor: Advisor, chat: ChatPrompt, options: EncodingOptions) -> tuple[Advice, ...]:
        try:
            for advice in advisor.slices(chat, options.tenant, options.owner or "", options.request_id):
                if advice is not None:
                    return advice
                await trio.lowlevel.checkpoint()
        except Exception:
            log.exception("advice.failed", request_id=options.request_id)
        return ()

    async def _encode(
        self, prompt: Prompt, options: EncodingOptions, slot: EncodingSlot, max_model_len: int, *, outlines: bool
    ) -> EncodedPrompt | RequestError:
        """Encode one prompt, and shorten it if its client wants that."""
        if (param := param_of(prompt, options.prompt_param)) != options.prompt_param:
            options = attrs.evolve(options, prompt_param=param)
        encoded = await self._encode_whole(prompt, options, slot, options.limit(max_model_len), outlines=outlines)
        if options.truncation is not None and isinstance(encoded, RequestError):
            return _longer_than_read(encoded, options.prompt_param)
        if options.truncation is None or isinstance(encoded, RequestError) or not isinstance(prompt, ChatPrompt):
            return encoded
        return shortened_chat(encoded, options.truncation)

    async def _encode_whole(
        self, prompt: Prompt, options: EncodingOptions, slot: EncodingSlot, limit: PromptLimit, *, outlines: bool
    ) -> EncodedPrompt | RequestError:
        """Encode one prompt; of a chat everything is kept, however it is to be shortened."""
        truncation = options.truncation
        if (error := exceeds_context(prompt, options.prompt_param, self._encoder, limit)) is not None:
            return error
        match prompt:
            case TokenPrompt():
                if truncation is not None:
                    return EncodedPrompt(shortened_ids(prompt.token_ids, truncation))
                if not options.echo or not prompt.token_ids:
                    return EncodedPrompt(list(prompt.token_ids))
                decoder = self._decoder.make_decoder(skip_special_tokens=options.skip_special_tokens, prompt_tail=())
                echo = await slot.run(decode_prompt, prompt.token_ids, decoder)
                return EncodedPrompt(list(prompt.token_ids), echo=echo)
            case TextPrompt():
                text, with_echo, special = prompt.text, options.echo, options.add_special_tokens
                encoded = await slot.encode(
                    lambda encoder: encoder.encode_text(
                        text, max_tokens=limit.max_tokens, with_echo=with_echo, add_special_tokens=special
                    )
                )
                if isinstance(encoded, TooManyTokens):
                    return too_many(options.prompt_param, encoded, limit)
                if truncation is not None:
                    ids, wanted = encoded.token_ids, truncation
                    short = await slot.encode(lambda e: shortened_text(e, ids, prompt, wanted, special=special))
                    return short if isinstance(short, RequestError) else self._checked(EncodedPrompt(short), options)
                return self._checked(EncodedPrompt(encoded.token_ids, echo=encoded.echo), options)
            case InfillPrompt():
                return await self._encode_infill(prompt, options, slot, limit)
            case ChatPrompt():
                return await self._encode_chat(prompt, options, limit, outlines=outlines)

    async def _encode_infill(
        self, prompt: InfillPrompt, options: EncodingOptions, slot: EncodingSlot, limit: PromptLimit
    ) -> EncodedPrompt | RequestError:
        if (tokens := self._encoder.infill) is None:
            return no_infill(prompt.suffix_param)
        encoded = await slot.encode(lambda e: encode_infill(e, tokens, prompt, max_tokens=limit.max_tokens))
        if isinstance(encoded, TooManyTokens):
            return too_many(options.prompt_param, encoded, limit)
        return self._checked(EncodedPrompt(encoded), options)

    def _checked(self, encoded: EncodedPrompt, options: EncodingOptions) -> EncodedPrompt | RequestError:
        """Return the prompt, or an error if it has a token that the model does not have."""
        if self._vocab_size is None or (largest := max(encoded.token_ids, default=0)) < self._vocab_size:
            return encoded
        param = options.prompt_param
        message = f"Invalid value for `{param}`: it contains token {largest}, which this model does not have."
        return RequestError(ErrorKind.INVALID, message, param)

    async def encode_alone(self, request: Encode, max_model_len: int) -> EncodedPrompt | RequestError:
        (prompt,) = request.prompts
        options = attrs.evolve(options_of(request), owner=None, echo=False)
        encoded = await self._encode_apart(prompt, options, max_model_len)
        if isinstance(encoded, RequestError):
            return encoded
        budget = output_budget(request, len(encoded.token_ids), max_model_len)
        return budget if isinstance(budget, RequestError) else encoded

    async def _encode_apart(
        self, prompt: Prompt, options: EncodingOptions, max_model_len: int
    ) -> EncodedPrompt | RequestError:
        """Encode one prompt in a slot of its own."""
        slot = self.enter(options.tenant, num_bytes_to_encode((prompt,), (), echo=options.echo))
        try:
            return await self._encode(prompt, options, slot, max_model_len, outlines=False)
        finally:
            slot.leave()

    async def read(self, question: ReadPrompt) -> PromptRead | RequestError:
        prompt, param, tenant = question.prompt, question.prompt_param, question.tenant
        with_text = question.with_text and not isinstance(prompt, TextPrompt)
        options = EncodingOptions(
            tenant,
            param,
            echo=with_text,
            skip_special_tokens=False,
            add_special_tokens=question.add_special_tokens,
            truncation=question.truncation,
        )
        encoded = await self._encode_apart(prompt, options, MAX_READ_TOKENS + 1)
        if isinstance(encoded, RequestError):
            return _longer_than_read(encoded, param)
        text = prompt.text if isinstance(prompt, TextPrompt) else "" if encoded.echo is None else encoded.echo.text
        names: list[str] = []
        while question.with_names and len(names) < len(encoded.token_ids):
            names += self._decoder.names_of(encoded.token_ids[len(names) : len(names) + NAMES_AT_ONCE])
            await trio.lowlevel.checkpoint()
        return PromptRead(encoded.token_ids, text if question.with_text else "", names)

    async def count(self, prompt: Prompt, options: EncodingOptions, max_model_len: int) -> int | RequestError:
        counted: int | TooManyTokens | EncodedChat
        limit = options.limit(max_model_len)
        match prompt:
            case TokenPrompt():
                return len(prompt.token_ids)
            case TextPrompt():
                counted = await self._count_text(prompt.text, options, limit.max_tokens)
            case InfillPrompt():
                encoded = await self._encode_apart(prompt, options, max_model_len)
                return encoded if isinstance(encoded, RequestError) else len(encoded.token_ids)
            case ChatPrompt():
                counted = await self._render_and_encode(prompt, options, limit.max_tokens)
        if isinstance(counted, TooManyTokens):
            return counted.num_tokens if counted.is_exact else too_many(options.prompt_param, counted, limit)
        return counted if isinstance(counted, int) else len(counted.token_ids)

    async def _encode_chat(
        self, chat: ChatPrompt, options: EncodingOptions, limit: PromptLimit, *, outlines: bool
    ) -> EncodedPrompt | RequestError:
        encoded = await self._render_and_encode(chat, options, limit.max_tokens, outlines=outlines)
        if not isinstance(encoded, TooManyTokens):
            outline = outline_of(chat.parts, encoded.outline_ends, len(encoded.token_ids))
            echo = PromptText(encoded.text, encoded.token_ids[0], ()) if options.echo and encoded.token_ids else None
            found = EncodedPrompt(
                encoded.token_ids, encoded.breakpoints, echo, encoded.spans, outline, images=encoded.images
            )
            return self._checked(found, options)
        first = chat.messages[0]
        if options.system_param and first["role"] == "system":
            # if the system message alone is too long, the error names its field
            alone = await self._count_text(str(first["content"]), options, limit.max_tokens)
            if isinstance(alone, TooManyTokens):
                return too_many(options.system_param, alone, limit)
        return too_many(options.prompt_param, encoded, limit)

    async def _render_and_encode(
        self, chat: ChatPrompt, options: EncodingOptions, max_tokens: int, *, outlines: bool = False
    ) -> EncodedChat | TooManyTokens:
        images = await self._images.read(chat.images, options.tenant)
        limit = self._encoder.chat_length_limit(max_tokens=max_tokens)
        try:
            max_characters = MAX_CHARACTERS if limit is None else min(MAX_CHARACTERS, limit - 1)
            rendered = await self._renderer.render(chat, options.tenant, max_characters)
        except ChatTooLong as error:
            if limit is None or error.num_characters < limit:
                raise TemplateError(f"The chat template wrote more than {MAX_CHARACTERS} characters.") from error
            num_tokens = self._encoder.bound.num_tokens_of_length(error.num_characters)
            return TooManyTokens(num_tokens, is_exact=False)
        if (too_long := self._encoder.too_long(rendered.text, max_tokens=max_tokens)) is not None:
            return too_long
        marks = chat.marks
        located = attrs.evolve(chat, messages=()) if chat.locates_parts else None
        outlined, image = (chat if outlines else None), self._images.shown(self._decoder)
        del chat
        cache, owner = None if options.owner is None else self._segments, options.owner or ""

        def encode(encoder: TextEncoder) -> EncodedChat | TooManyTokens:
            shown = self._images.spread(rendered, len(images))
            ends = _outlined(outlined, shown.text, encoder, image)
            return encoder.encode_chat(shown, marks, cache, owner, located, max_tokens=max_tokens, outlined=ends)

        slot = self.enter(options.tenant, num_text_bytes(rendered.text))
        try:
            encoded = await slot.encode(encode)
        finally:
            slot.leave()
        return self._images.place(encoded, images) if images and isinstance(encoded, EncodedChat) else encoded

    async def _count_text(self, text: str, options: EncodingOptions, max_tokens: int) -> int | TooManyTokens:
        if (too_long := self._encoder.too_long(text, max_tokens=max_tokens)) is not None:
            return too_long
        slot = self.enter(options.tenant, num_text_bytes(text))
        try:
            return await slot.encode(lambda encoder: encoder.count(text, max_tokens=max_tokens))
        finally:
            slot.leave()


def _outlined(chat: ChatPrompt | None, text: str, encoder: TextEncoder, image: str) -> tuple[int, ...]:
    return () if chat is None else part_ends(chat, text, encoder.split_points.tokens_between, image)


def _longer_than_read(error: RequestError, param: str) -> RequestError:
    message = f"Invalid value for `{param}`: must not have more than {MAX_READ_TOKENS} tokens."
    return attrs.evolve(error, message=message) if error.code == TOO_LONG else error
