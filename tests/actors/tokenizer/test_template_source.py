"""Which chat template renders a chat: checkpoints in every layout, compared with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.tokenizer.chat_template import ChatTemplate, TemplateError
from quipu.actors.tokenizer.template_source import TemplateSource, read_template
from tests.tiny import TINY

MESSAGES = ({"role": "system", "content": "Be brief, é."}, {"role": "user", "content": "Hello there"})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def template(name: str) -> str:
    return name + ": {% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"


def named(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template(f"entry {name}")} for name in names]


def make_folder(folder: Path, files: Mapping[str, str] = {}, **entries: Any) -> Path:
    """Make a checkpoint whose templates are these files, and these entries of tokenizer_config.json."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(TINY / name, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None, **entries}))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def render(source: TemplateSource, *tools: Any, **fields: Any) -> str:
    chat = ChatPrompt(MESSAGES, tools=tools, template_kwargs=fields)
    return ChatTemplate(source.source, source.variables, source.tool_source).render(chat).text


def render_as_transformers(folder: Path, *tools: Any, **fields: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = {"tools": list(tools)} if tools else {}
    return str(
        tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True, **given, **fields)
    )


FILE = {"chat_template.jinja": template("file")}
FOLDER = "additional_chat_templates"
LAYOUTS: list[tuple[dict[str, str], Any]] = [
    ({}, template("entry")),
    ({}, named("default")),
    ({}, named("rag", "tool_use", "default")),
    ({}, named("default", "default", "tool_use")),
    ({}, named("tool_use")),
    ({}, {"default": template("object"), "tool_use": template("object for tools")}),
    (FILE, template("entry")),
    (FILE, named("default", "tool_use")),
    ({**FILE, f"{FOLDER}/tool_use.jinja": template("tools")}, None),
    ({**FILE, f"{FOLDER}/rag.jinja": template("rag")}, named("default", "tool_use")),
    ({**FILE, f"{FOLDER}/default.jinja": template("other default")}, None),
    ({f"{FOLDER}/default.jinja": template("only default")}, template("entry")),
    ({f"{FOLDER}/tool_use.jinja": template("only for tools")}, template("entry")),
]


@pytest.mark.parametrize(("files", "entry"), LAYOUTS)
def test_chosen_as_in_transformers(tmp_path: Path, files: dict[str, str], entry: Any) -> None:
    """Chats with tools and without are rendered by the same templates as in transformers, or refused as there."""
    folder = make_folder(tmp_path, files, chat_template=entry)
    source = read_template(folder)
    assert source is not None
    for tools in ((), (TOOL,)):
        try:
            expected = render_as_transformers(folder, *tools)
        except ValueError as error:
            assert "no default" in str(error)
            with pytest.raises(TemplateError, match="none is the default"):
                render(source, *tools)
        else:
            assert render(source, *tools) == expected


def test_file_of_processors(tmp_path: Path) -> None:
    """chat_template.json is read if there is no other template, as by transformers' processors."""
    old = {"chat_template.json": json.dumps({"chat_template": template("old")})}
    source = read_template(make_folder(tmp_path, old))
    assert source is not None and source.source == template("old")
    source = read_template(make_folder(tmp_path, old, chat_template=template("entry")))
    assert source is not None and source.source == template("entry")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "chat_template must be a string or a list"),
        (["x"], "chat_template must be a string or a list"),
        ([{"template": "x"}], "chat_template must be a string or a list"),
        ([{"name": "default"}], "chat_template 'default' must be a string"),
        ({"tool_use": 3}, "chat_template 'tool_use' must be a string"),
        ("x" * 9_000_000, "has more than 8388608 characters"),
    ],
)
def test_refused_entries(tmp_path: Path, entry: Any, reason: str) -> None:
    """An invalid template is an error that names its file."""
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: .*{reason}"):
        read_template(make_folder(tmp_path, chat_template=entry))


def test_refused_files(tmp_path: Path) -> None:
    """A file that is too long, or a folder in its place, is refused by name; so are too many files."""
    make_folder(tmp_path, {f"{FOLDER}/tool_use.jinja": "x" * 9_000_000})
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja: a chat template has more than"):
        read_template(tmp_path)
    (tmp_path / FOLDER / "tool_use.jinja").unlink()
    (tmp_path / FOLDER / "tool_use.jinja").mkdir()
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja cannot be read"):
        read_template(tmp_path)
    for number in range(1000):
        (tmp_path / FOLDER / f"{number}.jinja").touch()
    with pytest.raises(CheckpointError, match="more than 1000 templates"):
        read_template(tmp_path)


PIECES = {
    "date": "{{ strftime_now('%Y-%m') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "generation in a loop": "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "generation trimmed": "a\n  {%- generation -%}\n b {{ messages[0].content }}\n {%- endgeneration +%}\n c",
    "generation's own scope": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "generation within": "{% generation %}{% if tools %}x{% else %}y{% endif %}{% endgeneration %}",
    "break": "{% for m in messages %}{{ m.content }}{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}",
    "absent": "{{ tools is defined }}{{ tools is none }}{{ tools }}{{ documents is none }}{{ nothing is defined }}",
    "tojson": "{{ {'b': 'é<>&', 'a': None} | tojson }}{{ 'é' | tojson(true) }}{{ messages[0] | tojson(indent=2) }}",
    "tojson's options": "{{ {'b': [1, 2], 'a': 2} | tojson(separators=(',', ':'), sort_keys=True) }}",
    "list": "{{ messages + [1] }}{{ messages[1:] + messages[:1] }}{{ messages is sequence }}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "dict": "{{ dict(a=1) }}{% for k, v in messages[0].items() %}{{ k }}{% endfor %}{{ messages[0] | items | list }}",
    "macro": "{% macro f(x, y='z') %}{{ x }}-{{ y }}{% endmacro %}{{ f(1) }}{{ f(x=2, y=3) }}",
    "tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}",
    "kwargs": "{{ enable_thinking | default('unset') }}{{ custom }}{{ add_generation_prompt }}",
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_rendered_as_by_transformers(tmp_path: Path, name: str) -> None:
    """Everything that transformers offers to templates works the same here."""
    folder = make_folder(tmp_path, {"chat_template.jinja": PIECES[name]})
    source = read_template(folder)
    assert source is not None
    assert render(source, custom="C") == render_as_transformers(folder, custom="C")
