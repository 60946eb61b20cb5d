"""`POST /v1/chat/completions`: its body. `chat_response.py` has its response."""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.config.declarations import CHAT
from quipu.actors.messages.prompts import ChatPrompt
from quipu.actors.request_desk.interface import ServingInfo

from ...request.errors import bad_value
from ..declared_body import Body
from ..fields import Fields
from ..generation import GenerationRequest, read_model
from ..image_parts import ImageParts
from ..pace import Pace
from ..request_reader import read_limit, read_request, unused_verbosity
from ..template_fields import Thinking, read_documents, read_switch_and_budget, read_template_kwargs
from .chat_messages import read_messages
from .chat_tools import read_chat_tools
from .logprobs import read_chat_scores
from .prediction import read_prediction
from .prompt_cache import PREWARM, PartBreakpoints, read_cache_wishes
from .responses_echo import read_metadata


async def read_chat(body: dict[str, Any], info: ServingInfo, max_sequences: int) -> GenerationRequest:
    """Check a body. Raises APIError."""
    fields = Body(body, CHAT)
    model = read_model(fields, info)
    fields.refuse_unsupported()
    read_metadata(fields)  # checked, although only what is stored has it
    limit = read_limit(fields)
    thinking = Thinking(info.output)
    thinking.read_effort(fields, "reasoning_effort")
    read_switch_and_budget(fields, thinking)
    wishes = read_cache_wishes(fields)
    breakpoints, images = PartBreakpoints(wishes), ImageParts(info.images)
    async with Pace() as pace:
        read = await read_messages(fields, breakpoints, pace, images)
        tools = await read_chat_tools(fields, info.output.call_form, pace)
        documents = await read_documents(fields, pace)
        prediction, unused_prediction = await read_prediction(fields, info, pace)
    unused = [*thinking.unused, *unused_verbosity(fields), *tools.unused, *read.unused, *breakpoints.unused(read.parts)]
    unused += unused_prediction
    if documents and "documents" not in info.output.template_variables:
        documents = ()
        unused.append("documents")
    prompt = ChatPrompt(
        messages=read.messages,
        add_generation_prompt=fields.flag("add_generation_prompt"),
        template_kwargs=read_template_kwargs(fields, thinking),
        tools=tools.shown,
        continue_final=_read_continued(fields, read.messages[-1]),
        documents=documents,
        marks=breakpoints.marks(read.parts),
        parts=read.parts,
        images=images.images,
    )
    scores = read_chat_scores(fields)
    request = read_request(
        fields, info, model=model, prompts=(prompt,), limit=limit, max_sequences=max_sequences, scores=scores
    )
    include_reasoning = fields.flag("include_reasoning")
    names_reasoning = include_reasoning and info.output.reasoning_parser is not None
    request = attrs.evolve(
        request,
        image_tokens=images.num_tokens,
        output=tools.output,
        rules=attrs.evolve(tools.rules, names_reasoning=names_reasoning),
        include_reasoning=include_reasoning,
        with_token_ids=fields.flag("return_token_ids"),
        grammar=tools.grammar,
        thinking_budget=thinking.budget,
        prediction=prediction,
        unused_fields=tuple(unused),
    )
    return request.prewarmed(PREWARM) if wishes.prewarm else request


def _read_continued(fields: Fields, last_message: Any) -> bool:
    is_continued = fields.flag("continue_final_message")
    if is_continued and fields.get("add_generation_prompt"):
        raise bad_value("continue_final_message", "not allowed together with `add_generation_prompt`")
    if is_continued and "tool_calls" in last_message:
        raise bad_value("continue_final_message", "the last message must not have tool calls")
    return is_continued
