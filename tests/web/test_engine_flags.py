"""Flags of the engine reach its configuration, and /server_info says so."""

from __future__ import annotations

import pytest

from quipu.web.cli import make_parser, resolve_config


@pytest.mark.parametrize(
    ("flags", "expected"), [([], True), (["--share-pending-prefixes"], True), (["--no-share-pending-prefixes"], False)]
)
def test_share_pending_prefixes(flags: list[str], expected: bool) -> None:
    """On unless the operator says no."""
    config, info = resolve_config(make_parser().parse_args(["serve", "demo", *flags]))
    assert config.engine.share_pending_prefixes is expected
    assert info.settings["share_pending_prefixes"] is expected
