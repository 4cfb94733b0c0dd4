"""The console's files as HTTP clients get them."""

import asyncio
from html.parser import HTMLParser
from importlib import resources
from pathlib import PurePath

import httpx
import pytest
from starlette.applications import Starlette

from ds4py.server.console import console_routes

ROUTES = console_routes()
PATHS = [route.path for route in ROUTES]
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PACKAGE = resources.files("ds4py.server.console")


def get(path: str, *, method: str = "GET", **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=ROUTES))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return await client.request(method, path, headers=sent)

    return asyncio.run(go())


class Links(HTMLParser):
    """Everything that a page makes a browser load, and what it should not have."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loaded += [values[name] or "" for name in ("src", "href") if name in values]
        self.handlers += [name for name in values if name.startswith("on") or name == "style"]


def imports_of(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if line.startswith("import ")]
    return [line.split('"')[1] for line in lines]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_comes_with_its_type_and_strict_headers(path):
    reply = get(path)
    assert reply.status_code == 200
    name = "index.html" if path == "/" else path.removeprefix("/console/")
    assert reply.content == PACKAGE.joinpath(name).read_bytes()
    kind = MEDIA_TYPES.get(PurePath(path).suffix, "text/html; charset=utf-8")
    assert reply.headers["content-type"] == kind
    policy = reply.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert {"base-uri 'none'", "frame-ancestors 'none'", "object-src 'none'"} <= set(policy)
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", "/console/main.js"])
def test_a_browser_that_has_the_file_gets_304(path):
    first = get(path)
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = get(path, if_none_match=known)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert again.headers["cache-control"] == "no-cache"
    for other in ('"other"', tag.strip('"'), ""):
        assert get(path, if_none_match=other).status_code == 200


def test_files_have_different_tags():
    tags = [get(path).headers["etag"] for path in PATHS]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "path",
    [
        *("/console", "/console/", "/console/__init__.py", "/console/index.html", "/index.html"),
        *("/console/../app.py", "/console/%2e%2e/app.py", "/console/..%2fapp.py", "/main.js"),
        *("/console//etc/passwd", "/console/main.js%00.css", "/console/sub/main.js"),
    ],
)
def test_nothing_else_can_be_reached(path):
    assert get(path).status_code == 404


def test_only_get_is_answered():
    assert get("/", method="POST").status_code == 405


def test_the_page_loads_only_what_is_served_here():
    links = Links()
    links.feed(PACKAGE.joinpath("index.html").read_text())
    assert links.handlers == []
    assert links.loaded
    assert {f"/{path}" for path in links.loaded} <= set(PATHS)


def test_scripts_import_only_each_other_and_all_of_them_are_used():
    used = {"index.html"}
    for entry in PACKAGE.iterdir():
        if entry.name.endswith(".js"):
            used |= {name.removeprefix("./") for name in imports_of(entry.read_text())}
    links = Links()
    links.feed(PACKAGE.joinpath("index.html").read_text())
    used |= {path.removeprefix("console/") for path in links.loaded}
    served = {path.removeprefix("/console/") for path in PATHS if path != "/"} | {"index.html"}
    assert used == served


def test_every_file_of_the_package_is_served():
    kinds = {".html", *MEDIA_TYPES}
    files = [entry.name for entry in PACKAGE.iterdir() if PurePath(entry.name).suffix in kinds]
    assert len(files) == len(PATHS)


def test_no_script_turns_text_into_markup_or_code():
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    for entry in PACKAGE.iterdir():
        if entry.name.endswith((".js", ".html")):
            text = entry.read_text()
            assert [word for word in forbidden if word in text] == []
            assert "http://" not in text
            assert "https://" not in text
