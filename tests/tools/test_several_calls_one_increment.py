"""Calls or arguments were dropped when one increment held more than one piece of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quipu.actors.detokenizer.decoder import ByteDecoder
from quipu.actors.detokenizer.output_format import choose_format
from quipu.actors.detokenizer.parsed_stream import ParsedStream
from quipu.actors.detokenizer.response_parsing.response_parser import ResponseParser
from quipu.actors.detokenizer.text_stream import Piece, StopMatcher
from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.shared.checkpoint import resolve
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.tokenizer.template_source import read_template
from tests.tools.scripted_model import CHAT_TOOLS, QUESTION, call
from tests.web.api.openai.test_openai_client import client_of
from tests.web.fakes import STARTED, FakeDesk, record, scripted

INPUTS: list[dict[str, Any]] = [{"city": "Oslo"}, {}, {"city": "Rome", "days": 2}]
OUTPUT = "<think>\nThree.\n</think>\n\nLook:\n" + "\n".join(call(json.dumps(one)) for one in INPUTS) + "\nDone."

UNUSED = 4096
"""The first id that the demo's vocabulary does not use."""


def deltas_of(size: int) -> list[Delta]:
    """Return what the detokenizer sends if the output comes in increments of `size` characters."""
    folder = resolve("demo")
    template = read_template(folder)
    assert template is not None
    chosen = choose_format(folder, load_library(folder), template.source, "auto", "auto")
    assert chosen.template is not None
    pieces = [OUTPUT[at : at + size].encode() for at in range(0, len(OUTPUT), size)]
    parser = ResponseParser(chosen.template, {"get_weather": {}}, ())
    stream = ParsedStream(ByteDecoder([b""] * UNUSED + pieces), parser, StopMatcher(None))
    told: list[Piece] = [*map(stream.push, range(UNUSED, UNUSED + len(pieces))), stream.flush()]
    deltas = [Delta(0, piece.text, 1, None, events=piece.events) for piece in told]
    return [*deltas, Delta(0, "", 0, FinishReason.STOP)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 40, 100, len(OUTPUT)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_several_calls_one_increment(size: int) -> None:
    """The official client reads all calls, complete and in order, whatever the increments are."""
    fields: Any = {"model": "tiny", "messages": QUESTION, "tools": CHAT_TOOLS}
    desk = FakeDesk(scripted(STARTED, *deltas_of(size), Closed(record(), None)))
    async with client_of(desk) as client:
        whole = (await client.chat.completions.create(**fields)).choices[0]
        async with client.chat.completions.stream(**fields) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        calls = choice.message.tool_calls or []
        assert [json.loads(one.function.arguments) for one in calls if one.type == "function"] == INPUTS
        assert choice.finish_reason == "tool_calls"
        text = choice.message.content or ""
        assert text.startswith("Look:") and text.endswith("Done.") and "tool_call" not in text
