"""The console in a headless Chromium, against the real HTTP server with a scripted model.

Every test ends by looking at what the page said on the browser's console: a script error or a
violation of the content security policy fails it.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from ds4py.errors import RemoteWorkError, RequestError
from ds4py.server.observability.console_stats import ConsoleStats
from ds4py.server.observability.event_log import EventLog
from ds4py.server.observability.request_metrics import RequestMetrics
from tests.e2e.console_page import (
    Consoles,
    browser,
    example_stats,
    stage,
    thinking_stack,
    why_no_browser,
    without_machine,
)
from tests.support.fakes import Gate
from tests.support.sockets import Background
from tests.unit.server.observability.measured import STAGES, Backend, Clock, watched
from tests.unit.server.support import DEADLINE, backend

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    with browser() as driver:
        yield driver


@pytest.fixture
def open_console(chromium: webdriver.Chrome) -> Iterator[Consoles]:
    consoles = Consoles(chromium)
    try:
        yield consoles
        consoles.check()
    finally:
        consoles.close()


# The chat


def test_an_answer_is_shown_while_it_is_written(open_console: Consoles) -> None:
    gate = Gate()
    console = open_console(backend("Hello **world**", n_ctx=1024, chunk=1024, gate=gate))
    console.send("hi")
    gate.let(6)  # the prompt and five letters
    console.wait_text(".answer .text", "Hello")
    assert "world" not in console.text(".answer .text")
    assert console.one(".answer").get_attribute("aria-busy") == "true"
    gate.open()
    console.wait_text("#chat-state", "Answered")
    assert console.text(".user .text") == "hi"
    assert console.text(".answer .text") == "Hello world"
    assert console.text(".answer .text strong") == "world"
    assert console.one(".answer").get_attribute("aria-busy") == "false"
    assert "15 tokens at" in console.text(".cost")
    assert "0 cached" in console.text(".cost")


def test_the_second_turn_tells_what_was_cached(open_console: Consoles) -> None:
    console = open_console()
    console.ask("hi")
    console.send("again")
    console.wait(lambda: len(console.all(".cost")) == 2 and console.all(".cost")[1].text)
    second = console.all(".cost")[1].text
    assert "cached" in second
    assert " 0 cached" not in second
    assert "Hello **world**" in console.prompt()
    assert console.prompt().count("again") == 1


def test_the_prompt_is_seen_to_be_read(open_console: Consoles) -> None:
    gate = Gate()
    console = open_console(backend("ok", n_ctx=1024, gate=gate))
    console.send("a longer message, read in several chunks")
    gate.let(2)
    console.wait_text("#chat-state", "Reading the prompt")
    console.wait(lambda: 0 < console.one("#prefill").get_property("value") < 1)
    gate.open()
    console.wait_text("#chat-state", "Answered")
    assert console.one("#prefill").get_property("value") == 0


def test_who_waits_sees_the_place_in_the_queue(open_console: Consoles) -> None:
    gate = Gate()
    console = open_console(backend("Hello", n_ctx=1024, chunk=1024, gate=gate))
    url = console.driver.current_url

    def another() -> Background[httpx.Response]:
        body = {"prompt": "hi", "max_tokens": 1}
        return Background(lambda: httpx.post(f"{url}v1/completions", json=body, trust_env=False))

    def n_waiting() -> int:
        requests = httpx.get(f"{url}health", trust_env=False).json()["requests"]
        return int(requests["waiting"])

    others = [another()]
    gate.wait_reached(1)
    others.append(another())
    console.wait(lambda: n_waiting() == 1)
    console.send("hi")
    console.wait_text("#chat-state", "Waiting, place 2")
    gate.let(1)
    console.wait_text("#chat-state", "Waiting, place 1")
    gate.open()
    console.wait_text("#chat-state", "Answered")
    assert console.text(".answer .text") == "Hello"
    assert [other.result().status_code for other in others] == [200, 200]


@pytest.mark.parametrize("by_key", [False, True], ids=["button", "escape"])
def test_stop_ends_the_generation_and_keeps_what_came(open_console: Consoles, by_key: bool) -> None:
    gate = Gate()
    fake = backend("Hello world", n_ctx=1024, chunk=1024, gate=gate)
    console = open_console(fake)
    console.send("hi")
    gate.let(6)
    console.wait_text(".answer .text", "Hello")
    if by_key:
        console.one("#message").send_keys(Keys.ESCAPE)
    else:
        console.one("#stop").click()
    console.wait_text("#chat-state", "Stopped")
    gate.open()
    console.wait(lambda: fake.n_free == 1, "the generation went on")
    assert "world" not in console.text(".answer .text")
    assert "stopped" in console.text(".cost")
    assert console.one("#send").is_enabled()
    console.ask("go on")
    assert "Hello" in console.prompt().partition("go on")[0]


def test_reasoning_stands_apart_and_opens_on_request(open_console: Consoles) -> None:
    fake = backend("Let me see.</think>Four.", n_ctx=1024)
    console = open_console(fake, text=thinking_stack())
    console.ask("2+2?")
    assert console.text(".answer .text") == "Four."
    assert "Thought for" in console.text(".reasoning summary")
    assert not console.one(".thoughts").is_displayed()
    console.one(".reasoning summary").send_keys(Keys.ENTER)
    assert console.text(".thoughts") == "Let me see."
    console.ask("and now?")
    console.wait(lambda: len(console.all(".thoughts")) == 2)
    assert console.all(".thoughts")[1].is_displayed()  # as the reader last chose


def test_settings_reach_the_server(open_console: Consoles) -> None:
    fake = backend("No thoughts.", n_ctx=1024)
    console = open_console(fake, text=thinking_stack())
    console.one("#settings summary").click()
    console.one("#system").send_keys("Be brief.")
    console.one("#temperature").send_keys("0")
    console.one("#max-tokens").send_keys("5")
    console.one("#thinking option[value=off]").click()
    console.ask("hi")
    assert "system\nBe brief." in console.prompt()
    assert "<think>" not in console.prompt()
    assert console.text(".answer .text") == "No th"
    assert "cut off at the token limit" in console.text(".cost")


def test_a_setting_out_of_range_is_not_sent(open_console: Consoles) -> None:
    console = open_console()
    console.one("#settings summary").click()
    console.one("#max-tokens").send_keys("0")
    console.send("hi")
    assert console.all(".turn") == []
    assert console.one("#message").get_property("value").startswith("hi")


def test_a_refused_message_comes_back_with_the_reason(open_console: Consoles) -> None:
    console = open_console(backend("ok", n_ctx=32))
    console.expected.append("400 (Bad Request)")
    console.send("far too long for so small a context")
    console.wait(lambda: console.one("#chat-state").get_attribute("data-level") == "error")
    assert "context" in console.text("#chat-state")
    assert console.all(".turn") == []
    assert console.one("#message").get_property("value") == "far too long for so small a context"


def test_an_answer_that_breaks_off_says_so(open_console: Consoles) -> None:
    lost = RemoteWorkError("out of memory", hop="10.0.0.9:1")
    console = open_console(backend("Hello world", n_ctx=1024, chunk=1024, failures={5: lost}))
    console.send("hi")
    console.wait_text("#chat-state", "out of memory")
    assert console.text(".answer .text") == "Hello"
    assert "broken off" in console.text(".cost")


def test_a_connection_that_breaks_is_no_end_of_an_answer(open_console: Consoles) -> None:
    gate = Gate()
    console = open_console(backend("Hello world", n_ctx=1024, chunk=1024, gate=gate))
    console.expected.append("net::ERR_")
    console.send("hi")
    gate.let(6)
    console.wait_text(".answer .text", "Hello")
    console.http.close(0.1)  # cuts off what is still open
    gate.open()
    console.wait_text("#chat-state", "The connection broke before the answer's end.")
    assert console.text(".answer .text").startswith("Hello")
    assert "broken off" in console.text(".cost")


def test_a_conversation_can_be_cleared_while_it_is_answered(open_console: Consoles) -> None:
    gate = Gate()
    fake = backend("Hello", n_ctx=1024, chunk=1024, gate=gate)
    console = open_console(fake)
    console.send("first")
    gate.let(3)
    console.wait_text(".answer .text", "He")
    console.one("#clear").click()
    gate.open()
    console.wait(lambda: fake.n_free == 1)
    assert console.all(".turn") == []
    console.ask("second")
    assert "first" not in console.prompt()


def test_markup_of_the_model_stays_text(open_console: Consoles) -> None:
    evil = (
        '<img src=x onerror="document.title=1"> <script>document.title=2</script> [a](javascript:1)'
    )
    console = open_console(backend(evil, n_ctx=2048))
    console.ask("<b>hi</b>")
    assert console.text(".answer .text") == evil
    assert console.text(".user .text") == "<b>hi</b>"
    assert console.all("#log :is(img, script, a, b)") == []


# The cluster


def test_bars_lie_over_the_layers_that_each_machine_has(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#stages", "coordinator")
    spans = console.probe("barSpans()")
    expected = [[0, 13 / 43], [13 / 43, 28 / 43], [28 / 43, 1]]
    assert spans == [[pytest.approx(edge, abs=0.005) for edge in span] for span in expected]
    labels = [element.text for element in console.all(".layers")]
    assert labels == ["layers 0–12", "layers 13–27", "layers 28–42 + output"]  # noqa: RUF001
    assert console.text(".axis").split() == ["0", "layers", "42"]
    assert console.text("#state") == "Ready"
    assert console.all(".gap") == []


def test_figures_of_machines_and_totals(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#stages", "coordinator")
    first, second, _ = (element.text.split("\n") for element in console.all(".stage dl"))
    assert first == [
        *("Compute", "6.9 ms", "Hop", "420 µs", "Busy", "62 %", "Decode", "58.1 t/s"),
        *("Prefill", "613 t/s", "Weights", "31 GiB", "KV cache", "512 MiB / 4 GiB"),
    ]
    assert second[-1] == "–"  # noqa: RUF001
    assert console.text(".totals").split("\n") == [
        *("Decode", "41.7 t/s", "Prefill", "613 t/s", "Running", "2", "Waiting", "1"),
        *("Sessions", "2 of 4", "Bubble", "32 %"),
    ]
    assert console.text("#token-time") == "24.1 ms"
    assert "10.0.0.12:1234 compute 8.2 ms" in console.one("#token").get_attribute("aria-label")
    assert "214 requests served, 1 failed, 6 cancelled" in console.text("#sums")
    assert "up 2 h 5 min" in console.text("#since")
    newest = console.all("#events li")[0].text
    assert "10.0.0.12:1234 joined" in newest


def test_layers_that_nobody_serves_are_shown_when_a_machine_goes(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#state", "Ready")
    console.figures.stats = without_machine(example_stats(), 1)
    console.wait_text("#stages", "Nobody serves 13–27")  # noqa: RUF001
    assert console.probe("barSpans('.missing')") == [
        [pytest.approx(13 / 43, abs=0.005), pytest.approx(28 / 43, abs=0.005)]
    ]
    order = [element.text for element in console.all("h4")]
    assert order == ["coordinator", "Nobody serves 13–27", "10.0.0.13:1234"]  # noqa: RUF001
    assert console.text("#state") == "Incomplete"
    assert "error" in console.all("#events li")[0].text
    console.figures.stats = example_stats()
    console.wait_text("#state", "Ready")
    assert console.all(".gap") == []


def test_a_cluster_of_which_little_is_known(open_console: Consoles) -> None:
    nothing = {"tokens": 0, "per_second": 0.0}
    idle = {"prefill": nothing, "decode": nothing, "busy": None, "weight_bytes": None}
    stages = [
        stage("coordinator", 0, 0, **idle) | {"layers": None},
        stage("10.0.0.5:1", 4, 6, **idle),
        stage("10.0.0.6:1", 4, 6, **idle),
        stage("10.0.0.7:1", 9, 9, **idle),
    ]
    stats = example_stats() | {"stages": stages, "bubble": None, "events": [], "ready": False}
    stats["model"]["layers"] = 10
    console = open_console(stats=stats)
    console.wait_text("#stages", "no layers")
    gaps = [element.text for element in console.all(".gap h4")]
    assert gaps == ["Nobody serves 0–3", "Nobody serves 7–8", "Nobody serves the output head"]  # noqa: RUF001
    assert console.text("#token-time") == "no token yet"
    assert console.text("#no-events") == "Nothing happened yet."
    assert console.text("#bubble") == "–"  # noqa: RUF001


def test_rows_stay_the_same_elements_while_their_figures_change(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#stages", "coordinator")
    row = console.one(".stage")
    changed = example_stats()
    changed["stages"][0]["busy"] = 0.11
    console.figures.stats = changed
    console.wait(lambda: "11 %" in row.text)  # a stale element would raise


def test_a_server_that_is_gone_is_said_to_be(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#state", "Ready")
    console.expected.append("net::ERR_")
    console.http.close(DEADLINE)
    console.wait_text("#state", "Unreachable")
    assert "The server does not answer. These figures are from" in console.text("#freshness")
    assert "coordinator" in console.text("#stages")
    console.send("hi")
    console.wait_text("#chat-state", "The server cannot be reached.")
    assert console.one("#message").get_property("value") == "hi"


def test_it_asks_ever_more_rarely_until_told_to_try(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#state", "Ready")
    console.expected.append("503 (Service Unavailable)")
    console.probe("recordPauses()")
    console.figures.refusal = RequestError("on its way down", status=503)
    console.wait(lambda: console.run("return pauses").count(30000) >= 2)
    pauses = console.run("return pauses")
    assert pauses[pauses.index(2000) :][:6] == [2000, 4000, 8000, 16000, 30000, 30000]
    console.wait_text("#freshness", "on its way down")
    console.probe("holdTimers()")
    console.figures.refusal = None
    console.one("#retry").click()
    console.wait_text("#state", "Ready")
    assert not console.one("#retry").is_displayed()


def test_a_page_that_is_not_seen_asks_rarely_and_at_once_when_seen(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#state", "Ready")
    console.probe("holdTimers()")  # the question that was planned before is the last
    console.probe("setHidden(true)")
    console.wait(lambda: console.run("return pauses") == [30000])
    asked = console.figures.n_asked
    console.probe("setHidden(false)")
    console.wait(lambda: console.run("return pauses") == [30000, 1000])
    assert console.figures.n_asked == asked + 1


def test_a_key_is_asked_for_and_used_for_everything(open_console: Consoles) -> None:
    console = open_console(key="sesame")
    console.expected.append("401 (Unauthorized)")
    console.wait(lambda: console.one("#key-form").is_displayed())
    assert console.text("#state") == "No figures"
    console.one("#key").send_keys("wrong", Keys.ENTER)
    console.wait(lambda: console.one("#key-form").is_displayed())
    console.one("#key").send_keys("sesame", Keys.ENTER)
    console.wait_text("#state", "Ready")
    assert not console.one("#key-form").is_displayed()
    console.ask("hi")
    assert console.run("return Object.values(localStorage)") == []
    console.driver.refresh()
    console.wait_text("#state", "Ready")  # kept until the tab closes


def test_a_server_shows_its_own_figures(open_console: Consoles) -> None:
    console = open_console(real=True)
    console.wait_text("#stages", "coordinator")
    assert console.text(".layers") == "layers 0–3 + output"  # noqa: RUF001
    assert console.text("#model") == "Fake Model"
    console.ask("hi")
    console.wait_text("#sums", "1 request served, 0 failed, 0 cancelled")
    console.wait_text("#sums", "15 written")


def test_the_figures_of_the_real_producer_are_understood(open_console: Consoles) -> None:
    figures = ConsoleStats(watched(Backend(STAGES), RequestMetrics(Clock())), EventLog()).object()
    console = open_console(stats=figures)
    console.wait_text("#state", "Ready")
    assert len(console.all(".stage:not(.gap)")) == len(STAGES)
    assert "undefined" not in console.text("body")
    assert "NaN" not in console.text("body")
