"""Bans, biases and penalties on one row, compared with a direct implementation of their definitions, and edge cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.kernels.batch import Drawn
from quipu.kernels.logit_processors import NONE_LEFT, LogitProcessor, Processing, edited
from quipu.kernels.sampling.oracle import draw, sample_row
from quipu.kernels.step_types import LogitRules
from tests.kernels.step_batches import make_batch

Row = npt.NDArray[np.float32]
Ids = Sequence[int]
VOCAB_SIZE = 40
OFF = -math.inf
ANY_ROW: dict[str, Any] = {"token_ids": [0], "position": 0, "blocks": [1]}
BUDGET = {"reasoning_opening_ids": (0,), "reasoning_closing_ids": (1,), "prompt_opens_reasoning": True}


def row_of(*logits: float) -> Row:
    return np.array(logits, dtype=np.float32)


def words_of(allowed: set[int], vocab_size: int) -> bytes:
    """Return the bit mask of these tokens: bit i % 32 of word i // 32."""
    words = [0] * -(-vocab_size // 32)
    for token_id in allowed:
        words[token_id // 32] |= 1 << token_id % 32
    return b"".join(word.to_bytes(4, "little") for word in words)


def seen(
    logits: Row, rules: LogitRules, prompt: Ids = (), outputs: Ids = (), mask: set[int] | None = None
) -> list[float]:
    """Return the edited logits, and check that the row is restored afterwards."""
    before = logits.copy()
    processing = Processing(
        rows=[3],
        processors=[LogitProcessor(rules, prompt, outputs)],
        masked_rows=[] if mask is None else [3],
        masks=lambda: [] if mask is None else [words_of(mask, len(logits))],
    )
    with edited(processing, [3], logits[None, :]):
        found = [float(logit) for logit in logits]
    assert (logits == before).all()
    return found


def expected(
    logits: Row, rules: LogitRules, prompt: list[int], outputs: list[int], mask: set[int] | None
) -> list[float]:
    """Return the expected logits, token by token, from the definitions; unchanged if nothing satisfies the mask."""
    left = [float(logit) for logit in logits]
    contradictions = []

    def ban(banned: set[int]) -> None:
        if any(left[i] > OFF for i in range(len(left)) if i not in banned):
            for i in banned:
                left[i] = OFF
        else:
            contradictions.append(banned)

    everything = set(range(len(left)))
    if mask is not None:
        for i in everything - mask:
            left[i] = OFF
    if rules.allowed_token_ids:
        ban(everything - set(rules.allowed_token_ids))
    ban({word[-1] for word in rules.bad_words if [*outputs, word[-1]][-len(word) :] == list(word)})
    if mask is not None and contradictions:
        return [float(logit) for logit in logits]
    if len(outputs) < rules.min_tokens:
        ban(set(rules.held_back_token_ids))
    for i in everything:
        left[i] += rules.bias.get(i, 0.0)
        if i in prompt or i in outputs:
            left[i] = left[i] / rules.repetition_penalty if left[i] > 0 else left[i] * rules.repetition_penalty
        left[i] -= rules.frequency_penalty * outputs.count(i)
        left[i] -= rules.presence_penalty * (i in outputs)
    return left


token_ids = st.integers(0, VOCAB_SIZE - 1)
few_ids = st.integers(0, 3)


@given(
    logits=st.lists(st.integers(-8, 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    rules=st.builds(
        LogitRules,
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
        bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3),
        allowed_token_ids=st.one_of(st.just(()), st.lists(few_ids, min_size=1, max_size=5).map(tuple)),
        bad_words=st.lists(st.lists(few_ids, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
        min_tokens=st.integers(0, 6),
        held_back_token_ids=st.lists(few_ids, max_size=3).map(tuple),
    ),
    prompt=st.lists(token_ids, max_size=12),
    outputs=st.lists(few_ids, max_size=9),
    num_added=st.integers(0, 9),
    mask=st.one_of(st.none(), st.sets(token_ids, min_size=1)),
)
def test_rules_match_their_definitions(
    logits: list[int],
    rules: LogitRules,
    prompt: list[int],
    outputs: list[int],
    num_added: int,
    mask: set[int] | None,
) -> None:
    """Apply all rules in vLLM's order, however the outputs are split into earlier ones and those of this admission."""
    row = row_of(*logits)
    split = max(0, len(outputs) - num_added)
    processor = LogitProcessor(rules, prompt, outputs[:split])
    for token_id in outputs[split:]:
        processor.add_output(token_id)
    masks = [] if mask is None else [words_of(mask, VOCAB_SIZE)]
    processing = Processing([0], [processor], [0] * len(masks), lambda: masks)
    with edited(processing, [0], row[None, :]):
        found = row.tolist()
    left = expected(row, rules, prompt, outputs, mask)
    assert found == pytest.approx(left, rel=1e-5)
    assert bool(processing.failures) == (mask is not None and mask != set(range(VOCAB_SIZE)) and OFF not in left)
    assert row.tolist() == logits


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"presence_penalty": 0.5}, [4.0, 0.5, -1.5, -3.0]),
        ({"frequency_penalty": 0.5}, [4.0, 0.0, -1.5, -3.0]),
        ({"frequency_penalty": -0.5, "presence_penalty": 1.0}, [4.0, 1.0, -1.5, -3.0]),
        ({"repetition_penalty": 2.0}, [2.0, 0.5, -2.0, -3.0]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, [2.0, -1.5, -3.0, -3.0]),
        ({"bias": {1: 1.0}, "repetition_penalty": 2.0}, [2.0, 1.0, -2.0, -3.0]),  # the bias comes first
        ({"bias": {3: -100.0, 2: 100.0}}, [4.0, 1.0, 99.0, -103.0]),
    ],
)
def test_penalties_by_hand(rules: dict[str, Any], left: list[float]) -> None:
    """Token 0 is only in the prompt, 1 was sampled twice, 2 once, 3 never."""
    assert seen(row_of(4, 1, -1, -3), LogitRules(**rules), [0, 0, 1], [1, 2, 1]) == left


@pytest.mark.parametrize(
    ("words", "outputs", "banned"),
    [
        ([(1,)], [], {1}),
        ([(1, 2)], [], set()),
        ([(1, 2)], [1], {2}),
        ([(1, 2)], [1, 2], set()),
        ([(1, 1)], [1], {1}),
        ([(1, 2, 3)], [2], set()),  # a word does not begin in the prompt
        ([(1, 2, 3)], [0, 1, 2], {3}),
        ([(1, 2, 3), (0, 2, 1), (2, 0), (3,)], [1, 2], {0, 3}),
    ],
)
def test_bad_words(words: list[tuple[int, ...]], outputs: list[int], banned: set[int]) -> None:
    """Ban a word's last token if the outputs end with the tokens before it; the prompt does not count."""
    left = seen(row_of(0, 0, 0, 0), LogitRules(bad_words=tuple(words)), [1, 2], outputs)
    assert {i for i, logit in enumerate(left) if logit == OFF} == banned


def test_min_tokens() -> None:
    """Ban tokens that end a sequence until there are enough outputs, including those of earlier admissions."""
    rules = LogitRules(min_tokens=2, held_back_token_ids=(1, 2))
    assert seen(row_of(0, 5, 5), rules, [0], [0]) == [0, OFF, OFF]
    assert seen(row_of(0, 5, 5), rules, [0], [0, 0]) == [0, 5, 5]


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"allowed_token_ids": (1,), "bad_words": ((1,),)}, [OFF, 2, OFF]),
        ({"allowed_token_ids": (1,), "min_tokens": 1, "held_back_token_ids": (1,)}, [OFF, 2, OFF]),
        # bad words take precedence over min_tokens
        (
            {"allowed_token_ids": (1, 2), "bad_words": ((2,),), "min_tokens": 1, "held_back_token_ids": (1,)},
            [OFF, 2, OFF],
        ),
        ({"bad_words": ((0,), (1,), (2,))}, [1, 2, 3]),
    ],
)
def test_ban_of_every_token_is_ignored(rules: dict[str, Any], left: list[float]) -> None:
    """Draw a token despite contradictory rules, because the step is shared with other requests."""
    assert seen(row_of(1, 2, 3), LogitRules(**rules)) == left


@pytest.mark.parametrize(("banned", "applies"), [(0, True), (180, False)])
def test_ban_among_few_tokens(banned: int, applies: bool) -> None:
    """Of a large vocabulary, the one token that the model has left may be anywhere."""
    logits = np.full(200, OFF, dtype=np.float32)
    logits[[banned, 180]] = 1.0
    left = seen(logits, LogitRules(bad_words=((banned,),)))
    assert (left[banned] == OFF, left[180]) == (applies, 1.0)


def test_allowed_tokens_yield_to_a_mask() -> None:
    """Leave the row alone if the mask and the allowed tokens have nothing in common: it fails."""
    assert seen(row_of(1, 2, 3), LogitRules(allowed_token_ids=(0,)), mask={1, 2}) == [1, 2, 3]
    assert seen(row_of(1, 2, 3), LogitRules(allowed_token_ids=(0, 1)), mask={1, 2}) == [OFF, 2, OFF]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 70])
def test_masks_at_word_boundaries(vocab_size: int) -> None:
    """Support any vocabulary size; ignore the bits beyond it."""
    allowed = {0, 30, vocab_size - 1}
    left = seen(np.zeros(vocab_size, dtype=np.float32), LogitRules(), mask=allowed)
    assert {i for i, logit in enumerate(left) if logit == 0} == allowed


@pytest.mark.parametrize(
    ("mask", "rules", "failure"),
    [
        (bytes(4), {}, NONE_LEFT),
        (b"\4", {"held_back_token_ids": (1,), "min_tokens": 5}, NONE_LEFT),
        ("It fails.", {"bias": {0: 1.0}}, "It fails."),
        (b"\1", {"bad_words": ((0,),)}, NONE_LEFT),
        (b"\1", {"allowed_token_ids": (1,)}, NONE_LEFT),
        (b"\1", {"held_back_token_ids": (0,), "min_tokens": 5}, None),
        (b"\1" + bytes(8), {}, None),
        (b"\1", {"thinking_budget": 0, **BUDGET}, None),
        (bytes(4), {"thinking_budget": 0, **BUDGET}, None),
    ],
)
def test_row_without_a_token(mask: bytes | str, rules: dict[str, Any], failure: str | None) -> None:
    """A mask that allows nothing, alone or with bans, fails its row, which stays raw, and no other.

    A token that ends the sequence is allowed before `min_tokens` if it is all that the mask allows.
    """
    logits = np.array([[1, 2], [3, 4]], dtype=np.float32)
    processors = [LogitProcessor(LogitRules(**rules), [], []), LogitProcessor(LogitRules(bias={0: 1.0}), [], [])]
    processing = Processing([0, 1], processors, [0], lambda: [mask])
    with edited(processing, [0, 1], logits):
        assert logits[1].tolist() == [4, 4]
        assert (logits[0].tolist() == [1, 2]) == (failure is not None)
    assert processing.failures == ({} if failure is None else {0: failure})
    assert logits.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("restores", [False, True])
def test_raw_logits_that_nobody_reads(restores: bool) -> None:
    """What is drawn from does not depend on `restores`; a row with other rules is restored in any case, and a row that
    fails is left raw."""
    logits = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3]], dtype=np.float32)
    rules = LogitProcessor(LogitRules(thinking_budget=0, **BUDGET), [], [])
    processing = Processing([1], [rules], [0, 1, 2], lambda: [b"\3", bytes(4), bytes(4)])
    with edited(processing, [0, 1, 2], logits, restores=restores):
        assert logits.tolist() == [[1, 2, OFF], [OFF, 0, OFF], [1, 2, 3]]
    assert processing.failures == {2: NONE_LEFT}
    assert logits[1:].tolist() == [[1, 2, 3], [1, 2, 3]]
    assert logits[0].tolist() == ([1, 2, 3] if restores else [1, 2, OFF])


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1e300])
def test_penalties_keep_logits_finite(penalty: float) -> None:
    """Keep logits finite for any penalty, so that the rest of the step continues."""
    left = seen(row_of(3, -3, 0), LogitRules(repetition_penalty=penalty), [0, 1, 2])
    assert np.isfinite(left).all()


def test_rows_without_rules_are_not_touched() -> None:
    """Each row gets its own rules; the others keep their bits."""
    logits = np.zeros((3, 4), dtype=np.float32)
    processors = [LogitProcessor(LogitRules(bias={i: 1.0}), [], []) for i in (1, 2)]
    with edited(Processing([4, 9], processors), [4, 7, 9], logits):
        assert logits.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert not logits.any()


def test_many_distinct_tokens() -> None:
    """Count correctly beyond the initial capacity of the counters."""
    row = np.zeros(5000, dtype=np.float32)
    outputs = [*range(3000), *range(1000)]
    left = seen(row, LogitRules(frequency_penalty=1.0, repetition_penalty=1.2), [4999, 1], outputs)
    assert left == [-2.0] * 1000 + [-1.0] * 2000 + [0.0] * 2000


def with_budget(num_tokens: int, **rules: Any) -> LogitRules:
    """Return rules whose sequence is reasoning from its first output on; token 2 ends that."""
    return LogitRules(
        thinking_budget=num_tokens,
        reasoning_opening_ids=(1,),
        reasoning_closing_ids=(2,),
        prompt_opens_reasoning=True,
        **rules,
    )


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"bad_words": ((2,),)},
        {"bad_words": ((0, 2),)},
        {"allowed_token_ids": (0, 1)},
        {"min_tokens": 5, "held_back_token_ids": (2,)},
        {"bias": {2: -100.0, 3: 100.0}, "presence_penalty": 2.0, "repetition_penalty": 9.0},
    ],
)
@pytest.mark.parametrize("mask", [None, {0, 3}, {2}])
def test_nothing_prevents_a_forced_token(rules: dict[str, Any], mask: set[int] | None) -> None:
    """Leave the forced token alone, whatever the other rules, a bit mask and the model's logits are."""
    for logits in (row_of(5, 1, 0, 7), row_of(5, 1, OFF, 7)):
        assert seen(logits, with_budget(1, **rules), [2], [0], mask) == [OFF, OFF, 0, OFF]


def test_other_rules_apply_while_nothing_is_forced() -> None:
    """A budget that is not used up yet, or no longer needed, does not change the effect of the other rules."""
    for outputs in ([0], [2, 0, 0, 0]):
        assert seen(row_of(5, 1, 0, 7), with_budget(2, bias={0: 1.0}), [2], outputs) == [6, 1, 0, 7]


@pytest.mark.parametrize("logits", [row_of(1, math.nan, 0), row_of(OFF, OFF, OFF), row_of(1, math.inf, 0)])
def test_forcing_does_not_hide_broken_logits(logits: Row) -> None:
    """Leave a row as it is if no token could be drawn from it, so that the step fails as it would without a budget."""
    with edited(Processing([0], [LogitProcessor(with_budget(0), [], [])]), [0], logits[None, :]):
        assert not np.isfinite(logits.max())


def test_idle_processor() -> None:
    """A processor with only a budget need not be asked until it forces a token; one with other rules always must."""
    alone, with_others = (LogitProcessor(with_budget(2, **rules), [], [0]) for rules in ({}, {"min_tokens": 9}))
    idle = []
    for token_id in (0, 2, 0):
        idle.append(alone.is_idle)
        assert not with_others.is_idle
        alone.add_output(token_id)
        with_others.add_output(token_id)
    assert idle == [True, False, True] and alone.is_idle
    assert not LogitProcessor(LogitRules(), [], []).is_idle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draws_after_a_forced_token_are_the_same(temperature: float) -> None:
    """A forced token takes the place of one draw: from the same logits, all others are what they are without."""
    logits = np.random.default_rng(7).normal(size=(12, 6)).astype(np.float32)
    logits[:, 2] = OFF  # the model never ends its reasoning by itself
    processor = LogitProcessor(with_budget(4), [], [])
    processing = Processing([0], [processor])
    plain, drawn = [], []
    for position, row in enumerate(logits):
        fields = {"temperature": temperature, "seed": 3, "output_position": position}
        batch = make_batch({"token_ids": [1], "position": position, "blocks": [1], **fields})
        plain += draw(batch, [0], row[None, :])
        drawn += draw(attrs.evolve(batch, processing=processing), [0], row[None, :])
        processor.add_output(drawn[-1])
    assert drawn == [*plain[:4], 2, *plain[5:]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("rules", "mask"),
    [
        ({}, None),
        ({"bad_words": ((1,),)}, None),
        ({"allowed_token_ids": (0, 2)}, None),
        ({"min_tokens": 3, "held_back_token_ids": (1,)}, None),
        ({"thinking_budget": 0, **BUDGET}, None),
        ({"bias": {1: -100.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0}, None),
        ({"bad_words": ((1,),)}, {0, 2}),
        (None, {0, 2}),
        (None, {1}),
    ],
)
def test_rules_do_not_hide_broken_logits(bad: float, rules: dict[str, Any] | None, mask: set[int] | None) -> None:
    """Nothing is drawn from a row with NaN or +inf, even where a rule or a mask bans that very token; and the row is
    reported as broken, not as one from which its rules leave nothing."""
    logits = np.array([[2, bad, 1, 0], [2, 3, 1, 0]], dtype=np.float32)
    made = None if rules is None else LogitProcessor(LogitRules(**rules), [1], [1])
    for restores in (True, False):
        processing = Processing(
            rows=[] if made is None else [0],
            processors=[] if made is None else [made],
            masked_rows=[] if mask is None else [0],
            masks=lambda: [] if mask is None else [words_of(mask, 4)],
        )
        batch = attrs.evolve(make_batch(ANY_ROW, ANY_ROW), processing=processing)
        changed = logits.copy()
        with edited(processing, [0, 1], changed, restores=restores):
            drawn = [sample_row(batch, row, changed[row]) for row in range(2)]
        assert drawn == [None, 1]
        assert Drawn.of(batch, [0, 1], drawn).broken_rows == [0] and not processing.failures


def test_mask_of_tokens_that_the_model_rules_out() -> None:
    """A row fails for its mask if the model's logits of all tokens that it allows are -inf: a client's mask alone."""
    logits = np.array([[OFF, OFF, 1, 0]], dtype=np.float32)
    processing = Processing([], [], [0], lambda: [words_of({0, 1}, 4)])
    batch = attrs.evolve(make_batch(ANY_ROW), processing=processing)
    drawn = Drawn.of(batch, [0], draw(batch, [0], logits))
    assert (drawn.broken_rows, processing.failures) == ([], {0: NONE_LEFT})
