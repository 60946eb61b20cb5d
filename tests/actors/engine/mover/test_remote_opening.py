"""What `--kv-remote` and its secrets may be, and what is imported for them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.engine.mover import remote_opening
from quipu.actors.engine.mover.remote_bucket import BucketLimits
from quipu.actors.engine.mover.remote_opening import check_remote_url, open_bucket, open_remote_store

LIMITS = BucketLimits()
SECRET = hashlib.sha256(b"secret").digest()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "unknown scheme ''"),
        ("bucket", "unknown scheme ''"),
        ("/srv/kv", "unknown scheme ''"),
        ("ftp://host/kv", "unknown scheme 'ftp'"),
        ("http://host/kv", "unknown scheme 'http'"),
        ("memory:///", "unknown scheme 'memory'"),
        ("s3:", "names no bucket"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("gs://", "names no bucket"),
        ("az://", "names no bucket"),
        ("s3://bucket:80", "names no bucket"),
        ("s3://[bucket", "invalid URL"),
        ("s3://bucket/a//b", "the prefix '/a//b'"),
        ("s3://bucket/a/../b", "the prefix"),
        ("s3://bucket/a%2Fb", "the prefix"),
        ("s3://bucket/a b", "the prefix"),
        ("s3://bucket/p?region=eu", "have no meaning"),
        ("s3://bucket/p#x", "have no meaning"),
        ("file://srv/kv", "names no folder"),
        ("file:", "names no folder"),
        ("file:///", "names no folder"),
    ],
)
def test_a_wrong_url_is_an_error_that_names_the_flag(url: str, reason: str) -> None:
    """Whatever is wrong with the URL is said at start, with the flag."""
    with pytest.raises(ValueError, match=f"^--kv-remote: .*{reason}"):
        open_bucket(url, LIMITS)


def test_the_url_is_checked_before_the_secrets() -> None:
    """Who gives a wrong URL and no secret hears of the URL first."""
    with pytest.raises(ValueError, match="unknown scheme"):
        open_remote_store("ftp://host/kv", None, None, numerics="n", block_bytes=1)


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    """An error about credentials in the URL does not show them."""
    with pytest.raises(ValueError, match=r"^--kv-remote: credentials belong in the environment") as caught:
        check_remote_url("s3://AKIAEXAMPLE:very-secret@bucket/prefix")
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "gs://a.b-c/p/q_1", "az://container/p", "file:///srv/kv"]
)
def test_what_the_page_says_is_accepted(url: str) -> None:
    """Buckets with and without a prefix, and folders, are accepted."""
    assert check_remote_url(url).geturl().startswith(url.rstrip("/"))


def test_an_account_is_required_for_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library misses in the environment is an error at start that names the flag."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match=r"^--kv-remote: az://container/p: .*Account must be specified"):
        open_bucket("az://container/p", LIMITS)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    open_bucket("az://container/p", LIMITS).close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A path below a file is an error at start."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--kv-remote: cannot create .*Not a directory"):
        open_bucket(f"file://{tmp_path}/file/kv", LIMITS)


def test_only_an_endpoint_with_http_is_reached_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections without TLS are allowed if the environment names an endpoint with http://, of this cloud."""
    allowed: list[Any] = []
    real = remote_opening._client_options  # noqa: SLF001 - what the library is told has no public accessor

    def noting(limits: BucketLimits, *, allow_http: bool) -> Any:
        allowed.append(allow_http)
        return real(limits, allow_http=allow_http)

    monkeypatch.setattr(remote_opening, "_client_options", noting)
    for environment in (
        {},
        {"AWS_ENDPOINT_URL": "https://host"},
        {"AZURE_ENDPOINT": "http://host"},
        {"AWS_ENDPOINT_URL": "http://host"},
        {"AWS_ENDPOINT": "HTTP://host:9000"},
        {"AWS_ENDPOINT_URL_S3": "https://host", "AWS_ENDPOINT_URL": "http://host"},
    ):
        open_bucket("s3://bucket", LIMITS, environment).close()
    assert allowed == [False, False, False, True, True, False]


def test_a_missing_extra_is_an_error_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error says how to install it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    with pytest.raises(ValueError, match=r'^--kv-remote needs the extra `remote`: pip install "quipu-llm\[remote\]"'):
        open_remote_store(f"file://{tmp_path}/kv", secret, None, numerics="n", block_bytes=1)


def test_nothing_is_imported_without_the_flag() -> None:
    """The server, an engine, and the modules that check the flags need neither obstore nor cryptography."""
    modules = ["quipu.web.cli.cli", "quipu.actors.engine.engine_server", "quipu.actors.wiring"]
    modules += [f"quipu.actors.engine.mover.remote_{name}" for name in ("opening", "bucket", "index", "keys", "health")]
    code = f"import sys, {', '.join(modules)}; print({{'obstore', 'cryptography'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
