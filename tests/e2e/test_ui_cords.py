"""The cache explorer's colours and words: cords beside a path stay visible; cached branches are not called evicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browsers import PHONE, Browser, Keys
from tests.e2e.servers import Server, serving
from tests.e2e.test_ui_cache import CORD, branch, tree_answer
from tests.e2e.test_ui_keys import answer, fake

WIDE = (1440, 900)
CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].map((value, at) => (at < 3 ? value : value / 255));
};
const opacityOf = (e) => (e ? Number(getComputedStyle(e).opacity) * opacityOf(e.parentElement) : 1);
const over = ([r, g, b, a], under, opacity) =>
  [r, g, b].map((value, at) => a * opacity * value + (1 - a * opacity) * under[at]);
const light = (colour) => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = colour.map((value) => linear(value / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const card = rgba(getComputedStyle(document.querySelector('.card.cords')).backgroundColor);
const path = rgba(getComputedStyle(document.querySelector('.quipu .over:not(.edge)')).stroke);
const found = [];
for (const e of document.querySelectorAll('.cord .strand, .cord .link, .cord .knot, .cord .end, .quipu .edge')) {
  const kind = e.matches('.knot, .end') ? 'fill' : 'stroke';
  const ground = e.closest('.is-on-path') ? path : card;
  const colour = over(rgba(getComputedStyle(e)[kind]), ground, opacityOf(e));
  found.push([e.getAttribute('class') + ' ' + (e.parentNode.getAttribute('class') ?? ''), contrast(colour, ground)]);
}
return found;
"""


CHOOSE = """
for (const [name, value] of Object.entries(arguments[0])) {
  const field = document.querySelector(`select[name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event('change'));
}
"""


@pytest.fixture(scope="module")
def served(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("cords"), "--executor", "fake") as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cords_beside_a_path_stay_legible(served: Server, browser: Browser, scheme: str) -> None:
    """With a path drawn and an engine chosen, all cords have a contrast of 3:1, coloured by age, tier or engine."""
    top, now = "0" * 16, 1000.0
    engines = [{str(number): 32} for number in range(6)]
    tiers = ("device", "host", "disk", "remote")
    ages = (0, 30, 300, 2000, 9000)
    kinds = [(engines[at % 6], tiers[at % 4], now - ages[at % 5]) for at in range(12)]
    nodes = [branch(top, None, children=24, requests=24, path_tokens=32, last_used_at=now)]
    for number, (engine, tier, used) in enumerate([*kinds, *kinds]):
        fields = {"engines": engine, "tier": tier, "last_used_at": used, "path_tokens": 32 * (number < len(kinds))}
        nodes.append(branch(f"{number + 1:016x}", top, start=32, **fields))
    faked = tree_answer(nodes)
    faked["headers"]["Date"] = "Thu, 01 Jan 1970 00:16:40 GMT"
    for size in (PHONE, WIDE):
        browser.look(size=size, scheme=scheme)
        browser.open(served.url)
        fake(browser, {"/v1/cache/tree": faked, "/v1/cache/explain/": answer(prompts=[])})
        browser.run("location.hash = '#cache'")
        browser.find(CORD)
        browser.find("input[name=request]").send_keys("req-1", Keys.ENTER)
        browser.find(".quipu .over")
        for only, colour in (("", "age"), ("", "tier"), ("", "engine"), ("1", "engine")):
            browser.run(CHOOSE, {"engine": only, "colour": colour})
            browser.until(lambda c=colour: browser.all(f".cord[class*={c}-]"), colour)
            found = browser.run(CONTRASTS)
            assert len(found) > 50
            assert [one for one in found if one[1] < 3] == [], (only, colour)


def test_cached_is_not_called_evicted(served: Server, browser: Browser) -> None:
    """A cached branch is nowhere called evicted, even if it is the next to go or was evicted before; a gone one is."""
    top, gone = "0" * 16, "1" * 16
    nodes = [branch(top, None, path_tokens=32, children=1), branch(gone, top, start=32, cached_tokens=0)]
    explained = {
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "ended": {"reason": "evicted", "token": 0, "message": 0, "part": 0, "evicted": {"by": "req-9", "idle_s": 3}},
        "advice": [],
    }
    browser.open(served.url)
    fake(browser, {"/v1/cache/tree": tree_answer(nodes), "/v1/cache/explain/": answer(prompts=[explained])})
    browser.run("location.hash = '#cache'")
    browser.find("input[name=order]").click()
    browser.find("input[name=request]").send_keys("req-1", Keys.ENTER)
    browser.wait_text(".path-card", "all of them are cached now.")
    browser.wait_text(".path-card", "in message 1, part 1. What follows had been cached before")
    browser.run("document.querySelector(arguments[0]).focus()", f"[data-id='{top}']")
    browser.wait_text(".details dl div", "eviction order\nnumber 1")
    beside = browser.find(".beside").text
    assert "evicted" not in beside, beside
    assert "evicted" not in str(browser.find(f"[data-id='{top}']").get_attribute("aria-label"))
    browser.run("document.querySelector(arguments[0]).focus()", f"[data-id='{gone}']")
    browser.wait_text(".details dl div", "cached\nevicted")
    assert ", evicted," in str(browser.find(f"[data-id='{gone}']").get_attribute("aria-label"))


def test_focus_in_the_explorer(served: Server, browser: Browser) -> None:
    """When a pressed button vanishes, the focus moves to the first unfolded cord, or to the request's field."""
    nodes = [branch(f"{number:016x}", "0" * 16 if number else None, start=32 * bool(number)) for number in range(40)]
    nodes[0] |= {"children": 39, "last_request": "req-1", "path_tokens": 32}
    drawn = "return document.activeElement.dataset.id ?? document.activeElement.name"
    browser.open(served.url)
    fake(browser, {"/v1/cache/tree": tree_answer(nodes), "/v1/cache/explain/": answer(prompts=[])})
    browser.run("location.hash = '#cache'")
    browser.find(CORD)
    browser.run("document.querySelector('.is-more').focus()")
    browser.tab_to("e.textContent === 'Unfold them'")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.run(drawn) == nodes[25]["id"], "the focus on the first that was unfolded")
    browser.press(Keys.HOME)
    browser.until(lambda: browser.run(drawn) == nodes[0]["id"], "the focus on the first cord")
    browser.tab_to("e.textContent === 'Path of its last request'")
    browser.press(Keys.SPACE)
    browser.until(lambda: browser.run(drawn) == "request", "the focus on the field")
    browser.tab_to("e.textContent === 'remove'")
    browser.press(Keys.ENTER)
    browser.until(lambda: not browser.all(".path-card"), "the path is gone")
    assert browser.run(drawn) == "request"
