"""The cache explorer in a browser: it shows the endpoint's branches, by mouse and keyboard, for each key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from selenium.webdriver.support.ui import Select

from tests.browsers import DESKTOP, PHONE, Browser, Keys
from tests.e2e.prompts import text_prompt
from tests.e2e.servers import PATIENCE_S, Server, serving, write_keys
from tests.e2e.test_ui_keys import MARKUP, answer, assert_only_text, fake

KEYS = {"acme": "sk-quipu-of-acme", "bolt": "sk-quipu-of-bolt", "ops": "sk-quipu-of-ops"}
SYSTEM = {"role": "system", "content": text_prompt("system", 60)}
CORD = "[role=treeitem]"


def post(server: Server, path: str, body: dict[str, Any], tenant: str) -> str:
    """Send a request and return its id."""
    done = httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": KEYS[tenant]}, timeout=PATIENCE_S)
    assert done.status_code == 200, done.text
    return done.headers["x-quipu-request-id"]


def chat(server: Server, *texts: str, tenant: str = "acme") -> str:
    messages = [SYSTEM, *({"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts))]
    return post(server, "/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": 2}, tenant)


def tree(server: Server, tenant: str = "acme", **parameters: object) -> dict[str, Any]:
    query = {"depth": 12, "limit": 400, **parameters}
    headers = {"x-api-key": KEYS[tenant]}
    answer = httpx.get(f"{server.url}/v1/cache/tree", params=query, headers=headers, timeout=PATIENCE_S)
    found: dict[str, Any] = answer.json()
    return found


def top_of(shown: dict[str, Any]) -> dict[str, Any]:
    """Return the branch with the most requests among those at the start of a prompt."""
    tops: list[dict[str, Any]] = [node for node in shown["nodes"] if node["parent"] is None]
    return max(tops, key=lambda node: node["requests"])


@pytest.fixture(scope="module")
def keyed(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two tenants and an admin; a prefix is pinned."""
    folder = tmp_path_factory.mktemp("keyed")
    write_keys(folder / "keys.json", **KEYS)
    flags = ["--executor", "fake", "--fake-step-seconds", "0.001"]
    with serving(folder / "served", *flags, "--key-file", str(folder / "keys.json")) as server:
        for name in ("one", "two", "three"):
            chat(server, text_prompt(name, 30))
        chat(server, text_prompt("one", 30), "yes", text_prompt("more", 30))
        chat(server, text_prompt("one", 30), tenant="bolt")
        system = {"type": "text", "text": text_prompt("pinned", 60), "cache_control": {"type": "ephemeral"}}
        said = [{"role": "user", "content": text_prompt("pinning", 10)}]
        post(server, "/v1/messages", {"model": "demo", "max_tokens": 2, "system": [system], "messages": said}, "acme")
        yield server


def ids_of(browser: Browser, selector: str = CORD) -> set[str | None]:
    return {cord.get_attribute("data-id") for cord in browser.all(selector)}


def choose(browser: Browser, name: str, value: str) -> None:
    Select(browser.find(f"select[name={name}]")).select_by_visible_text(value)


def chosen(browser: Browser) -> str | None:
    """Return the id of the branch that the keyboard is on."""
    found: str | None = browser.run("return document.activeElement.dataset.id || null")
    return found


def test_cords_and_knots(keyed: Server, browser: Browser) -> None:
    """Every branch is a cord; a knot tells how many requests passed and branches follow, and where these diverge."""
    shown = tree(keyed)
    top = top_of(shown)
    children = [node for node in shown["nodes"] if node["parent"] == top["id"]]
    browser.open(keyed.url, "cache", key=KEYS["acme"])
    browser.find(CORD)
    ids = ids_of(browser)
    assert ids == {node["id"] for node in shown["nodes"]}
    assert len(browser.all(".quipu .knot")) >= 2 and browser.all(".quipu .pin")
    browser.find(f"[data-id='{top['id']}'] .knot").click()
    exact = min(child["diverged"]["token"] for child in children if child["diverged"]["exact"])
    browser.wait_text(".about", f"{top['requests']} requests came by. {len(children)} branches go on.")
    browser.wait_text(".about", f"They differ from token {exact} on, in message 2 (user).")
    browser.wait_text(".details dl div", f"tokens\n{top['tokens']}")
    browser.wait_text(".details li", "engine ")
    label = browser.find(f"[data-id='{top['id']}']").get_attribute("aria-label")
    assert label is not None and label.startswith(f"{top['tokens']} tokens from token 0, {top['requests']} requests")
    pinned = next(node for node in shown["nodes"] if node["pinned_until"])
    browser.run("document.querySelector(arguments[0]).focus()", f"[data-id='{pinned['id']}']")
    browser.wait_text(".details dl div", "not while pinned")


def test_path_of_a_request(keyed: Server, browser: Browser) -> None:
    """A request's path is drawn over the tree, with its explanation; its id is never in the page's URL."""
    request_id = chat(keyed, text_prompt("path", 30))
    explained = httpx.get(
        f"{keyed.url}/v1/cache/explain/{request_id}", headers={"x-api-key": KEYS["acme"]}, timeout=PATIENCE_S
    ).json()
    (prompt,) = explained["prompts"]
    browser.open(keyed.url, "cache", key=KEYS["acme"])
    browser.find("input[name=request]").send_keys(request_id, Keys.ENTER)
    browser.wait_text(
        ".path-card", f"{prompt['prompt_tokens'] // 16 * 16} tokens in whole blocks; all of them are cached"
    )
    browser.wait_text(".path-card", f"{prompt['cached_tokens']} came from cache")
    browser.wait_text(".path-card", f"at token {prompt['ended']['token']}, in message 2 (user)")
    on_path = {node["id"] for node in tree(keyed, request=request_id)["nodes"] if node["path_tokens"]}
    assert ids_of(browser, ".is-on-path") == on_path
    assert len(browser.all(".quipu .over")) >= len(on_path) >= 2
    assert request_id not in browser.run("return location.href")
    browser.button("remove").click()
    browser.until(lambda: not browser.all(".is-on-path"), "the path is gone")
    browser.find("input[name=request]").send_keys("req-unknown", Keys.ENTER)
    browser.wait_text(".error", "No path of the request req-unknown is known")
    assert browser.all(CORD)


def test_order_of_eviction(keyed: Server, browser: Browser) -> None:
    """Numbers show the order of eviction, and a list leads to the branches."""
    browser.open(keyed.url, "cache", key=KEYS["ops"])
    browser.find("input[name=order]").click()
    order = tree(keyed, "ops")["eviction_order"]
    first = browser.find(f"[data-id='{order[0]}'] .number:not(.tokens)")
    assert first.text == "1"
    browser.wait_text("h2", "Next in the order of eviction")
    browser.find("ol button").click()
    browser.until(lambda: chosen(browser) == order[0], "the first is chosen")


def test_engines_and_tiers(keyed: Server, browser: Browser) -> None:
    """Cords of other engines fade, cords can be coloured by engine or tier, and evicted ones are dotted."""
    top, first, second, third = (digit * 16 for digit in "0123")
    nodes = [
        branch(top, None, engines={"0": 32, "7": 16}, children=5, requests=9),
        branch(first, top, start=32, engines={"7": 32}),
        branch(second, top, start=32, engines={"0": 16}, cached_tokens=16),
        branch(third, top, start=32, tier="host", in_use=True),
    ]
    browser.open(keyed.url, key=KEYS["acme"])
    fake(browser, {"/v1/cache/tree": tree_answer(nodes)})
    browser.find("nav a[href='#cache']").click()
    browser.find(CORD)
    browser.wait_text(".about", "9 requests came by. 3 branches go on. 2 others have been evicted.")
    choose(browser, "engine", "7")
    browser.until(lambda: ids_of(browser, ".is-elsewhere") == {second, third}, "cords of engine 0 alone fade")
    choose(browser, "colour", "engine")
    browser.until(
        lambda: ids_of(browser, ".cord.engine-0") == {top, second, third},
        "cords have the colour of the engine with most of them",
    )
    assert ids_of(browser, ".cord.engine-1") == {first} and len(browser.all(".second.engine-1")) == 1
    choose(browser, "colour", "tier")
    browser.until(lambda: ids_of(browser, ".cord.tier-host") == {third}, "the colours of tiers")
    assert (
        len(browser.all(".cord .gone")) == len(browser.all(".cord .ring")) == len(browser.all(".cord .tier-mark")) == 1
    )
    browser.wait_text(".legend", "host")


def is_other(browser: Browser, than: str | None) -> bool:
    return chosen(browser) not in (None, than)


def test_keyboard(keyed: Server, browser: Browser) -> None:
    """Arrows move between knots, Enter shows the branches below one, Escape goes back up; on phones, too."""
    top = top_of(tree(keyed))
    below = [node["id"] for node in tree(keyed, **{"from": top["id"]})["nodes"]]
    for size, (out, aside, back) in (
        (DESKTOP, (Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_UP)),
        (PHONE, (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT)),
    ):
        browser.look(size=size, scheme="dark")
        browser.open(keyed.url, "cache", key=KEYS["acme"])
        browser.find(CORD)
        browser.tab_to("e.getAttribute('role') === 'treeitem'")
        browser.press(Keys.HOME)
        assert chosen(browser) == top["id"]
        browser.press(out)
        browser.until(lambda: chosen(browser) in below, "a cord below")
        first = chosen(browser)
        browser.press(aside)
        browser.until(partial(is_other, browser, first), "the one beside it")
        browser.press(back)
        browser.until(lambda: chosen(browser) == top["id"], "back")
        browser.press(Keys.ENTER)
        browser.wait_text(".steps", f"behind token {top['tokens']}")
        browser.until(lambda: ids_of(browser) == set(below), "the rest")
        browser.until(lambda: chosen(browser) in below, "the focus goes along")
        browser.press(Keys.ESCAPE)
        browser.until(lambda: chosen(browser) == top["id"], "up again")
        assert not browser.all(".steps")


def test_what_a_key_sees(keyed: Server, browser: Browser) -> None:
    """A tenant sees its own branches; an admin sees those of all tenants, by name, or of a chosen one."""
    browser.open(keyed.url, "cache", key=KEYS["bolt"])
    browser.find(CORD)
    ids = ids_of(browser)
    assert ids == {node["id"] for node in tree(keyed, "bolt")["nodes"]}
    assert not browser.all("input[name=tenant]") and not browser.all(".tenant")
    browser.open(keyed.url, "cache", key=KEYS["ops"])
    browser.until(lambda: {name.text for name in browser.all(".tenant")} == {"acme", "bolt"}, "both tenants")
    browser.find("input[name=tenant]").send_keys("bolt", Keys.ENTER)
    browser.until(lambda: ids_of(browser) == ids, "only bolt's")


def test_next_key_sees_nothing_of_the_last(keyed: Server, browser: Browser) -> None:
    """When a key is refused, what was read with it is forgotten: the page starts empty for the next key."""
    browser.open(keyed.url, "cache", key=KEYS["acme"])
    browser.find(CORD)
    browser.run("sessionStorage['quipu.key'] = 'sk-quipu-revoked'")
    browser.find("#key")
    browser.run("const real = fetch; fetch = (url, o) => (/tree/.test(url) ? new Promise(() => {}) : real(url, o))")
    browser.find("#key").send_keys(KEYS["bolt"], Keys.ENTER)
    browser.wait_text("main", "loading…")
    assert not browser.all(CORD)


def test_folded_branches(keyed: Server, browser: Browser) -> None:
    """If a knot has very many branches, those with the most requests are drawn, and the others on demand."""
    nodes = [branch(f"{number:016x}", "0" * 16 if number else None, start=32 * bool(number)) for number in range(60)]
    nodes[0]["children"] = 80
    browser.open(keyed.url, key=KEYS["acme"])
    fake(browser, {"/v1/cache/tree": tree_answer(nodes, has_more=True)})
    browser.find("nav a[href='#cache']").click()
    browser.until(lambda: len(browser.all(CORD)) == 26, "24 of them, their knot and what is folded")
    assert len(browser.all(".frayed")) >= 1
    browser.wait_text(".number", "+35")
    browser.run("document.querySelector('.is-more').focus()")
    browser.press(Keys.ENTER)
    browser.until(lambda: len(browser.all(CORD)) == 60, "all of them")
    browser.wait_text(".cords .note", "There are more")


def test_nothing_cached(keyed: Server, browser: Browser) -> None:
    """A cache without blocks says so."""
    browser.open(keyed.url, key=KEYS["acme"])
    fake(browser, {"/v1/cache/tree": tree_answer([])})
    browser.find("nav a[href='#cache']").click()
    browser.wait_text(".nothing", "No block is cached yet.")


def branch(branch_id: str, parent: str | None, start: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "id": branch_id,
        "parent": parent,
        "tenant": "acme",
        "start": start,
        "tokens": 32,
        "cached_tokens": 32,
        "engines": {"0": 32},
        "tier": "device",
        "requests": 2,
        "children": 0,
        "created_at": 0,
        "last_used_at": 0,
        "pinned_until": None,
        "in_use": False,
        "last_request": None,
        "diverged": None,
        "path_tokens": 0,
        **fields,
    }


def tree_answer(nodes: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    order = [node["id"] for node in nodes]
    return answer(
        object="cache.tree", block_size=16, nodes=nodes, **{"eviction_order": order, "has_more": False, **fields}
    )


def test_markup_is_text(keyed: Server, browser: Browser) -> None:
    """Markup in tenants, ids, engines, tiers, roles, requests, explanations and errors is shown as it is."""
    diverged = {"token": 3, "exact": True, "role": MARKUP, "message": 1, "part": MARKUP}
    names = {"tenant": MARKUP, "tier": MARKUP, "engines": {MARKUP: 16, "1": 8}, "last_request": MARKUP}
    flags = {"in_use": True, "pinned_until": 9e9, "diverged": diverged, "path_tokens": 16}
    nodes = [
        branch(MARKUP, None, children=3, **names, **flags),
        branch("a" * 16, MARKUP, **names, diverged=diverged),
        branch("b" * 16, MARKUP, **{**names, "cached_tokens": 8}, diverged=diverged),
        branch("c" * 16, None, tenant=f"{MARKUP}!"),
    ]
    explained = {
        "prompt_tokens": 20,
        "cached_tokens": 3,
        "ended": {"reason": MARKUP, "token": 3, "message": 0, "part": MARKUP, "diverged_from": MARKUP},
        "advice": [{"code": MARKUP, "message": 0, "token": 1, "text": MARKUP}],
    }
    browser.open(keyed.url, key=KEYS["ops"])
    fake(browser, {"/v1/cache/tree": tree_answer(nodes), "/v1/cache/explain/": answer(prompts=[explained])})
    browser.find("nav a[href='#cache']").click()
    browser.find(CORD)
    browser.find("input[name=order]").click()
    browser.find("input[name=request]").send_keys(MARKUP, Keys.ENTER)
    for place in (
        ".path-card code",
        ".path-card li",
        ".path-card p",
        ".details li",
        ".details .wraps",
        ".about",
        ".goes-on small",
    ):
        browser.wait_text(place, MARKUP)
    choose(browser, "colour", "tier")
    choose(browser, "colour", "engine")
    browser.wait_text("select[name=engine]", MARKUP)
    browser.wait_text(".legend", MARKUP)
    assert_only_text(browser)
    refused = {
        "status": 400,
        "headers": {},
        "body": json.dumps({"error": {"message": MARKUP, "code": 1}}),
    }
    browser.open(keyed.url, key=KEYS["ops"])
    fake(browser, {"/v1/cache/tree": refused})
    browser.find("nav a[href='#cache']").click()
    browser.wait_text(".error", MARKUP)
    assert_only_text(browser)
