"""Scores as tokens with their texts: offsets, the prompt's first token, half characters."""

from __future__ import annotations

from quipu.actors.core.scribe import Scribe, Spelling
from quipu.actors.core.text import ByteDecoder
from quipu.actors.messages import LikelyToken, PromptText, ScoredToken, Scores

TABLE = [b"a", b"bc", "é".encode()[:1], "é".encode()[1:], b"", b" d"]


def spell(token_id: int) -> Spelling:
    return Spelling(TABLE[token_id].decode("utf-8", "replace"), TABLE[token_id])


def scores(token_ids: list[int], top: int = 0) -> Scores:
    count = len(token_ids)
    return Scores(token_ids, [-1.0] * count, [3] * count, [list(range(top))] * count, [[-0.5] * top] * count)


def drawn(scribe: Scribe, token_ids: list[int]) -> list[ScoredToken]:
    told = scores(token_ids)
    return [scribe.drawn(told, at) for at in range(len(token_ids))]


def test_offsets_of_outputs() -> None:
    """Each token's offset is the length of the text before it; both halves of a character begin where it begins."""
    tokens = drawn(Scribe(spell, ByteDecoder(TABLE), None), [1, 2, 3, 4, 5, 0])
    assert [token.offset for token in tokens] == [0, 2, 2, 3, 3, 5]
    assert [token.text for token in tokens] == ["bc", "�", "�", "", " d", "a"]
    assert [token.utf8 for token in tokens] == [TABLE[i] for i in (1, 2, 3, 4, 5, 0)]


def test_after_an_echo() -> None:
    """Outputs begin where the prompt's text ends; the prompt's first token leads, unscored, and comes once."""
    scribe = Scribe(spell, ByteDecoder(TABLE), PromptText("abc d", 0, (0, 1, 3)))
    assert scribe.echoed_text == "abc d"
    scribe.hear_prompt(1, scores([1]))
    scribe.hear_prompt(2, scores([5]))
    assert drawn(scribe, [0])[0].offset == 5
    prompt = scribe.take_prompt()
    assert [(token.text, token.offset, token.logprob, token.rank) for token in prompt] == [
        ("a", 0, None, None),
        ("bc", 1, -1.0, 3),
        (" d", 3, -1.0, 3),
    ]


def test_without_an_echo() -> None:
    """What was said of the prompt, and nothing of its first token."""
    scribe = Scribe(spell, ByteDecoder(TABLE), None)
    assert scribe.echoed_text == "" and scribe.take_prompt() == ()
    scribe.hear_prompt(1, scores([5], top=2))
    (token,) = scribe.take_prompt()
    assert token.top == (LikelyToken(0, "a", b"a", -0.5, 1), LikelyToken(1, "bc", b"bc", -0.5, 2))
