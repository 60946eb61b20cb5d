"""Free text with regions that match schemas: which outputs are allowed, and which structural tags are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.grammars.structural_tags import structural_tag_rules
from quipu.actors.grammars.text_values import UnsupportedSchema
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.grammars import EOS, tiny_grammars
from tests.tiny import TINY

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": OBJECT}
TEXT = {"type": "any_text"}
F = {"begin": "<function=f>", "content": JSON, "end": "</function>"}
G = {"type": "tag", "begin": "<function=g>", "content": {"type": "regex", "pattern": "[0-9/]+"}, "end": ["</f>", "!"]}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": OBJECT, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"enum": [1, 2]}, "end": "</function>"},
        {"begin": "[", "end": "]"},
    ],
    "triggers": ["<function=", "["],
}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<function="], "tags": [F, G], **fields}


def new(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


THOUGHT = tag("<t>", TEXT, "</t>")
ONE, TWO = '<function=f>{"a":1}</function>', "<function=g>1/2!"
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLDER,
        [
            "",
            "a < b <func",
            ONE,
            f"x{ONE}y <function=g>2</function>\n z<",
            '<function=f>{"a": 1}</function>',
            "[[1, 2]]",
        ],
        ["<function=", "<function=h>", "<function=g>3</function>", "x<function=f>{}</function>", "[x]", ONE[:-1]],
    ),
    (new({"type": "regex", "pattern": "a\\\n/\n\\/"}), ["a\n/\n/"], ["a\\\n/\n/", "a"]),
    (new(triggered()), ["", f"a{ONE}{TWO}b"], ["<function=g>x!", f"{ONE}<function="]),
    (new(triggered(at_least_one=True)), [ONE, f"{TWO} b{ONE}"], ["", f"a{ONE}"]),
    (new(triggered(stop_after_first=True)), ["", "a", ONE, f"a{TWO}"], [f"{ONE} ", ONE + ONE]),
    (new(triggered(at_least_one=True, stop_after_first=True)), [ONE, TWO], ["", "a", f"a{ONE}", ONE + ONE]),
    (new(triggered(excludes=["no"])), ["n o", f"yes{ONE}"], ["no", f"no{ONE}", f"{ONE}now"]),
    (
        new(tag("<r>", triggered(), "</r>")),
        ["<r></r>", f"<r>x{ONE}y</r>"],
        ["<r>", "<r></r>x", f"<r>{ONE}", "<r></r></r>", f"<r></r>{ONE}</r>"],
    ),
    (new(THOUGHT), ["<t></t>", "<t>a <t> b</t>"], ["<t>", "<t>a</t></t>", "a"]),
    (
        new({"type": "sequence", "elements": [THOUGHT, const("\n"), triggered()]}),
        ["<t>a</t>\n", f"<t></t>\nx{ONE}"],
        [f"<t>a</t>{ONE}", "<t>a\n"],
    ),
    (new({"type": "any_text", "excludes": ["no"]}), ["", "yes"], ["a no"]),
    (new(JSON), ['{"a":1}'], ["{}", '{"a":1}x']),
    (new({"type": "json_schema", "json_schema": True}), ["1", "[{}]"], ["x"]),
    (new({"type": "or", "elements": [const("yes"), THOUGHT]}), ["yes", "<t>x</t>"], ["no", "yes<t></t>"]),
    (
        new({"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, const("b")]}),
        ["b", "ab"],
        ["a", "aab"],
    ),
    (new({"type": "plus", "content": const("ab")}), ["ab", "abab"], ["", "aba"]),
    (new({"type": "star", "content": const("ab")}), ["", "abab"], ["b"]),
    (new({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}), ["ab", "abab"], ["", "ababab"]),
    (new({"type": "repeat", "min": 2, "max": -1, "content": const("a")}), ["aa", "aaaa"], ["a"]),
    (
        new({"type": "tags_with_separator", "tags": [F, G], "separator": ", "}),
        ["", ONE, f"{TWO}, {ONE}"],
        [ONE + TWO, "x"],
    ),
    (
        new(
            {
                "type": "tags_with_separator",
                "tags": [F],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            }
        ),
        [ONE],
        ["", f"{ONE},{ONE}"],
    ),
    (new(tag("a", triggered(triggers=["<function=f", "<function=g"]), "")), ["a", f"ax{TWO} <function=h"], ["b"]),
]


def lark_of(value: dict[str, Any]) -> str:
    return "".join(structural_tag_rules(value, "response_format"))


def compiled(value: dict[str, Any]) -> str:
    spec = GrammarSpec(GrammarKind.LARK, lark_of(value), "response_format")
    text = GrammarChecker(tiny_grammars(), 99_999).check(spec)
    assert isinstance(text, str), text.message
    return text


@pytest.mark.parametrize(("value", "good", "bad"), CASES)
def test_allowed_outputs(value: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Whole outputs of a structural tag are allowed, and nothing else is."""
    matcher = tiny_grammars().compile(compiled(value))
    for text, is_good in [*((text, True) for text in good), *((text, False) for text in bad)]:
        token_ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS]
        assert matcher.accepts(token_ids) == is_good, text


def test_tokens() -> None:
    """A delimiter may be a token of the vocabulary, by its id or by its name."""
    opens, closes = {"type": "token", "token": "<|im_start|>"}, {"type": "token", "token": EOS - 1}
    matcher = tiny_grammars().compile(compiled(new({"type": "tag", "begin": opens, "content": TEXT, "end": closes})))
    start = TOKENIZER.token_to_id("<|im_start|>")
    words = TOKENIZER.encode("any words", add_special_tokens=False).ids
    assert matcher.accepts([start, *words, EOS - 1, EOS])
    assert not matcher.accepts([*words, EOS - 1, EOS]) and not matcher.accepts([start, *words, EOS])


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ({}, "", "either `format`"),
        ({**OLDER, "format": TEXT}, "", "either `format`"),
        (new(None), ".format", "an object"),
        (new({"type": "dispatch", "rules": []}), ".format.type", "`dispatch` is not supported"),
        (new({"type": "any_tokens"}), ".format.type", "`any_tokens` is not supported"),
        (new({**TEXT, "max_tokens": 5}), ".format.max_tokens", "not supported"),
        (new({**JSON, "style": "glm_xml"}), ".format", "`style`"),
        (new({"type": "json_schema"}), ".format.json_schema", "an object"),
        (new({"type": "sequence", "elements": [TEXT, const("a")]}), ".format.elements[0]", "text of any length"),
        (new({"type": "star", "content": triggered()}), ".format.content", "text of any length"),
        (new({"type": "sequence", "elements": []}), ".format.elements", "not empty"),
        (new({"type": "repeat", "min": 3, "max": 2, "content": const("a")}), ".format.max", "at least `min`"),
        (new({"type": "repeat", "min": 3, "max": 10**9, "content": const("a")}), ".format", "at most"),
        (new(tag("a", TEXT, ["b", ""])), ".format.end", "must be a string"),
        (new(tag("a", TEXT, None)), ".format.end", "must be a string"),
        (new({**F, "type": "tag", "begin": {"type": "token", "token": "x y"}}), ".format.begin", "a token"),
        (new(triggered(triggers=["<tool="])), ".format.tags[0].begin", "one of the triggers"),
        (new(triggered(triggers=["<", "<f"])), ".format.tags[0].begin", "no other"),
        (new(triggered(triggers=[])), ".format.triggers", "between 1 and"),
        (new(triggered(triggers=["<function=", *["x" * 999] * 3])), ".format.triggers", "2048 characters"),
        (new(tag("a", TEXT, "b" * 2049)), ".format.end", "2048 characters"),
        (new(triggered(triggers=[""])), ".format.triggers", "not empty"),
        (new(triggered(at_least_one=1)), ".format.at_least_one", "a boolean"),
        (new({"type": "regex", "pattern": ""}), ".format.pattern", "not be empty"),
        (new({"type": "regex", "pattern": "a\\"}), ".format.pattern", "end with a backslash"),
        ({**OLDER, "triggers": "["}, ".triggers", "a list of strings"),
        ({**OLDER, "structures": [{"begin": "[", "schema": 1, "end": "]"}]}, ".structures[0].schema", "an object"),
    ],
)
def test_refused_tags(value: dict[str, Any], param: str, words: str) -> None:
    """A structural tag that cannot be enforced is refused, with the field that is to blame."""
    with pytest.raises(UnsupportedSchema) as refused:
        lark_of(value)
    assert refused.value.param == f"response_format{param}" and words in refused.value.problem


def test_schema_that_is_not_supported() -> None:
    """A keyword that the library does not support is named, with the tag that contains it."""
    lark = lark_of(new(triggered(tags=[F, {**F, "content": {**JSON, "json_schema": {"not": {}}}}])))
    refused = GrammarChecker(tiny_grammars(), 99_999).check(GrammarSpec(GrammarKind.LARK, lark, "response_format"))
    assert not isinstance(refused, str)
    assert "`not` at `response_format.format.tags[1].content.json_schema#`" in refused.message, json.dumps(lark)
