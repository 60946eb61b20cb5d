"""How the fake backend, which has no logits, draws tokens under grammars and rules.

Used by `fake.py`. A grammar's mask moves a token that it does not allow to one that it does; for rules, a row of logits
is made up in which the token that is drawn without them is the likeliest.

What must always hold: what is drawn depends on the token that is drawn without rules, and on the rules and the outputs
of the sequence alone.
"""

from __future__ import annotations

import attrs
import numpy as np

from .batch import Drawn
from .logit_edits import Edit
from .logit_processors import NONE_LEFT, LogitProcessor, Processing

VOCABULARY = 4096
"""Of made-up logits: that of the tests' tiny models."""
_LIKELIEST = np.float32(8.0)


def masked(processing: Processing, drawn: Drawn) -> Drawn:
    """Replace drawn tokens that a mask does not allow by one that it does."""
    token_of = dict(zip(drawn.rows, drawn.token_ids, strict=True))
    for row, mask in zip(processing.masked_rows, processing.masks(), strict=True):
        if isinstance(mask, str):
            processing.failures[row] = mask
        elif not any(mask):
            processing.failures[row] = NONE_LEFT
        else:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            if token_of[row] not in allowed:
                token_of[row] = int(allowed[token_of[row] % len(allowed)])
    return attrs.evolve(drawn, token_ids=list(token_of.values()))


def draw_by_rules(processor: LogitProcessor, token_id: int) -> int:
    """Return the token that rules leave likeliest where `token_id` is drawn without them."""
    distance_V = np.abs(np.arange(VOCABULARY) - token_id)
    logits_V = (-distance_V / VOCABULARY).astype(np.float32)
    logits_V[token_id] = _LIKELIEST
    processor.apply(Edit(logits_V))
    return int(logits_V.argmax())
