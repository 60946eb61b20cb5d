"""What the documents refer to exists (paths, classes, tests, pages, headings), and the tables of each are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quipu.web.auth.auth import ADMIN_ROUTES, ADMIN_TREES, OPEN_ROUTES, RECORD_ROUTES, SHOWN_ROUTES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "changes/README.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
FAULTS = "docs/internals/faults.md"
"""Its paths are relative to `tests/`; `test_faults_page.py` checks them."""

PRODUCT = ("actors", "kernels", "web")
FOLDERS = ("actors", "bench", "docs", "kernels", "scripts", "src", "tests", "typings", "web")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]*)*")
ARCHITECTURE, CHANGES = "docs/internals/architecture.md", "docs/internals/change/"
NAMING_CODE = (ARCHITECTURE, "docs/operate/limits.md", *(page for page in PAGES if page.startswith(CHANGES)))
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def read(page: str) -> str:
    """Return a page without its fenced code blocks, in which backticks and brackets have other meanings."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)


@cache
def sources() -> dict[Path, str]:
    """Return the product's sources. Reading all of them takes a tenth of a second."""
    return {path: path.read_text("utf-8") for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}


def test_index_lists_every_page() -> None:
    """Every page of `docs/`, decisions apart, is linked from its index, and in one of the three folders.

    The pages that say where to change what are linked from the architecture's page.
    """
    changes = {page.removeprefix("docs/internals/") for page in PAGES if page.startswith(CHANGES)}
    assert changes == {link for link in LINK.findall(read(ARCHITECTURE)) if link.startswith("change/")}
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    pages = {page for page in pages if not page.startswith(("decisions/", "internals/change/"))} - {"README.md"}
    assert pages <= set(LINK.findall(read("docs/README.md")))
    assert {page.partition("/")[0] for page in pages} == {"use", "operate", "internals"}


@cache
def anchors_of(page: str) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", read(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page != FAULTS])
def test_paths_exist(page: str) -> None:
    """Every path in backticks is a file or folder of the tree, or a pattern that matches one."""
    named = [name.partition("::")[0] for name in re.findall(r"`([^`]+)`", read(page))]
    paths = [name for name in named if PATH.fullmatch(name)]
    missing = [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("page", NAMING_CODE)
def test_classes_exist(page: str) -> None:
    """Every class in backticks exists in the product, with the attribute that follows it."""
    for name in re.findall(r"`([^`]+)`", read(page)):
        owner, _, attribute = name.partition(".")
        if not CLASS.fullmatch(owner):
            continue
        defined = re.compile(rf"^(?:class )?{owner}\b[(:]", flags=re.M)
        classes = [source for source in sources().values() if owner in source and defined.search(source)]
        assert classes, name
        assert not attribute or any(re.search(rf"^    {attribute}: ", source, flags=re.M) for source in classes), name


@pytest.mark.parametrize("page", NAMING_CODE)
def test_constants_exist(page: str) -> None:
    """Every `module.CONSTANT` in backticks is in a module of that name, every `MAX_…` in some module."""
    named = re.findall(r"`(?:([a-z_0-9]+)\.)?([A-Z]+(?:_[A-Z]+)+)`", read(page))
    missing = [
        f"{module}.{constant}"
        for module, constant in named
        if not any(
            constant in source and re.search(rf"^{constant}\b", source, flags=re.M)
            for path, source in sources().items()
            if module in ("", path.stem)
        )
    ]
    assert not missing


def test_invariants_are_tested() -> None:
    """Every test that `docs/internals/engine.md` names for an invariant is in the tests of the actors."""
    _, _, table = read("docs/internals/engine.md").partition("## Invariants and their tests")
    names = [name for name in re.findall(r"`(\w+)", table) if name not in FOLDERS]
    assert names
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "actors").rglob("*.py"))
    assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    """Every relative link points to a file, and its fragment to a heading of that file."""
    for target in LINK.findall(read(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), target
        if fragment:
            assert fragment in anchors_of(file.relative_to(ROOT).as_posix()), target


def misshapen_tables(text: str) -> Iterator[str]:
    """Yield the first row of each table in which a row has more or fewer cells, or which has no line under its head."""
    for table in re.findall(r"(?:^\|.*\n)+", re.sub(r"`[^`\n]*`|\\\\\|", "x", text), re.MULTILINE):
        rows = table.splitlines()
        if len({row.count("|") for row in rows}) > 1 or not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", "".join(rows[1:2])):
            yield rows[0]


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_their_rows(page: str) -> None:
    """Every row of a table has a line of its own, with as many cells as its head."""
    assert list(misshapen_tables(read(page))) == []


@pytest.mark.parametrize("table", ["| a | b |\n|---|---|\n| 1 | 2 | | 3 | 4 |\n", "| a | b | |---|---| | 1 | 2 |\n"])
def test_misshapen_tables_are_found(table: str) -> None:
    """A table whose lines were joined is found."""
    assert list(misshapen_tables(f"Text.\n\n{table}")) != []


def test_keys_page_names_every_route_with_a_rule_of_its_own() -> None:
    """The page about keys names each route that needs no key or an admin key, or that is for the own machine only."""
    page = (ROOT / "docs/operate/keys.md").read_text("utf-8")
    _, _, with_keys = page.partition("## Using a key")
    with_keys, _, without_keys = with_keys.partition("## Without keys")
    named, local = (set(re.findall(r"`(/[^`]*)`", part)) for part in (with_keys, without_keys))
    below = {"/ui/", "/ui/static/<path:name>", "/v1/usage/<request_id>/receipt"}
    assert (OPEN_ROUTES | ADMIN_ROUTES | set(ADMIN_TREES)) - below <= named
    shown = {route.replace("<", "{").replace(">", "}") for route in RECORD_ROUTES - below}
    assert shown | (ADMIN_ROUTES - SHOWN_ROUTES) | set(ADMIN_TREES) <= local
