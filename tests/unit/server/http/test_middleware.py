"""Who comes in: API keys in the ways of both families, and what needs none."""

import asyncio

import pytest

from tests.unit.server.support import USER, backend, client

KEY = "s3cret"
CHAT = {"messages": USER}


def ask(method, path, *, json=None, headers=None, **config):
    async def scenario():
        with client(backend(), api_key=KEY, **config) as http:
            return await http.request(method, path, json=json, headers=headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
    ],
)
def test_the_key_opens_the_door(headers):
    assert ask("POST", "/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert ask("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": "schlüssel".encode("latin-1")},
    ],
)
def test_anything_else_is_refused_before_it_is_read(headers):
    response = ask("POST", "/v1/chat/completions", json={"broken": 1}, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert KEY not in response.text


def test_the_other_family_reads_its_own_error():
    body = ask("POST", "/v1/messages", json=CHAT).json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize("path", ["/", "/health", "/console/main.js"])
def test_what_holds_nothing_needs_no_key(path):
    assert ask("GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/stats", "/metrics", "/v1/models", "/console", "/nope"])
def test_what_tells_something_needs_it(path):
    assert ask("GET", path).status_code == 401


def test_browsers_of_other_origins_may_ask_without_a_key_what_is_allowed():
    response = ask("OPTIONS", "/v1/chat/completions", cors=True)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "*"
    refused = ask("POST", "/v1/chat/completions", json=CHAT, cors=True)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"
