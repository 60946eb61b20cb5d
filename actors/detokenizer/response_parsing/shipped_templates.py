"""The formats of the model families that the server knows, as `response_template` dictionaries.

Beyond transformers' keys, `tool_calls` may be a list of alternatives, and `is_bare` says that a call may begin without
its opening delimiter where an answer begins.
"""

from __future__ import annotations

from typing import Any

from .template_building import Spec

_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CHATML_TEXT = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}


def _calls(*alternatives: dict[str, Any], text: dict[str, Any] | None = None) -> Spec:
    return {"fields": {"tool_calls": list(alternatives), "content": text or {"content": "text"}}}


def _call(opens: str, closes: str | None = None, **more: Any) -> dict[str, Any]:
    """Return calls of the form `{"name": …, "arguments": …}`."""
    ends = {} if closes is None else {"close_pattern": closes}
    return {"open_pattern": opens, **ends, "repeats": True, "content": "json", "transform": _CALL, **more}


def _named_call(opens: str, closes: str | None = None, **more: Any) -> dict[str, Any]:
    """Return calls whose opening delimiter has the name."""
    return {**_call(opens, closes, **more), "transform": _NAMED_CALL}


def _reasoning(opens: str | list[str], closes: str | list[str]) -> Spec:
    reasoning = {"open": opens, "close": closes, "content": "text"}
    return {"fields": {"reasoning_content": reasoning, "content": {"content": "text"}}}


_HERMES = _calls(_call(r"\s*<tool_call>", "</tool_call>"), text=_CHATML_TEXT)
_QWEN_CODER = _calls(
    _named_call(
        r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
        r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    ),
    text=_CHATML_TEXT,
)
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_HARMONY_MESSAGE = r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
_HARMONY_TEXT = {
    "close_pattern": rf"{_HARMONY_START}<\|channel\|>(?:final|commentary|analysis){_HARMONY_MESSAGE}"
    r"|<\|start\|>assistant|<\|end\|>|<\|return\|>|<\|call\|>",
    "content": "text",
}
"""What begins or ends a message of text: an output of gpt-oss is several messages, each in a channel."""
_HARMONY = _calls(
    _named_call(
        rf"{_HARMONY_START}<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[^<\s]+){_HARMONY_MESSAGE}",
        r"<\|call\|>",
    ),
    _named_call(
        rf"{_HARMONY_START} ?to=functions\.(?P<name>[^<\s]+)\s*<\|channel\|>(?:commentary|analysis){_HARMONY_MESSAGE}",
        r"<\|call\|>",
    ),
    text=_HARMONY_TEXT,
)
_HARMONY_REASONING = {
    "open_pattern": rf"{_HARMONY_START}<\|channel\|>analysis<\|message\|>",
    "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
    "content": "text",
}
_LLAMA = _calls(_call(r"\s*<\|python_tag\|>", is_bare=True))
_LLAMA4 = _calls(_call(r"\s*(?:<\|python_tag\|>|<\|python_start\|>\s*<\|python_end\|>)", is_bare=True))
"""Llama 4's template writes calls behind the text of their message, which is between two tokens."""


def deepseek_token(name: str) -> str:
    """Return a token of DeepSeek's, which has its own character between words."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_DEEPSEEK_OPEN = rf"\s*(?:{deepseek_token('tool calls begin')})?\s*{deepseek_token('tool call begin')}"
_DEEPSEEK_SEPARATOR = deepseek_token("tool sep")
_DEEPSEEK_CLOSE = rf"{deepseek_token('tool call end')}(?:\s*{deepseek_token('tool calls end')})?"

TOOL_CALLS: dict[str, Spec] = {
    "deepseek_v3": _calls(
        _named_call(
            _DEEPSEEK_OPEN + rf"(?:function)?{_DEEPSEEK_SEPARATOR}(?P<name>[^\n<]+)\n```json\n",
            r"\n```" + _DEEPSEEK_CLOSE,
        )
    ),
    "deepseek_v31": _calls(_named_call(_DEEPSEEK_OPEN + rf"(?P<name>[^\n<]+){_DEEPSEEK_SEPARATOR}", _DEEPSEEK_CLOSE)),
    "functiongemma": _calls(
        _named_call(
            r"\s*<start_function_call>call:(?P<name>\w+)",
            "<end_function_call>",
            content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        )
    ),
    "gemma4": _calls(
        _named_call(
            r"\s*<\|tool_call>call:(?P<name>\w+)",
            r"<tool_call\|>",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        text={"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    ),
    "granite": _calls(_call(r"\s*(?:<\|tool_call\|>|<tool_call>)")),
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA4,
    "mistral": _calls(
        _call(r"\s*\[TOOL_CALLS\]"),
        _named_call(r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s\"]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?"),
    ),
    "openai": _HARMONY,
    "phi4_mini_json": _calls(_call(r"\s*functools\["), _call(r"\s*<\|tool_call\|>", r"<\|/tool_call\|>")),
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
}
"""By the names that vLLM has for them."""

_THINK = _reasoning("<think>", "</think>")

REASONING: dict[str, Spec] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "gemma4": _reasoning("<|channel>thought\n", "<channel|>"),
    "glm45": _THINK,
    "granite": _reasoning(
        ["Here is my thought process:", "Here's my thought process:"], ["Here is my response:", "Here's my response:"]
    ),
    "mistral": _reasoning("[THINK]", "[/THINK]"),
    "openai_gptoss": {"fields": {"reasoning_content": _HARMONY_REASONING, "content": _HARMONY_TEXT}},
    "qwen3": _THINK,
    "seed_oss": _reasoning("<seed:think>", "</seed:think>"),
}

CALLS_BY_CHAT_TEMPLATE = (
    (("<|channel|>commentary",), "openai"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    ((_DEEPSEEK_SEPARATOR, "```json"), "deepseek_v3"),
    ((_DEEPSEEK_SEPARATOR,), "deepseek_v31"),
    (("functools",), "phi4_mini_json"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>ipython",), "llama3_json"),
    (("<|header_start|>ipython",), "llama4_json"),
)
"""Texts that a chat template contains and the format that they show together. The first match counts."""
REASONING_BY_CHAT_TEMPLATE = (
    (("<|channel|>analysis",), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<|channel>thought",), "gemma4"),
    (("<seed:think>",), "seed_oss"),
    (("my thought process",), "granite"),
    (("<think>",), "qwen3"),
    (("</think>",), "qwen3"),
)
