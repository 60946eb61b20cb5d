"""Text that is ahead of the numbers of its prompt."""

from __future__ import annotations

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, PromptNumbers, Started
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.early_text import EarlyText
from quipu.actors.request_desk.mailbox import Mailbox

KNOWN = Started(14, 0, 0)
CLOSED = Closed(UsageRecord(request_id="r", outcome=Outcome.FINISHED), None)


def text(index: int, what: str) -> Delta:
    return Delta(index, what, 1, None)


def read(early: EarlyText, events: list[OutletEvent]) -> list[OutletEvent]:
    """Return what a mailbox hands out of these events."""
    mailbox, seen = Mailbox(early), list[OutletEvent]()
    mailbox.attach(seen.extend)
    for event in events:
        mailbox.put(event)
    return seen


def test_text_waits_for_the_numbers_of_its_prompt() -> None:
    """Another choice that is ahead of the first is shown after the prompt's numbers, and later text at once."""
    early, late = [text(1, "a"), text(1, "b")], [text(0, "c"), text(1, "d")]
    assert read(EarlyText(1, 2), [*early, KNOWN, *late, CLOSED]) == [KNOWN, *early, *late, CLOSED]


def test_each_of_several_prompts_has_its_own_numbers() -> None:
    """With several prompts, only the text of those waits whose numbers are not known."""
    first = Started(14, 0, 0, by_prompt={0: PromptNumbers(14, 0)})
    both = Started(28, 0, 0, by_prompt={0: PromptNumbers(14, 0), 1: PromptNumbers(14, 0)})
    events = [first, text(3, "early"), text(1, "in time"), both, CLOSED]
    assert read(EarlyText(2, 2), events) == [first, text(1, "in time"), both, text(3, "early"), CLOSED]


def test_nothing_is_lost_without_numbers() -> None:
    """If a request ends before its numbers are known, its text comes out before its end."""
    assert read(EarlyText(1, 2), [text(1, "a"), CLOSED]) == [text(1, "a"), CLOSED]
