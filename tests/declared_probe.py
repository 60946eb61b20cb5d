"""Probe a copy of the product for a made-up engine setting and made-up fields of bodies; print findings as JSON.

Run by `test_declared_once.py` as a program, with a path on which `quipu` and `scripts` are the copy's.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any
from unittest import mock

import attrs
import trio
import trio.testing

from quipu.actors.engine.executor.sequence_state import SequenceState
from quipu.actors.fleet.frames import FrameReader, FrameWriter
from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.web.app import make_app
from quipu.web.cli.cli import make_parser
from quipu.web.cli.settings import resolve_config
from scripts.declared_tables import fields_tables, sampling_table, settings_table
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/responses": {"input": "p"},
    "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4},
}


async def probe_setting(flag: str, name: str, value: str, bad_value: str) -> dict[str, Any]:
    """Follow a setting from the command line to the engine process, `/server_info` and the documents."""
    config, info = resolve_config(make_parser().parse_args(["serve", "demo", flag, value]))
    default, _ = resolve_config(make_parser().parse_args(["serve", "demo"]))
    with mock.patch("trio.lowlevel.open_process") as start:
        # stops short of starting a process
        await ProcessHost(config.engine, {})._start(3, 4, 1, mock.Mock(lifeline=5, address=""))  # noqa: SLF001 (as said)
    _, answer = await Client(make_app(FakeDesk(info=info))).get("/server_info")
    return {
        "default": getattr(default.engine, name),
        "sent to the engine process": json.loads(start.call_args.args[0][-1])[name],
        "server_info": answer["settings"][name],
        "refused": parser_output(flag, bad_value),
        "help": parser_output("--help"),
        "documents": [line for line in settings_table().splitlines() if flag in line],
    }


def parser_output(*arguments: str) -> str:
    """Return what the parser prints before it exits."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        make_parser().parse_args(["serve", "demo", *arguments])
    return " ".join(printed.getvalue().split())


async def probe_field(name: str, value: Any, bad_value: Any) -> dict[str, Any]:
    """Follow a sampling field from the bodies of all APIs to the executor, and into the documents."""
    read, refused = {}, {}
    sampling: SamplingParams | None = None
    for path, fields in BODIES.items():
        desk = FakeDesk()
        exchange, _ = await Client(make_app(desk)).post(path, {"model": "tiny", **fields, name: value})
        sampling = desk.ticket.encode.sampling
        read[path] = [getattr(sampling, name), exchange.headers.get("x-quipu-ignored-fields")]
        exchange, answer = await Client(make_app(FakeDesk())).post(path, {"model": "tiny", **fields, name: bad_value})
        refused[path] = [exchange.status, answer["error"]["message"]]
    assert sampling is not None
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await FrameWriter(ours, 1).send_all([Submit(1, [1, 2], b"", [], sampling)])
    (received,) = await FrameReader(theirs, 1).receive_all()
    assert isinstance(received, Submit)
    state = SequenceState(slot=0, sampling=received.sampling, num_outputs=0, keys=[], tokens=[1, 2])
    return {
        "default": attrs.fields_dict(SamplingParams)[name].default,
        "read": read,
        "refused": refused,
        "received by the engine": getattr(received.sampling, name),
        "given to the backend": getattr(state.row_sampling, name),
        "documents": [line for line in sampling_table().splitlines() if f"`{name}`" in line],
    }


async def probe_body_field(name: str, attribute: str, *values: int) -> dict[str, Any]:
    """Follow a field that is no sampling field from the bodies of all APIs to the tokenizer, and into the documents."""
    found: dict[str, dict[str, Any]] = {case: {} for case in ("neutral", "given", "out of bounds")}
    for case, value in zip(found, values, strict=True):
        for path, fields in BODIES.items():
            desk = FakeDesk()
            exchange, answer = await Client(make_app(desk)).post(path, {"model": "tiny", **fields, name: value})
            if exchange.status == 200:
                ignored = exchange.headers.get("x-quipu-ignored-fields")
                found[case][path] = [200, getattr(desk.ticket.encode, attribute), ignored]
            else:
                found[case][path] = [exchange.status, answer["error"]["message"]]
    return {**found, "documents": [line for line in fields_tables().splitlines() if f"`{name}`" in line]}


async def main() -> None:
    import quipu

    setting, field, body_field = json.loads(sys.argv[1])
    found = {
        "quipu": quipu.__file__,
        "setting": await probe_setting(*setting),
        "field": await probe_field(*field),
        "body field": await probe_body_field(*body_field),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    trio.run(main)
