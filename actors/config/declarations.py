"""The vocabulary in which an engine setting or a sampling field is declared once.

`runtime_config.py` declares settings and `messages/sampling.py` declares sampling fields, as attrs fields with
metadata. Flags, readers of request bodies, `/server_info` and the tables in `docs/` are made by iterating over
`settings_of` and `sampling_fields_of`. This module is data only: it knows neither argparse nor JSON.

What must always hold: a name, default or bound that is declared here is written down nowhere else.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

T = TypeVar("T")
REQUIRED: Any = attrs.NOTHING
"""As a default: there is none."""
_KEY = "declaration"


@attrs.frozen(kw_only=True)
class Bounds:
    """The values that a number may have."""

    minimum: float | None = None
    above: float | None = None
    """An exclusive minimum."""
    maximum: float | None = None

    def words(self) -> str:
        """Return the bounds as they follow "must be"; empty where there are none."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {number(self.minimum)} and {number(self.maximum)}"
        parts = (
            ("at least", self.minimum),
            ("greater than", self.above),
            ("at most", self.maximum),
        )
        return " and ".join(f"{words} {number(limit)}" for words, limit in parts if limit is not None)

    def allow(self, value: float) -> bool:
        """Return whether a number is within the bounds. NaN is outside of any."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )


def number(value: float) -> str:
    """Write a bound or a default, whole numbers without a fraction."""
    return str(value) if isinstance(value, int) else f"{value:g}"


# ---------------------------------------------------------------- engine settings


@attrs.frozen(kw_only=True)
class Setting:
    """A field of a config that an operator can set."""

    attribute: str = ""
    """Its name in the config."""
    reader: str = ""
    """Which reader of `web/cli/setting_flags.py` takes its value: `integer`, `number`, `text`, `switch` (on or off),
    `size` (bytes), `kv_events` and `resources` (JSON objects), `engines` (a number, or numbers by role; on a cluster
    after `ray:`), `ports` (a range), `pass_costs` (numbers by number of tokens), `names` (after commas)."""
    flags: tuple[str, ...]
    """The first names it; the others are aliases."""
    default: Any
    """Of the flag. None: it is resolved from the checkpoint, the machine or other settings."""
    resolved: str = ""
    """To what, in words."""
    help: str = ""
    """Empty: for tests; the setting is not shown to operators."""
    bounds: Bounds = Bounds()
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = "engine"
    """Settings of one group stand together in `--help`."""
    key: str = attrs.field(default=attrs.Factory(lambda setting: setting.destination, takes_self=True))
    """Its name in `/server_info`."""
    is_shown: bool = attrs.field(default=attrs.Factory(lambda setting: bool(setting.help), takes_self=True))
    """In `/server_info`."""

    @property
    def destination(self) -> str:
        """Its name among parsed arguments."""
        return self.flags[0].removeprefix("--").replace("-", "_")

    def default_words(self) -> str:
        """Return the default as documents write it."""
        if self.resolved:
            return self.resolved
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return number(self.default) if isinstance(self.default, int | float) else str(self.default)


def setting(
    default: T,
    *flags: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    **words: Any,
) -> T:
    """Declare a setting as the value of an attrs field; `words` are fields of `Setting`.

    Its `reader` follows from the field's type.
    """
    bounds = Bounds(minimum=minimum, above=above, maximum=maximum)
    declaration = Setting(flags=flags, default=None if "resolved" in words else default, bounds=bounds, **words)
    return attrs.field(default=default, metadata={_KEY: declaration})


_SETTING_READERS = {int: "integer", float: "number", bool: "switch", str: "text"}


def settings_of(config: type[attrs.AttrsInstance]) -> tuple[Setting, ...]:
    """Return the settings that a config declares, in order."""
    hints = get_type_hints(config)
    return tuple(
        attrs.evolve(declared, attribute=name, reader=declared.reader or _SETTING_READERS[_without_none(hints[name])])
        for name, declared in _declared(config)
    )


# ---------------------------------------------------------------- sampling fields

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COMPACT = "/v1/responses/compact"
"""Its body is that of responses, without what has no meaning for a summary."""
OPENAI = (COMPLETIONS, CHAT, RESPONSES)
EVERY_API = (*OPENAI, MESSAGES)
"""The endpoints that generate."""
GENERATE = "/generate"
"""SGLang's, whose bodies are read as completions..."""
LLAMA_COMPLETIONS = ("/completion", "/completions")
INFILL = "/infill"
"""...and llama.cpp's."""
EMBEDDINGS = "/v1/embeddings"
SCORES = ("/v1/score", "/score")
RERANKS = ("/v1/rerank", "/rerank", "/v2/rerank")
POOLED = (EMBEDDINGS, *SCORES, *RERANKS)
"""Those that answer with vectors or scores of prompts."""


_DEFAULT = (REQUIRED,)
"""As what is off, until the default is known: the default alone."""


@attrs.frozen(kw_only=True)
class SamplingField:
    """A field of a request body that says how tokens are drawn."""

    name: str = ""
    """As clients write it."""
    attribute: str = ""
    """Its name in the message to the engine."""
    reader: str = ""
    """Which reader of `web/api/sampling.py` takes its value: `number`, `integer`, `boolean`, and some of their own."""
    help: str
    apis: tuple[str, ...] = OPENAI
    """The endpoints that take it. The others refuse it, unless its value is one of `off`."""
    bounds: Bounds
    messages_bounds: Bounds = attrs.field(default=attrs.Factory(lambda field: field.bounds, takes_self=True))
    """On `/v1/messages`, where Anthropic's API has others."""
    max_length: int | None = None
    """Of a list or object."""
    values: str = ""
    """In words for the documents, where the bounds do not say it all."""
    default: Any = None
    """That of the attrs field."""
    off: tuple[Any, ...] = _DEFAULT
    """Values that ask for nothing."""
    same_as_off: float | None = None
    """A number that the API has for "off" and the engine does not."""
    is_clamped: bool = False
    """A number beyond the vocabulary's size means all of it."""
    at_most_max_tokens: bool = False
    from_checkpoint: bool = False
    """A checkpoint's generation_config.json may suggest another default."""
    is_portable: bool = False
    """It means the same to other servers with the same API."""

    def on(self, endpoint: str) -> SamplingField:
        """Return the field as an endpoint takes it."""
        return attrs.evolve(self, bounds=self.messages_bounds) if endpoint == MESSAGES else self


def sampling_rule(
    help: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None, **words: Any
) -> SamplingField:
    """Declare a sampling field; `words` are fields of `SamplingField`."""
    return SamplingField(help=help, bounds=Bounds(minimum=minimum, above=above, maximum=maximum), **words)


def sampling_field(default: T, help: str, **words: Any) -> T:
    """Declare a sampling field as the value of an attrs field; `words` are those of `sampling_rule`."""
    return attrs.field(default=default, metadata={_KEY: sampling_rule(help, **words)})


_DECLARED_ELSEWHERE: dict[type[attrs.AttrsInstance], Mapping[str, SamplingField]] = {}
"""Fields of classes that cannot import this module, by attribute. Filled while modules are imported."""
_FIELD_READERS = {int: "integer", float: "number", bool: "boolean"}


def declare(message: type[attrs.AttrsInstance], **fields: SamplingField) -> None:
    """Declare sampling fields of a class that is defined below this package, by attribute."""
    _DECLARED_ELSEWHERE[message] = fields


def sampling_fields_of(message: type[attrs.AttrsInstance]) -> tuple[SamplingField, ...]:
    """Return the sampling fields that a message declares, or that were declared for it, in order."""
    hints, defaults = get_type_hints(message), {field.name: field.default for field in attrs.fields(message)}
    found = [*_declared(message), *_DECLARED_ELSEWHERE.get(message, {}).items()]
    return tuple(_resolved(field, name, hints[name], defaults[name]) for name, field in found)


def _resolved(field: SamplingField, attribute: str, hint: Any, default: Any) -> SamplingField:
    return attrs.evolve(
        field,
        attribute=attribute,
        name=field.name or attribute,
        reader=field.reader or _FIELD_READERS[_without_none(hint)],
        default=default,
        off=(default,) if field.off is _DEFAULT else field.off,
    )


# ---------------------------------------------------------------- both


def _declared(cls: type[attrs.AttrsInstance]) -> list[tuple[str, Any]]:
    return [(field.name, field.metadata[_KEY]) for field in attrs.fields(cls) if _KEY in field.metadata]


def _without_none(hint: Any) -> Any:
    """Return `int` for `int | None`."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next(part for part in get_args(hint) if part is not type(None))
