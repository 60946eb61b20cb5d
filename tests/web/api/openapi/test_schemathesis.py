"""Requests drawn by schemathesis; `make test-openapi` sends 10,000 of them."""

from __future__ import annotations

import pytest
import trio

from tests.web.api.openapi.schemathesis_cases import run

CASES = 70


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # schemathesis warns of formats that it does not draw
def test_document_is_true() -> None:
    """Nothing drawn is a 5xx, nothing that the document forbids is served, and it describes every answer."""
    report = trio.run(run, CASES)
    assert report.broken == {}
    assert {"POST /v1/batches", "GET /v1/messages/batches/{batch_id}/results"} <= report.served_at.keys()
    assert report.num_cases > CASES / 2 and 10 < report.num_served < report.num_allowed < report.num_cases
