"""Endpoints by which operators load and unload adapters while the server runs, as vLLM has them.

    POST /v1/load_lora_adapter     {"lora_name", "lora_path", "load_inplace"}
    POST /v1/unload_lora_adapter   {"lora_name"}

What must always hold: nothing outside of `--lora-dir` is read, whatever the path says; a name of the model is never an
adapter's.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.request_desk.adapters import NAME_RULE, AdapterRefused, UnknownAdapter, is_adapter_name
from quipu.actors.request_desk.interface import Desk
from quipu.actors.threads import run_in_thread

from ...options import AppOptions
from ...request.errors import APIError, bad_value, invalid, not_found, quoted
from ..body_field import Shape
from ..fields import Fields
from ..operation import TEXT, route
from ..small_body import read_small_body
from .admin_schemas import LOAD_ADAPTER, LOADED, MAX_PATH_CHARS, UNLOAD_ADAPTER, UNLOADED


def install_adapter_routes(app: QuartTrio, desk: Desk, options: AppOptions) -> None:
    """Register the routes. `web/auth/auth.py` decides who may use them."""

    @route(app, "POST /v1/load_lora_adapter", LOAD_ADAPTER)
    async def load_adapter() -> Response:
        fields = await _read_fields(LOADED, desk)
        name, path, in_place = fields.text("lora_name"), fields.text("lora_path"), fields.flag("load_inplace")
        if not is_adapter_name(name):
            raise bad_value("lora_name", f"must be {NAME_RULE}")
        if name in desk.info.model_names or name in desk.info.passed_on:
            raise bad_value("lora_name", "a model has this name")
        folder = await run_in_thread(_find, options.lora_dir, path)
        try:
            await desk.adapters.load(name, str(folder), in_place=in_place)
        except AdapterRefused as error:
            raise APIError(
                HTTPStatus.BAD_REQUEST, str(error), "invalid_request_error", param="lora_path", code="adapter_refused"
            ) from None
        return _say(f"Success: LoRA adapter '{name}' added successfully.")

    @route(app, "POST /v1/unload_lora_adapter", UNLOAD_ADAPTER)
    async def unload_adapter() -> Response:
        name = (await _read_fields(UNLOADED, desk)).text("lora_name")
        try:
            await desk.adapters.unload(name)
        except UnknownAdapter:
            raise not_found(f"No adapter is loaded as {quoted(name)}.", "lora_name", "adapter_not_found") from None
        return _say(f"Success: LoRA adapter '{name}' removed successfully.")


async def _read_fields(declared: Shape, desk: Desk) -> Fields:
    """Return the body's fields. Raises APIError."""
    fields = await read_small_body(declared)
    if not desk.adapters.is_enabled:
        raise invalid("This server serves no adapters: start it with --enable-lora.", code="adapters_not_enabled")
    return fields


def _find(allowed: Path | None, path: str) -> Path:
    """Return the folder that a path names, with all links followed. Raises APIError."""
    if allowed is None:
        raise invalid("Adapters cannot be loaded: the server was started without --lora-dir.", "lora_path")
    refusal = bad_value("lora_path", "must be a folder within the server's --lora-dir", "path_not_allowed")
    if len(path) > MAX_PATH_CHARS or "\0" in path:
        raise refusal
    try:
        root = allowed.resolve(strict=True)
        folder = (root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # also for links in circles
        raise refusal from None
    if root not in folder.parents or not folder.is_dir():
        raise refusal
    return folder


def _say(text: str) -> Response:
    return Response(text, content_type=TEXT)
