"""Rules about outputs that reason and call tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.simulation.evidence import Evidence
from tests.simulation.expected_calls import Call, Reading, read_output, squeezed
from tests.simulation.judged_texts import UNREADABLE
from tests.simulation.seen import Part


def calls_are_right(evidence: Evidence) -> Iterator[str]:
    """Names and arguments of calls, and the text around them, are those of an undisturbed run, each call once.

    What was cut is a beginning of that. Where nothing is told from text, all is text.
    """
    for arrival, watched in evidence.requests():
        for choice in range(arrival.num_outputs):
            what, pieces = f"{arrival.request_id} choice {choice}", list(watched.pieces_of(choice))
            parts = [part for piece in pieces for part in piece.parts]
            if not arrival.is_read:
                if any(part.kind != "text" for part in parts):
                    yield f"{what} wants text, and got {parts}"
                continue
            if (disorder := _disorder(parts)) is not None:
                yield f"{what} got {disorder}"
                continue
            answer = evidence.answer(arrival, choice)
            want = read_output(answer.text, arrival.tools, is_amid_reasoning=arrival.is_amid_reasoning)
            got = _read(parts)
            is_over = any(piece.reason is not None for piece in pieces)
            if not (got == want if is_over else _begins(got, want)):
                yield f"{what} got {got} instead of {want}"


def reasoning_is_counted(evidence: Evidence) -> Iterator[str]:
    """Tokens of reasoning, delimiters included, are told and counted, each once."""
    for arrival, watched, record in evidence.recorded():
        got, choices = record.get("reasoning_tokens", 0), range(arrival.num_outputs)
        want = sum(evidence.answer(arrival, choice).num_thoughts for choice in choices) if arrival.is_read else 0
        if got > want or (record["outcome"] == "finished" and got != want):
            yield f"{arrival.request_id} has {got} tokens of reasoning, of {want}"
        told = sum(piece.num_thoughts for piece in watched.pieces)
        if told > got or (watched.ends and watched.ends[0].is_final and told != got):
            yield f"{arrival.request_id} was told of {told} tokens of reasoning, its record says {got}"


def _disorder(parts: Sequence[Part]) -> str | None:
    """Return what does not belong where it came: calls are numbered from 0, and one ends before the next begins."""
    num_begun, is_open = 0, False
    for part in parts:
        belongs = {
            "text": not is_open,
            "reasoning": not is_open and not num_begun,
            "markup": True,
            "call": not is_open and part.call == num_begun,
            "arguments": is_open and part.call == num_begun - 1,
            "end": is_open and part.call == num_begun - 1,
        }
        if not belongs.get(part.kind, False):
            return f"{part} after {num_begun} calls"
        num_begun += part.kind == "call"
        is_open = part.kind != "end" and (is_open or part.kind == "call")
    return None


def _read(parts: Sequence[Part]) -> Reading:
    content, reasoning = ("".join(part.text for part in parts if part.kind == kind) for kind in ("text", "reasoning"))
    ended = {part.call for part in parts if part.kind == "end"}
    calls = [
        Call(
            begun.text,
            "".join(part.text for part in parts if part.kind == "arguments" and part.call == begun.call),
            begun.call in ended,
        )
        for begun in parts
        if begun.kind == "call"
    ]
    return Reading(squeezed(content), tuple(calls), squeezed(reasoning))


def _begins(got: Reading, want: Reading) -> bool:
    """Whether an output may go on to be another."""
    if not want.content.startswith(got.content.rstrip(UNREADABLE)) or len(got.calls) > len(want.calls):
        return False
    reasoning = got.reasoning.rstrip(UNREADABLE)
    if not want.reasoning.startswith(reasoning) or (got.content and got.reasoning != want.reasoning):
        return False
    return all(
        mine == whole or (mine.name == whole.name and not mine.is_whole and whole.arguments.startswith(mine.arguments))
        for mine, whole in zip(got.calls, want.calls, strict=False)
    )
