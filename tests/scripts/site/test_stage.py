"""The site of the documents has every page of the repository, and a reference with everything that there is."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import quipu
from quipu.web.api.openapi.document import make_document
from scripts.site.check_links import broken_links
from scripts.site.http_pages import slug
from scripts.site.stage import FIRST_PAGE, places, stage
from tests.web.api.openapi.full_apps import full_app

WIRE_NAMES = Path(__file__).resolve().parents[2] / "wire_names.json"
TOCTREE = re.compile(r"^```\{toctree\}\n(?::.*\n)*\n((?:.+\n)*?)```$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "gone.md").write_text("# Gone")
    stage(folder)
    return folder


def below(site: Path, page: str) -> set[str]:
    """Return the pages that the navigation has at a page and below it."""
    found = {page}
    for tree in TOCTREE.findall((site / page).read_text("utf-8")):
        for entry in tree.split():
            found |= below(site, os.path.normpath(Path(page).parent / entry).removesuffix(".md") + ".md")
    return found


def test_navigation_has_every_page(site: Path) -> None:
    """Each page of the repository has a place, and each page of the site can be reached from the first."""
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.md") if "files" not in path.parts}
    assert below(site, FIRST_PAGE) == pages
    assert set(places().values()) <= pages


def test_no_heading_skips_a_level(site: Path) -> None:
    """A heading is at most one level below the one before it: else Sphinx refuses the page."""
    fences = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
    for path in site.rglob("*.md"):
        text = fences.sub("", path.read_text("utf-8"))
        levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
        assert levels[:1] in ([], [1]), path
        assert all(later <= level + 1 for level, later in pairwise(levels)), path


def test_http_pages_have_every_operation(site: Path) -> None:
    """Each operation of the OpenAPI document has a heading with its path, and each field of a body or schema a row."""
    document = make_document(full_app())
    pages = {path.stem: path.read_text("utf-8") for path in (site / "reference/http").glob("*.md")}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            page = pages[slug(operation["tags"][0])]
            _, _, told = page.partition(f"\n## `{method.upper()} {path}`\n")
            assert operation["summary"] in told.partition("\n## ")[0]
            assert f"`{method.upper()} {path}`" in pages["index"]
    for name, schema in document["components"]["schemas"].items():
        _, _, told = pages["schemas"].partition(f"\n## {name}\n")
        missing = [field for field in fields_of(schema) if f"`{field}` |" not in told.partition("\n## ")[0]]
        assert not missing, name


def fields_of(schema: Any) -> set[str]:
    kinds = [schema, *schema.get("anyOf", ())]
    return {field for kind in kinds for field in kind.get("properties", ())}


def test_bounds_and_defaults_are_shown(site: Path) -> None:
    """A field's row has its bounds, its default and whether it is required, as the document has them."""
    text = (site / "reference/http/generation.md").read_text("utf-8")
    _, _, told = text.partition("## `POST /v1/chat/completions`")
    told = told.partition("\n## ")[0]
    assert "| `n` | integer, at least 1, at most 128 | default `1` |" in told
    assert "array of ([ChatMessage](schemas.md#chatmessage)), at least 1 items | required |" in told
    assert "[ChatCompletion](schemas.md#chatcompletion)" in told and "events of" in told


def test_code_pages(site: Path) -> None:
    """Every exported name and command is in the reference."""
    read = {path.stem: path.read_text("utf-8") for path in (site / "reference").glob("*.md")}
    python = (site / "reference/python/index.md").read_text("utf-8")
    assert all(f":: quipu.{name}\n" in python for name in quipu.__all__)
    assert {"## quipu serve", "## quipu ledger verify-receipt", "## quipu bench latency"} <= set(
        read["commands"].splitlines()
    )
    assert "--kv-cache-memory" in read["commands"]


def test_metrics_page_has_every_metric(site: Path) -> None:
    """The page has what a real server exports, with everything turned on: what `test_wire_names.py` has found there."""
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \| \S", (site / "reference/metrics.md").read_text("utf-8"), re.MULTILINE
    )
    kinds = {name: kind for name, (kind, *_) in json.loads(WIRE_NAMES.read_text())["metrics"].items()}
    of_server = {f"{name}_total" if kind == "counter" else name: kind for name, kind in kinds.items()}
    assert dict(rows) == {name: kind for name, kind in of_server.items() if not name.endswith("_created")}


def test_links_follow_their_pages(site: Path) -> None:
    """Links to pages lead to their place in the site, links to other files to a copy of the file."""
    links = re.findall(r"\]\(([^)#\s]+)", "".join(path.read_text("utf-8") for path in site.rglob("architecture.md")))
    assert "benchmarks.md" in links
    text = (site / "operate/behind-a-proxy.md").read_text("utf-8")
    assert "(../files/deploy/nginx.conf)" in text and (site / "files/deploy/nginx.conf").is_file()
    assert "([Keys and tenants](keys.md#without-keys))" in text and "[keys](keys.md)" in text
    assert "(contributing.md" in (site / FIRST_PAGE).read_text("utf-8")


def test_old_pages_are_removed(site: Path) -> None:
    """What an earlier run wrote and this one does not is removed."""
    assert not (site / "gone.md").exists()


def test_broken_links_are_found(tmp_path: Path) -> None:
    """A link to a missing page, anchor or picture is found; links to hosts and whole links are not."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="here"></h1><a href="#here"></a><a href="sub/a.html#there"></a><a href="https://example.com/x"></a>'
    )
    (tmp_path / "sub/a.html").write_text('<a href="../index.html#gone"></a><a href="b.html"></a><img src="c.png">')
    assert sorted(broken_links(tmp_path)) == [
        "index.html: sub/a.html#there",
        "sub/a.html: ../index.html#gone",
        "sub/a.html: b.html",
        "sub/a.html: c.png",
    ]
