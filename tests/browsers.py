"""Chromium for the tests of the pages: headless, driven by Debian's chromedriver, and cut off from every other host.

Where it is not installed the tests are skipped with the reason; in CI (`CI` is set) that is a failure, since `.ci/run`
installs it.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.processes import eventually

T = TypeVar("T")
PHONE = (390, 844)
DESKTOP = (1280, 860)
_PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium's own does not work as root, nor in most containers
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    # one process for all pages, which are all of this host: each page that is loaded would start one
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@attrs.define(eq=False)
class Browser:
    """One window."""

    driver: Chrome
    url: str = ""
    """The URL of the server whose pages are shown."""

    def open(self, url: str, page: str = "", *, key: str | None = None) -> None:
        """Load the pages of a server anew, as a new tab would: without a key, or with one."""
        self.url = url
        self.driver.get(f"{url}/ui/static/icon.svg")
        self.run("sessionStorage.clear(); localStorage.clear()")
        if key is not None:
            self.run("sessionStorage['quipu.key'] = arguments[0]", key)
        self.driver.get(f"{url}/ui/{page and '#'}{page}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def find(self, selector: str) -> WebElement:
        """Wait for an element that is shown."""

        def shown() -> WebElement | None:
            return next((element for element in self.all(selector) if element.is_displayed()), None)

        return self.until(shown, f"{selector} is shown")

    def button(self, text: str) -> WebElement:
        """Wait for a button that can be pressed, by its text."""

        def enabled() -> WebElement | None:
            return next((one for one in self.all("button") if one.text == text and one.is_enabled()), None)

        return self.until(enabled, f"there is a button {text!r}")

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait until `condition` returns a true value; return it. Elements may be replaced meanwhile."""

        def holds() -> T | None:
            try:
                return condition()
            except StaleElementReferenceException:
                return None

        found = eventually(holds, what)
        assert found is not None
        return found

    def wait_text(self, selector: str, text: str) -> None:
        """Wait until an element that matches contains `text`."""
        self.until(
            lambda: any(text in one.text for one in self.all(selector)),
            f"{selector} contains {text!r}; the page says: {self.body()[-600:]!r}",
        )

    def body(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text

    def paste(self, selector: str, text: str, *keys: str) -> None:
        """Insert text into a field at once, as from a clipboard, then press keys. Typing takes 5 ms per character."""
        field = self.find(selector)
        self.run("arguments[0].focus()", field)
        self.command("Input.insertText", {"text": text})
        if keys:
            field.send_keys(*keys)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def tab_to(self, is_it: str) -> None:
        """Press Tab until the focused element fulfils a condition in JavaScript on `e`. It may appear meanwhile.

        The key is not sent to an element: that would move the focus back to it where the page has just moved it on.
        """

        def is_reached() -> bool:
            for _ in range(60):
                if self.run(f"const e = document.activeElement; return Boolean({is_it})"):
                    return True
                ActionChains(self.driver).send_keys(Keys.TAB).perform()
            return False

        self.until(is_reached, f"the keyboard reaches {is_it}")

    def look(self, *, size: tuple[int, int], scheme: str) -> None:
        """Set the size of the window and the system's colours ("light" or "dark")."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, path: Path) -> None:
        """Store what is shown, as WebP."""
        shot = self.command("Page.captureScreenshot", {"format": "webp", "quality": 82})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return and forget what the console has: errors of scripts and violations of the policy."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        # a response that is an error is logged, too, and the pages handle it
        return [line for line in lines if "Failed to load resource" not in line]

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a browser until the block is left. Raises WebDriverException."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which(_PROGRAMS[0]))
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=str(shutil.which(_PROGRAMS[1]))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def missing_programs() -> list[str]:
    return [name for name in _PROGRAMS if shutil.which(name) is None]


def check_browser() -> None:
    """Skip a test if there is no browser; in CI, fail."""
    if missing := missing_programs():
        reason = f"not installed: {', '.join(missing)} (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(f"NO BROWSER: {reason}")
        pytest.skip(f"NO BROWSER: {reason}")


@pytest.fixture
def browser(one_browser: Browser) -> Iterator[Browser]:
    """Provide the browser at desktop size, and check afterwards that no script failed and nothing broke the policy."""
    one_browser.look(size=DESKTOP, scheme="light")
    one_browser.complaints()
    yield one_browser
    complaints = one_browser.complaints()
    one_browser.driver.get("about:blank")
    assert not complaints


__all__ = ["DESKTOP", "PHONE", "Browser", "Keys", "browser", "check_browser", "missing_programs", "open_browser"]
