"""What a server reports about itself before the run: its model and, if it is quipu, its vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping

import httpx2
import msgspec

from .client import make_http

PATIENCE_S = 30.0
ASSUMED_VOCABULARY = 8000
"""Smaller than the vocabulary of any model in use, so ids below it are valid everywhere."""


class DiscoveryError(Exception):
    """The server does not report what is needed. The message names the flag that provides it."""

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        """As in `Failure`, if there was no usable response: `connect`, `http_401`."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ServerInfo(msgspec.Struct):
    vocab_size: int


async def find_model(base_url: str, headers: Mapping[str, str]) -> str:
    """Return the first model of `GET /v1/models`. Raises DiscoveryError."""
    content = await _get(f"{base_url}/v1/models", headers)
    try:
        models = msgspec.json.decode(content, type=_Models).data
    except msgspec.DecodeError as error:
        raise DiscoveryError(
            f"{base_url}/v1/models is not a list of models ({error}); name one with --model"
        ) from error
    if not models:
        raise DiscoveryError(f"{base_url}/v1/models lists no model; name one with --model")
    return models[0].id


async def find_vocab_size(base_url: str, headers: Mapping[str, str]) -> int:
    """Return the size from quipu's `GET /server_info`, or else one that suits every model."""
    try:
        return msgspec.json.decode(await _get(f"{base_url}/server_info", headers), type=_ServerInfo).vocab_size
    except (DiscoveryError, msgspec.DecodeError):
        return ASSUMED_VOCABULARY


async def _get(url: str, headers: Mapping[str, str]) -> bytes:
    async with make_http(headers) as http:
        try:
            response = await http.get(url, timeout=PATIENCE_S)
        except httpx2.HTTPError as error:
            kind = "connect" if isinstance(error, httpx2.ConnectError) else None
            raise DiscoveryError(f"GET {url}: {str(error) or type(error).__name__}", kind) from error
    if response.status_code != httpx2.codes.OK:
        what = "name a model with --model"
        if response.status_code == httpx2.codes.UNAUTHORIZED:
            what = "the server wants a key: give --api-key or set OPENAI_API_KEY"
        message = f"GET {url} was answered {response.status_code}; {what}"
        raise DiscoveryError(message, f"http_{response.status_code}")
    return response.content
