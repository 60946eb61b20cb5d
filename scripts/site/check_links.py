"""Check that every link within a built site leads to a page and an anchor: `python -m scripts.site.check_links HTML`.

Sphinx checks what it resolves itself. This reads the pages as a browser does, with the links of the theme, of raw HTML
and of what is generated. Links to other hosts are not followed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SOURCES = {"a": "href", "link": "href", "img": "src", "script": "src"}


class _Page(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        if (link := given.get(_SOURCES.get(tag, ""))) is not None:
            self.links.append(link)


def broken_links(site: Path) -> Iterator[str]:
    """Yield the links that lead nowhere, each after the page that it is on."""
    site = site.absolute()
    pages = {path: _Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            named = unquote(parts.path)
            target = (path.parent / named).resolve() if named else path
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                yield f"{path.relative_to(site)}: {link}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.site.check_links", description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    broken = sorted(set(broken_links(parser.parse_args().site)))
    print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
