"""Write the tables of `docs/` that are generated from declarations: `python -m scripts.declared_tables`.

Engine settings go into `docs/operate/settings.md`, sampling fields into `docs/use/sampling.md` and what becomes of
fields into `docs/use/fields.md`, between two markers. With `--check` nothing is written, and the exit code is 1 if a
document is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quipu.actors.config.declarations import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Bounds,
    SamplingField,
    Setting,
    number,
)
from quipu.actors.config.runtime_config import SETTINGS
from quipu.actors.messages.sampling import SAMPLING_FIELDS
from quipu.web.api.body_field import OFF, BodyField
from quipu.web.api.body_table import SHAPES
from quipu.web.api.foreign_table import EITHER, FOREIGN, ForeignField
from quipu.web.cli.setting_flags import GROUPS

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- made by `python -m scripts.declared_tables` -->"
END = "<!-- end of the table -->"


def settings_table() -> str:
    """Return the tables of engine settings for operators, grouped as in `quipu serve --help`."""
    by_title: dict[str, list[Sequence[str]]] = {title: [] for title in GROUPS.values()}
    for setting in SETTINGS:
        if setting.help:
            row = (_flags(setting), _setting_values(setting), setting.default_words(), setting.help)
            by_title[GROUPS[setting.group]].append(row)
    head = ("flag", "values", "default", "what")
    return "\n".join(f"## {title[0].upper()}{title[1:]}\n\n{_table(head, rows)}" for title, rows in by_title.items())


def sampling_table() -> str:
    """Return the table of the sampling fields that clients can send."""
    rows = [
        (
            f"`{field.name}`",
            _field_values(field),
            _field_default(field),
            "yes" if MESSAGES in field.apis else "",
            field.help,
        )
        for field in SAMPLING_FIELDS
    ]
    return _table(("field", "values", "default", f"`{MESSAGES}`", "what"), rows)


def fields_tables() -> str:
    """Return the tables of what every endpoint makes of the fields of all servers."""
    refused = [
        (
            f"`{field.name}`",
            ", ".join(field.servers),
            _accepted(field),
            "" if field.instead is None else f"`{field.instead}`",
        )
        for field in FOREIGN.values()
        if field.is_refused
    ]
    harmless = [
        (f"`{field.name}`", ", ".join(field.servers), _accepted(field))
        for field in FOREIGN.values()
        if not field.is_refused
    ]
    return "\n".join(
        (
            "## Refused: they would change the answer\n",
            _table(("field", "of", "accepted", "use instead, on chat and completions"), refused),
            "## Ignored: they change no answer\n",
            _table(("field", "of", "not named in the header"), harmless),
            "## Read\n",
            _table(("field", *(f"`{path}`" for path in _ENDPOINTS), "values"), _read_rows()),
        )
    )


_ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def _read_rows() -> Iterable[Sequence[str]]:
    for name in sorted(set().union(*(SHAPES[path].by_name for path in _ENDPOINTS)) - FOREIGN.keys()):
        fields = {path: SHAPES[path].by_name[name] for path in _ENDPOINTS if name in SHAPES[path].by_name}
        is_read = {path: path in _apis_of(field) for path, field in fields.items()}
        if not any(is_read.values()):
            continue
        marks = ("" if path not in fields else "yes" if is_read[path] else "refused" for path in _ENDPOINTS)
        yield (f"`{name}`", *marks, _limits({path: field for path, field in fields.items() if is_read[path]}))


def _limits(fields: Mapping[str, BodyField]) -> str:
    """Return the bounds of one field, by the endpoints that read it."""
    by_limits: dict[str, list[str]] = {}
    for path, field in fields.items():
        by_limits.setdefault(field.limits(), []).append(f"`{path}`")
    if len(by_limits) == 1:
        return next(iter(by_limits))
    return "; ".join(f"{limits} on {', '.join(paths)}" for limits, paths in by_limits.items() if limits)


def _apis_of(field: BodyField) -> Sequence[str]:
    """Return the endpoints that read a field."""
    return next((sampling.apis for sampling in SAMPLING_FIELDS if sampling.name == field.name), field.apis)


def _accepted(field: ForeignField) -> str:
    """Return the values that are accepted in silence."""
    if field.only_with:
        return f"anything without {', '.join(f'`{name}`' for name in field.only_with)}"
    if field.members:
        return "empty; named if it has nothing but " + ", ".join(f"`{name}`" for name in sorted(field.members))
    if field.neutral is OFF:
        return "false, 0, empty"
    if field.neutral is EITHER:
        return "true, false"
    return ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)


def _flags(setting: Setting) -> str:
    first, *aliases = (f"`{flag}`" for flag in setting.flags)
    return f"{first} ({', '.join(aliases)})" if aliases else first


def _setting_values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    kinds = {
        "switch": f"on, or off with `--no-{setting.flags[0].removeprefix('--')}`",
        "size": "bytes, or a size such as `4GiB`",
        "kv_events": "a JSON object",
        "resources": "a JSON object of amounts above 0",
        "engines": "a number, or numbers by role such as `prefill:1,decode:3`",
        "pass_costs": "numbers of tokens with their costs, such as `1:20,8:24`",
        "ports": "a port, or a range such as `7600-7607`",
        "names": "names, separated by commas",
    }
    words = kinds.get(setting.reader, setting.reader)
    return (
        f"{words}; {setting.bounds.words()}"
        if "," in words and setting.bounds.words()
        else _values(words, setting.bounds)
    )


def _field_values(field: SamplingField) -> str:
    values = field.values or _values(field.reader, field.bounds)
    if field.messages_bounds != field.bounds:
        values += f" ({field.messages_bounds.words()} on `{MESSAGES}`)"
    return values


def _field_default(field: SamplingField) -> str:
    if field.reader not in ("number", "integer", "boolean"):
        return "random" if field.reader == "seed" else "none"
    default = str(field.default).lower() if field.reader == "boolean" else number(field.default)
    if field.same_as_off is not None:
        default = f"{default} (or {number(field.same_as_off)})"
    return f"the checkpoint's, else {default}" if field.from_checkpoint else default


def _values(kind: str, bounds: Bounds) -> str:
    return f"{kind}, {bounds.words()}" if bounds.words() else kind


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|\n" for line in lines)


TABLES = {"operate/settings.md": settings_table, "use/sampling.md": sampling_table, "use/fields.md": fields_tables}


def outdated(*, write: bool) -> list[str]:
    """Return the documents whose table differs from the declarations; with `write`, bring them up to date."""
    found = []
    for name, make_table in TABLES.items():
        before = (DOCS / name).read_text()
        head, _, rest = before.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not end:
            raise ValueError(f"docs/{name} lacks a marker: {BEGIN} or {END}")
        after = f"{head}{BEGIN}\n\n{make_table()}\n{END}{tail}"
        if after != before:
            found.append(name)
            if write:
                (DOCS / name).write_text(after)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.declared_tables", description="Write the generated tables of the documents."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, only report what differs")
    is_checking = parser.parse_args().check
    changed = outdated(write=not is_checking)
    print(*(f"docs/{name}" for name in changed), sep="\n", end="\n" if changed else "")
    return 1 if is_checking and changed else 0


if __name__ == "__main__":
    sys.exit(main())
