"""The pictures behind ./tools/console_screenshots.

The page and its server are the real ones; the model is a script that writes one character a token,
and the cluster's figures are an example. How letters look depends on the fonts of the machine.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.e2e.console_page import (
    Figures,
    browser,
    example_stats,
    serving,
    thinking_stack,
    view,
    without_machine,
)
from tests.unit.server.support import backend

ROOT = Path(__file__).resolve().parents[1]
SECONDS_A_TOKEN = 0.022
QUESTION = "Why does a second machine make long prompts faster, but not a single answer?"
ANSWER = """\
The user asks about prefill and decode in a pipeline. Keep it short.</think>
A prompt is cut into **chunks**. While the second machine works on chunk 1, the first one already \
has chunk 2, so both are busy:

```text
machine 1   [c1][c2][c3][c4]
machine 2       [c1][c2][c3][c4]
```

An answer has no chunks to overlap:

1. Each token needs *all* layers, one machine after the other.
2. The next token cannot begin before the last one is known.

Several conversations at once do fill the gaps: look at **Bubble** while `running` is above 1."""


class Pace:
    """Makes the scripted model take its time, so that its rates look like those of a model."""

    def pass_through(self) -> None:
        """Wait as long as one evaluation shall take."""
        time.sleep(SECONDS_A_TOKEN)


def save(driver: webdriver.Chrome, path: Path) -> None:
    """Keep what is in view, packed as tightly as PNG can without loss."""
    with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
        picture.convert("RGB").save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def wait(driver: webdriver.Chrome, condition: Callable[[webdriver.Chrome], object]) -> None:
    WebDriverWait(driver, 60, poll_frequency=0.1).until(condition)


def desktop(driver: webdriver.Chrome, url: str, path: Path) -> None:
    """A conversation beside a complete cluster, in light colours."""
    view(driver, 1280, 800, scale=1.25)
    driver.get(url)
    driver.find_element(By.ID, "message").send_keys(QUESTION, Keys.ENTER)
    wait(driver, lambda page: page.find_element(By.ID, "chat-state").text == "Answered")
    save(driver, path)


def phone(driver: webdriver.Chrome, url: str, path: Path) -> None:
    """A cluster that lacks a machine, on a phone in dark colours."""
    view(driver, 360, 780, dark=True, scale=2)
    driver.get(url)
    driver.find_element(By.CSS_SELECTOR, "#views [data-view=cluster]").click()
    wait(driver, lambda page: page.find_element(By.ID, "stages").text)
    driver.execute_script("document.activeElement.blur()")
    save(driver, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    out = parser.parse_args().out
    figures = Figures()
    fake = backend(ANSWER, n_ctx=4096, chunk=64, gate=Pace())
    with browser() as driver, serving(fake, figures, text=thinking_stack()) as (_, url):
        desktop(driver, url, out / "console.png")
        figures.stats = without_machine(example_stats(), 1)
        phone(driver, url, out / "console-phone.png")


if __name__ == "__main__":
    main()
