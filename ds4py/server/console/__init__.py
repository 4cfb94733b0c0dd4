"""The console: the page at `GET /` and the files that it loads.

Owns: which paths exist, their media types, how browsers cache them, and the headers that keep a
page from running or loading anything else. Refuses to know: what the page shows; it asks `/stats`
and `/v1/chat/completions` like any other client. Invariant: only the files named here are served,
from memory; nothing that a client sends becomes part of a path.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePath
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_INDEX: Final = "index.html"
_FILES: Final = (
    *(_INDEX, "style.css", "icon.svg", "theme.js", "main.js", "dom.js", "api.js"),
    *("chat.js", "completion.js", "answer.js", "markdown.js", "cluster.js", "picture.js"),
)
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    # No script but ours, no text turned into markup (trusted types), no frame around the page.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, but asked for again: an upgraded server shows its own page
}


def console_routes() -> list[Route]:
    """Return the routes of the console, with its files read into memory.

    They need no API key: the page holds no data, and asks for a key when the server wants one.

    Raises:
        FileNotFoundError: The package was installed without its page.
    """
    return [_route(name) for name in _FILES]


def _route(name: str) -> Route:
    body = resources.files(__name__).joinpath(name).read_bytes()
    media_type = _MEDIA_TYPES[PurePath(name).suffix]
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = _HEADERS | {"ETag": tag}

    async def serve(request: Request) -> Response:
        if _holds(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return Route("/" if name == _INDEX else f"/console/{name}", serve, methods=["GET"])


def _holds(known: str, tag: str) -> bool:
    """Tell whether `If-None-Match` names a tag, by the weak comparison of RFC 9110, 13.1.2."""
    tags = [one.strip().removeprefix("W/") for one in known.split(",")]
    return tag in tags or tags == ["*"]
