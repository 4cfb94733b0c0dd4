"""The console's looks and its use without a mouse or eyes, and the Markdown of answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.e2e.console_page import (
    Consoles,
    browser,
    example_stats,
    thinking_stack,
    why_no_browser,
    without_machine,
)
from tests.support.fakes import Gate
from tests.unit.server.support import backend

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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_enough_contrast(open_console: Consoles, dark: bool) -> None:
    fake = backend("Hm.</think># T\n**Bold** `code`\n```\nx\n```", n_ctx=1024)
    stats = without_machine(example_stats(), 1)
    console = open_console(fake, stats=stats, text=thinking_stack(), dark=dark)
    console.wait_text("#stages", "Nobody")
    console.ask("hi")
    console.run(
        "for (const one of document.querySelectorAll('details')) one.open = true;"
        "document.getElementById('key-form').hidden = false;"
    )
    ground = console.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 20, 22)" if dark else "rgb(246, 246, 243)")
    assert console.probe("poorContrasts(4.5)") == []


def test_the_scheme_can_be_chosen_and_is_remembered(open_console: Consoles) -> None:
    console = open_console(dark=False)
    button = console.one("#theme")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    dark = "return getComputedStyle(document.body).backgroundColor === 'rgb(18, 20, 22)'"
    assert console.run(dark)
    console.driver.refresh()
    assert console.run(dark)
    console.one("#theme").click()
    assert not console.run(dark)


@pytest.mark.parametrize("width", [360, 700, 1280])
def test_nothing_is_wider_than_the_screen(open_console: Consoles, width: int) -> None:
    long = "x" * 300 + "\n```\n" + "y" * 300 + "\n```\n`" + "z" * 300 + "`"
    stats = example_stats()
    stats["stages"][1]["name"] = "a-machine-with-a-very-long-name.example.org:12345"
    stats["model"]["name"] = "A model whose name does not fit into any header that is so narrow"
    stats["events"][0]["text"] = "w" * 200
    console = open_console(backend(long, n_ctx=4096), stats=stats, width=width)
    console.wait_text("#state", "Ready")
    console.ask("q" * 200)
    console.run("document.querySelector('#settings details').open = true")
    assert console.probe("overflowing()") == []
    for button in console.all("#views button"):
        if button.is_displayed():
            button.click()
            assert console.probe("overflowing()") == []


def test_a_narrow_screen_shows_one_view_at_a_time(open_console: Consoles) -> None:
    console = open_console(width=360)
    console.wait_text("#state", "Ready")
    assert console.one("#chat").is_displayed()
    assert not console.one("#cluster").is_displayed()
    console.one("#views [data-view=cluster]").click()
    assert not console.one("#chat").is_displayed()
    assert console.one("#stages").is_displayed()
    pressed = [one.get_attribute("aria-pressed") for one in console.all("#views button")]
    assert pressed == ["false", "true"]


def test_everything_works_by_keyboard_alone(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#stages", "coordinator")
    press = console.driver.switch_to.active_element.send_keys
    seen = []
    for _ in range(12):
        press(Keys.TAB)
        focused = console.driver.switch_to.active_element
        press = focused.send_keys
        seen.append(focused.get_attribute("id") or focused.tag_name)
        outline = focused.value_of_css_property("outline-style")
        assert outline == "solid", f"{seen[-1]} does not show that it has the focus"
        if seen[-1] == "events":
            break
    assert seen == ["theme", "clear", "log", "message", "send", "summary", "events"]
    console.one("#message").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two", Keys.ENTER)
    console.wait_text("#chat-state", "Answered")
    assert console.text(".user .text") == "one\ntwo"
    assert console.driver.switch_to.active_element.get_attribute("id") == "message"


def test_everything_that_can_be_used_has_a_name(open_console: Consoles) -> None:
    fake = backend("Hm.</think>```\nx\n```", n_ctx=1024)
    console = open_console(fake, text=thinking_stack(), key="k")
    console.expected.append("401 (Unauthorized)")
    console.wait(lambda: console.one("#key-form").is_displayed())
    console.one("#key").send_keys("k", Keys.ENTER)
    console.ask("hi")
    console.run(
        "for (const one of document.querySelectorAll('details')) one.open = true;"
        "document.getElementById('key-form').hidden = false;"
    )
    tree = console.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    used = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if any(one["name"] == "focusable" for one in node.get("properties", []))
        and node["role"]["value"] != "RootWebArea"
    ]
    assert len(used) >= 15
    assert [role for role, name in used if not name.strip()] == []
    roles = {node["role"]["value"] for node in tree}
    assert {"banner", "main", "log", "status", "region", "navigation"} - roles <= {"navigation"}
    assert console.one("#log").get_attribute("role") == "log"  # polite by its role


def test_nothing_moves_around_what_is_written(open_console: Consoles) -> None:
    console = open_console()
    console.wait_text("#stages", "coordinator")
    console.ask("hi")
    assert console.await_probe("shifts") == []


def test_nothing_is_animated_for_those_who_ask_for_stillness(open_console: Consoles) -> None:
    gate = Gate()
    fake = backend("Hello", n_ctx=1024, gate=gate)
    for still, wanted in ((False, "breathe"), (True, "none")):
        console = open_console(fake, still=still)
        console.send("hi")
        console.wait(lambda console=console: console.all(".answer[aria-busy=true]"))
        script = (
            "return getComputedStyle(document.querySelector('.cost'), '::before').animationName"
        )
        assert console.run(script) == wanted
    gate.open()


MARKDOWN = {
    "a **b** *c* `d`": "<p>a <strong>b</strong> <em>c</em> <code>d</code></p>",
    "2 * 3 * 4 ** 5": "<p>2 * 3 * 4 ** 5</p>",
    "**open `code` x": "<p>**open <code>code</code> x</p>",
    "`` a`b `` and **b *i***": "<p><code>a`b</code> and **b *i***</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# Title\ntext": '<p class="heading">Title</p><p>text</p>',
    "text\n- a\n- b\n  more\n\n- c\n\nend": (
        "<p>text</p><ul><li>a</li><li>b\nmore</li><li>c</li></ul><p>end</p>"
    ),
    "3. a\n   - b\n     1. c\n   - d\n4. e": (
        '<ol start="3"><li>a<ul><li>b<ol start="1"><li>c</li></ol></li><li>d</li></ul></li>'
        "<li>e</li></ol>"
    ),
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "```py\n# no **mark**\n\n- x\n```\nend": (
        '<pre tabindex="0" role="region" aria-label="Code, py"><code># no **mark**\n\n- x</code>'
        "</pre><p>end</p>"
    ),
    "~~~~\n~~~\nstill": (
        '<pre tabindex="0" role="region" aria-label="Code"><code>~~~\nstill</code></pre>'
    ),
    "1. a\n   ```sh\n   ls\n   ```\n2. b": (
        '<ol start="1"><li>a</li></ol><pre tabindex="0" role="region" aria-label="Code, sh">'
        '<code>ls</code></pre><ol start="2"><li>b</li></ol>'
    ),
    "```not``` a fence": "<p><code>not</code> a fence</p>",
    "": "",
}


def test_the_markdown_that_models_write(open_console: Consoles) -> None:
    console = open_console()
    shown = console.await_probe("showAll", list(MARKDOWN))
    assert dict(zip(MARKDOWN, shown, strict=True)) == MARKDOWN


def test_text_that_grows_ends_as_if_it_had_come_at_once(open_console: Consoles) -> None:
    console = open_console()
    grown = console.await_probe("showGrowing", list(MARKDOWN))
    assert dict(zip(MARKDOWN, grown, strict=True)) == MARKDOWN


def test_hostile_markdown_does_not_stop_the_page(open_console: Consoles) -> None:
    """Quadratic time would be minutes here; the driver gives a script 30 s."""
    console = open_console()
    marks = (
        "`",
        "``` ",
        "*a",
        "**a ",
        "- ",
        "1. ",
        " ",
        "> ",
        "#",
        "`a``",
        "a\n\n",
        "# a\n",
        "- a\n",
    )
    lengths = console.await_probe("showMany", marks, 50_000)
    assert len(lengths) == len(marks)
