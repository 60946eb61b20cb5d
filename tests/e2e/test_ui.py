"""The pages at `/ui` in a real browser, on a server of the demo model: by mouse and keyboard, on phone and desktop."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import DESKTOP, PHONE, Browser, Keys
from tests.deploy.pictures import ALERTS, PICTURE
from tests.e2e.servers import Server, eventually
from tests.e2e.ui_pictures import MAX_BYTES, SYSTEM, ask, demo_with_history, take_all, tell

PAGES = {"playground": "#draft", "cache": ".quipu .knot", "live": ".spark", "usage": ".bars"}
"""The pages, each with a selector of something that is there once it has loaded."""


@pytest.fixture(scope="module")
def demo(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model; not started without a browser."""
    with demo_with_history(tmp_path_factory.mktemp("demo")) as server:
        yield server


def fact(browser: Browser, pattern: str) -> list[int]:
    """Return the numbers of the last answer's bar."""
    found = re.search(pattern, browser.all(".promptbar .facts")[-1].text)
    assert found, browser.all(".promptbar .facts")[-1].text
    return [int(number.replace(",", "")) for number in found.groups()]


def chats(server: Server) -> list[dict[str, Any]]:
    """Return the log lines of all chat completions."""
    return [line for line in server.events("request.done") if line["endpoint"] == "/v1/chat/completions"]


def test_playground(demo: Server, browser: Browser) -> None:
    """A chat is streamed; the bar has the numbers of the usage record; "why not more?" answers in words."""
    browser.open(demo.url)
    browser.paste(".settings textarea", SYSTEM)
    ask(browser, "Where does Mira live?")
    browser.wait_text(".turn.assistant .text", "Mira lives in Ashford.")
    ask(browser, "What does Otto keep?")
    browser.wait_text(".turn.assistant .text", "Otto keeps an owl.")
    (prompt, cached, computed) = fact(browser, r"([\d,]+) prompt tokens\s+([\d,]+) from cache.*?\s([\d,]+) computed")
    assert cached > 0 and cached + computed == prompt
    assert "to first token" in browser.all(".facts")[-1].text
    eventually(
        lambda: (prompt, cached) in [(line["prompt_tokens"], line["cached_tokens"]) for line in chats(demo)],
        "the log has the bar's numbers",
    )
    bar = browser.all(".strip.sources")[-1]
    widths = [span.size["width"] for span in bar.find_elements("css selector", "span")]
    assert widths[0] / sum(widths) == pytest.approx(cached / prompt, abs=0.01)


def test_explanation_and_cache(demo: Server, browser: Browser) -> None:
    """Bar and "why not more?" say what the server explains; "show in the cache" leads to the prompt's path."""
    num_before = len(chats(demo))
    browser.open(demo.url)
    browser.paste(".settings textarea", SYSTEM)
    ask(browser, "Where does Mira live?")
    ask(browser, "Where does Otto live?")
    browser.all(".turn.user button.edit")[0].click()
    browser.find(".editor textarea").send_keys(" Please say where.")
    browser.button("Send as a branch").click()
    browser.until(lambda: len(browser.all(".promptbar")) == 1 and browser.all(".strip.messages"), "another answer")
    lines = eventually(lambda: found if len(found := chats(demo)[num_before:]) == 3 else None, "all three are logged")
    assert lines is not None
    request_id = lines[-1]["request_id"]
    explained = demo.get(f"/v1/cache/explain/{request_id}").json()
    (prompt,) = explained["prompts"]
    assert prompt["ended"]["reason"] == "diverged" and prompt["ended"]["message"] == 1
    strip = browser.all(".strip.messages")[-1].find_elements("css selector", "span")
    assert [part.text for part in strip][:2] == ["system", "user"]
    titles = [str(part.get_attribute("title")) for part in browser.all(".strip.sources span")]
    sources = [(block["source"], block["start"], block["end"]) for block in prompt["blocks"]]
    names = {"reused": "from cache", "copied": "copied", "computed": "computed"}
    assert titles == [f"{names[source]}: tokens {start:,} to {end:,}" for source, start, end in sources]
    browser.button("why not more?").click()
    browser.wait_text(".why", f"The cached part ends at token {prompt['ended']['token']:,}, in message 2 (user).")
    browser.wait_text(".why", f"Request {prompt['ended']['diverged_from']} continued differently there.")
    browser.button("show in the cache").click()
    browser.wait_text("h1", "Cache")
    tokens = prompt["prompt_tokens"] // 16 * 16
    browser.wait_text(".path-card", f"{tokens:,} tokens in whole blocks; all of them are cached now.")
    browser.until(lambda: browser.all(".cord.is-selected.is-on-path"), "the end of the path is chosen")
    assert request_id not in browser.run("return location.href")
    browser.driver.back()
    browser.find("#draft")


def test_edit_and_branches(demo: Server, browser: Browser) -> None:
    """An edited message and a second answer are branches; the earlier ones stay, and what is sent is what is shown."""
    browser.open(demo.url)
    ask(browser, "What is a quipu?")
    ask(browser, "What are you?")
    browser.all(".turn.user button.edit")[0].click()
    editor = browser.find(".editor textarea")
    assert editor.get_attribute("value") == "What is a quipu?"
    editor.send_keys(Keys.END, " Say it again.")
    browser.button("Send as a branch").click()
    browser.until(lambda: len(browser.all(".promptbar")) == 1 and len(browser.all(".turn")) == 2, "a new branch")
    browser.wait_text(".turn.user .text", "What is a quipu? Say it again.")
    browser.find("button[aria-label='Previous branch']").click()
    browser.until(lambda: len(browser.all(".turn")) == 4, "the first branch with both questions")
    texts = [turn.text for turn in browser.all(".turn.user .text")]
    assert texts == ["What is a quipu?", "What are you?"]
    browser.button("answer again").click()
    browser.wait_text(".branches", "2 of 2")
    browser.until(lambda: len(browser.all(".turn")) == 2, "the second answer is chosen")


def test_keyboard(demo: Server, browser: Browser) -> None:
    """Everything can be reached and done by keyboard: a chat, the explanation, an edit, colours, pages."""
    browser.open(demo.url)
    browser.find("#draft")
    browser.tab_to("e.classList.contains('skip')")
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    browser.tab_to("e.id === 'draft'")
    browser.press("What is", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "a quipu?")
    assert browser.find("#draft").get_attribute("value") == "What is\na quipu?"
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.all(".promptbar"), "the answer")
    browser.tab_to("e.textContent === 'why not more?'")
    browser.press(Keys.ENTER)
    browser.find(".why")
    browser.tab_to("e.textContent === 'edit'")
    browser.press(Keys.ENTER)
    browser.tab_to("e.getAttribute('aria-label') === 'Edited message'")
    browser.press("!")
    browser.tab_to("e.textContent === 'Send as a branch'")
    browser.press(Keys.SPACE)
    browser.wait_text(".branches", "2 of 2")
    browser.until(lambda: browser.all(".promptbar"), "the second answer")
    browser.tab_to("e.classList.contains('theme')")
    browser.press(Keys.ENTER)
    assert browser.run("return document.documentElement.dataset.theme") == "light"
    for page in ("cache", "live", "usage"):
        browser.tab_to(f"e.getAttribute('href') === '#{page}'")
        browser.press(Keys.ENTER)
        browser.wait_text("h1", page.capitalize())
    browser.tab_to("e.type === 'checkbox'")
    browser.press(Keys.SPACE)
    browser.wait_text("h2", "All together")


def test_live(demo: Server, browser: Browser) -> None:
    """The live page has the server's own numbers: requests, queue, pool, steps, engines, event-loop lag."""
    browser.open(demo.url, "live")
    ended = int(demo.metrics()['requests_total{outcome="finished"}'])
    browser.wait_text("dl div", f"requests finished\n{ended}")
    titles = [title.text for title in browser.all("h2")]
    assert {"Waiting in the queue", "Steps per second", "Event-loop lag", "Pool of KV blocks", "Engines"} <= set(titles)
    demo.complete("A cord.").raise_for_status()
    browser.wait_text("dl div", f"requests finished\n{ended + 1}")
    row = browser.find("table tbody tr").text.split()
    assert row[:3] == ["0", "ready", "mixed"]
    free = int(demo.metrics()['kv_blocks{state="free"}'])
    browser.wait_text(".facts span", f"free {free:,}")


def test_usage(demo: Server, browser: Browser) -> None:
    """The usage page shows the ledger's sums, their cost and an export, grouped as chosen."""
    browser.open(demo.url, "usage")
    browser.find("[data-figure=Requests]")
    shown = demo.get("/ui/usage?by=model").json()["total"]
    assert browser.find("[data-figure='Prompt tokens'] .big").text == f"{shown['prompt_tokens']:,}"
    assert browser.find("[data-figure=Cost] .big").text == f"{shown['cost']['EUR']} EUR"
    browser.find("fieldset label:last-of-type input").click()
    browser.wait_text("h2", "By model, tenant")
    tenants = {row.text.split()[1] for row in browser.all(".card table tbody tr") if row.is_displayed()}
    assert {"acme", "bolt", "default"} == tenants
    assert len([bar for bar in browser.all(".bars rect.is-reused") if bar.size["height"]]) >= 20
    browser.run(
        "window.files = []; const make = URL.createObjectURL; "
        "URL.createObjectURL = (blob) => { blob.text().then((text) => files.push(text)); return make(blob); }"
    )
    browser.button("Export CSV").click()
    exported = browser.until(lambda: browser.run("return window.files[0]"), "the export").splitlines()
    assert exported[0].startswith("start,model,tenant,parent,requests,prompt_tokens,cached_tokens")
    assert exported[0].endswith(",cost_EUR")
    assert sum(int(line.split(",")[4]) for line in exported[1:]) == shown["requests"]


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_widths_and_colours(demo: Server, browser: Browser, size: tuple[int, int]) -> None:
    """No page is wider than its window, and each follows the system's colour scheme until another is chosen."""
    grounds = set()
    for number in range(2):
        tell(demo, number)
    for scheme in ("light", "dark"):
        browser.look(size=size, scheme=scheme)
        for page in PAGES:
            browser.open(demo.url, page)
            browser.find(PAGES[page])
            width = "return [document.documentElement.scrollWidth, window.innerWidth]"
            assert browser.run(width) == [size[0], size[0]], page
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    browser.find("button.theme").click()  # from the system's, which is dark, to light
    assert browser.run("return getComputedStyle(document.body).backgroundColor") in grounds
    assert browser.find("button.theme").get_attribute("aria-label") == "Colours: light. Change to dark"


def test_nothing_inline_runs(demo: Server, browser: Browser) -> None:
    """The policy is in force: a script, a style or markup that got into a page would do nothing."""
    browser.open(demo.url)
    browser.find("#draft")
    refusals = browser.run(
        """
        const attempts = [
            () => (document.createElement("script").textContent = "window.owned = 1"),
            () => (document.body.innerHTML = "<b>x</b>"),
            () => document.createElement("img").setAttribute("onerror", "window.owned = 1"),
        ];
        const style = document.createElement("style");
        style.textContent = "body { display: none }";
        document.head.append(style);
        return attempts.map((attempt) => { try { attempt(); return null } catch (error) { return error.name } });
        """
    )
    assert refusals == ["TypeError"] * 3
    assert browser.run("return getComputedStyle(document.body).display") == "block"
    assert browser.run("return window.owned") is None
    assert any("Content Security Policy" in line for line in browser.complaints())


def test_pictures(demo: Server, browser: Browser, tmp_path: Path) -> None:
    """The pages' pictures can be taken again; both the new ones and those in the repository are small."""
    fresh = take_all(browser, demo, tmp_path / "pictures")
    kept = list(Path(__file__).resolve().parents[2].joinpath("docs", "pictures").iterdir())
    assert {path.name for path in fresh} == {path.name for path in kept} - {PICTURE.name, ALERTS.name}
    assert all(0 < path.stat().st_size <= MAX_BYTES for path in [*fresh, *kept])


def test_pages_say_what_went_wrong(demo: Server, browser: Browser) -> None:
    """A refused request is shown under its message, with the server's reason, and the chat goes on."""
    browser.open(demo.url)
    browser.find("input[name=top_p]").send_keys("7")
    browser.find("#draft").send_keys("What are you?", Keys.ENTER)
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "top_p": 7}
    reason = json.loads(demo.post("/v1/chat/completions", body).text)["error"]["message"]
    browser.wait_text(".turn.assistant .error", reason)
    browser.find("input[name=top_p]").send_keys(Keys.BACKSPACE)
    browser.button("answer again").click()
    browser.until(lambda: browser.all(".promptbar"), "an answer")
