"""Rules about what clients were given: the right texts, ids and scores, in order."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from tests.simulation.arrival import Arrival
from tests.simulation.evidence import Evidence
from tests.simulation.expected import Answer, Scored, prompt_scores, vector_of
from tests.simulation.seen import Numbers, Piece, Watched

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""Shown in place of a character of which only some bytes came."""
CLOSE = 1e-5
"""Of two vectors of length 1."""


def right_texts(evidence: Evidence) -> Iterator[str]:
    """A finished choice has exactly the text of an undisturbed run; one that was cut has a prefix of it."""
    for arrival, watched in evidence.requests():
        for choice in range(arrival.num_outputs):
            what = f"{arrival.request_id} choice {choice}"
            pieces, want = list(watched.pieces_of(choice)), evidence.answer(arrival, choice)
            text = "".join(piece.text for piece in pieces)
            last = pieces[-1] if pieces and pieces[-1].reason is not None else None
            if last is None:
                if not want.text.startswith(text.rstrip(UNREADABLE)):
                    yield f"{what} got {text!r} instead of {want.text!r}"
                if watched.has_finished:
                    yield f"{what} has no reason to end, and its request has finished"
                continue
            if text != want.text:
                yield f"{what} got {text!r} instead of {want.text!r}"
            told = last.reason, last.stop, last.stop_token_id
            if told != (want.reason, want.stop, want.stop_token_id):
                yield f"{what} ended with {told}, not {want.reason}, {want.stop!r}, {want.stop_token_id}"
            if sum(piece.num_tokens for piece in pieces) != want.num_tokens:
                yield f"{what} has got {sum(piece.num_tokens for piece in pieces)} of {want.num_tokens} tokens"
        strangers = {piece.choice for piece in watched.pieces} - set(range(arrival.num_outputs))
        if strangers:
            yield f"{arrival.request_id} got choices {strangers}"


def right_ids_and_scores(evidence: Evidence) -> Iterator[str]:
    """Ids and logprobs are those of the tokens that were given, once each, and come where they were asked for."""
    for arrival, watched in evidence.requests():
        for choice in range(arrival.num_outputs):
            part = arrival.parts[choice // arrival.num_choices]
            yield from _extras(part, watched, choice, evidence.answer(arrival, choice))
        if arrival.prompt_logprobs is None or not watched.has_finished:
            continue
        for part in arrival.parts:
            want = prompt_scores(part, evidence.digest_of(arrival))
            for choice in range(part.part * part.num_choices, (part.part + 1) * part.num_choices):
                if len(part.prompt) == 1:
                    continue
                got = [p.prompt_scores for p in watched.pieces_of(choice) if p.prompt_scores is not None]
                if len(got) != 1 or not _are_close(got[0], want):
                    yield f"{arrival.request_id} choice {choice} got {len(got)} wrong scores of its prompt"


def right_vectors(evidence: Evidence) -> Iterator[str]:
    """A prompt that is embedded has its vector once, whoever has computed its blocks; no other has any."""
    for arrival, watched in evidence.requests():
        for part in arrival.parts:
            got = [piece.vector for piece in watched.pieces_of(part.part) if piece.vector is not None]
            if not arrival.is_embedded:
                if got:
                    yield f"{arrival.request_id} got a vector"
                continue
            want = vector_of(part, evidence.digest_of(arrival))
            found = [struct.unpack(f"<{len(one) // 4}f", one) for one in got]
            is_right = all(len(one) == len(want) and math.dist(one, want) < CLOSE for one in found)
            if not is_right or len(found) > 1 or (watched.has_finished and not found):
                yield f"{arrival.request_id} got {len(found)} vectors of prompt {part.part}: {found}"


def _extras(arrival: Arrival, watched: Watched, choice: int, want: Answer) -> Iterator[str]:
    what, pieces = f"{arrival.request_id} choice {choice}", list(watched.pieces_of(choice))
    num = sum(piece.num_tokens for piece in pieces)
    ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    if ids != (want.token_ids[:num] if arrival.with_token_ids else ()):
        yield f"{what} got ids {ids} of {want.token_ids}"
    scores = tuple(score for piece in pieces for score in piece.scores)
    if not _are_close(scores, want.scores[:num]):
        yield f"{what} got scores {scores} instead of {want.scores[:num]}"
    prompts = [piece.prompt_token_ids for piece in pieces if piece.prompt_token_ids is not None]
    if prompts != ([arrival.prompt] if arrival.with_token_ids and pieces else []):
        yield f"{what} got {len(prompts)} prompts' ids, or wrong ones"


def _are_close(some: tuple[Scored, ...], others: tuple[Scored, ...]) -> bool:
    """Whether scores are equal, apart from the rounding of logprobs."""
    return len(some) == len(others) and all(
        (a.token_id, a.rank, a.top) == (b.token_id, b.rank, b.top) and abs(a.logprob - b.logprob) < 1e-5
        for a, b in zip(some, others, strict=True)
    )


def nothing_after_the_end(evidence: Evidence) -> Iterator[str]:
    """Nothing comes after the end of its choice or its request, and no token before the prompt's numbers."""
    for arrival, watched in evidence.requests():
        ended: set[int] = set()
        has_started = False
        for event in watched.events:
            if isinstance(event, Numbers):
                has_started = True
            if isinstance(event, Piece):
                if not has_started and (watched.numbers or watched.has_finished):
                    yield f"{arrival.request_id} got text before its numbers"
                if event.choice in ended:
                    yield f"{arrival.request_id} choice {event.choice} went on after its end"
                if event.reason is not None:
                    ended.add(event.choice)
        if watched.ends and watched.events[-1] is not watched.ends[0]:
            yield f"{arrival.request_id} got something after its end"
