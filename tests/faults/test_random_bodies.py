"""Random bodies made of each endpoint's own fields: nothing breaks, nothing leaks, everything is accounted for.

`bench/bodies.py` and `bench/stored_bodies.py` make the bodies; `python -m bench.stalls --fuzz` sends the same ones to
a real server. Six runtimes get 20 bodies each for each endpoint (many more with `--hypothesis-profile long`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bodies import ENDPOINTS, POOLED, bodies
from bench.body_parts import COMPACT, COUNT, LOAD, MESSAGES, UNLOAD
from bench.stored_bodies import JSON, MADE_FIRST, MESSAGE_BATCHES, STORED_BODIES, filled
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.response_store.response_store import StoreConfig, open_store
from quipu.actors.text_workers import encode_process
from quipu.kernels.fake import Dials
from quipu.web.batches.batch_service import BatchService
from quipu.web.batches.batch_store import BatchStore
from quipu.web.batches.batch_values import BatchLimits
from tests.actors.engine.adapter_folders import make_folder
from tests.grammars import EOS
from tests.journals import KeptJournal
from tests.kept_forks import kept_forks
from tests.remote_engines import FORKED
from tests.runtimes import BLOCK, small_runtime
from tests.traps.wire import over_http, samples, settle
from tests.web.asgi_client import Client as HttpClient

BODIES_PER_RUNTIME = 20
IN_TIME_S = 60.0
LETTER_A = 67
ANTHROPIC = (MESSAGES, COUNT, MESSAGE_BATCHES)
LOST_GRAMMAR = b"The output cannot match its grammar any more"
"""The error for a grammar that has no end, or none that the tokens so far can reach."""


@attrs.frozen
class Answer:
    sent: bytes
    status: int
    content_type: str
    body: bytes


async def send(
    client: HttpClient, endpoint: str, sent: bytes, answers: list[Answer], headers: Mapping[str, str] = JSON
) -> None:
    with trio.fail_after(IN_TIME_S):
        async with client.open("POST", endpoint, sent, headers) as exchange:
            status = await exchange.wait_started()
            answers.append(Answer(sent, status, exchange.headers["content-type"], await exchange.read()))


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Have the processes of all runtimes forked, from few that have loaded what they need."""
    with kept_forks(), mock.patch.object(encode_process, "subprocess", FORKED):
        yield


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters, and one that has none."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("first", "second"):
        make_folder(folder / name, name)
    (folder / "empty").mkdir()
    return folder


def check(answer: Answer, endpoint: str) -> None:
    """Assert that a response is readable for the endpoint's clients and no server error."""
    assert answer.status < HTTPStatus.INTERNAL_SERVER_ERROR, (answer.sent, answer.body)
    if answer.content_type.startswith("text/event-stream"):
        assert answer.status == HTTPStatus.OK
        assert answer.body.endswith(b"\n\n")
        assert b'"server_error"' not in answer.body and b'"api_error"' not in answer.body, (answer.sent, answer.body)
        return
    if answer.content_type.startswith("text/plain"):
        assert endpoint in (LOAD, UNLOAD) and answer.status == HTTPStatus.OK
        return
    parsed = json.loads(answer.body)
    if answer.status != HTTPStatus.OK:
        error = parsed["error"]
        assert error["message"]
        assert parsed["type"] == "error" if endpoint in ANTHROPIC else {"type", "param", "code"} <= set(error)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("endpoint", [*ENDPOINTS, *POOLED, *STORED_BODIES])
def test_random_bodies(endpoint: str, adapters: Path) -> None:
    """No 5xx; afterwards no account is open and no block held, and records, counters and clients agree.

    Grammars without an end are among them, and fail only their own requests.
    """

    @settings(max_examples=max(6, settings.default.max_examples // 5))
    @given(st.data())
    def try_bodies(data: st.DataObject) -> None:
        drawing = STORED_BODIES[endpoint].bodies if endpoint in STORED_BODIES else bodies(endpoint)
        drawn = data.draw(st.lists(drawing, min_size=BODIES_PER_RUNTIME, max_size=BODIES_PER_RUNTIME))
        with tempfile.TemporaryDirectory() as folder:
            trio.run(serve_them, endpoint, drawn, adapters, Path(folder))

    try_bodies()


async def serve_them(endpoint: str, drawn: list[bytes], adapters: Path, folder: Path) -> None:
    journal = KeptJournal()
    dials = Dials(only_token_id=LETTER_A)
    settings = {
        "num_blocks": 600,
        "max_num_batched_tokens": 2048,
        "eos_token_ids": (EOS,),
        "tool_call_parser": "hermes",
        "max_loras": 2,
        "task": "embed" if endpoint in POOLED else "generate",
    }
    if endpoint == COMPACT:  # whose outputs fill the context
        settings["max_model_len"] = 20 * BLOCK
    async with (
        small_runtime(dials, journal=journal, encode_apart=True, **settings) as runtime,
        open_store(StoreConfig(data_dir=folder, ttl_s=3600.0)) as store,
        running_batches(folder / "batches") as batches,
    ):
        client, answers = over_http(runtime, store, batches, lora_dir=adapters), list[Answer]()
        async with batches.serving(client.app):
            path, headers, made_id = await prepare(client, endpoint)
            async with trio.open_nursery() as nursery:
                for body in drawn:
                    sent = filled(body, made_id)
                    nursery.start_soon(send, client, path, sent, answers, headers)
            await assert_batches_end(batches, folder / "batches")
        await settle(runtime)
        assert store.trouble is None and not store.num_unstored and not store.num_running()
        assert len(answers) == len(drawn)
        for answer in answers:
            check(answer, endpoint)
        counters = samples(runtime)
        assert counters["usage_disputed_total"] == 0
        assert not journal.open
        admitted = [record for record in journal.closed if record.admitted_at is not None]
        for name, wanted in {
            "prompt_tokens_total": sum(record.prompt_tokens or 0 for record in admitted),
            "prefix_cache_hits_total": sum(record.cached_tokens or 0 for record in admitted),
            "generation_tokens_total": sum(record.completion_tokens for record in admitted),
        }.items():
            assert counters[name] == wanted, name
        failed = [record for record in admitted if record.outcome is not Outcome.FINISHED]
        assert all(record.outcome is Outcome.FAILED for record in failed)
        if endpoint != MESSAGE_BATCHES:  # whose lines fail as well
            assert len(failed) == sum(LOST_GRAMMAR in answer.body for answer in answers)
        assert not app_bytes(client)


async def prepare(client: HttpClient, endpoint: str) -> tuple[str, Mapping[str, str], str]:
    """Make what the bodies need; return the path and the headers to send them with, and the id of what was made."""
    stored, made_id = STORED_BODIES.get(endpoint), ""
    first = MADE_FIRST.get(endpoint) if stored is None else stored.made
    if first is not None:
        async with client.open("POST", first.path, first.body, first.headers) as exchange:
            made_id = (await exchange.json())["id"]
    return endpoint.replace("{id}", made_id), JSON if stored is None else stored.headers, made_id


@asynccontextmanager
async def running_batches(folder: Path) -> AsyncIterator[BatchService]:
    store = await trio.to_thread.run_sync(BatchStore, folder)

    async def find_recorded(request_ids: Sequence[str]) -> Collection[str]:
        raise AssertionError("no server has died")

    try:
        yield BatchService(store, BatchLimits(), find_recorded)
    finally:
        store.close()


async def assert_batches_end(batches: BatchService, folder: Path) -> None:
    """Assert that every batch ends, and that nothing is left of uploads that were refused."""
    with trio.fail_after(IN_TIME_S):
        while await batches.call(batches.store.open_batches):
            await trio.sleep(0.01)
    assert not list((folder / "files").glob(".new-*"))


def app_bytes(client: HttpClient) -> int:
    """Return how many bytes of bodies the web layer still holds."""
    held: int = client.app.bodies.num_bytes
    return held
