"""What a release makes of CHANGELOG.md."""

from __future__ import annotations

import pytest

from scripts.changelog import section, take_in_unreleased

HEAD = "# Changelog\n\n<!-- towncrier release notes start -->\n\n"
NEWS = "## 0.2.0 (2026-12-01)\n\n### Added\n\n- A thing.\n\n\n"
OLD = "## 0.1.0 (2026-11-01)\n\nThe first.\n"


def test_unreleased_part_joins_the_release() -> None:
    """What was written by hand for the version follows its news, under one heading."""
    text = take_in_unreleased(f"{HEAD}{NEWS}## 0.2.0 (unreleased)\n\n### Serving\n\n- More.\n\n{OLD}", "0.2.0")
    assert text == f"{HEAD}## 0.2.0 (2026-12-01)\n\n### Added\n\n- A thing.\n\n### Serving\n\n- More.\n\n{OLD}"


def test_release_without_news() -> None:
    """A part that was written by hand is enough; nothing at all is refused."""
    empty = "## 0.2.0 (2026-12-01)\n\nNo significant changes.\n\n\n"
    text = take_in_unreleased(f"{HEAD}{empty}## 0.2.0 (unreleased)\n\nFirst.\n", "0.2.0")
    assert text == f"{HEAD}## 0.2.0 (2026-12-01)\n\nFirst.\n"
    with pytest.raises(ValueError, match=r"no news of 0\.2\.0"):
        take_in_unreleased(f"{HEAD}{empty}{OLD}", "0.2.0")


def test_other_releases_stay() -> None:
    """Without a part written by hand, nothing is moved."""
    text = f"{HEAD}{NEWS}## 0.3.0 (unreleased)\n\nLater.\n\n{OLD}"
    assert take_in_unreleased(text, "0.2.0") == text


def test_section() -> None:
    """The text of one version is found, without the next; another version is refused."""
    assert section(f"{HEAD}{NEWS}{OLD}", "0.2.0") == "### Added\n\n- A thing.\n"
    assert section(f"{HEAD}{NEWS}{OLD}", "0.1.0") == "The first.\n"
    with pytest.raises(ValueError, match=r"does not have 0\.1"):
        section(f"{HEAD}{NEWS}{OLD}", "0.1")
