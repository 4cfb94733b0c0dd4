"""The endurance run's judgement: what it asks, what counts as a fault, which promises it checks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ds4py.config import ServerConfig
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.messages.request import read_messages
from ds4py.server.api.responses.request import read_responses
from tools.run_soak import DIALECTS, Footprint, Outcome, body, fault, refused_well, verdicts

READERS: dict[str, Callable[[bytes, ServerConfig], Any]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/messages": read_messages,
    "/v1/responses": read_responses,
}
CALM = Footprint(memory=100 << 20, threads=9, files=12)


def outcome(**changes: Any) -> Outcome:
    """What three clients saw of a server without a fault."""
    served, cached = Counter({0: 5, 1: 4, 2: 3}), dict.fromkeys(DIALECTS, 30)
    return Outcome(**{"served": served, "cached": cached, **changes})


def broken(seen: Outcome, after: Footprint | None = CALM) -> list[str]:
    """The promises that were not kept."""
    judged = verdicts(seen, 3, {"worker1": CALM}, {"worker1": after})
    return [promise for promise, kept in judged.items() if not kept]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_question_is_one_in_its_dialect(path: str, stream: bool) -> None:
    asked = body(path, stream=stream, chance=random.Random(1))
    options = READERS[path](json.dumps(asked).encode(), ServerConfig())
    assert (options.stream, options.max_tokens, options.sampling.temperature) == (stream, 12, 0)
    assert body(path, stream=stream, chance=random.Random(1)) == asked
    assert body(path, stream=stream, chance=random.Random(2)) != asked


@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_is_whole_or_a_fault(path: str) -> None:
    for end in DIALECTS[path].ends:
        assert fault(path, b'data: {"error":null}\n\n' + end, stream=True) == ""
    assert "without its end" in fault(path, b'data: {"a":1}\n\n', stream=True)
    assert "error inside" in fault(path, b'{"error":{}}' + DIALECTS[path].ends[0], stream=True)
    assert fault(path, b'{"choices":[],"error":null}', stream=False) == ""
    assert "half an answer" in fault(path, b'{"choices":[', stream=False)
    assert "error inside" in fault(path, b'{"error":{"message":"m"}}', stream=False)


def test_a_refusal_tells_why_and_when_to_come_again() -> None:
    said = b'{"error":{"message":"too many"}}'
    assert refused_well(httpx.Headers({"Retry-After": "1"}), said)
    assert not refused_well(httpx.Headers(), said)
    assert not refused_well(httpx.Headers({"Retry-After": "soon"}), said)
    assert not refused_well(httpx.Headers({"Retry-After": "1"}), b"")


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert broken(outcome()) == []
    grown = Footprint(CALM.memory + (64 << 20), CALM.threads + 2, CALM.files + 2)
    assert broken(outcome(), grown) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (outcome(errors=["status 500"]), "no error (1)"),
        (outcome(served=Counter({0: 9, 1: 9, 2: 4})), "fair: least served 4, median 9"),
        (outcome(served=Counter({0: 9, 1: 9})), "fair: least served 0"),
        (outcome(served=Counter({0: 9}), refused=7), "fair: least served 0, median 0"),
        (outcome(served=Counter()), "fair: least served 0"),
        (outcome(cached={**dict.fromkeys(DIALECTS, 3), "/v1/messages": 0}), "[3, 3, 0, 3]"),
        (outcome(cached={}), "from the cache: []"),
    ],
)
def test_what_clients_saw_breaks_a_promise(seen: Outcome, words: str) -> None:
    (promise,) = broken(seen)
    assert words in promise


def test_who_is_refused_may_be_served_less() -> None:
    assert broken(outcome(served=Counter({0: 9, 1: 9}), refused=7)) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (CALM._replace(threads=12), "worker1: threads 9 -> 12"),
        (CALM._replace(files=15), "worker1: open files 12 -> 15"),
        (CALM._replace(memory=(164 << 20) + 1), "worker1: memory 105 -> 172 MB"),
        (None, "worker1: runs to the end"),
    ],
)
def test_what_a_process_keeps_breaks_a_promise(after: Footprint | None, words: str) -> None:
    assert broken(outcome(), after) == [words]


def test_a_process_that_has_ended_has_no_footprint() -> None:
    mine = Footprint.of(os.getpid())
    assert mine is not None
    assert min(mine) > 0
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its status yet
    assert Footprint.of(ended.pid) is None
    ended.wait()
    assert Footprint.of(ended.pid) is None
