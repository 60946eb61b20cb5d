"""CHANGELOG.md at a release: `python -m scripts.changelog VERSION` prints what it says of a version.

Used by `release.py`, and by the workflow that publishes, for the page of the release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
NOTHING = "No significant changes.\n"
"""What towncrier writes if there is no news."""


def take_in_unreleased(text: str, version: str) -> str:
    """Move what stands under `## VERSION (unreleased)` into the section that towncrier has written for this version.

    Before there were files in `changes/`, changes were written there by hand. Raises ValueError if the changelog then
    says nothing of the version.
    """
    parts = re.split(r"(?m)^(?=## )", text)
    written, by_hand = f"## {version} (", f"## {version} (unreleased)\n"
    (new,) = (number for number, part in enumerate(parts) if part.startswith(written) and not part.startswith(by_hand))
    for old, part in enumerate(parts):
        if part.startswith(by_hand):
            head, _, news = parts[new].replace(NOTHING, "").rstrip("\n").partition("\n")
            parts[new] = "\n\n".join(
                each for each in (head, news.strip("\n"), part.removeprefix(by_hand).strip()) if each
            )
            parts[new] += "\n\n"
            del parts[old]
            break
    if NOTHING in parts[new]:
        raise ValueError(f"there is no news of {version}: no files in changes/, and nothing unreleased in CHANGELOG.md")
    return "".join(parts).rstrip("\n") + "\n"


def section(text: str, version: str) -> str:
    """Return what the changelog says of a version, without its heading. Raises ValueError if that is nothing."""
    found = re.search(rf"(?ms)^## {re.escape(version)} \([^\n]*\n+(.*?)(?=^## |\Z)", text)
    if found is None:
        raise ValueError(f"CHANGELOG.md does not have {version}")
    return found[1].rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(section(CHANGELOG.read_text("utf-8"), sys.argv[1]))
