"""The description that an index of packages shows: its links lead somewhere, though the index has no files."""

from __future__ import annotations

import re
import runpy

from tests.examples.page_blocks import ROOT

with_addresses = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["with_addresses"]
SOURCE = "https://code.example/quipu"


def test_links_lead_to_the_release() -> None:
    """Links to files and pictures get the address of the release; other links stay as they are."""
    text = "![a](docs/a.webp) [b](docs/b.md#c), `d`[e](#f)[g](https://h.example/i)"
    assert with_addresses(text, f"{SOURCE}/", "1.2.0") == (
        f"![a]({SOURCE}/raw/v1.2.0/docs/a.webp) [b]({SOURCE}/blob/v1.2.0/docs/b.md#c), `d`[e](#f)[g](https://h.example/i)"
    )


def test_readme_keeps_no_relative_link() -> None:
    """No link of README.md is left without an address."""
    links = re.findall(r"\]\(([^)]+)\)", with_addresses((ROOT / "README.md").read_text("utf-8"), SOURCE, "1.2.0"))
    assert len(links) > 50
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
