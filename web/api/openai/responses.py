"""`POST /v1/responses`: its body.

Fields that would change the response and are not implemented are refused by name (`../body_table.py`), and so are those
that refer to what is stored if nothing is (`response_state.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quipu.actors.config.declarations import RESPONSES
from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.request_desk.interface import ServingInfo

from ...auth.sealed_texts import NOTHING_SEALED, TenantSeal
from ...request.errors import bad_value
from ..declared_body import Body
from ..fields import wrong_type
from ..forced_calls import read_calls_grammar
from ..generation import GenerationRequest, TokenLimit, read_model
from ..image_parts import ImageParts
from ..item_shapes import MAX_INCLUDED
from ..output_grammar import only_one, read_format, read_structured
from ..pace import Pace
from ..request_reader import read_delivery, read_request, unused_verbosity
from ..template_fields import Thinking, read_switch_and_budget, read_template_kwargs
from .prompt_cache import PREWARM, PartBreakpoints, read_cache_wishes
from .response_state import NO_STATE, ResponseState
from .responses_echo import read_echo
from .responses_input import read_input
from .responses_logprobs import read_response_scores
from .responses_tools import ResponseTools
from .tool_choice import read_tool_choice


@attrs.frozen
class ResponseRequest:
    wanted: GenerationRequest
    echo: Mapping[str, Any]
    """Fields of the request that every version of the response object repeats."""


async def read_response(
    body: dict[str, Any],
    info: ServingInfo,
    max_sequences: int,
    state: ResponseState = NO_STATE,
    seal: TenantSeal = NOTHING_SEALED,
) -> ResponseRequest:
    """Check a body, of which `state` says what it continues; `seal` opens summaries. Raises APIError."""
    fields = Body(body, RESPONSES)
    model = read_model(fields, info)
    fields.refuse_unknown()
    fields.refuse_unsupported()
    check_included(fields.get("include"))
    limit = TokenLimit(fields.integer("max_output_tokens"), "max_output_tokens")
    thinking = Thinking(info.output)
    thinking.read_effort(fields.fields("reasoning"), "effort")
    read_switch_and_budget(fields, thinking)
    wishes = read_cache_wishes(fields)
    breakpoints, images = PartBreakpoints(wishes), ImageParts(info.images)
    several = fields.flag("parallel_tool_calls")
    async with Pace() as pace:
        tools = ResponseTools(pace)
        await tools.read(fields)
        read = await read_input(fields, tools, breakpoints, pace, state, seal, images)
        choice = await read_tool_choice(fields, pace)
        one_call = choice.one_call or not several
        answer = only_one(
            [await read_format(fields.fields("text"), "format", None, pace), await read_structured(fields, pace)]
        )
        grammar = await read_calls_grammar(tools, choice, answer, info.output.call_form, one_call=one_call, pace=pace)
    prompt = ChatPrompt(
        messages=read.messages,
        template_kwargs=read_template_kwargs(fields, thinking),
        tools=tuple(tools.shown),
        marks=breakpoints.marks(read.parts),
        parts=read.parts,
        images=images.images,
    )
    scores, unused = read_response_scores(fields)
    wanted = read_request(
        fields, info, model=model, prompts=(prompt,), limit=limit, max_sequences=max_sequences, scores=scores
    )
    verbosity = unused_verbosity(fields.fields("text"))
    truncation = ("truncation",) if fields.optional_text("truncation") == "auto" else ()  # nothing is dropped
    wanted = attrs.evolve(
        wanted,
        system_param="instructions" if fields.get("instructions") else "",
        output=tools.rules(choice.names, one_call=one_call),
        rules=tools.reply_rules(),
        include_reasoning=fields.flag("include_reasoning"),
        image_tokens=images.num_tokens,
        grammar=grammar,
        thinking_budget=thinking.budget,
        unused_fields=(
            *unused,
            *thinking.unused,
            *verbosity,
            *truncation,
            *tools.unused,
            *breakpoints.unused(read.parts),
        ),
    )
    if wishes.prewarm:
        wanted = wanted.prewarmed(PREWARM)
    wanted = attrs.evolve(wanted, delivery=read_delivery(fields))
    return ResponseRequest(wanted, read_echo(fields, wanted, state))


def check_included(include: Any) -> None:
    """Raise APIError unless this is None or a list of what may be included.

    Everything but logprobs belongs to items that this server never produces.
    """
    if type(include) is list and len(include) > MAX_INCLUDED:
        raise bad_value("include", f"must have at most {MAX_INCLUDED} entries")
    if include is not None and (type(include) is not list or any(type(item) is not str for item in include)):
        raise wrong_type("include", "a list of strings")
