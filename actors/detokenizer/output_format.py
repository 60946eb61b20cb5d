"""Choose at start how the model's output is read, from the server's flags and the checkpoint's files.

Called by `wiring.py`: the detokenizer gets the template, the web layer what requests may ask for. No other module that
parses outputs opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import jinja2

from ..messages.call_syntax import CallForm
from ..messages.output import OutputFormat
from ..shared.checkpoint import CheckpointError, read_json
from ..shared.template_names import TemplateNames, names_in
from ..shared.tokenizers_library import Library
from .response_parsing.call_syntaxes import own_form, shipped_form
from .response_parsing.parser_choice import OWN, Chosen, UnknownParser, choose
from .response_parsing.response_template import ResponseTemplate

_SWITCHES = ("developer", "documents", "enable_thinking", "reasoning_effort", "thinking")
_SHORT_IDS = re.compile(r"tool_call\.id\s*\|\s*length\s*!=\s*9|length 9")
"""How templates of Mistral's models refuse other ids."""


@attrs.frozen
class ParserFiles:
    own_template: dict[str, Any] | None
    """The `response_template`, if it is an object."""
    special_ids: dict[str, int]
    """The ids of special tokens, by text."""
    added_ids: dict[str, int]
    """The ids of all tokens that are recognized in text as a whole, by text."""


def read_parser_files(path: Path, library: Library) -> ParserFiles:
    """Read tokenizer_config.json of the checkpoint in `path`; a missing file is ignored.

    `library` is the checkpoint's tokenizer, which has the tokens of all its files. Raises CheckpointError.
    """
    config = path / "tokenizer_config.json"
    template = read_json(config).get(OWN) if config.exists() else None
    special_ids, added_ids = {}, {}
    for token_id, token in library.tokenizer.get_added_tokens_decoder().items():
        if token.content:
            added_ids[token.content] = token_id
            if token.special:
                special_ids[token.content] = token_id
    return ParserFiles(template if isinstance(template, dict) else None, special_ids, added_ids)


@attrs.frozen
class ChosenFormat:
    template: ResponseTemplate | None
    output: OutputFormat


def choose_format(
    folder: Path, library: Library, chat_template: str | None, tool_call_parser: str, reasoning_parser: str
) -> ChosenFormat:
    """Return how the output of the checkpoint in `folder`, which has the tokenizer `library`, is read.

    Raises CheckpointError for an unknown parser.
    """
    files = read_parser_files(folder, library)
    source = chat_template or ""
    names = _names_in(source)
    is_plain = chat_template is not None and not names.shows_calls
    try:
        chosen = choose(
            tool_call_parser, reasoning_parser, files.own_template, chat_template, files.special_ids, is_plain=is_plain
        )
    except UnknownParser as error:
        raise CheckpointError(str(error)) from None
    return ChosenFormat(
        chosen.template,
        OutputFormat(
            tool_call_parser=chosen.tool_call_parser,
            reasoning_parser=chosen.reasoning_parser,
            reason=chosen.reason,
            reasoning_tags=None if chosen.template is None else chosen.template.reasoning_tags,
            template_variables=frozenset(name for name in _SWITCHES if name in names),
            has_short_call_ids=_SHORT_IDS.search(source) is not None,
            call_form=_call_form(chosen, files.added_ids),
        ),
    )


def _call_form(chosen: Chosen, added_ids: Mapping[str, int]) -> CallForm | None:
    if chosen.tool_call_parser == OWN:
        return own_form(chosen.own_calls, added_ids)
    return None if chosen.tool_call_parser is None else shipped_form(chosen.tool_call_parser, added_ids)


def _names_in(source: str) -> TemplateNames:
    """Return the template's names; none if it does not compile, an error that rendering reports."""
    try:
        return names_in(source)
    except (jinja2.TemplateError, RecursionError, ValueError):  # the last for numbers that are too long
        return TemplateNames()
