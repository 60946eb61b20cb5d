"""From the flags to the store of the tier: `--kv-remote s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`.

obstore (extra `remote`) and cryptography are imported here, when a bucket is opened. Credentials come from the
environment, in the variables that each cloud's own tools read (`AWS_*`, `GOOGLE_*`, `AZURE_*`), or from the machine's
role.

What must always hold: whatever is wrong with the URL is a ValueError at start, which names the flag and shows no
credentials; connections are encrypted, unless the environment names an endpoint that begins with `http://`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from quipu import __version__

from ...config.tier_settings import TIER_FLAGS
from .remote_bucket import Bucket, BucketLimits
from .remote_keys import read_remote_keys

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from .remote_store import RemoteStore

REMOTE_FLAG = TIER_FLAGS["kv_remote"]
MISSING_EXTRA = f'{REMOTE_FLAG} needs the extra `remote`: pip install "quipu-llm[remote]"'
FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_SEGMENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._=@+-]{1,128}")


def check_remote_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError if it cannot name a place for objects."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{REMOTE_FLAG}: invalid URL: {error}") from None
    if "@" in parts.netloc:
        raise ValueError(f"{REMOTE_FLAG}: credentials belong in the environment, not in the URL")
    if parts.scheme not in (*_ENDPOINTS, "file"):
        raise ValueError(f"{REMOTE_FLAG}: unknown scheme {parts.scheme!r}: use {FORMS}")
    if parts.query or parts.fragment:
        raise ValueError(f"{REMOTE_FLAG}: {url}: `?` and `#` have no meaning here: use {FORMS}")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError(f"{REMOTE_FLAG}: {url} names no folder by an absolute path, as in file:///srv/kv")
    elif not _BUCKET.fullmatch(parts.netloc):
        raise ValueError(f"{REMOTE_FLAG}: {url} names no bucket: use {FORMS}")
    elif not all(map(_SEGMENT.fullmatch, parts.path.strip("/").split("/"))) and parts.path.strip("/"):
        raise ValueError(
            f"{REMOTE_FLAG}: the prefix {parts.path!r} may have letters, digits and ._=@+- between slashes"
        )
    return parts


def open_remote_store(
    url: str,
    secret_file: Path | None,
    encryption_file: Path | None,
    *,
    numerics: str,
    block_bytes: int,
    limits: BucketLimits | None = None,
) -> RemoteStore:
    """Open the tier that the flags name; nothing is sent yet. Raises ValueError, which names the flag at fault.

    The process that calls this must not fork later: the library's threads would be missing in the other.
    """
    check_remote_url(url)
    keys = read_remote_keys(secret_file, encryption_file)
    bucket = open_bucket(url, limits or BucketLimits())
    from .remote_store import RemoteStore

    return RemoteStore(bucket, keys, numerics=numerics, block_bytes=block_bytes)


def open_bucket(url: str, limits: BucketLimits, environment: Mapping[str, str] = os.environ) -> Bucket:
    """Open what a URL names; nothing is sent yet. Raises ValueError.

    The environment is only asked whether the endpoint is one without TLS; obstore itself reads that of the process.
    """
    parts = check_remote_url(url)
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ValueError(MISSING_EXTRA) from None
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "v1").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{REMOTE_FLAG}: cannot create {folder}: {error.strerror}") from None
        return Bucket(LocalStore(folder), limits, folder)
    endpoint = next((environment[name] for name in _ENDPOINTS[parts.scheme] if environment.get(name)), "")
    is_open = endpoint.lower().startswith("http://")
    client, retries = _client_options(limits, allow_http=is_open), _retry_options(limits)
    try:
        store: ObjectStore = from_url(url, client_options=client, retry_config=retries)
    except Exception as error:  # of any class of the library's
        reason = " ".join(str(error).partition("Debug source:")[0].split())
        raise ValueError(f"{REMOTE_FLAG}: {url}: {reason}") from None
    return Bucket(store, limits)


def _client_options(limits: BucketLimits, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "timeout": timedelta(seconds=limits.request_s),
        "user_agent": f"quipu/{__version__}",
    }


def _retry_options(limits: BucketLimits) -> RetryConfig:
    return {
        "max_retries": limits.max_retries,
        # the last attempt may begin as late as this
        "retry_timeout": timedelta(seconds=max(0.0, limits.whole_s - limits.request_s)),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
    }
