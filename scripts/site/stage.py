"""Lay out the pages of the documents as Sphinx reads them: `python -m scripts.site.stage FOLDER`.

The pages are written for GitHub, with links relative to their place in the repository, and are read from there. In the
folder, README.md is the first page, each section of `docs/README.md` has an index, which lists its pages in the same
order, and a reference is added that is made of the code. Links follow their page. A link to a file that is no page
becomes a download. What has not changed is not written, so that Sphinx reads it only once.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import attrs

from .code_pages import code_pages
from .http_pages import http_pages

ROOT = Path(__file__).resolve().parents[2]
CONTENTS = "docs/README.md"
ELSEWHERE = {
    "bench/README.md": "internals/benchmarks.md",
    "changes/README.md": "internals/news.md",
    ".github/SECURITY.md": "operate/security.md",
}
"""Pages outside of `docs/`, and where they are in the site."""
FIRST_PAGE = "index.md"
DOWNLOADS = "files"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE_NAMED = re.compile(r"\[[\w-]+\.md\](?=\(([^)#\s]+))")
"""A link whose text is the name of a page's file, as it is good to read in the repository."""
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_CARDS = {
    "use": "Send requests: chats, tools, structured output, batches, and what is counted.",
    "operate": "Run a server: install, models, memory, many engines, keys, ledger, alerts.",
    "reference/http": "Every endpoint with its fields, bounds, answers and errors.",
    "reference/python": "`LLM` and `AsyncLLM`: a model in your program.",
    "internals": "How it works inside, and where to change what.",
    "decisions": "Choices that closed a door, and why.",
}
"""The sections that the first page points to, and what is in them."""


@attrs.frozen
class Section:
    """A section of the index: a heading, a table of pages, and the folder that they are in."""

    title: str
    text: str

    @property
    def folder(self) -> str:
        return self.title.lower()

    def pages(self) -> list[str]:
        """Return the pages that it lists, then others in its folder, relative to `docs/`."""
        listed = [link for link in _LINK.findall(self.text) if link.endswith(".md")]
        present = sorted(path.relative_to(ROOT / "docs").as_posix() for path in _docs().glob(f"{self.folder}/*.md"))
        return list(dict.fromkeys([*listed, *present]))


def _docs() -> Path:
    return ROOT / "docs"


def sections() -> list[Section]:
    """Return the sections of the index."""
    _, *parts = re.split(r"^## ", (ROOT / CONTENTS).read_text("utf-8"), flags=re.MULTILINE)
    return [Section(title.strip(), text.strip()) for title, _, text in (part.partition("\n") for part in parts)]


def places() -> dict[str, str]:
    """Return where each page of the repository, and each folder of pages, is in the site."""
    found = {path.name: path.name.lower() for path in ROOT.glob("*.md")}
    found |= {"README.md": FIRST_PAGE, CONTENTS: FIRST_PAGE, **ELSEWHERE}
    for path in _docs().rglob("*.md"):
        page = path.relative_to(ROOT).as_posix()
        found.setdefault(page, page.removeprefix("docs/"))
    folders = {path.relative_to(ROOT).as_posix() for path in _docs().iterdir() if path.is_dir()}
    titles = {section.folder for section in sections()} | {"decisions"}
    return found | {folder: f"{folder.removeprefix('docs/')}/index.md" for folder in folders if folder[5:] in titles}


@attrs.frozen
class Site:
    """Writes a site's pages to a folder."""

    folder: Path
    places: Mapping[str, str] = attrs.field(factory=places)
    written: set[Path] = attrs.field(factory=set)

    def write(self, place: str, text: str | bytes) -> None:
        """Write a page or file unless it is there."""
        path, data = self.folder / place, text.encode() if isinstance(text, str) else text
        self.written.add(path)
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def page(self, page: str) -> str:
        """Return a page of the repository, with the links of its place in the site."""
        text = (ROOT / page).read_text("utf-8")
        return self.moved(text, page, self.places[page])

    def moved(self, text: str, page: str, place: str) -> str:
        """Return text that was written for a page of the repository as another place in the site needs it."""

        def change(part: str) -> str:
            part = _FILE_NAMED.sub(lambda link: f"[{short_title(_named(link[1], page))}]", part)
            return _LINK.sub(lambda link: self._link(link[1], page, place), part)

        return _outside_code(text, change)

    def _link(self, target: str, page: str, place: str) -> str:
        path, mark, fragment = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return f"]({target})"
        named = _named(path, page)
        if named in self.places:
            found = self.places[named]
            fragment = fragment if found != FIRST_PAGE or named == "README.md" else ""
        elif (ROOT / named).is_dir():
            found, fragment = f"{DOWNLOADS}/{named}.txt", ""
            self.write(found, "".join(f"{file.relative_to(ROOT)}\n" for file in _files(ROOT / named)))
            for file in _files(ROOT / named):
                self.write(f"{DOWNLOADS}/{file.relative_to(ROOT)}", file.read_bytes())
        elif named.endswith(".md"):
            raise ValueError(f"{page} links to {named}, which is no page of the site")
        else:
            found = named.removeprefix("docs/") if named.startswith("docs/") else f"{DOWNLOADS}/{named}"
            self.write(found, (ROOT / named).read_bytes())
        moved = os.path.relpath(found, PurePosixPath(place).parent)
        return f"]({moved}{mark if fragment else ''}{fragment})"

    def drop_others(self) -> None:
        """Remove what is in the folder from earlier and was not written now."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.written:
                path.unlink()


def _named(path: str, page: str) -> str:
    """Return the file of the repository that a page's link leads to."""
    return os.path.normpath(PurePosixPath(page).parent / path)


def short_title(page: str) -> str:
    """Return a page's title up to its first colon or question."""
    heading = (ROOT / page).read_text("utf-8").partition("\n")[0].removeprefix("# ")
    return re.split(r": |(?<=\?) ", heading)[0]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is neither in a code block nor in backticks."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def toctree(pages: list[str], *options: str) -> str:
    """Return the list of what is below a page in the navigation."""
    return "\n".join(["```{toctree}", *options, "", *pages, "```", ""])


def stage(folder: Path) -> None:
    """Write all pages of the site to a folder."""
    site = Site(folder)
    for page in site.places:
        if page.endswith(".md") and page not in ("README.md", CONTENTS):
            site.write(site.places[page], site.page(page) + below(page))
    for section in sections():
        place = f"{section.folder}/index.md"
        pages = [os.path.relpath(page, section.folder) for page in section.pages() if page.startswith(section.folder)]
        also = [os.path.relpath(page, section.folder) for page in ELSEWHERE.values() if page.startswith(section.folder)]
        body = site.moved(re.sub(r"^#(?=##)", "", section.text, flags=re.MULTILINE), CONTENTS, place)  # below its title
        site.write(place, f"# {section.title}\n\n{body}\n\n{toctree([*pages, *also], ':hidden:')}")
    decisions = sorted(path.name for path in _docs().glob("decisions/*.md"))
    told = "Decisions that closed a door: the context, the choice, what was measured, and what would change our mind."
    site.write("decisions/index.md", f"# Decisions\n\n{told}\n\n{toctree(decisions, ':maxdepth: 1')}")
    for place, text in {**http_pages(), **code_pages()}.items():
        site.write(f"reference/{place}", text)
    site.write(FIRST_PAGE, first_page(site))
    site.drop_others()


def below(page: str) -> str:
    """Return the list of pages that only this page leads to."""
    if page != "docs/internals/architecture.md":
        return ""
    links = [link for link in _LINK.findall((ROOT / page).read_text("utf-8")) if link.startswith("change/")]
    return "\n" + toctree(links, ":hidden:")


def first_page(site: Site) -> str:
    """Return README.md with cards for the sections before its second heading."""
    text = site.page("README.md")
    head, mark, rest = text.partition("\n## ")
    cards = "".join(f"- **[{_name(folder)}]({folder}/index.md)**\n\n  {told}\n" for folder, told in _CARDS.items())
    folders = [section.folder for section in sections()]
    also = sorted(place for page, place in site.places.items() if "/" not in page and page != "README.md")
    order = [*(f"{folder}/index" for folder in [*folders, "decisions"]), *also]
    order.insert(order.index("internals/index"), "reference/index")
    return f"{head}\n\n{{.cards}}\n{cards}{mark}{rest}\n\n{toctree(order, ':hidden:')}"


def _name(folder: str) -> str:
    return {"reference/http": "HTTP API", "reference/python": "Python API"}.get(folder, folder.capitalize())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.site.stage", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pages are written")
    stage(parser.parse_args().folder.absolute())


if __name__ == "__main__":
    main()
