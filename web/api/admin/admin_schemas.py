"""What is declared of the routes of operators and their probes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from quipu.actors.config.declarations import Bounds
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.config.runtime_config import MAX_ENGINES
from quipu.actors.request_desk.adapters import NAME_PATTERN
from quipu.actors.request_desk.health import DrainMode, EngineState

from ..body_field import BOOLEAN, NUMBER, STRING, BodyField, shape
from ..operation import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    MODELS,
    NUMBER_VALUE,
    OPERATORS,
    TEXT,
    TEXT_VALUE,
    Named,
    Operation,
    array,
    by_name,
    maybe,
    one_of,
    record,
)

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_PATH_CHARS: Final = 4096
MAX_MOVED: Final = 1 << 20
"""Sequences in one call: more than an engine can run."""
_ROLE = BodyField(name="role", schema=one_of(*EngineRole), help="What the engine is for.")
ADDED: Final = shape(BodyField(name="count", bounds=Bounds(minimum=1, maximum=MAX_ENGINES), default=1), _ROLE)
CHANGED: Final = shape(BodyField(name="role", schema=one_of(*EngineRole), is_required=True))
DRAINED: Final = shape(
    BodyField(name="mode", schema=one_of(*DrainMode), help="What happens to its requests."),
    BodyField(
        name="timeout_s",
        type=NUMBER,
        bounds=Bounds(minimum=0),
        help="Seconds after which the rest of them are handed over.",
    ),
)
MOVED: Final = shape(
    BodyField(
        name="count", bounds=Bounds(minimum=1, maximum=MAX_MOVED), is_required=True, help="Of running sequences."
    ),
    BodyField(name="to", bounds=Bounds(minimum=0), help="The id of the engine that continues them."),
)
_NAME = BodyField(name="lora_name", schema={"type": STRING, "pattern": f"^({NAME_PATTERN})$"}, is_required=True)
LOADED: Final = shape(
    _NAME,
    BodyField(
        name="lora_path",
        schema={"type": STRING, "maxLength": MAX_PATH_CHARS},
        is_required=True,
        help="A folder within the server's `--lora-dir`.",
    ),
    BodyField(name="load_inplace", type=BOOLEAN, help="Replace an adapter of this name."),
)
UNLOADED: Final = shape(BodyField(name="lora_name", type=STRING, is_required=True), "lora_int_id")

_HEALTH = Named(
    "Health",
    record(
        {
            "status": one_of("ok", "unavailable"),
            "state": TEXT_VALUE,
            "incarnation": COUNT,
            "detail": maybe(TEXT_VALUE),
            "actor_restarts": by_name(COUNT),
        }
    ),
)
_UNAVAILABLE = {HTTPStatus.SERVICE_UNAVAILABLE: "It cannot serve requests now."}
HEALTH = Operation(summary="Check whether the server works", tag=OPERATORS, answer=_HEALTH, others=_UNAVAILABLE)
READY = Operation(summary="Check whether requests can be served", tag=OPERATORS, answer=_HEALTH, others=_UNAVAILABLE)
METRICS = Operation(summary="Show metrics in Prometheus' text format", tag=OPERATORS, content_type=METRICS_CONTENT_TYPE)
_DRAFT_MODEL = record({"weights_bytes": COUNT, "kv_cache_bytes": COUNT})
_DESCRIPTION = Named(
    "EngineDescription",
    record(
        {
            "backend": TEXT_VALUE,
            "library": maybe(TEXT_VALUE),
            "instruction_set": maybe(TEXT_VALUE),
            "dtype": TEXT_VALUE,
            "weights": TEXT_VALUE,
            "activations": TEXT_VALUE,
            "kv_cache_dtype": maybe(TEXT_VALUE),
            "determinism": one_of("strict", "fast"),
            "num_threads": maybe(COUNT),
            "weights_bytes": COUNT,
            "workspace_bytes": maybe(COUNT),
            "draft_model": maybe(_DRAFT_MODEL),
            "numerics": TEXT_VALUE,
        }
    ),
)
_KV_CACHE = record(
    {"num_blocks": maybe(COUNT), "block_size": COUNT},
    {"num_bytes": COUNT, "num_tokens": COUNT, "max_concurrency": NUMBER_VALUE},
)
_ONE_ENGINE = record({"id": COUNT, "incarnation": COUNT, "state": one_of(*EngineState), "engine": maybe(_DESCRIPTION)})
SERVER_INFO = Operation(
    summary="Show the server's configuration",
    tag=OPERATORS,
    answer=record(
        {
            "version": TEXT_VALUE,
            "model": maybe(TEXT_VALUE),
            "model_names": array(TEXT_VALUE),
            "max_model_len": COUNT,
            "vocab_size": COUNT,
            "state": TEXT_VALUE,
            "detail": maybe(TEXT_VALUE),
            "incarnation": COUNT,
            "kv_cache": _KV_CACHE,
            "engine": maybe(_DESCRIPTION),
            "engines": array(_ONE_ENGINE),
            "upstreams": array(ANY_OBJECT),
            "output": record(dict.fromkeys(("tool_call_parser", "reasoning_parser", "reason"), maybe(TEXT_VALUE))),
            "keys": ANY_OBJECT,
            "settings": ANY_OBJECT,
        }
    ),
)
RESET = Operation(
    summary="Empty the prefix cache",
    tag=OPERATORS,
    help="Requests that run keep their blocks.",
    answer=ANY_OBJECT,
)
VERSION = Operation(summary="Show the server's version", tag=OPERATORS, answer=record({"version": TEXT_VALUE}))
LOAD = Operation(
    summary="Count the open requests",
    tag=OPERATORS,
    help="As in vLLM, where it needs a flag.",
    answer=record({"server_load": COUNT}),
)
MODEL_INFO = Operation(
    summary="Describe the model, as SGLang does",
    tag=MODELS,
    answer=record(
        {
            "model_path": maybe(TEXT_VALUE),
            "tokenizer_path": maybe(TEXT_VALUE),
            "served_model_name": maybe(TEXT_VALUE),
            "is_generation": FLAG,
            "preferred_sampling_params": maybe(ANY_OBJECT),
            "max_context_length": maybe(COUNT),
            "vocab_size": maybe(COUNT),
        }
    ),
)
PEER_SERVER_INFO = Operation(
    summary="Describe the server, as SGLang does",
    tag=OPERATORS,
    answer={**ANY_OBJECT, "required": ["version", "served_model_name", "dp_size", "internal_states"]},
)
GENERATE_PROBE = Operation(
    summary="Generate one token, as a probe",
    tag=OPERATORS,
    help="Counts as a request of the key's tenant, with one prompt token.",
    content_type=TEXT,
    others={**_UNAVAILABLE, HTTPStatus.CONFLICT: "This server has no engines of its own."},
)

_ENGINE = Named(
    "Engine",
    record(
        {
            "id": COUNT,
            "incarnation": COUNT,
            "role": one_of(*EngineRole),
            "state": one_of(*EngineState),
            "detail": maybe(TEXT_VALUE),
            "numerics": maybe(TEXT_VALUE),
            "num_running": COUNT,
            "num_waiting": COUNT,
            "blocks_used": COUNT,
            "blocks_total": COUNT,
            "deaths": COUNT,
        }
    ),
)
_ID = {"engine_id": "The id of an engine."}
_NOT_FOUND = {HTTPStatus.NOT_FOUND: "No engine has this id."}
_CONFLICT = {HTTPStatus.CONFLICT: "It is the last engine, or the server's settings allow no roles."}
_ACCEPTED = HTTPStatus.ACCEPTED
LIST_ENGINES = Operation(
    summary="List the engines and upstreams",
    tag=OPERATORS,
    answer=record({"engines": array(_ENGINE), "upstreams": array(ANY_OBJECT)}),
)
ADD_ENGINES = Operation(
    summary="Start more engines",
    tag=OPERATORS,
    body=ADDED,
    body_may_be_empty=True,
    answer=record({"ids": array(COUNT)}),
    status=_ACCEPTED,
    others=_CONFLICT,
)
CHANGE_ENGINE = Operation(
    summary="Change an engine's role",
    tag=OPERATORS,
    path=_ID,
    body=CHANGED,
    answer=_ENGINE,
    others={**_NOT_FOUND, **_CONFLICT},
)
DRAIN_ENGINE = Operation(
    summary="Send an engine no more prompts, and end it when it holds nothing",
    tag=OPERATORS,
    path=_ID,
    body=DRAINED,
    body_may_be_empty=True,
    answer=_ENGINE,
    status=_ACCEPTED,
    others={**_NOT_FOUND, **_CONFLICT},
)
MOVE_SEQUENCES = Operation(
    summary="Have other engines continue some of an engine's requests",
    tag=OPERATORS,
    help="They fetch the KV blocks. The engine itself goes on.",
    path=_ID,
    body=MOVED,
    answer=record({"id": COUNT, "count": COUNT}),
    status=_ACCEPTED,
    others={**_NOT_FOUND, HTTPStatus.CONFLICT: "No engine could continue them."},
)
REMOVE_ENGINE = Operation(
    summary="Remove an engine, whose requests others continue",
    tag=OPERATORS,
    path=_ID,
    query=(BodyField(name="force", type=BOOLEAN, help="Also the last one, whose requests then fail."),),
    answer=_ENGINE,
    status=_ACCEPTED,
    others={**_NOT_FOUND, **_CONFLICT},
)
LOAD_ADAPTER = Operation(summary="Load an adapter", tag=OPERATORS, body=LOADED, content_type=TEXT)
UNLOAD_ADAPTER = Operation(
    summary="Unload an adapter",
    tag=OPERATORS,
    body=UNLOADED,
    content_type=TEXT,
    others={HTTPStatus.NOT_FOUND: "No adapter has this name."},
)
