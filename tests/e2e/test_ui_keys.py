"""The pages on a server with keys: what each key sees, how a key is kept, and that names and values stay text.

The server runs the fake executor; responses that it cannot produce (reasoning, calls, explanations) come from a fake
`fetch` in the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quipu.web.auth.key_file import hash_key
from tests.browsers import DESKTOP, Browser, Keys
from tests.e2e.servers import Server, serving

ACME, BOLT, OPS = "sk-quipu-of-acme", "sk-quipu-of-bolt", "sk-quipu-of-ops"
MARKUP = """<img src=x onerror="document.title='owned'"><b class=owned>x</b>&amp;"""
ANSWER = "/v1/chat/completions"
FAKED = """
const [answers] = arguments;
const real = window.fetch;
window.sent = [];
window.fetch = async (url, options) => {
  const path = new URL(url).pathname;
  const found = Object.keys(answers).find((start) => path.startsWith(start));
  if (!found) return real(url, options);
  if (options.body) window.sent.push(JSON.parse(options.body));
  const { status, headers, body } = answers[found];
  return new Response(body, { status, headers });
};
"""


@pytest.fixture(scope="module")
def keyed(one_browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two tenants and an admin; the names of keys and of a model are markup."""
    folder = tmp_path_factory.mktemp("keyed")
    entries: list[dict[str, Any]] = [
        {"id": f"id-{tenant}", "name": f"{tenant} {MARKUP}", "tenant": tenant, "sha256": hash_key(key)}
        for tenant, key in (("acme", ACME), ("bolt", BOLT), ("ops", OPS))
    ]
    entries[-1]["admin"] = True
    (folder / "keys.json").write_text(json.dumps({"keys": entries}))
    flags = ["--executor", "fake", "--fake-step-seconds", "0.02", "--key-file", str(folder / "keys.json")]
    with serving(folder / "served", *flags, "--served-model-name", "demo", MARKUP) as server:
        yield server


def answer(**fields: Any) -> dict[str, Any]:
    return {"status": 200, "headers": {"Content-Type": "application/json"}, "body": json.dumps(fields)}


def stream(*deltas: dict[str, Any], usage: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
    """Return a streamed chat with these deltas."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks += [{"choices": [], "usage": usage}] if usage else []
    events = "".join(f"data: {json.dumps(chunk)}\n\n: ping\n\n" for chunk in chunks)
    return {"status": 200, "headers": {"X-Quipu-Request-Id": "req-1", **headers}, "body": events + "data: [DONE]\n\n"}


def fake(browser: Browser, answers: dict[str, Any]) -> None:
    browser.find("#draft, h1")
    browser.run(FAKED, answers)


def send(browser: Browser, text: str) -> None:
    browser.find("#draft").send_keys(text, Keys.ENTER)


def assert_only_text(browser: Browser) -> None:
    """Check that no markup of a client has become an element."""
    assert MARKUP in browser.run("return document.body.textContent")
    assert browser.run("return document.querySelectorAll('img[src=x], .owned').length") == 0
    assert "owned" not in browser.driver.title


def test_key_is_asked_for_and_kept_for_the_tab(keyed: Server, browser: Browser) -> None:
    """Without a key the page shows nothing; a key is in its tab only, in no URL and no log, until it is forgotten."""
    browser.open(keyed.url)
    browser.wait_text("h1", "API key")
    assert not browser.all("nav a") and not browser.all(".error")
    assert browser.run("return document.activeElement.id") == "key"
    browser.press("sk-quipu-wrong", Keys.ENTER)
    browser.wait_text(".error", "Incorrect API key provided.")
    browser.tab_to("e.textContent === 'Continue'")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.run("return document.activeElement.id") == "key", "the focus is back on the key")
    browser.find("#key").clear()
    browser.find("#key").send_keys("sk-→", Keys.ENTER)
    browser.wait_text(".error", "This is not a key.")
    browser.open(keyed.url)
    browser.find("#key").send_keys(ACME, Keys.ENTER)
    browser.find("#draft")
    browser.until(lambda: browser.run("return document.activeElement.id") == "draft", "the focus goes on")
    assert browser.run("return Object.entries(sessionStorage)") == [["quipu.key", ACME]]
    assert browser.run("return [document.cookie, localStorage.length]") == ["", 0]
    urls = browser.run("return [location.href, ...performance.getEntries().map((entry) => entry.name)]")
    assert urls and not any("sk-quipu" in url for url in urls)
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    browser.driver.get(f"{keyed.url}/ui/")
    browser.wait_text("h1", "API key")
    browser.driver.close()
    browser.driver.switch_to.window(first)
    browser.look(size=DESKTOP, scheme="light")
    browser.button("Forget key").click()
    browser.wait_text("h1", "API key")
    assert browser.run("return sessionStorage.length") == 0
    assert ACME not in keyed.log_text


def test_what_a_key_sees(keyed: Server, browser: Browser) -> None:
    """A tenant sees its own usage and no server; an admin sees every tenant and the server."""
    for key in (ACME, ACME, BOLT):
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        keyed.post("/v1/completions", body, headers={"x-api-key": key}).raise_for_status()
    shown = {}
    for key, pages in ((ACME, ["Playground", "Cache", "Usage"]), (OPS, ["Playground", "Cache", "Live", "Usage"])):
        browser.open(keyed.url, "usage", key=key)
        browser.find("[data-figure=Requests]")
        assert [link.text for link in browser.all("nav a")] == pages
        browser.find("fieldset label:last-of-type input").click()
        browser.wait_text("h2", "By model, tenant")
        rows = [row.text.split() for row in browser.all(".card:not(details) table tbody tr") if row.is_displayed()]
        shown[key] = {row[1]: int(row[2]) for row in rows if row[0] == "demo"}
    assert shown == {ACME: {"acme": 2}, OPS: {"acme": 2, "bolt": 1}}
    browser.open(keyed.url, "live", key=ACME)
    browser.find("#draft")  # the playground: a tenant has no live page
    browser.wait_text(".who", "sees tenant acme")
    browser.open(keyed.url, "live", key=OPS)
    browser.wait_text("table", "ready")


def test_stop(keyed: Server, browser: Browser) -> None:
    """Stop ends the answer and cancels the request; the text that had arrived stays."""
    browser.open(keyed.url, key=ACME)
    num_before = len(cancelled(keyed))
    send(browser, "Say much.")
    browser.until(lambda: browser.all(".turn.assistant .text"), "text arrives")
    browser.press(Keys.ESCAPE)
    browser.wait_text(".turn.assistant .note", "stopped")
    browser.button("answer again")
    browser.until(lambda: len(cancelled(keyed)) == num_before + 1, "the request is logged as cancelled")


def cancelled(server: Server) -> list[dict[str, Any]]:
    return [line for line in server.events("request.done") if line["outcome"] == "cancelled"]


def test_reasoning_calls_and_explanation(keyed: Server, browser: Browser) -> None:
    """Reasoning is folded, calls are shown and answered, and the bar shows blocks by message, with advice."""
    calls = [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"to'}}]
    rest = [{"index": 0, "function": {"arguments": 'wn": "Ashford"}'}}]
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
    blocks = [
        ("reused", "device", 0, 16),
        ("reused", "host", 16, 48),
        ("copied", None, 48, 64),
        ("computed", None, 64, 100),
    ]
    explained = {
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "blocks": [{"start": start, "end": end, "source": source, "tier": tier} for source, tier, start, end in blocks],
        "messages": [
            {"index": 0, "role": "system", "start": 0, "end": 60},
            {"index": 1, "role": "user", "start": 60, "end": 95},
            {"index": None, "role": "assistant", "start": 95, "end": 100},
        ],
        "ended": {"reason": "diverged", "token": 64, "message": 1, "part": None, "diverged_from": "req-0"},
        "advice": [{"code": "volatile_prefix", "message": 1, "token": 64, "text": "Move the date to the end."}],
    }
    browser.open(keyed.url, key=ACME)
    fake(
        browser,
        {
            ANSWER: stream({"reasoning_content": "Think"}, {"tool_calls": calls}, {"tool_calls": rest}, usage=usage),
            "/v1/cache/explain/req-1": answer(prompts=[explained]),
        },
    )
    send(browser, "Weather?")
    browser.wait_text(".call", '"town": "Ashford"')
    reasoning = browser.find("details.reasoning")
    assert reasoning.get_attribute("open") is None and "Think" not in reasoning.text
    browser.wait_text(".facts", "16 from cache (16.0 %)")
    browser.wait_text(".facts", "32 from cache on the host (32.0 %)")
    browser.wait_text(".facts", "16 copied (16.0 %)")
    roles = browser.until(lambda: browser.all(".strip.messages span"), "the messages")
    assert [role.text for role in roles] == ["system", "user", ""]
    assert [role.get_attribute("title") for role in roles[1:]] == [
        "message 2, user: 4 of 35 tokens copied, 31 of 35 tokens computed",
        "assistant, from the template: 5 of 5 tokens computed",
    ]
    browser.button("why not more?").click()
    browser.wait_text(".why", "The cached part ends at token 64, in message 2 (user). From there on")
    browser.wait_text(".why", "Request req-0 continued differently there.")
    browser.wait_text(".why li", "Move the date to the end.")
    browser.find(".editor textarea").send_keys("sunny")
    browser.button("Give results").click()
    browser.wait_text(".turn.tool", "sunny")
    messages = browser.until(lambda: browser.run("return window.sent[1]"), "the results are sent")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"town": "Ashford"}'}
    assert messages[1]["reasoning_content"] == "Think"
    assert messages[2] == {"role": "tool", "tool_call_id": "call-1", "content": "sunny"}


def test_markup_is_text_in_the_playground(keyed: Server, browser: Browser) -> None:
    """Markup in prompts, answers, reasoning, calls, headers, errors, explanations and names is shown as it is."""
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    call = {"index": 0, "id": MARKUP, "function": {"name": MARKUP, "arguments": MARKUP}}
    delta = {"content": MARKUP, "reasoning_content": MARKUP, "tool_calls": [call]}
    ended = {
        "reason": MARKUP,
        "token": 3,
        "message": 0,
        "part": MARKUP,
        "diverged_from": MARKUP,
        "evicted": {"by": MARKUP},
    }
    explained = {
        "blocks": [{"start": 0, "end": 20, "source": MARKUP}],
        "messages": [{"index": 0, "role": MARKUP, "start": 0, "end": 20}],
        "ended": ended,
        "advice": [{"code": MARKUP, "message": 0, "token": 1, "text": MARKUP}],
    }
    browser.open(keyed.url, key=ACME)
    browser.until(lambda: MARKUP in [option.text for option in browser.all("option")], "the models")
    browser.find(".settings textarea").send_keys(MARKUP)
    streamed = stream(delta, usage=usage, **{"X-Quipu-Ignored-Fields": MARKUP})
    fake(browser, {ANSWER: streamed, "/v1/cache/explain/": answer(prompts=[explained])})
    send(browser, MARKUP)
    browser.until(lambda: browser.all(".strip.messages"), "the explanation")
    browser.button("why not more?").click()
    browser.find("details.reasoning summary").click()
    for place in (
        ".turn.user .text",
        ".turn.assistant > .text",
        ".reasoning .text",
        ".call b",
        ".call pre",
        ".why",
        ".note",
    ):
        browser.wait_text(place, MARKUP)
    browser.wait_text(".who", MARKUP)
    assert_only_text(browser)
    refused = {"status": 400, "headers": {}, "body": json.dumps({"error": {"message": MARKUP, "code": MARKUP}})}
    browser.open(keyed.url, key=ACME)
    fake(browser, {ANSWER: refused})
    send(browser, "x")
    browser.wait_text(".turn .error", MARKUP)
    failed = {"status": 200, "headers": {}, "body": f"data: {json.dumps({'error': {'message': MARKUP}})}\n\n"}
    fake(browser, {ANSWER: failed})
    browser.button("answer again").click()
    browser.wait_text(".branches", "2 of 2")
    browser.wait_text(".turn .error", MARKUP)
    assert_only_text(browser)


def test_markup_is_text_elsewhere(keyed: Server, browser: Browser) -> None:
    """Markup in names of models, tenants, keys, requests, currencies, engines and upstreams is shown as it is."""
    counted = ("requests", "prompt_tokens", "cached_tokens", "cache_write_tokens", "completion_tokens", "disputed")
    numbers = dict.fromkeys(counted, 1)
    names = {"model": MARKUP, "api_key": MARKUP, "tenant": MARKUP}
    cost = {"cost": {MARKUP: MARKUP}, "unpriced_models": [MARKUP]}
    row = {"start": 0, **names, **numbers, **cost}
    record = {"request_id": MARKUP, "closed_at": 0, "prompt_tokens": 1, "cached_tokens": 1, **names}
    body = answer(by=[*names], rows=[row], total=row, disputed=[record, record], has_prices=True)
    browser.open(keyed.url, key=OPS)
    fake(browser, {"/ui/usage": body})
    browser.find("nav a[href='#usage']").click()
    browser.find(".bars")
    browser.find("details summary").click()
    text = browser.body()
    assert text.count(MARKUP) >= 4 * len(names) + 4
    assert_only_text(browser)
    engine = {"id": MARKUP, "state": MARKUP, "detail": MARKUP, "num_running": 0, "num_waiting": 0}
    upstream = {"id": 1, "url": MARKUP, "state": MARKUP, "detail": MARKUP, "models": [MARKUP], "num_running": 0}
    browser.open(keyed.url, key=OPS)
    fake(browser, {"/v1/admin/engines": answer(engines=[engine], upstreams=[upstream])})
    browser.find("nav a[href='#live']").click()
    browser.wait_text("table", MARKUP)
    browser.until(lambda: browser.body().count(MARKUP) >= 7, "both tables")
    assert_only_text(browser)
