"""The prompts of requests that are passed on, in tokens and blocks: for routing, and never for what is booked.

For each folder with a tokenizer there are workers as for an own engine's texts (`text_workers/`). What they cannot
encode is passed on all the same, without an estimate.

What must always hold: nothing that grows with a prompt runs on the event loop in one piece; no request fails for what
happens here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import structlog
import trio

from .config.runtime_config import RuntimeConfig
from .detokenizer.decoder import Decoder
from .detokenizer.output_format import choose_format
from .kv_events.follower import chain_root
from .messages.outcomes import RequestError
from .messages.output import OutputFormat
from .messages.prompts import Prompt
from .messages.upstream import Forward
from .request_desk.upstream_pool import UpstreamPool
from .router.upstream_routing import PromptKeys
from .shared.block_keys import chain_keys
from .shared.image_files import knows_images
from .shared.tokenizers_library import load_library
from .text_workers.chat_pool import ChatPool
from .text_workers.lanes import Lanes
from .text_workers.pooled_encoder import PooledEncoder
from .tokenizer.encoder import load_encoder
from .tokenizer.prompt_encoder import EncodingOptions
from .tokenizer.prompt_sizes import num_bytes_to_encode
from .tokenizer.segment_cache import SegmentCache
from .tokenizer.template_source import read_template

log = structlog.get_logger()

MAX_PROMPT_TOKENS = 1 << 20
"""Of a longer prompt there is no estimate."""
MAX_ENCODING_S = 0.5
"""How long a request waits for its prompt to be tokenized, before it is sent without an estimate."""
HASHED_TOKENS = 32_768
"""Tokens whose block keys are computed between two checkpoints."""


@attrs.define(eq=False)
class UpstreamTokenizer:
    """The tokenizer of some upstreams."""

    encoder: PooledEncoder
    output: OutputFormat


@attrs.define(eq=False)
class UpstreamPrompts:
    """Finds the block keys of requests, for the upstreams whose blocks are known."""

    tokenizers: Mapping[str, UpstreamTokenizer]
    """By folder."""
    pool: UpstreamPool
    block_sizes: dict[int, int] = attrs.field(factory=dict)
    """By upstream, as its events say."""

    async def find(self, forward: Forward) -> Mapping[int, PromptKeys]:
        """Return a request's prompt as each upstream cuts it."""
        found: dict[int, PromptKeys] = {}
        if len(forward.prompts) != 1:
            return found
        with trio.move_on_after(MAX_ENCODING_S):
            tokens: dict[str, Sequence[int]] = {}
            keys: dict[tuple[str, int], PromptKeys] = {}
            for upstream in self.pool:
                folder, size = upstream.config.tokenizer, self.block_sizes.get(upstream.engine_id)
                if folder is None or size is None:
                    continue
                if folder not in tokens:
                    tokens[folder] = await self._encode(self.tokenizers[folder], forward.prompts[0], forward)
                if (folder, size) not in keys:
                    keys[folder, size] = await _keys_of(tokens[folder], size)
                if tokens[folder]:
                    found[upstream.engine_id] = keys[folder, size]
        return found

    async def _encode(self, tokenizer: UpstreamTokenizer, prompt: Prompt, forward: Forward) -> Sequence[int]:
        """Return a prompt's tokens, none if they cannot be known."""
        options = EncodingOptions(tenant=forward.tenant, prompt_param="messages")
        try:
            num_bytes = num_bytes_to_encode((prompt,), (), echo=False)  # a chat has its own queue
            slot = tokenizer.encoder.enter(forward.tenant, num_bytes)
            try:
                encoded = await tokenizer.encoder.encode(prompt, options, slot, MAX_PROMPT_TOKENS)
            finally:
                slot.leave()
        except Exception as error:
            log.debug("upstream.not_tokenized", request_id=forward.request_id, error_type=type(error).__name__)
            return ()
        return () if isinstance(encoded, RequestError) else encoded.token_ids


async def _keys_of(token_ids: Sequence[int], block_size: int) -> PromptKeys:
    keys: list[bytes] = []
    key, stride = chain_root(block_size), max(1, HASHED_TOKENS // block_size) * block_size
    for start in range(0, len(token_ids), stride):
        keys += chain_keys(key, token_ids[start : start + stride], block_size)
        key = keys[-1] if keys else key
        await trio.lowlevel.checkpoint()
    return PromptKeys(keys, len(token_ids), block_size)


@asynccontextmanager
async def open_prompts(config: RuntimeConfig, pool: UpstreamPool) -> AsyncIterator[UpstreamPrompts]:
    """Run the tokenizers of the upstreams until the block is left. Raises CheckpointError."""
    tokenizers: dict[str, UpstreamTokenizer] = {}
    async with trio.open_nursery() as nursery:
        for folder in {upstream.config.tokenizer for upstream in pool if upstream.config.kv_events} - {None}:
            assert folder is not None
            path = Path(folder)
            library, template = load_library(path), read_template(path, lists_parts=knows_images(path))
            encoder = load_encoder(library)
            renderer = ChatPool(template, config.chat_template_timeout_s)
            lanes = Lanes(config.max_encode_waiting, config.max_encode_waiting_bytes, encoder)
            await nursery.start(renderer.run)
            nursery.start_soon(lanes.run)
            pooled = PooledEncoder(encoder, Decoder(library), renderer, lanes, SegmentCache(0))
            text = None if template is None else template.text
            output = choose_format(path, library, text, config.tool_call_parser, config.reasoning_parser).output
            tokenizers[folder] = UpstreamTokenizer(pooled, output)
        yield UpstreamPrompts(tokenizers, pool)
        nursery.cancel_scope.cancel()
