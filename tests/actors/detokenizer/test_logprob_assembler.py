"""Scores as tokens with their texts: offsets, the prompt's first token, half characters."""

from __future__ import annotations

from quipu.actors.detokenizer.logprob_assembler import PromptReading, Scribe, Spelling
from quipu.actors.detokenizer.text_stream import ByteDecoder
from quipu.actors.messages.prompts import PromptText
from quipu.actors.messages.scores import LikelyToken, ScoredToken, Scores
from quipu.actors.shared.scored_tokens import pack

TABLE = [b"a", b"bc", "é".encode()[:1], "é".encode()[1:], b"", b" d"]


def spell(token_id: int) -> Spelling:
    return Spelling(TABLE[token_id].decode("utf-8", "replace"), TABLE[token_id])


def scores(token_ids: list[int], top: int = 0) -> Scores:
    count = len(token_ids)
    return Scores(token_ids, [-1.0] * count, [3] * count, [list(range(top))] * count, [[-0.5] * top] * count)


def drawn(scribe: Scribe, token_ids: list[int]) -> list[ScoredToken]:
    told = scores(token_ids)
    return [scribe.drawn(told, at) for at in range(len(token_ids))]


def tokens_of(reading: PromptReading, num_top: int = 20) -> list[ScoredToken]:
    return list(reading.scores.tokens(0, len(reading.scores), num_top))


def test_offsets_of_outputs() -> None:
    """Each token's offset is the length of the text before it; both halves of a character begin where it begins."""
    tokens = drawn(Scribe(spell, ByteDecoder(TABLE)), [1, 2, 3, 4, 5, 0])
    assert [token.offset for token in tokens] == [0, 2, 2, 3, 3, 5]
    assert [token.text for token in tokens] == ["bc", "�", "�", "", " d", "a"]
    assert [token.utf8 for token in tokens] == [TABLE[i] for i in (1, 2, 3, 4, 5, 0)]


def test_after_an_echo() -> None:
    """Outputs begin where the prompt's text ends; the prompt's first token leads, unscored, and comes once."""
    reading = PromptReading(spell, PromptText("abc d", 0, (0, 1, 3)), 2)
    assert reading.text == "abc d"
    reading.hear(1, pack(scores([1])))
    assert not reading.is_complete
    reading.hear(2, pack(scores([5])))
    assert reading.is_complete
    assert drawn(Scribe(spell, ByteDecoder(TABLE), len(reading.text)), [0])[0].offset == 5
    assert [(token.text, token.offset, token.logprob, token.rank) for token in tokens_of(reading)] == [
        ("a", 0, None, None),
        ("bc", 1, -1.0, 3),
        (" d", 3, -1.0, 3),
    ]


def test_without_an_echo() -> None:
    """What was said of the prompt, and nothing of its first token."""
    reading = PromptReading(spell, None, 1)
    assert reading.text == "" and tokens_of(reading) == []
    reading.hear(1, pack(scores([5], top=2)))
    (token,) = tokens_of(reading)
    assert token.top == (LikelyToken(0, "a", b"a", -0.5, 1), LikelyToken(1, "bc", b"bc", -0.5, 2))


def test_nothing_is_missing_of_a_prompt_that_is_only_echoed() -> None:
    """Its choices begin at once."""
    assert PromptReading(spell, PromptText("a", 0, (0,)), 0).is_complete
