"""Before it is ready, the server asks itself over its own socket, and compares the answer.

That an engine can produce tokens does not show that a client gets them: a library of another version may break every
request while the probes answer. So `serve.py` serves a `SelfCheckedApp`, and runs `check` beside it. The check is a
chat, whole and streamed, on an application with all of the web layer and a desk that answers by itself
(`stand_in_desk.py`); only requests with this process's own random token get there.

What must always hold: until the answer was right once, `/ready` is not ok, and says why; the check needs no key,
reaches no upstream, and leaves ledger, counters and cache as they were.
"""

from __future__ import annotations

import secrets
from typing import Any

import httpx2
import orjson
import structlog
import trio
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Response

from quipu.actors.request_desk.desk import RequestDesk
from quipu.actors.request_desk.health import State, Withheld

from ..app import make_app
from ..request.request_context import current_request_context
from .stand_in_desk import ANSWER, MODEL, StandInDesk

log = structlog.get_logger("quipu.cli")

PATH = "/v1/chat/completions"
TOKEN_HEADER = "X-Quipu-Self-Check"  # noqa: S105 (its name)
TRY_S = 10.0
NUM_TRIES = 3
"""After so many the server says that it cannot serve; before, that it is starting."""
RETRY_S = (0.5, 5.0)
"""From a failed try to the next: of the first ones, and of those after `NUM_TRIES`. What is missing (a file descriptor,
a thread) may come back."""


class WrongAnswer(Exception):
    """The server answered its own request, but not as it should have. The message says what is wrong."""


class SelfCheckedApp:
    """The ASGI application that is served: the real one, and for the server's own requests the one that is checked."""

    def __init__(self, app: ASGIFramework, desk: RequestDesk) -> None:
        self._app = app
        self._desk = desk
        self._stand_in = StandInDesk(desk)
        self._checked: ASGIFramework | None = _checked_app(self._stand_in)
        self.token = secrets.token_hex(16)
        desk.withheld = Withheld(State.STARTING, "the server has not answered its own request yet")

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve one connection of ASGI. Only the check itself knows the token, which is of no use afterwards."""
        app: Any = self._app
        if self._checked is not None and scope["type"] == "http":
            name, token = TOKEN_HEADER.lower().encode(), self.token.encode()
            if any(header == name and secrets.compare_digest(value, token) for header, value in scope["headers"]):
                app = self._checked
        await app(scope, receive, send)

    async def check(self, server_url: str) -> None:
        """Send the request to the server until its answer is right; until then the desk withholds readiness."""
        num_failed = 0
        while True:
            try:
                with trio.fail_after(TRY_S):
                    await self._try(server_url)
                break
            except Exception as error:
                num_failed += 1
                reason = f"{type(error).__name__}: {error}" if not isinstance(error, WrongAnswer) else str(error)
                state = State.STARTING if num_failed < NUM_TRIES else State.REFUSING
                detail = f"the server does not answer its own request as it should: {reason}"
                self._desk.withheld = Withheld(state, detail)
                log.error("server.self_check_failed", num_tries=num_failed, detail=detail)
            await trio.sleep(RETRY_S[num_failed >= NUM_TRIES])
        self._desk.withheld = None
        self._checked = None

    async def _try(self, server_url: str) -> None:
        url = server_url + PATH
        client = httpx2.AsyncClient(
            headers={TOKEN_HEADER: self.token},
            timeout=None,
            trust_env=False,
            verify=server_url.startswith("https:"),  # loading certificates takes longer than all the rest
        )
        async with client as http:
            whole = await http.post(url, json=_body(stream=False))
            _check_status(whole.status_code)
            self._compare(*whole_answer(whole.content))
            streamed = await http.post(url, json=_body(stream=True))
            _check_status(streamed.status_code)
            self._compare(*streamed_answer(streamed.content))

    def _compare(self, text: object, usage: object) -> None:
        """Raises WrongAnswer unless text and usage are what the stand-in desk has given."""
        if text != "".join(ANSWER):
            raise WrongAnswer("the text is not what was generated")
        if not isinstance(usage, dict):
            raise WrongAnswer("there is no usage")
        details = usage.get("prompt_tokens_details")
        told = (usage.get("prompt_tokens"), usage.get("completion_tokens"), details and details.get("cached_tokens"))
        if told != (self._stand_in.num_counted, len(ANSWER), 0) or not self._stand_in.num_counted:
            raise WrongAnswer(f"its usage is {told}, not {(self._stand_in.num_counted, len(ANSWER), 0)}")


def _checked_app(desk: StandInDesk) -> ASGIFramework:
    """Return an application with the web layer's code, for whoever has the token."""
    app = make_app(desk)

    @app.after_request
    async def keep_quiet(response: Response) -> Response:
        current_request_context().is_generation = False  # no line at info level for what no client has sent
        return response

    return app


def _body(*, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Are you ready?"}]}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _check_status(status: int) -> None:
    if status != 200:
        raise WrongAnswer(f"POST {PATH} is answered with status {status}")


def whole_answer(data: bytes) -> tuple[object, object]:
    """Return text and usage of a whole response. Raises WrongAnswer."""
    try:
        answer = orjson.loads(data)
        return answer["choices"][0]["message"]["content"], answer["usage"]
    except (ValueError, LookupError, TypeError):
        raise WrongAnswer("a whole response cannot be read") from None


def streamed_answer(data: bytes) -> tuple[object, object]:
    """Return text and usage of a streamed response. Raises WrongAnswer."""
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    try:
        if events[-1] != b"[DONE]":
            raise WrongAnswer("a stream does not end with [DONE]")
        chunks = [orjson.loads(event) for event in events[:-1]]
        deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        return "".join(deltas), chunks[-1]["usage"]
    except (ValueError, LookupError, TypeError):
        raise WrongAnswer("a stream cannot be read") from None
