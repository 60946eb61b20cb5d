"""SIGHUP, which has the key file read again, before the server listens to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from quipu.web.auth.keys import KeyStore
from quipu.web.cli.keys import note_hangups, reloading_on_hangup
from tests.e2e.servers import write_keys

BEFORE, AFTER = "sk-quipu-before", "sk-quipu-after"


@pytest.fixture(autouse=True)
def kept_handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, handler)


async def test_hangup_while_the_server_loads(tmp_path: Path) -> None:
    """It does not end the process, and the file is read again once the server listens to the signal."""
    path = tmp_path / "keys.json"
    write_keys(path, a=BEFORE)
    keys = KeyStore(path=path)
    note_hangups(keys)
    write_keys(path, a=AFTER)
    os.kill(os.getpid(), signal.SIGHUP)
    assert keys.ring.find(BEFORE) is not None
    async with reloading_on_hangup(keys):
        with trio.fail_after(60):
            while keys.ring.find(AFTER) is None:
                await trio.sleep(0.01)
    assert keys.ring.find(BEFORE) is None and not keys.is_stale


def test_hangup_without_a_key_file() -> None:
    """It keeps its meaning."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    note_hangups(KeyStore())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
