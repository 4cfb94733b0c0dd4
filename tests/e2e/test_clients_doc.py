"""docs/clients: every block of a page that can be run is run, against a server with a small model.

`sh` and `python` blocks are run, those of one page together, as a reader would. Only the address
and the budgets are others. `console` blocks show what needs a program that is not at hand.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import golden
from tests.support.processes import DEADLINE, Launcher, Server, environment

PAGES = Path(__file__).parents[2] / "docs" / "clients"
ADDRESS = "127.0.0.1:8000"

SAYS: dict[str, dict[str, Sequence[str]]] = {
    "openai-sdk": {
        "sh": [r'"object":"list"'],
        "python": [
            r"^answer: \S",
            r"^tokens: \d+$",
            r"^after the tool: (stop|length|tool_calls)$",
            r"^reused: \d+ of \d+$",
            r'^json: \{\s*"sky"\s*:\s*"(clear|cloudy|rain)"\s*\}',
            r"^status: (completed|incomplete)$",
            r"^item: reasoning$",
            r"^refused: context_length_exceeded$",
        ],
    },
    "anthropic-sdk": {
        "sh": [r'\{"input_tokens":\d+\}'],
        "python": [
            r"^block: thinking$",
            r"^stop: (end_turn|max_tokens)$",
            r"^out: \d+$",
            r"^read: \d+ wrote: \d+$",
            r"^counted: \d+$",
            r"^refused: Prompt has \d+ tokens, but the configured context size is \d+ tokens "
            r"\(prompt is too long: \d+ tokens > \d+ maximum\)$",
        ],
    },
    "curl": {
        "sh": [
            r'"status":"ok"',
            r'"object":"chat.completion"',
            r"^data: \[DONE\]$",
            r'"object":"text_completion"',
            r'"object":"response"',
            r'"type":"message"',
            r'^\{"input_tokens":\d+\}$',
            r'"uptime":',
            r"^ds4_build_info\{",
        ]
    },
    "claude-code": {"sh": [r'^\{"input_tokens":\d+\}$']},
    "codex-cli": {"sh": [r'"object":"response"']},
    "opencode": {"sh": [r'"object":"chat.completion"']},
    "open-webui-and-others": {"sh": [r"^ds4_build_info\{"]},
}
"""Page -> language -> what its blocks print, in order."""

CASES = [(page, language) for page, languages in SAYS.items() for language in languages]


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = golden.path("tiny-a.gguf")
    with Launcher(tmp_path_factory.mktemp("server")) as launch:
        started = launch.server(
            *("-m", model, "-c", 8192, "--tokens", 24, "--temp", 0, "--http", "127.0.0.1:0")
        )
        started.wait_ready()
        yield started


@pytest.mark.parametrize(("page", "language"), CASES)
def test_the_blocks_of_a_page_do_what_it_says(
    page: str, language: str, server: Server, tmp_path: Path
) -> None:
    if language == "sh" and not (shutil.which("bash") and shutil.which("curl")):
        pytest.skip("needs bash and curl")
    script = "\n".join(blocks(page, language)).replace(ADDRESS, server.address)
    assert server.address in script
    script = re.sub(r"(max_(?:output_)?tokens\W{1,3})\d+", r"\g<1>16", script)
    program = (
        [sys.executable, "-W", "error"] if language == "python" else ["bash", "-euo", "pipefail"]
    )
    done = subprocess.run(
        [*program, "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment({"NO_PROXY": "*", "no_proxy": "*", "HOME": str(tmp_path)}),
        timeout=DEADLINE,
        check=False,
    )
    said, told = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    assert done.returncode == 0, told
    at = 0
    for pattern in SAYS[page][language]:
        found = re.compile(pattern, re.MULTILINE).search(said, at)
        assert found, f"{pattern!r} is not in:\n{said[at:]}"
        at = found.end()


def test_every_page_is_here_and_has_a_command_to_check() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert pages == set(SAYS)
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for page in pages:
        assert f"({page}.md)" in index
        assert any("curl " in block for block in blocks(page, "sh")), page
        text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        known = {"sh", "python", "console", "toml", "json"}
        assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= known, page
        assert ("python" in SAYS[page]) == bool(blocks(page, "python")), page


def test_the_settings_of_codex_are_a_provider_that_is_chosen() -> None:
    (text,) = blocks("codex-cli", "toml")
    settings = tomllib.loads(text)
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == f"http://{ADDRESS}/v1"
    assert provider["wire_api"] == "responses"
    assert settings["model_auto_compact_token_limit"] < settings["model_context_window"]


def test_the_settings_of_opencode_are_a_provider_that_is_chosen() -> None:
    (text,) = blocks("opencode", "json")
    settings: Any = json.loads(text)
    for chosen in (settings["model"], settings["small_model"]):
        name, model = chosen.split("/")
        provider = settings["provider"][name]
        assert provider["options"]["baseURL"] == f"http://{ADDRESS}/v1"
        assert provider["models"][model]["limit"].keys() == {"context", "output"}
