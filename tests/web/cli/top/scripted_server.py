"""A server whose health and metrics `quipu top` reads, until it is gone."""

from __future__ import annotations

import json

import attrs

from tests.web.cli.bench.bench_server import Reply, Request

METRICS = b"""\
quipu:ledger_info{server="a"} 1.0
quipu:num_requests_running 3.0
quipu:prefix_cache_queries_total 200.0
quipu:prefix_cache_hits_total 150.0
"""


@attrs.define
class Server:
    """What a scripted server answers, until it is gone."""

    is_gone: bool = False

    def answer(self, request: Request) -> Reply:
        if self.is_gone:
            return Reply(status=502, pieces=[b"<html>"])
        match request.path:
            case "/health":
                return Reply(content_type="application/json", pieces=[json.dumps({"state": "ready"}).encode()])
            case "/metrics":
                return Reply(content_type="text/plain", pieces=[METRICS])
        return Reply(status=403, pieces=[b"{}"])
