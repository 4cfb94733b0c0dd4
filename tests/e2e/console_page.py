"""The console in a real browser: a headless Chromium, and a server on loopback for it to show.

What the server says of its cluster is up to the test (`Figures`); all else is the real program.
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4py.config import SamplingParams, ServerConfig
from ds4py.errors import RequestError
from ds4py.server.errors import error_response, json_response
from ds4py.server.http.app import create_app
from ds4py.server.http.server import HttpServer
from ds4py.server.requests.prompts import TextStack
from ds4py.text.chat_formats.template import ChatTemplate
from tests.support.fakes import FakeBackend
from tests.support.toys import CHATML
from tests.unit.server.support import DEADLINE, backend, text_stack

CHROMIUM = Path("/usr/bin/chromium")
CHROMEDRIVER = Path("/usr/bin/chromedriver")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PROBES = Path(__file__).with_name("console_probes.js").read_text(encoding="utf-8")
"""Functions that measure the page from inside."""

_TOKEN_RATES = {"tokens": 4096, "per_second": 612.5}
_GIB = 1 << 30


def why_no_browser() -> str:
    """Why the console cannot be shown here; empty if it can or must (`DS4PY_NEED_BROWSER`)."""
    missing = [str(path) for path in (CHROMIUM, CHROMEDRIVER) if not path.exists()]
    if not missing or os.environ.get("DS4PY_NEED_BROWSER"):
        return ""
    return f"no {' and no '.join(missing)}: install chromium and chromium-driver to run this"


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A Chromium with a profile of its own that keeps what pages say on their consoles."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(str(CHROMEDRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def view(
    driver: webdriver.Chrome,
    width: int,
    height: int,
    *,
    dark: bool = False,
    still: bool = False,
    scale: float = 1,
) -> None:
    """Give the page a size in CSS pixels and what its reader prefers."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})


def stage(name: str, first: int, last: int, **changes: Any) -> dict[str, Any]:
    """A machine of `GET /stats`."""
    return {
        "name": name,
        "layers": [first, last],
        "has_output": False,
        "weight_bytes": 31 * _GIB,
        "kv_bytes": None,
        "kv_budget_bytes": None,
        "prefill": dict(_TOKEN_RATES),
        "decode": {"tokens": 1840, "per_second": 58.1},
        "decode_usec": {"compute": 6900.0, "hop": 420.0},
        "busy": 0.62,
        **changes,
    }


def example_stats() -> dict[str, Any]:
    """A cluster of three machines at work."""
    return {
        "time": 1780000000.123,
        "uptime": 7512.0,
        "version": "0.5.0",
        "model": {"name": "Example 43B", "architecture": "llama", "layers": 43, "n_ctx": 32768},
        "ready": True,
        "missing": "",
        "stages": [
            stage("coordinator", 0, 12, kv_bytes=_GIB // 2, kv_budget_bytes=4 * _GIB),
            stage(
                "10.0.0.12:1234",
                *(13, 27),
                decode_usec={"compute": 8240.0, "hop": 510.0},
                busy=0.74,
                weight_bytes=36 * _GIB,
            ),
            stage(
                "10.0.0.13:1234",
                *(28, 42),
                has_output=True,
                decode_usec={"compute": 7610.0, "hop": 380.0},
                busy=0.68,
                weight_bytes=37 * _GIB,
            ),
        ],
        "bubble": 0.32,
        "requests": {"running": 2, "waiting": 1, "served": 214, "failed": 1, "cancelled": 6},
        "tokens": {
            "prompt": 391_204,
            "cached": 338_112,
            "completion": 48_930,
            "prefill_per_second": 612.5,
            "decode_per_second": 41.7,
        },
        "sessions": {"total": 4, "leased": 2},
        "events": [
            {"time": 1779992500.0, "level": "info", "text": "10.0.0.12:1234 joined, layers 13-27"},
            {"time": 1779992504.0, "level": "info", "text": "10.0.0.13:1234 joined, layers 28-42"},
            {"time": 1779992504.2, "level": "info", "text": "the route is complete"},
            {
                "time": 1779996104.0,
                "level": "warning",
                "text": "10.0.0.12:1234 was lost",
            },
            {"time": 1779996109.0, "level": "info", "text": "10.0.0.12:1234 joined, layers 13-27"},
        ],
    }


def without_machine(stats: dict[str, Any], number: int) -> dict[str, Any]:
    """The same cluster when a machine has gone."""
    changed = copy.deepcopy(stats)
    gone = changed["stages"].pop(number)
    first, last = gone["layers"]
    words = f"layers {first}-{last}"
    event = {"time": changed["time"], "level": "error", "text": f"{gone['name']} was lost: {words}"}
    return changed | {"ready": False, "missing": words, "events": [*changed["events"], event]}


@dataclass
class Figures:
    """What `/stats` says; a test changes it at any time.

    Args:
        stats: The reply.
        refusal: Given instead of the reply.
        real: The server speaks for itself, and none of the others counts.
        n_asked: How often it was asked for.
    """

    stats: dict[str, Any] = field(default_factory=example_stats)
    refusal: RequestError | None = None
    real: bool = False
    n_asked: int = 0

    async def answer(self, _: Request) -> Response:
        self.n_asked += 1
        if self.refusal is not None:
            return error_response(self.refusal)
        return json_response(self.stats)


@contextmanager
def serving(
    fake: FakeBackend, figures: Figures, *, text: TextStack | None = None, key: str = ""
) -> Iterator[tuple[HttpServer, str]]:
    """A server with the console; yields it and its address."""
    config = ServerConfig(
        sampling=SamplingParams(temperature=0.0),
        api_key=key or None,
        keepalive_seconds=0.05,  # who waits in the queue hears of it after such a pause
    )
    app = create_app(fake, text or text_stack(), config, n_sessions=len(fake.sessions))
    if not figures.real:
        app.router.routes.insert(0, Route("/stats", figures.answer))
    http = HttpServer(app)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    http.start([listener])
    try:
        yield http, f"http://127.0.0.1:{port}/"
    finally:
        http.close(DEADLINE)


def thinking_stack() -> TextStack:
    """The toy's text stack with a template that opens the reasoning unless it is switched off."""
    stack = text_stack()
    opening = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    return TextStack(stack.tokenizer, ChatTemplate(CHATML + opening, stack.tokenizer))


@dataclass(kw_only=True)
class Console:
    """The open page, and what is behind it."""

    driver: webdriver.Chrome
    fake: FakeBackend
    figures: Figures
    http: HttpServer
    expected: list[str] = field(default_factory=list)
    """Parts of messages on the browser's console that the test provokes."""

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text that is seen, of all elements together."""
        return "\n".join(element.text for element in self.all(selector))

    def wait(self, condition: Callable[[], object], what: str = "") -> None:
        WebDriverWait(
            self.driver,
            DEADLINE,
            poll_frequency=0.03,
            ignored_exceptions=[StaleElementReferenceException],
        ).until(lambda _: condition(), what)

    def wait_text(self, selector: str, wanted: str) -> None:
        self.wait(lambda: wanted in self.text(selector), f"{selector} never said {wanted!r}")

    def send(self, words: str) -> None:
        self.one("#message").send_keys(words, Keys.ENTER)

    def ask(self, words: str) -> None:
        """Send and wait for the whole answer."""
        self.send(words)
        self.wait_text("#chat-state", "Answered")

    def probe(self, call: str) -> Any:
        """Return what a function of console_probes.js says of the page."""
        return self.driver.execute_script(f"{PROBES}\nreturn {call};")

    def await_probe(self, function: str, *arguments: object) -> Any:
        """Return what a function of console_probes.js gives to its last argument, `done`."""
        return self.driver.execute_async_script(f"{PROBES}\n{function}(...arguments)", *arguments)

    def run(self, script: str) -> Any:
        """Return what a script in the page returns."""
        return self.driver.execute_script(script)

    def prompt(self) -> str:
        """What the model read and wrote last, as text."""
        session = self.fake.sessions[0]
        return text_stack().tokenizer.decode(session.tokens, special=True).decode()

    def say_nothing_bad(self) -> None:
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        bad = [line for line in said if not any(part in line for part in self.expected)]
        assert bad == []


class Consoles:
    """Opens consoles, each on a server of its own, in one browser.

    Args:
        driver: The browser.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver
        self._servers = ExitStack()
        self._opened: list[Console] = []

    def __call__(
        self,
        fake: FakeBackend | None = None,
        *,
        stats: dict[str, Any] | None = None,
        text: TextStack | None = None,
        key: str = "",
        width: int = 1280,
        real: bool = False,
        **preferences: bool,
    ) -> Console:
        """Open one: of a model that says hello, with the example's figures, unless told better."""
        fake = fake or backend("Hello **world**", n_ctx=1024)
        figures = Figures(stats or example_stats(), real=real)
        http, url = self._servers.enter_context(serving(fake, figures, text=text, key=key))
        view(self._driver, width, 800, **preferences)
        self._driver.get_log("browser")
        self._driver.get(url)
        console = Console(driver=self._driver, fake=fake, figures=figures, http=http)
        self._opened.append(console)
        return console

    def check(self) -> None:
        """Fail if a page complained: of an error in a script, or of what its policy forbids."""
        for console in self._opened:
            console.say_nothing_bad()

    def close(self) -> None:
        """Leave the page and end the servers."""
        self._driver.get("about:blank")
        self._servers.close()
