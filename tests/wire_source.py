"""Wire names from the source code, independent of file, class and function names.

`SourceNames` reads every Python file below the three code folders once. Used by `wire_names.py` for names that a
running server uses only when something fails, and for words that might be fields of a request.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=ast.AST)
FOLDERS = ("actors", "kernels", "web")
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_ERROR_WORD = re.compile(r"[a-z]+(_[a-z0-9]+)+")
_DOTTED = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_HYPHENATED = re.compile(r"[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)+-?")
_FILE_OR_WEIGHT = re.compile(
    r".*\.(bias|c|cpp|csv|h|inv_freq|jinja|json|lock|py|safetensors|so|sqlite3?|txt|wal|weight)"
)
_CODE_KEYWORDS = frozenset({"code", "error_type", "kind", "type"})
_METHODS_OF_LOGGERS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


class SourceNames:
    def __init__(self, root: Path) -> None:
        trees = [
            ast.parse(path.read_text("utf-8"))
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
            # schemas of answers repeat what others write, and are compared with it (tests/web/api/openapi/);
            # migrations describe the past, the demo model's training talks to nobody, and names of checkpoints' formats
            # are others' own
            if not {"versions", "demo", "checkpoints"} & set(path.relative_to(root).parts)
            and not path.stem.endswith("_schemas")
        ]
        assert len(trees) > 50, "the code is not where it was"
        self._by_type: dict[type[ast.AST], list[ast.AST]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                self._by_type.setdefault(type(node), []).append(node)
        self._docstrings = {id(node.value) for node in self._nodes(ast.Expr) if isinstance(node.value, ast.Constant)}
        self._literals = set(self._every_literal())

    def _every_literal(self) -> Iterator[str]:
        for node in self._nodes(ast.Constant):
            if id(node) not in self._docstrings:
                if isinstance(node.value, str):
                    yield node.value
                elif isinstance(node.value, bytes):
                    yield node.value.decode("latin-1")

    def words(self) -> list[str]:
        """Return every literal, word of a literal and declared field that could be the name of a JSON field."""
        listed = {word for text in self._literals for word in text.split()}
        declared = {node.target.id for node in self._declarations() if isinstance(node.target, ast.Name)}
        return sorted(text for text in self._literals | listed | declared if _WORD.fullmatch(text))

    def log_events(self) -> dict[str, list[str]]:
        """Return the keywords of every call whose first argument is an event name; `**` for unpacked ones."""
        events: dict[str, set[str]] = {}
        for call in self._nodes(ast.Call):
            first = call.args[0] if call.args else None
            if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                continue
            is_logger = isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS_OF_LOGGERS
            if _is_dotted(first.value) and (is_logger or len(call.args) == 1):
                events.setdefault(first.value, set()).update(keyword.arg or "**" for keyword in call.keywords)
        return {name: sorted(keys) for name, keys in sorted(events.items())}

    def dotted(self) -> list[str]:
        """Return span attributes, types of stream events and names of log events."""
        return sorted(text for text in self._literals if _is_dotted(text))

    def error_words(self) -> list[str]:
        """Return error codes and types: literals that a call has next to a sentence, or as its code."""
        found = {text for text in self._literals if re.fullmatch(r"[a-z_]+_error", text)}
        declarations = {id(node.value) for node in self._declarations()}
        for call in self._nodes(ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id == "declare":
                declarations.update(id(keyword.value) for keyword in call.keywords)
        for call in self._nodes(ast.Call):
            if id(call) in declarations:
                continue
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(map(_is_sentence, values)):
                for value in values:
                    found.update(text for text in _literals_of(value) if _ERROR_WORD.fullmatch(text))
            for keyword in call.keywords:
                if keyword.arg in _CODE_KEYWORDS:
                    found.update(text for text in _literals_of(keyword.value) if _WORD.fullmatch(text))
        for arguments in self._nodes(ast.arguments):
            named = [*arguments.posonlyargs, *arguments.args]
            pairs = [
                *zip(reversed(named), reversed(arguments.defaults), strict=False),
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if argument.arg in _CODE_KEYWORDS and default is not None:
                    found.update(_literals_of(default))
        return sorted(found)

    def headers(self) -> list[str]:
        """Return literals with hyphens, and those in statements that mention headers."""
        found = {text for text in self._literals if _HYPHENATED.fullmatch(text)}
        for statement in self._nodes(ast.stmt):
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.AugAssign)):
                found.update(_beside_headers(statement))
            elif isinstance(statement, (ast.If, ast.For, ast.While)):
                found.update(_beside_headers(statement.iter if isinstance(statement, ast.For) else statement.test))
        return sorted(found)

    def variables(self) -> list[str]:
        """Return environment variables."""
        return sorted(text for text in self._literals if _VARIABLE.fullmatch(text))

    def enums(self) -> list[str]:
        """Return the values of every enum of strings."""
        found = set()
        for node in self._nodes(ast.ClassDef):
            if any("Enum" in ast.unparse(base) for base in node.bases):
                values = [
                    item.value.value
                    for item in node.body
                    if isinstance(item, ast.Assign)
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, str)
                ]
                if values:
                    found.add(" ".join(sorted(values)))
        return sorted(found)

    def _declarations(self) -> Iterator[ast.AnnAssign]:
        """Yield class fields that are declared by a call, such as `sampling_field`."""
        for node in self._nodes(ast.AnnAssign):
            if isinstance(node.value, ast.Call):
                yield node

    def _nodes(self, kind: type[T]) -> Iterator[T]:
        for type_, nodes in self._by_type.items():
            if issubclass(type_, kind):
                for node in nodes:
                    assert isinstance(node, kind)
                    yield node


def _is_dotted(text: str) -> bool:
    return (
        bool(_DOTTED.fullmatch(text))
        and not _FILE_OR_WEIGHT.fullmatch(text)
        and not text.startswith(("quipu.", "pyarrow."))
    )


def _is_sentence(node: ast.expr) -> bool:
    """Return whether an argument is a message, or has the name of one."""
    match node:
        case ast.Constant(value=str(text)):
            return " " in text
        case ast.JoinedStr():
            return any(isinstance(part, ast.Constant) and " " in str(part.value) for part in node.values)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("message", "why", "text")
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="error")], keywords=[]):
            return True
    return False


def _literals_of(node: ast.expr) -> Iterator[str]:
    """Yield the strings that an expression may evaluate to, on both sides of an `or` and an `if`."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.BoolOp(values=values):
            for value in values:
                yield from _literals_of(value)
        case ast.IfExp(body=body, orelse=other):
            yield from _literals_of(body)
            yield from _literals_of(other)


def _beside_headers(tree: ast.AST) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if any(name.lower().strip("_").endswith(("header", "headers")) for name in names):
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                if re.fullmatch(r"[A-Za-z]+", text):
                    yield text
