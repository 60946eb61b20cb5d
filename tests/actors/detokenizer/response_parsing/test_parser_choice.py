"""Which formats are chosen, and what happens to templates that are not supported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.detokenizer.output_format import choose_format, read_parser_files
from quipu.actors.detokenizer.response_parsing.call_syntaxes import own_form
from quipu.actors.detokenizer.response_parsing.parser_choice import OWN, UnknownParser, choose
from quipu.actors.detokenizer.response_parsing.shipped_templates import REASONING, TOOL_CALLS
from quipu.actors.shared.checkpoint import DEMO, CheckpointError
from quipu.actors.shared.tokenizers_library import Library, load_library
from tests.parsed_outputs import parse
from tests.tiny import TINY

CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


XML = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>", "value_parser": {"name": "json", "args": {}}}
DIALECT = {"unquoted_keys": True, "string_delims": [["'", "'"]]}


def spec(**calls: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {
                "open": "<c>",
                "close": "</c>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
                **calls,
            },
            "content": {},
        },
    }


def test_every_shipped_format() -> None:
    """Each known name can be chosen, alone and together with one of the other kind."""
    for name in TOOL_CALLS:
        assert choose(name, "none", None, None, {}).tool_call_parser == name
    for name in REASONING:
        chosen = choose("hermes", name, None, None, {})
        assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("hermes", name)


@pytest.mark.parametrize(
    ("chat_template", "calls", "reasoning"),
    [
        ('<tool_call>\n{"name": ', "hermes", None),
        ("<tool_call>\n<function=x> <think>", "qwen3_coder", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|python_tag|>", "llama3_json", None),
        ("<|tool_call|>", "granite", None),
        ("<|tool_call|> <|/tool_call|>", "phi4_mini_json", None),
        ("<|tool_call>call:", "gemma4", None),
        ("<|tool|>{{ message.tools }}<|/tool|>", "phi4_mini_json", None),
        ("<|start_header_id|>ipython<|end_header_id|>", "llama3_json", None),
        ("<|python_start|><|python_end|> <|header_start|>ipython<|header_end|>", "llama4_json", None),
        ("<\uff5ctool\u2581sep\uff5c>{{ name }}\n```json", "deepseek_v3", None),
        ("<\uff5ctool\u2581sep\uff5c>{{ arguments }}", "deepseek_v31", None),
        ("<|channel|>analysis<|message|> <|channel|>commentary ", "openai", "openai_gptoss"),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_found_by_the_chat_template(chat_template: str | None, calls: str | None, reasoning: str | None) -> None:
    """Without a name or an own template, the chat template's markers decide."""
    chosen = choose("auto", "auto", None, chat_template, {})
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == (calls, reasoning)
    assert (chosen.template is None) is (calls is None and reasoning is None)


@pytest.mark.parametrize(("chat_template", "name"), [("{{ messages }}", "hermes"), ("[TOOL_CALLS]", "mistral")])
def test_calls_in_plain_text_are_read(chat_template: str, name: str) -> None:
    """If tools are described to a model in plain text, its calls are read in the hermes form and in its own."""
    chosen = choose("auto", "auto", None, chat_template, {}, is_plain=True)
    assert chosen.tool_call_parser == name and "and hermes" in chosen.reason and chosen.template is not None
    call = '{"name": "f", "arguments": {}}'
    assert parse(chosen.template, f"<tool_call>{call}</tool_call>").calls == [("f", "{}")]
    if name == "mistral":
        assert parse(chosen.template, f"[TOOL_CALLS][{call}]").calls == [("f", "{}")]
        assert parse(choose("mistral", "auto", None, "x", {}, is_plain=True).template, "<tool_call>").calls == []


def test_names_come_before_the_own_template() -> None:
    """A parser's name overrides its half of the checkpoint's own template, `auto` keeps it, `none` disables it."""
    chosen = choose("auto", "qwen3", spec(), "<tool_call>", {})
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == (OWN, "qwen3")
    assert chosen.template is not None
    assert chosen.template.reasoning_tags == ("<think>", "</think>")
    parsed = parse(chosen.template, '<think>a</think>b<c>{"name": "f", "arguments": {}}</c>')
    assert (parsed.reasoning, parsed.text, parsed.calls) == ("a", "b", [("f", "{}")])
    assert choose("none", "none", spec(), "<tool_call>", {}).template is None


@pytest.mark.parametrize("names", [("herms", "auto"), ("auto", "qwen")])
def test_unknown_names(names: tuple[str, str]) -> None:
    """The error lists the known names."""
    with pytest.raises(UnknownParser, match=r"auto, none, .*(hermes|deepseek_r1).*mistral"):
        choose(*names, None, None, {})


@pytest.mark.parametrize(
    "own",
    [
        spec() | {"version": 2},
        spec() | {"more": 1},
        {"fields": []},
        {"fields": {"tool_calls": 1}},
        {"fields": {"audio": {"open": "<a>", "close": "</a>"}}},
        spec(open_pattern="x"),
        {**spec(), "fields": {"tool_calls": {"open_pattern": "(?=<c>)", "content": "json", "transform": CALL}}},
        spec(content="text"),
        spec(content="int"),
        spec(content_args={"unquoted_keys": True}),
        spec(transform={"a": "{content}"}),
        spec(transform=NAMED),
        spec(open=None),
        spec(open=[]),
        spec(open=5),
        spec(open=""),
        spec(content="xml-inline", transform=NAMED),
        spec(content_args=3),
        spec(transform=3),
        {"fields": {"thinking": {"open": "<t>"}}},
    ],
)
def test_refused_templates(own: dict[str, Any]) -> None:
    """A template that is not supported is not fatal: the reason says so, and the chat template decides."""
    chosen = choose("auto", "auto", own, "<tool_call>", {})
    assert chosen.tool_call_parser == "hermes"
    assert "the checkpoint's response_template is not used" in chosen.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "x", "{content}", "{name}", "json", "(", "a|b"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "name", "args"]), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(data=st.data())
def test_odd_templates(data: st.DataObject) -> None:
    """No template, whatever it contains, raises an exception, which would stop the server."""
    own = data.draw(st.sampled_from([spec(), named("xml-inline", XML), named("json", DIALECT), named("kv-lines", {})]))
    own = json.loads(json.dumps(own))
    place: Any = own
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    chosen = choose("auto", "auto", own, None, {"x": 1})
    own_form(chosen.own_calls, {"x": 1})


def named(content: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"open_pattern": r"<c (?P<name>\w+)>", "close": "</c>", "content": content, "content_args": arguments}
    return {"fields": {"tool_calls": {**call, "transform": NAMED}, "content": {}}}


@pytest.mark.parametrize(
    ("own", "output", "arguments"),
    [
        (named("kv-lines", {}), "<c f>\ncount: 12\ntext : a: b \n</c>", {"count": 12, "text": "a: b"}),
        (named("kv-lines", {"line_sep": ";", "kv_sep": "="}), "<c f>count=1;other=2</c>", {"count": 1, "other": "2"}),
        (
            named("xml-inline", {"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</\w+>"}),
            "<c f><text> a\n</text><count>3</count></c>",
            {"text": "a", "count": 3},
        ),
        (
            named(
                "xml-inline",
                {
                    "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
            ),
            '<c get_weather><a>{"x": [1]}</a><b>b</b><c>"q"</c></c>',
            {"a": {"x": [1]}, "b": "b", "c": "q"},
        ),
        (named("json", {}), '<c f> {"a": 1} </c>', {"a": 1}),
    ],
)
def test_own_templates(own: dict[str, Any], output: str, arguments: dict[str, Any]) -> None:
    """The content types that transformers defines are read, whole and character by character."""
    template = choose("auto", "auto", own, None, {}).template
    assert template is not None
    for tokens in ([output], list(output)):
        parsed = parse(template, tokens)
        assert [json.loads(text) for _, text in parsed.calls] == [arguments]
        assert parsed.num_ended == 1


def test_ends_of_turns() -> None:
    """The end of a turn is not content; an unsupported pattern for it is ignored."""
    for field, text in (({"close": ["<e>", "<e>!"]}, "ab"), ({"close_pattern": "x*|$"}, "a<e>b"), ({}, "a<e>b")):
        own = spec()
        own["fields"]["content"] = field
        template = choose("auto", "auto", own, None, {}).template
        assert template is not None
        assert parse(template, "a<e>b").text == text


def test_closing_delimiters_that_may_be_longer() -> None:
    """Only tokens up to the end of a closing delimiter count as reasoning, even if more text is needed to know where
    it ends."""
    own = spec()
    own["fields"]["thinking"] = {"open_pattern": "<(?<name>t)>", "close": ["</t>", "</t>!"]}
    template = choose("none", "auto", own, None, {}).template
    assert template is not None
    assert parse(template, ["<t>", "a", "</t>", "b", "c"]).num_reasoning_tokens == 3
    assert parse(template, ["<t>", "a", "</t>", "!", "c"]).num_reasoning_tokens == 4


def test_text_that_is_not_stripped() -> None:
    """With `strip: false`, white space around text is content."""
    own = spec()
    own["fields"]["content"] = {"content": "text", "content_args": {"strip": False}}
    template = choose("auto", "auto", own, None, {}).template
    assert template is not None
    assert parse(template, "<t> a </t> b <c>{}").text == " b <c>{}"
    assert parse(template, "<t> a </t> b <c>{}").reasoning == "a"


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    """The own template comes from tokenizer_config.json, the special tokens from the tokenizer."""
    assert read_parser_files(tmp_path, no_tokens()).special_ids == {}, "without a file there are no special tokens"
    demo = read_parser_files(DEMO, load_library(DEMO))
    assert demo.own_template is None
    assert demo.special_ids["<|im_end|>"] == 2
    assert "<think>" not in demo.special_ids and "<think>" in demo.added_ids
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"response_template": spec()}))
    assert read_parser_files(tmp_path, no_tokens()).own_template == spec()
    path.write_text(json.dumps({"response_template": [spec()]}))
    assert read_parser_files(tmp_path, no_tokens()).own_template is None
    path.write_text("{")
    with pytest.raises(CheckpointError):
        read_parser_files(tmp_path, no_tokens())


@pytest.mark.parametrize("content", ["{", json.dumps({"added_tokens": [{"id": True}, 3, {"content": "x"}]})])
def test_tokenizer_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    """A tokenizer.json that is not valid raises CheckpointError."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError):
        load_library(tmp_path)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "{{ " + "9" * 5000 + " }}"]
)
def test_chat_templates_that_cannot_be_read(source: str) -> None:
    """What is wrong with a chat template is for rendering to say: it only tells nothing of the format."""
    assert choose_format(DEMO, load_library(DEMO), source, "none", "none").output.template_variables == frozenset()


@pytest.mark.parametrize("is_named", [False, True])
def test_tokens_that_only_the_config_adds(tmp_path: Path, is_named: bool) -> None:
    """Delimiters that only tokenizer_config.json declares as special tokens are recognized, though decoding skips
    them."""
    tags = ["<tool_call>", "</tool_call>"]
    extra = dict(zip(("begin_call", "end_call"), tags, strict=True)) if is_named else tags
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": extra}))
    library = load_library(tmp_path)
    chosen = choose_format(tmp_path, library, "<tool_call>", "hermes", "none")
    ids = [token_id for tag in tags for token_id in library.list_ids(tag)]
    assert len(ids) == 2 and chosen.template is not None and chosen.output.call_form is not None
    assert list(chosen.output.call_form.token_ids.values()) == ids
    stands = chosen.template.specials.by_id
    assert [stands[token_id].text for token_id in ids] == tags


def no_tokens() -> Library:
    """Return a tokenizer without tokens."""
    return Library.load(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}).encode())
