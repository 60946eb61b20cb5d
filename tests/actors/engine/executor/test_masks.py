"""Masks of sequences whose output has to match a grammar: where it begins, where it ends, and after which tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from quipu.actors.engine.executor.grammar_entry import Mask
from quipu.actors.engine.executor.grammars import GrammarMasks, NoMasks
from quipu.actors.engine.executor.sequence_grammar import SequenceGrammar
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarSpec
from quipu.actors.messages.sampling import OutputGrammar
from tests.grammars import EOS, LATE_DIGITS, PERSON, UNION, costly_later, regex, schema
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

SOURCE = (TINY / "tokenizer.json").read_bytes()
VOCABULARY = Vocabulary(TINY)
OPEN, CLOSE = (3901, 3902), (3903,)
"""Delimiters, made of tokens that no grammar here allows."""
LATE = grammar_text(costly_later())
DIGITS = grammar_text(regex("[0-9]{2}"))


@pytest.fixture(scope="module")
def masks() -> Iterator[GrammarMasks]:
    masks = GrammarMasks(SOURCE, (EOS,))
    yield masks
    masks.close()


def ids(text: str) -> list[int]:
    return VOCABULARY.library.list_ids(text, add_special_tokens=False)


def allowed(mask: Mask) -> set[int]:
    assert isinstance(mask, bytes)
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def mask_of(masks: GrammarMasks, sequence: SequenceGrammar) -> Mask:
    (mask,) = masks.begin([sequence])()
    return mask


def test_grammar_begins_where_reasoning_ends(masks: GrammarMasks) -> None:
    """While the prompt's reasoning lasts, only the EOS token is masked out; then comes the answer, with at most two
    tokens of white space before it, and none within it.
    """
    sequence = SequenceGrammar(OutputGrammar(DIGITS, OPEN, CLOSE, prompt_opens_reasoning=True), [], ends_early=True)
    digits, (space,), (line,) = {ids(digit)[0] for digit in "0123456789"}, ids(" "), ids("\n")
    for token_id in (*ids("thinking 1"), *OPEN):
        assert sequence.is_reasoning
        assert EOS not in allowed(mask_of(masks, sequence)) and {token_id, *CLOSE} <= allowed(mask_of(masks, sequence))
        sequence.add_output(token_id)
    sequence.add_output(CLOSE[0])
    for token_id in (line, space):
        assert not sequence.is_reasoning
        assert {space, line} | digits <= allowed(mask_of(masks, sequence)) and EOS not in allowed(
            mask_of(masks, sequence)
        )
        sequence.add_output(token_id)
    assert digits <= allowed(mask_of(masks, sequence)) and not {space, line} & allowed(mask_of(masks, sequence))
    sequence.add_output(ids("7")[0])
    assert allowed(mask_of(masks, sequence)) == digits
    sequence.add_output(ids("7")[0])
    assert allowed(mask_of(masks, sequence)) == {EOS}


def test_model_may_open_reasoning_first(masks: GrammarMasks) -> None:
    """A complete opening delimiter may come first; within the answer none may."""
    grammar = OutputGrammar(DIGITS, OPEN, CLOSE)
    reasons = SequenceGrammar(grammar, [], ends_early=True)
    assert OPEN[0] in allowed(mask_of(masks, reasons)) and ids("1")[0] in allowed(mask_of(masks, reasons))
    reasons.add_output(OPEN[0])
    assert allowed(mask_of(masks, reasons)) == {OPEN[1]}
    reasons.add_output(OPEN[1])
    assert reasons.is_reasoning
    for token_id in (5, CLOSE[0], *ids("12")):
        reasons.add_output(token_id)
    assert allowed(mask_of(masks, reasons)) == {EOS}

    answers = SequenceGrammar(grammar, ids("1"), ends_early=True)
    assert allowed(mask_of(masks, answers)) == {ids(digit)[0] for digit in "0123456789"}


def test_opening_that_the_grammar_allows_too(masks: GrammarMasks) -> None:
    """A delimiter of several tokens may start like an answer: both remain possible until they differ."""
    opening = tuple(ids("1") + ids("x"))
    sequence = SequenceGrammar(OutputGrammar(DIGITS, opening, CLOSE), ids("1"), ends_early=True)
    assert allowed(mask_of(masks, sequence)) == {ids(digit)[0] for digit in "0123456789x"}
    sequence.add_output(ids("4")[0])
    assert allowed(mask_of(masks, sequence)) == {EOS}


@pytest.mark.parametrize(
    ("ends_early", "eos", "ends"), [(True, (EOS,), True), (False, (EOS,), False), (True, (), False)]
)
def test_end_of_a_grammar(*, ends_early: bool, eos: tuple[int, ...], ends: bool) -> None:
    """An output that could end or continue may end, unless EOS tokens are ignored or the model has none."""
    masks = GrammarMasks(SOURCE, eos)
    sequence = SequenceGrammar(OutputGrammar(grammar_text(regex("[0-9]+"))), ids("1"), ends_early=ends_early)
    assert (EOS in allowed(mask_of(masks, sequence))) == ends
    done = SequenceGrammar(OutputGrammar(DIGITS), ids("1") + ids("2"), ends_early=ends_early)
    assert allowed(mask_of(masks, done)) == ({EOS} if eos else set())
    masks.close()


def test_failures_are_a_sequences_own(masks: GrammarMasks) -> None:
    """A sequence that does not match, or whose grammar is invalid, gets a reason; the others in its step get masks."""
    specs = [(DIGITS, ids("x")), ("start: [", []), (DIGITS, [])]
    lost, broken, well = (SequenceGrammar(OutputGrammar(text), tokens, ends_early=True) for text, tokens in specs)
    for _ in range(2):
        first, second, third = masks.begin([lost, broken, well])()
        assert isinstance(first, str) and isinstance(second, str) and len(allowed(third)) >= 10
    assert all(isinstance(mask, str) for mask in NoMasks().begin([well])())


def test_grammar_that_becomes_too_complex(masks: GrammarMasks) -> None:
    """The library counts a mask's steps, not its time: if there are too many, only that sequence fails, on every
    machine."""
    costly, well = (SequenceGrammar(OutputGrammar(text), [], ends_early=True) for text in (LATE, DIGITS))
    assert all(allowed(mask) for mask in masks.begin([costly, well])())
    for _ in range(LATE_DIGITS):
        costly.add_output(ids("7")[0])
    first, second = masks.begin([costly, well])()
    assert isinstance(first, str) and "too complex to follow" in first and "Too many items" in first
    assert len(allowed(second)) >= 10


@pytest.mark.parametrize("spec", [schema(PERSON), regex("[a-c]{3,9}!")])
@pytest.mark.parametrize("num_wrong", [0, 1])
def test_masks_after_drafts(masks: GrammarMasks, spec: GrammarSpec, num_wrong: int) -> None:
    """The masks after draft tokens are those of single steps, up to one that the grammar does not allow: after that, no
    token is; other sequences of the step are not concerned, nor is what follows."""
    grammar = OutputGrammar(grammar_text(spec))
    single, drafting, other = (SequenceGrammar(grammar, [], ends_early=True) for _ in range(3))
    generator, first = random.Random(5), allowed(mask_of(masks, other))
    for _ in range(6):
        draft: list[int] = []
        expected: list[set[int]] = [allowed(mask_of(masks, single))]
        for _ in range(3):
            if (choices := expected[-1] - {EOS}) == set():
                break
            draft.append(generator.choice(sorted(choices)))
            single.add_output(draft[-1])
            expected.append(allowed(mask_of(masks, single)))
        wrong = [next(i for i in range(4, 4000) if i not in expected[-1])] * num_wrong
        beside, *found = masks.begin([other, drafting], [[], [*draft, *wrong, *wrong]])()
        assert allowed(beside) == first
        assert [allowed(mask) for mask in found[: len(expected)]] == expected
        assert [allowed(mask) for mask in found[len(expected) :]] == [set()] * (2 * num_wrong)
        for token_id in draft:
            drafting.add_output(token_id)


def test_forced_tokens_are_told(masks: GrammarMasks) -> None:
    """A sequence knows which tokens have to follow: exactly those that its masks leave no choice about, after drafts
    that were right, and after others none but the mask's."""
    grammar = OutputGrammar(grammar_text(schema(PERSON)))
    sequence, drafting = (SequenceGrammar(grammar, [], ends_early=True) for _ in range(2))
    num_forced = 0
    (mask,) = masks.begin([sequence])()
    for token_id in ids('{"name":"ab","age":7,"tags":["b"]}'):
        forced = sequence.forced_next()
        drafting.answer[:] = sequence.answer
        told_after_draft = masks.begin([drafting], [[token_id]])()
        assert [allowed(one) for one in told_after_draft[:1]] == [allowed(mask)]
        assert (len(allowed(mask)) == 1) == bool(forced)
        if forced:
            num_forced += 1
            assert allowed(mask) == {forced[0]}
            token_id = forced[0]
        sequence.add_output(token_id)
        assert sequence.forced_next() == forced[1:], "what was told holds until more is asked"
        drafting.add_output(token_id)
        after_draft = drafting.forced_next()
        (mask,) = masks.begin([sequence])()
        assert after_draft == sequence.forced_next(), "told ahead, with the masks of drafts"
    assert num_forced > 8
    sequence.add_output(3999)
    assert sequence.forced_next() == [], "another token than the ones that were told"


def test_forced_tokens_after_many_drafts(masks: GrammarMasks) -> None:
    """What has to follow each of many drafts is known as if it had been asked for alone, also where drafts leave what
    was forced, and spell it in other tokens."""
    grammar = OutputGrammar(grammar_text(schema(PERSON)))
    for drafts in (ids('{"name":"ab","age":7,"tags":["b"]}'), [ids(char)[0] for char in '{"name":"ab","age":7,"ta']):
        drafting = SequenceGrammar(grammar, [], ends_early=True)
        masks.begin([drafting], [drafts])()
        nums = []
        for num, token_id in enumerate(drafts, 1):
            drafting.add_output(token_id)
            alone = SequenceGrammar(grammar, drafts[:num], ends_early=True)
            mask_of(masks, alone)
            assert drafting.forced_next() == alone.forced_next()
            nums.append(len(drafting.forced_next()))
        assert max(nums) > 1 and nums.count(0) > 1


def test_nothing_is_forced_while_reasoning_may_open(masks: GrammarMasks) -> None:
    """Where the model may still decide to reason, or to begin with white space, it has a choice."""
    text = grammar_text(schema(PERSON))
    undecided = SequenceGrammar(OutputGrammar(text, OPEN, CLOSE), [], ends_early=True)
    after_reasoning = SequenceGrammar(OutputGrammar(text, OPEN, CLOSE), [*OPEN, *CLOSE], ends_early=True)
    decided = SequenceGrammar(OutputGrammar(text), [], ends_early=True)
    masks.begin([undecided, after_reasoning, decided])()
    assert undecided.forced_next() == after_reasoning.forced_next() == [] != decided.forced_next()


def test_draft_that_is_too_complex(masks: GrammarMasks) -> None:
    """A draft whose masks take too long fails nothing: it is not accepted, and the sequence goes on."""
    sequence = SequenceGrammar(OutputGrammar(LATE), [], ends_early=True)
    digits = ids("7") * LATE_DIGITS
    first, *after = masks.begin([sequence], [digits])()
    assert allowed(first) and not allowed(after[-1])
    sequence.add_output(digits[0])
    assert allowed(mask_of(masks, sequence))


def test_drafts_that_may_be_followed() -> None:
    """No draft is followed while reasoning may be opened, and in reasoning none from where it could close."""
    grammar = OutputGrammar(DIGITS, OPEN, CLOSE)
    assert SequenceGrammar(grammar, [], ends_early=True).num_to_follow([1, 2]) == 0
    reasons = SequenceGrammar(grammar, list(OPEN), ends_early=True)
    assert reasons.num_to_follow([1, 2]) == 2 and reasons.num_to_follow([1, *CLOSE, 2]) == 1
    assert SequenceGrammar(grammar, [*OPEN, *CLOSE], ends_early=True).num_to_follow([1, *CLOSE]) == 2


@pytest.mark.parametrize("spec", [schema(PERSON), schema(UNION), regex("[a-c]{3,9}!")])
def test_rebuilt_matcher_is_the_same(masks: GrammarMasks, spec: GrammarSpec) -> None:
    """A mask depends only on the outputs, not on whether the matcher has followed them or was made afterwards."""
    rng = random.Random(4)
    grammar = OutputGrammar(grammar_text(spec), OPEN, CLOSE, prompt_opens_reasoning=True)
    outputs = [77, *CLOSE, *ids("\n\n")]
    sequence = SequenceGrammar(grammar, outputs, ends_early=True)
    while (mask := mask_of(masks, sequence)) and len(outputs) < 40:
        assert mask == mask_of(masks, SequenceGrammar(grammar, outputs, ends_early=True))
        outputs.append(rng.choice(sorted(allowed(mask))))
        if outputs[-1] == EOS:
            break
        sequence.add_output(outputs[-1])
