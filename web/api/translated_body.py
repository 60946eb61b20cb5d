"""Bodies of other servers' own endpoints, read as bodies of `/v1/completions`.

Such an endpoint declares which field of a completion each of its fields is (`same_as`), and gets that field's schema,
bounds and reader. A body becomes that of a completion, is read as one, and every error names the client's own field.

What must always hold: a field that would change the answer is read or refused, never ignored; no field of a completion
is read under its own name, unless it is declared so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from quipu.actors.config.declarations import COMPLETIONS
from quipu.actors.messages.sampling import SAMPLING_FIELDS

from ..request.errors import APIError, bad_value, unknown_parameter
from .body_field import BodyField, Shape
from .body_table import SHAPES
from .fields import Fields
from .foreign_table import FOREIGN
from .generation import GenerationRequest
from .sampling_schemas import sampling_value

_SAMPLING = {field.name: field for field in SAMPLING_FIELDS}
BIASES = next(field.name for field in SAMPLING_FIELDS if field.reader == "biases")
"""The field of biases, which other servers write differently."""
_READ = {field.name: field for field in SHAPES[COMPLETIONS].fields if COMPLETIONS in field.apis}
MAX_FIELDS, MAX_NAME_CHARS = 256, 64
"""Fields of an object that has no unknown ones; characters of an unknown one that its error names."""
_NAMED = re.compile(r"`([a-z_]+)((?:\.[a-z_]+)?)")


def same_as(completion: str, name: str = "", **changes: Any) -> BodyField:
    """Declare a field that means the same as one of a completion."""
    name = name or completion
    sampling = _SAMPLING.get(completion)
    if sampling is None:
        return attrs.evolve(_READ[completion], name=name, **changes)
    return BodyField(name=name, schema=sampling_value(sampling), help=sampling.help, **changes)


def sampling_names(*others: str) -> tuple[str, ...]:
    """Return the sampling fields that another server has under the same names: all but `others`."""
    return tuple(name for name in _SAMPLING if name not in others)


def with_foreign(body: Shape) -> Shape:
    """Return a body's shape with the fields of other servers, which are refused or named apart."""
    others = tuple(BodyField(name=name) for name in FOREIGN if name not in body.by_name)
    return attrs.evolve(body, fields=(*body.fields, *others))


@attrs.frozen
class Translation:
    """One body: what it is as that of a completion, and what its client calls each field of that."""

    values: dict[str, Any] = attrs.field(factory=dict)
    """The body of the completion."""
    names: dict[str, str] = attrs.field(factory=dict)
    """The client's names, by those of the completion."""

    def put(self, completion: str, name: str, value: Any) -> None:
        """Add a field, unless it is absent or another one has the same meaning."""
        if value is not None and completion not in self.values:
            self.values[completion] = value
            self.names[completion] = name

    def put_others(self, values: Mapping[str, Any], known: Mapping[str, object], path: str = "") -> None:
        """Add the fields of other servers that the endpoint does not have, so that they are refused if they matter."""
        for name in values.keys() & FOREIGN.keys() - known.keys():
            self.put(name, path + name, values[name])

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raise every APIError of the block with the client's names."""
        try:
            yield
        except APIError as error:
            param = None if error.param is None else self._own_path(error.param)
            told = _NAMED.sub(lambda match: f"`{self._own_path(match[1] + match[2])}", error.message)
            raise APIError(error.status, told, error.error_type, param=param, code=error.code) from None

    def renamed(self, wanted: GenerationRequest) -> GenerationRequest:
        """Return a request whose later errors have the client's names."""
        grammar = wanted.grammar
        return attrs.evolve(
            wanted,
            prompt_param=self._own_path(wanted.prompt_param),
            max_tokens_param=self._own_path(wanted.max_tokens_param),
            grammar=None if grammar is None else attrs.evolve(grammar, param=self._own_path(grammar.param)),
            unused_fields=tuple(map(self._own_path, wanted.unused_fields)),
        )

    def _own_path(self, path: str) -> str:
        """Return a path in the client's body, for one in that of the completion."""
        for length in range(len(path), 0, -1):
            if (length == len(path) or path[length] in ".[") and path[:length] in self.names:
                return self.names[path[:length]] + path[length:]
        return path


def refuse_unknown(fields: Fields, known: Mapping[str, object]) -> None:
    """Raise APIError for a field of an object that no other server has, as the server does whose API it is."""
    if len(fields.values) > MAX_FIELDS:
        raise bad_value(fields.path, f"must have at most {MAX_FIELDS} fields", "too_many_items")
    given = (name for name, value in fields.values.items() if value is not None)
    if unknown := [name for name in given if name not in known and name not in FOREIGN]:
        raise unknown_parameter(fields.param(ascii(min(unknown)[:MAX_NAME_CHARS])[1:-1]))
