"""How many modules of the server a request passes, from its body to the finish and back."""

import threading
from pathlib import Path
from types import FrameType

import httpx
import pytest

import ds4py.server
from tests.unit.server.support import USER, backend, server

SERVER = Path(ds4py.server.__file__).parent
CHAT = "/v1/chat/completions"
MOST = 21
"""Modules whose functions are called; more would be a way that nobody holds in mind."""


class Traced:
    """The modules of the server whose functions are called while it is switched on."""

    def __init__(self):
        self.on = False
        self.passed: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if not (self.on and event == "call") or code.co_name == "<module>":
            return
        path = Path(code.co_filename)
        if path.is_relative_to(SERVER):
            name = str(path.relative_to(SERVER).with_suffix(""))
            if name not in self.passed:
                self.passed.append(name)


@pytest.fixture
def traced():
    """What traces every thread that begins meanwhile."""
    before = threading.getprofile() if hasattr(threading, "getprofile") else None
    trace = Traced()
    threading.setprofile(trace)
    yield trace
    threading.setprofile(before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_passes_few_modules(traced, stream):
    with server(backend("Hello")) as (_, port):
        traced.on = True
        asked = {"messages": USER, "max_tokens": 4, "stream": stream}
        assert httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=asked).status_code == 200
        traced.on = False
    assert {"api/chat/request", "requests/worker", "api/chat/response"} <= {*traced.passed}
    assert len(traced.passed) <= MOST, f"{len(traced.passed)} modules: {traced.passed}"
