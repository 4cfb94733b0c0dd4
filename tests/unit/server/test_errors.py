"""What clients learn about exceptions."""

import json

import pytest

from ds4py.errors import (
    CancelledError,
    CapacityError,
    Ds4Error,
    RemoteWorkError,
    RequestError,
    RouteIncompleteError,
    TransportTimeoutError,
)
from ds4py.server.errors import describe, error_response, unknown_endpoint


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no", status=413, code="request_too_large"), 413, "request_too_large"),
        (RouteIncompleteError("layers 2-3", first_missing=2), 503, "route_incomplete"),
        (CapacityError("slots", needed=2, available=1), 503, "capacity_exhausted"),
        (CancelledError("stopped"), 503, "cancelled"),
        (RemoteWorkError("out of memory", hop="worker1"), 500, None),
        (TransportTimeoutError("silent", peer="worker1"), 500, None),
        (Ds4Error("anything else"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
def test_status_and_code_follow_the_type(error, status, code):
    problem = describe(error)
    assert (problem.status, problem.code) == (status, code)


def test_our_own_sentences_are_passed_on_and_foreign_ones_are_not():
    assert "worker1" in describe(RemoteWorkError("out of memory", hop="worker1")).message
    assert "secret" not in describe(ZeroDivisionError("secret")).message


def test_the_body_is_the_openai_error_object_and_one_newline():
    response = error_response(RequestError("too long", param="messages", code="c", extra={"n": 3}))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.body.endswith(b"}\n")
    assert json.loads(response.body) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "c",
            "n": 3,
        }
    }


def test_the_type_is_one_word_except_in_streams():
    body = json.loads(error_response(Ds4Error("broken")).body)
    assert body["error"]["type"] == "invalid_request_error"
    assert describe(Ds4Error("broken")).body(in_stream=True)["type"] == "server_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error")),
        *((404, "not_found_error"), (413, "request_too_large"), (429, "rate_limit_error")),
        *((500, "api_error"), (503, "overloaded_error")),
    ],
)
def test_the_other_family_has_an_envelope_and_types_of_its_own(status, kind):
    error = RequestError("bad", status=status, extra={"n": 3})
    response = error_response(error, anthropic=True)
    assert response.status_code == status
    assert json.loads(response.body) == {
        "type": "error",
        "error": {"type": kind, "message": "bad", "n": 3},
    }


def test_only_states_that_pass_ask_to_retry():
    full = error_response(RequestError("full", status=429))
    assert full.headers["retry-after"] == "1"
    assert error_response(CapacityError("x", needed=1, available=0)).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(Ds4Error("x")).headers


def test_the_unknown_endpoint_is_a_404():
    assert describe(unknown_endpoint()).status == 404
    assert unknown_endpoint() is not unknown_endpoint()  # a shared one would collect tracebacks
