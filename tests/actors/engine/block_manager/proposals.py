"""`Reserve` messages as a scheduler would send them, with everything not mentioned left empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.prompts import Pin
from quipu.actors.messages.scheduler import Granted
from quipu.actors.shared.block_keys import chain_keys, root_key


@attrs.frozen
class Candidate:
    """A waiting sequence: its id, the tokens that it has to compute, and its cache domain."""

    id: int
    tokens: Sequence[int]
    num_prompt_tokens: int
    domain: str = "a"
    pins: tuple[Pin, ...] = ()


def root_of(domain: str, block_size: int) -> bytes:
    return root_key(domain=domain, model="m", kv_dtype="f32", kv_layout="paged", block_size=block_size)


@attrs.frozen
class Filled:
    """A block that decoding has filled."""

    sequence_id: int
    index: int
    key: bytes
    parent_key: bytes = b""
    token_ids: list[int] = attrs.field(factory=list)


def keys_of(domain: str, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of `tokens`."""
    return chain_keys(root_of(domain, block_size), tokens, block_size)


def reserve(
    step: int,
    block_size: int,
    *,
    failed: Sequence[int] = (),
    committed: Sequence[int] = (),
    filled: Sequence[Filled] = (),
    reset: bool = False,
    free: Sequence[int] = (),
    rows: Sequence[tuple[int, int, int]] = (),
    victims: Sequence[int] = (),
    candidates: Sequence[Candidate] = (),
    budget: int = 1_000,
    chunk: int = 1 << 30,
) -> Reserve:
    """Make a Reserve. `rows` are (sequence, start, count)."""
    return Reserve(
        step=step,
        failed_steps=list(failed),
        committed_steps=list(committed),
        filled_sequence_ids=[f.sequence_id for f in filled],
        filled_block_indexes=[f.index for f in filled],
        filled_keys=[f.key for f in filled],
        filled_parent_keys=[f.parent_key for f in filled],
        filled_token_ids=[f.token_ids for f in filled],
        free_sequence_ids=list(free),
        row_ids=[r[0] for r in rows],
        row_starts=[r[1] for r in rows],
        row_counts=[r[2] for r in rows],
        victim_ids=list(victims),
        candidate_ids=[c.id for c in candidates],
        candidate_num_tokens=[len(c.tokens) for c in candidates],
        candidate_num_prompt_tokens=[c.num_prompt_tokens for c in candidates],
        candidate_keys=[keys_of(c.domain, c.tokens, block_size) for c in candidates],
        candidate_root_keys=[root_of(c.domain, block_size) for c in candidates],
        candidate_token_ids=[list(c.tokens) for c in candidates],
        reset_prefix_cache=reset,
        token_budget=budget,
        candidate_chunk_limit=chunk,
        candidate_pins={c.id: c.pins for c in candidates if c.pins},
    )


def written_of(granted: Granted) -> list[tuple[int, int, int]]:
    return list(zip(granted.written_ids, granted.written_starts, granted.written_ends, strict=True))


def pinned_of(granted: Granted) -> list[tuple[int, int]]:
    """Return (sequence, tokens in its pinned prefix) for each pin."""
    return list(zip(granted.pinned_ids, granted.pinned_ends, strict=True))


def reused_of(granted: Granted) -> Mapping[int, int]:
    """Return the tokens granted as cached, by admitted sequence."""
    return dict(zip(granted.admitted_ids, granted.admitted_reused, strict=True))


def copy_sources_of(granted: Granted) -> Mapping[int, int]:
    """Return the blocks offered for copying, by admitted sequence; 0 for none."""
    return dict(zip(granted.admitted_ids, granted.admitted_copy_sources, strict=True))
