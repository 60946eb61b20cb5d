"""Servers whose KV outlives them: killed and started again with the same disk, or beside others with the same bucket.

They serve the tiny model on the executor that the machine has, so that a text that depends on wrong KV would differ.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import BLOCK, PATIENCE_S, Server, eventually, run_quipu, serve_command, serving

NUM_BLOCKS = 20
DETAILS = {"return_cached_tokens_details": True}
NONE = {"device": 0, "host": 0, "disk": 0, "remote": 0, "unattributed": 0}


def prompt(number: int) -> list[int]:
    """Return one of many prompts of twenty blocks, and a token."""
    return [*random.Random(number).choices(range(300, 2000), k=NUM_BLOCKS * BLOCK), 7]


def ask(server: Server, number: int) -> tuple[str, dict[str, int]]:
    """Return the text for a prompt, and its cached tokens by tier."""
    answer = server.complete(prompt(number), max_tokens=6, **DETAILS)
    assert answer.status_code == 200, answer.text
    body: Any = answer.json()
    details = body["usage"]["prompt_tokens_details"]
    assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
    return body["choices"][0]["text"], details["cached_tokens_by_tier"]


def num_stored(server: Server, tier: str) -> float:
    server.complete([7], max_tokens=1)  # its report says what was stored before
    return server.metrics()[f'kv_tier_stored_blocks_total{{tier="{tier}"}}']


def found_by_look_up(server: Server, number: int) -> dict[str, int]:
    """Return the cached tokens of a prompt by tier, as a look-up tells them."""
    question = {"url": "/v1/completions", "body": {"model": "demo", "prompt": prompt(number)}}
    found: Any = server.post("/v1/cache/lookup", question).json()["prompts"][0]
    by_tier: dict[str, int] = found["cached_tokens_by_tier"]
    return by_tier


def is_listed(server: Server, number: int) -> bool:
    """Return whether a prompt is known to be in the bucket. Grants begin the listing, so the engine is given work."""
    server.complete([7], max_tokens=1)
    return found_by_look_up(server, number) == NONE | {"remote": NUM_BLOCKS * BLOCK}


def disk_flags(tmp_path: Path) -> tuple[str, ...]:
    return ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "64MiB", "--kv-load", "always")


def end(server: Server, sent: signal.Signals) -> None:
    """Send a signal to a server, and to its engine if it kills, and wait until the server has ended."""
    for pid in server.engines() if sent == signal.SIGKILL else ():
        os.kill(pid, sent)
    os.kill(server.process.pid, sent)
    server.process.wait(PATIENCE_S)


def test_found_after_the_server_has_ended(tmp_path: Path) -> None:
    """Whether a server is asked to end or killed, the next one finds its prompts; texts are the same, and nothing is
    disputed. A look-up with `prefetch` has one loaded, so that the request after it finds all of it on the device."""
    flags = disk_flags(tmp_path)
    on_disk = NONE | {"disk": NUM_BLOCKS * BLOCK}
    with serving(tmp_path / "1", *flags) as server:
        first, cold = ask(server, 1)
        assert cold == NONE
        eventually(lambda: num_stored(server, "disk") >= NUM_BLOCKS, "the prompt is on the disk")
        end(server, signal.SIGTERM)
    with serving(tmp_path / "2", *flags) as server:
        assert found_by_look_up(server, 1) == on_disk
        assert ask(server, 1) == (first, on_disk)
        after = server.metrics()
        assert after['cached_tokens_total{tier="disk"}'] == NUM_BLOCKS * BLOCK
        assert after["usage_disputed_total"] == 0
        second, cold = ask(server, 2)
        assert cold == NONE
        eventually(lambda: num_stored(server, "disk") >= NUM_BLOCKS, "another prompt is on the disk")
        end(server, signal.SIGKILL)
    with serving(tmp_path / "3", *flags) as server:
        assert found_by_look_up(server, 2) == on_disk
        assert ask(server, 2) == (second, on_disk)
        question = {"url": "/v1/completions", "body": {"model": "demo", "prompt": prompt(1)}, "prefetch": True}
        found = server.post("/v1/cache/lookup", question).json()["prompts"][0]
        assert found["prefetching_tokens"] == NUM_BLOCKS * BLOCK
        eventually(
            lambda: found_by_look_up(server, 1)["device"] == NUM_BLOCKS * BLOCK,
            "the prompt is on the device",
        )
        assert ask(server, 1) == (first, NONE | {"device": NUM_BLOCKS * BLOCK})
        assert server.metrics()["usage_disputed_total"] == 0
    folder = tmp_path / "kv" / "engine-0"
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_shared_by_two_servers(tmp_path: Path) -> None:
    """What one server stores in a bucket is found by another with the same secret, and by none with another one."""
    secrets = []
    for name in ("secret", "other"):
        path = tmp_path / name
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
        secrets.append(str(path))
    remote = ("--kv-remote", f"file://{tmp_path}/bucket", "--kv-load", "always", "--kv-remote-secret")
    with serving(tmp_path / "1", *remote, secrets[0]) as server:
        first, _ = ask(server, 1)
        eventually(lambda: num_stored(server, "remote") >= NUM_BLOCKS, "the prompt is in the bucket")
    with serving(tmp_path / "2", *remote, secrets[0]) as server:
        eventually(lambda: is_listed(server, 1), "the bucket has been listed")
        assert ask(server, 1) == (first, NONE | {"remote": NUM_BLOCKS * BLOCK})
        assert ask(server, 1) == (first, NONE | {"device": NUM_BLOCKS * BLOCK})
    with serving(tmp_path / "3", *remote, secrets[1]) as server:
        ask(server, 2)
        eventually(lambda: num_stored(server, "remote") >= NUM_BLOCKS, "another prompt is in the bucket")
    with serving(tmp_path / "4", *remote, secrets[1]) as server:
        eventually(lambda: is_listed(server, 2), "the bucket has been listed")
        assert ask(server, 1) == (first, NONE)


def test_shared_by_two_engines(tmp_path: Path) -> None:
    """What one engine of a server stores in a bucket the other finds with the next prompt, without listing it again."""
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    remote = ("--kv-remote", f"file://{tmp_path}/bucket", "--kv-load", "always", "--kv-remote-secret")
    flags = (*remote, str(tmp_path / "secret"), "--engines", "2", "--routing", "round-robin")
    with serving(tmp_path / "1", *flags) as server:
        eventually(lambda: len(server.events("engine.ready")) == 2, "both engines are ready")
        first, cold = ask(server, 1)
        assert cold == NONE
        name = 'kv_tier_stored_blocks_total{tier="remote"}'
        eventually(lambda: server.metrics()[name] >= NUM_BLOCKS, "the report after the last store tells of it")
        assert ask(server, 1) == (first, NONE | {"remote": NUM_BLOCKS * BLOCK})
        assert server.metrics()["usage_disputed_total"] == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--kv-disk", "{folder}/file/kv", "--kv-disk-size", "64MiB"), "--kv-disk {folder}/file/kv cannot be used"),
        (("--kv-disk", "{folder}/kv", "--kv-disk-size", "1KiB"), "--kv-disk-size of 1024 bytes holds no two blocks"),
        (("--kv-remote", "ftp://bucket", "--kv-remote-secret", "{folder}/secret"), "--kv-remote: unknown scheme"),
        (("--kv-remote", "file://{folder}/bucket"), "--kv-remote needs --kv-remote-secret"),
    ],
)
def test_unusable_tier(flags: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    """A tier that cannot be opened ends the start with one reason, which names the flag and not the checkpoint."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    folder = str(tmp_path)
    ended = run_quipu(
        *serve_command("--executor", "fake", "--port", "0", *(flag.format(folder=folder) for flag in flags)),
        folder=tmp_path,
    )
    assert ended.returncode not in (0, None)
    assert reason.format(folder=folder) in ended.stderr
    assert "checkpoint cannot be served" not in ended.stderr and "Traceback" not in ended.stderr
