"""Whether a prompt has opened reasoning, which the output then begins inside."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .delimiter_programs import Meaning
from .delimiter_scanner import DelimiterScanner, Hold
from .response_template import ResponseTemplate


@attrs.frozen
class PromptEnd:
    is_open: bool
    """The prompt has opened reasoning and not closed it."""
    is_at_delimiter: bool
    """Nothing but white space follows the prompt's last delimiter of reasoning."""


def read_prompt(template: ResponseTemplate, tail: Iterable[tuple[int, str]]) -> PromptEnd:
    """Read a prompt's last tokens and their texts. Special tokens, such as those between turns, end reasoning."""
    if template.reasoning is None:
        return PromptEnd(False, False)
    scanner = DelimiterScanner(template.prompt_programs, Hold.NOTHING)
    last: Meaning | None = None
    is_blank = True
    for token_id, piece in tail:
        stand = template.specials.by_id.get(token_id)
        if stand is not None:
            piece = stand.replace(piece)
        elif token_id in template.special_ids:
            last = None
            scanner.take()
            continue
        while piece:
            scan = scanner.feed(piece)
            is_blank = is_blank and not scan.text.strip()
            if scan.found is not None:
                last, is_blank = scan.found.delimiter.meaning, True
            piece = scan.rest
    is_blank = is_blank and not scanner.held.strip()
    return PromptEnd(last is Meaning.REASONING_OPEN, last is not None and is_blank)
