"""Flags of the engine reach its configuration, and /server_info says so."""

from __future__ import annotations

import pytest

from quipu.web.cli import make_parser
from quipu.web.settings import resolve_config


@pytest.mark.parametrize(
    ("flags", "expected"), [([], True), (["--share-pending-prefixes"], True), (["--no-share-pending-prefixes"], False)]
)
def test_share_pending_prefixes(flags: list[str], expected: bool) -> None:
    """On unless the operator says no."""
    config, info = resolve_config(make_parser().parse_args(["serve", "demo", *flags]))
    assert config.engine.share_pending_prefixes is expected
    assert info.settings["share_pending_prefixes"] is expected


@pytest.mark.parametrize(("flags", "expected"), [([], 0.5), (["--max-pinned-share", "0"], 0.0)])
def test_max_pinned_share(flags: list[str], expected: float) -> None:
    """Half of the blocks unless the operator says otherwise."""
    config, info = resolve_config(make_parser().parse_args(["serve", "demo", *flags]))
    assert config.engine.max_pinned_share == info.settings["max_pinned_share"] == expected


@pytest.mark.parametrize("share", ["-0.1", "1.5", "half", "nan"])
def test_a_share_that_is_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is named."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", "--max-pinned-share", share])
    assert "--max-pinned-share" in capsys.readouterr().err
