"""Assembling logprobs: offsets, the prompt's first token, partial characters."""

from __future__ import annotations

import pytest

from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.logprob_assembler import LogprobAssembler, PromptAssembler
from quipu.actors.messages.prompts import PromptText
from quipu.actors.messages.scores import LikelyToken, ScoredToken, Scores
from quipu.actors.shared.scored_tokens import pack
from quipu.actors.shared.token_decoding import TokenText

TABLE = [b"a", b"bc", "é".encode()[:1], "é".encode()[1:], b"", b" d"]


def token_text(token_id: int) -> TokenText:
    return TokenText(TABLE[token_id].decode("utf-8", "replace"), TABLE[token_id])


def scores(token_ids: list[int], top: int = 0) -> Scores:
    count = len(token_ids)
    return Scores(token_ids, [-1.0] * count, [3] * count, [list(range(top))] * count, [[-0.5] * top] * count)


def outputs(assembler: LogprobAssembler, token_ids: list[int]) -> list[ScoredToken]:
    scored = scores(token_ids)
    return [assembler.next_token(scored, at) for at in range(len(token_ids))]


def tokens_of(prompt: PromptAssembler, num_top: int = 20) -> list[ScoredToken]:
    return list(prompt.scores.tokens(0, len(prompt.scores), num_top))


def test_offsets_of_outputs() -> None:
    """Each offset is the length of the text before the token; both halves of a character have the same offset."""
    tokens = outputs(LogprobAssembler(token_text, ByteDecoder(TABLE)), [1, 2, 3, 4, 5, 0])
    assert [token.offset for token in tokens] == [0, 2, 2, 3, 3, 5]
    assert [token.text for token in tokens] == ["bc", "�", "�", "", " d", "a"]
    assert [token.utf8 for token in tokens] == [TABLE[i] for i in (1, 2, 3, 4, 5, 0)]


def test_outputs_after_an_echo() -> None:
    """Outputs begin where the prompt's text ends. The prompt's first token comes first, once and without a score."""
    prompt = PromptAssembler(token_text, PromptText("abc d", 0, (0, 1, 3)), 2)
    assert prompt.text == "abc d"
    prompt.add(2, pack(scores([1])))
    assert not prompt.is_complete
    prompt.add(3, pack(scores([5])))
    assert prompt.is_complete
    assert outputs(LogprobAssembler(token_text, ByteDecoder(TABLE), len(prompt.text)), [0])[0].offset == 5
    assert [(token.text, token.offset, token.logprob, token.rank) for token in tokens_of(prompt)] == [
        ("a", 0, None, None),
        ("bc", 1, -1.0, 3),
        (" d", 3, -1.0, 3),
    ]


def test_prompt_without_an_echo() -> None:
    """Without an echo, the prompt's scores begin with its second token."""
    prompt = PromptAssembler(token_text, None, 1)
    assert prompt.text == "" and tokens_of(prompt) == []
    prompt.add(2, pack(scores([5], top=2)))
    (token,) = tokens_of(prompt)
    assert token.top == (LikelyToken(0, "a", b"a", -0.5, 1), LikelyToken(1, "bc", b"bc", -0.5, 2))


def test_echo_without_scores_is_complete() -> None:
    """An echo without scores is complete at once, so that its choices need not wait."""
    assert PromptAssembler(token_text, PromptText("a", 0, (0,)), 0).is_complete


def test_payload_of_another_length() -> None:
    """Scores that lack some bytes are refused, and none of them is added."""
    prompt = PromptAssembler(token_text, None, 1)
    with pytest.raises(ValueError, match="another length"):
        prompt.add(2, pack(scores([5], top=2))[:-8])
    assert tokens_of(prompt) == [] and not prompt.is_complete
