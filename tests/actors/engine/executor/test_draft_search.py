"""Which of several texts says how a sequence goes on, as far as earlier guesses tell."""

from __future__ import annotations

import numpy as np

from quipu.actors.engine.executor.acceptance import Acceptance, Place, Source
from quipu.actors.engine.executor.draft_lookup import Tokens
from quipu.actors.engine.executor.draft_search import Draft, Text, find_draft


def ids(*token_ids: int) -> Tokens:
    return np.array(token_ids, dtype=np.int32)


def find(
    end: Tokens,
    *texts: Text,
    acceptance: Acceptance | None = None,
    forced: tuple[int, ...] = (),
    most: int = 8,
    num_searches: int = 1,
) -> Draft:
    return find_draft(texts, end, acceptance or Acceptance(), forced=forced, most=most, num_searches=num_searches)


END = ids(9, 1, 2)
LONG = Text(Source.OUTPUT, ids(9, 1, 2, 3, 4))
SHORT = Text(Source.RECENT, ids(8, 2, 5, 6))


def test_what_is_right_more_often_is_taken() -> None:
    """A longer match is followed, until short ones of another text were right more often; so it is for others."""
    acceptance = Acceptance()
    draft = find(END, LONG, SHORT, acceptance=acceptance)
    assert draft.token_ids == [3, 4] and [kind.place for kind in draft.kinds] == [Place.NEXT, Place.FURTHER]
    wrong, right = draft.kinds, find(END, SHORT, acceptance=acceptance).kinds
    for _ in range(20):
        acceptance.note(wrong, 0)
        acceptance.note(right, 2)
    assert find(END, LONG, SHORT, acceptance=acceptance).token_ids == [5, 6]
    assert find(END, LONG, SHORT).token_ids == [3, 4]


def test_prompt_and_output_are_told_apart() -> None:
    """A prompt and what the sequence has said itself are told apart: one may be right where the other is not."""
    tokens = ids(1, 2, 3, 7, 7, 1, 2)
    (in_output, *_), (in_prompt, *_) = (
        find(tokens, Text(Source.OUTPUT, tokens, num_prompt)).kinds for num_prompt in (2, 5)
    )
    assert (in_output.source, in_prompt.source) == (Source.OUTPUT, Source.PROMPT)


def test_what_follows_another_value() -> None:
    """A value that is nowhere in a text does not keep what comes after it from being found."""
    text = Text(Source.RECENT, ids(10, 11, 20, 12, 13))
    draft = find(ids(10, 11, 21), text)
    assert draft.token_ids == [12, 13] and draft.kinds[0].place is Place.BEHIND_GAP
    assert not find(ids(11, 21), text).token_ids, "one token before a gap says too little"
    assert find(ids(10, 11, 20), text).kinds[0].place is Place.NEXT


def test_another_search_goes_on_where_a_text_ends() -> None:
    """What a text does not know any more, another may: a second search takes up where the first one ends."""
    first, second = Text(Source.OUTPUT, ids(1, 2, 3)), Text(Source.RECENT, ids(3, 4, 5))
    assert find(ids(1, 2), first, second).token_ids == [3]
    assert find(ids(1, 2), first, second, num_searches=2).token_ids == [3, 4, 5]
    assert find(ids(1, 2), first, second, num_searches=2, most=2).token_ids == [3, 4]


def test_forced_tokens_come_first() -> None:
    """Tokens that a grammar forces begin the draft, and what is found after them goes on."""
    draft = find(ids(9, 9), SHORT, forced=(8, 2))
    assert (draft.token_ids, draft.num_forced, len(draft.kinds)) == ([8, 2, 5, 6], 2, 2)
    assert find(ids(9, 9), forced=(8, 2)).token_ids == [8, 2]
    assert find(ids(9, 9), SHORT, forced=(8, 2), most=1).token_ids == [8]
    cut = draft.cut(1)
    assert (cut.token_ids, cut.kinds, cut.num_forced) == ([8], [], 1)
    cut = draft.cut(3)
    assert (cut.token_ids, cut.kinds, cut.num_forced) == ([8, 2, 5], draft.kinds[:1], 2)


def test_predictions_are_not_mixed_with_other_texts() -> None:
    """A draft is from what the client predicts, or not: usage says how much of the prediction was right."""
    predicted, other = Text(Source.PREDICTION, ids(1, 2, 3)), Text(Source.RECENT, ids(3, 4, 5))
    draft = find(ids(1, 2), predicted, other, num_searches=2)
    assert draft.token_ids == [3] and draft.is_predicted
    first, second = Text(Source.RECENT, ids(1, 2, 4)), Text(Source.PREDICTION, ids(4, 5))
    draft = find(ids(1, 2), second, first, num_searches=2)
    assert draft.token_ids == [4] and not draft.is_predicted


def test_unlikely_tokens_are_left_out() -> None:
    """A draft ends where it is hardly ever right."""
    acceptance, text = Acceptance(), Text(Source.RECENT, ids(1, 2, 3, 4, 5, 6, 7))
    kinds = find(ids(1, 2), text, acceptance=acceptance).kinds
    assert len(kinds) == 5
    for _ in range(40):
        acceptance.note(kinds, 1)
    assert len(find(ids(1, 2), text, acceptance=acceptance).kinds) == 2
