"""Every request field of OpenAI's and Anthropic's packages is in the document, or listed as refused or ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic.types as anthropic_types
import openai.types.chat as chat_types
import openai.types.responses as response_types
import openai.types.shared_params as shared_types
import pytest
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from quipu.actors.config.declarations import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from quipu.web.api.body_table import NAMES
from quipu.web.api.openapi.document import make_document
from tests.web.api.openapi.full_apps import full_app

IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}
BODIES: dict[str, tuple[type, ...]] = {
    NAMES[COMPLETIONS]: (completion_params.CompletionCreateParamsBase,),
    NAMES[CHAT]: (chat_params.CompletionCreateParamsBase,),
    NAMES[RESPONSES]: (response_params.ResponseCreateParamsBase,),
    NAMES[MESSAGES]: (
        anthropic_types.message_create_params.MessageCreateParamsBase,
        beta_params.MessageCreateParamsBase,
    ),
}
WITHIN: dict[str, tuple[type, ...]] = {
    "ChatMessage": (
        chat_types.ChatCompletionSystemMessageParam,
        chat_types.ChatCompletionDeveloperMessageParam,
        chat_types.ChatCompletionUserMessageParam,
        chat_types.ChatCompletionAssistantMessageParam,
        chat_types.ChatCompletionToolMessageParam,
        chat_types.ChatCompletionFunctionMessageParam,
    ),
    "TextPart": (chat_types.ChatCompletionContentPartTextParam,),
    "AssistantPart": (
        chat_types.ChatCompletionContentPartTextParam,
        chat_types.ChatCompletionContentPartRefusalParam,
    ),
    "ToolCall": (
        chat_types.ChatCompletionMessageFunctionToolCallParam,
        chat_types.ChatCompletionMessageCustomToolCallParam,
    ),
    "StreamOptions": (chat_types.ChatCompletionStreamOptionsParam,),
    "FunctionDefinition": (shared_types.FunctionDefinition,),
    "ResponseFormat": (
        shared_types.ResponseFormatText,
        shared_types.ResponseFormatJSONObject,
        shared_types.ResponseFormatJSONSchema,
    ),
    "Prediction": (chat_types.ChatCompletionPredictionContentParam,),
    "Reasoning": (shared_types.Reasoning,),
    "ResponseText": (response_types.ResponseTextConfigParam,),
    "ResponseTextFormat": (response_types.ResponseFormatTextJSONSchemaConfigParam,),
    "ResponseTool": (
        response_types.FunctionToolParam,
        response_types.CustomToolParam,
        response_types.NamespaceToolParam,
    ),
    "ResponseItem": (
        response_types.EasyInputMessageParam,
        response_types.ResponseOutputMessageParam,
        response_types.ResponseFunctionToolCallParam,
        response_types.ResponseReasoningItemParam,
        response_types.ResponseCustomToolCallParam,
        response_types.ResponseCustomToolCallOutputParam,
    ),
    "ResponsePart": (
        response_types.ResponseInputTextParam,
        response_types.ResponseOutputTextParam,
        response_types.ResponseOutputRefusalParam,
    ),
    "Message": (
        anthropic_types.UserMessageParam,
        anthropic_types.AssistantMessageParam,
        anthropic_types.SystemMessageParam,
    ),
    "UserBlock": (
        anthropic_types.TextBlockParam,
        anthropic_types.ToolResultBlockParam,
        anthropic_types.SearchResultBlockParam,
        anthropic_types.DocumentBlockParam,
    ),
    "AssistantBlock": (
        anthropic_types.TextBlockParam,
        anthropic_types.ToolUseBlockParam,
        anthropic_types.ThinkingBlockParam,
        anthropic_types.RedactedThinkingBlockParam,
    ),
    "MessagesTool": (anthropic_types.ToolParam,),
    "MessagesToolChoice": (
        anthropic_types.ToolChoiceAutoParam,
        anthropic_types.ToolChoiceAnyParam,
        anthropic_types.ToolChoiceToolParam,
        anthropic_types.ToolChoiceNoneParam,
    ),
    "CacheControl": (anthropic_types.CacheControlEphemeralParam,),
    "MessagesMetadata": (anthropic_types.MetadataParam,),
    "Thinking": (
        anthropic_types.ThinkingConfigEnabledParam,
        anthropic_types.ThinkingConfigDisabledParam,
        anthropic_types.ThinkingConfigAdaptiveParam,
    ),
    "OutputConfig": (anthropic_types.OutputConfigParam,),
    "CountTokensRequest": (anthropic_types.message_count_tokens_params.MessageCountTokensParams,),
}


@pytest.fixture(scope="module")
def schemas() -> Any:
    return make_document(full_app())["components"]["schemas"]


def names_in(schema: Any) -> Iterator[str]:
    """Yield the fields that a schema describes or lists."""
    for kind in schema.get("anyOf", [schema]):
        yield from kind.get("properties", ())
        yield from kind.get("x-refused-fields", ())
        yield from kind.get("x-ignored-fields", ())
    yield from schema.get("x-ignored-fields", ())


@pytest.mark.parametrize("name", [*BODIES, *WITHIN])
def test_every_field_is_known(name: str, schemas: Any) -> None:
    """What the packages' types can send to an endpoint or within a body is described, or listed with its fate."""
    fields = {field for one in (BODIES | WITHIN)[name] for field in get_type_hints(one)}
    assert len(fields) >= 1
    assert fields - IN_HEADERS - set(names_in(schemas[name])) == set()


def test_lists_do_not_contradict(schemas: Any) -> None:
    """No field is described and also listed as refused or ignored."""
    for name in BODIES:
        schema = schemas[name]
        described, refused, ignored = (
            set(schema[part]) for part in ("properties", "x-refused-fields", "x-ignored-fields")
        )
        assert not described & refused and not described & ignored and not refused & ignored, name
