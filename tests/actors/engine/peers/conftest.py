"""Fixtures of the tests of peers: certificates of one authority, and strangers that need not wait."""

from __future__ import annotations

import pytest

from quipu.actors.fleet.processes import strangers
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.authorities import Authority


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PENALTY_S", 0.01)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> LinkTls | None:
    return authority.files("127.0.0.1") if request.param == "tls" else None
