"""The configurations of `deploy/` for nginx and HAProxy: what a running proxy shows only after minutes, or by chance.

Everything else is checked with the proxies themselves by `python -m tests.deploy`.
"""

from __future__ import annotations

import pytest

from quipu.web.http.connection import ConnectionLimits
from tests.deploy.proxies import HAPROXY, NGINX, seconds

SILENT = 1800.0
"""How long an answer that is not streamed may take, at least."""


@pytest.mark.parametrize(
    ("text", "directives"),
    [
        (NGINX.read_text(), ("proxy_read_timeout",)),
        (HAPROXY.read_text(), ("timeout server", "timeout client")),
    ],
    ids=["nginx", "HAProxy"],
)
def test_silent_answers_are_waited_for(text: str, directives: tuple[str, ...]) -> None:
    """No time limit of a proxy cuts off an answer that takes long and is not streamed."""
    assert all(seconds(text, directive) >= SILENT for directive in directives)


def test_idle_connections_are_closed_by_the_proxy() -> None:
    """A proxy closes an idle connection before quipu does, so that no request is sent on a closed one."""
    idle_s = ConnectionLimits().keep_alive_timeout_s
    kept = NGINX.read_text().partition("upstream quipu {")[2].partition("}")[0]
    assert seconds(kept, "keepalive_timeout") < idle_s
    _, _, server = HAPROXY.read_text().partition("pool-purge-delay ")
    assert seconds(f"purge {server}", "purge") < idle_s


def test_nginx_buffers_nothing() -> None:
    """nginx passes on what comes in both directions, however large."""
    lines = {line.strip() for line in NGINX.read_text().splitlines()}
    wanted = {"proxy_buffering off;", "proxy_request_buffering off;", "gzip off;", "client_max_body_size 0;"}
    assert wanted <= lines
