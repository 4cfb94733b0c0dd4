"""Conversations on disk, over a route of two workers: evicted, restarted, cut otherwise.

The toy's answers are random bytes, of which no client could send back what it got: a grammar makes
them letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4py.snapshot.disk_cache import DiskCacheOptions
from tests.e2e.support import Alone, LocalServer, client, coordinator, route, worker

FORM = {"type": "regex", "regex": "[a-z ]{12}"}
LIMITS = DiskCacheOptions(
    min_tokens=16,
    continued_interval_tokens=0,
    boundary_align_tokens=1,
    boundary_trim_tokens=0,
)
SYSTEM = {"role": "system", "content": "in the world of an old and kind house " * 3}
WHALE = [SYSTEM, {"role": "user", "content": "hello the world and the sea"}]
TREE = [{"role": "user", "content": "or on an in the of and hello world hello in an"}]


@contextmanager
def serving(toy: Path, folder: Path | None, *layers: str) -> Iterator[LocalServer]:
    """A route with a single session and, with a folder, a disk cache."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(toy, span)) for span in layers]
        built = stack.enter_context(
            coordinator(toy, route=route(*workers), n_sessions=1, disk=folder and (folder, LIMITS))
        )
        built.wait_ready()
        yield built


def ask(server: LocalServer, messages: list[dict[str, str]]) -> tuple[str, Any]:
    """The greedy answer, and its usage."""
    with client(server) as api:
        reply = api.chat.completions.create(
            model="toy",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            response_format=FORM,  # type: ignore[call-overload]
        )
    assert reply.usage is not None
    return str(reply.choices[0].message.content), reply.usage


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def goes_on(messages: list[dict[str, str]], said: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]


Answers = Callable[[list[dict[str, str]]], str]


@pytest.fixture(scope="module")
def afresh(toy: Path) -> Iterator[Answers]:
    """Answers without any help of a disk."""
    with serving(toy, None, "0-5") as server:
        yield lambda messages: ask(server, messages)[0]


def test_a_conversation_comes_back_from_disk(
    toy: Path, alone: Alone, afresh: Answers, tmp_path: Path
) -> None:
    """A, then B in the only session, then A again; then after a restart, over another cut."""
    with serving(toy, tmp_path, "0-2", "3-5") as server:
        said, usage = ask(server, WHALE)
        assert (said, cached(usage)) == (afresh(WHALE), 0)
        ask(server, TREE)
        again = goes_on(WHALE, said)
        answer, usage = ask(server, again)
        assert answer == afresh(again)
        assert cached(usage) >= len(alone.chat_ids(WHALE))
    assert list(tmp_path.glob("*.kv")), "the shutdown saved what the session held"
    with serving(toy, tmp_path, "0-1", "2-3", "4-5") as server:
        third = goes_on(again, answer)
        told, usage = ask(server, third)
        assert told == afresh(third)
        assert cached(usage) >= len(alone.chat_ids(again))


def test_another_question_finds_the_system_text(
    toy: Path, alone: Alone, afresh: Answers, tmp_path: Path
) -> None:
    with serving(toy, tmp_path, "0-2", "3-5") as server:
        ask(server, WHALE)
    other = [SYSTEM, {"role": "user", "content": "of an or?"}]
    with serving(toy, tmp_path, "0-2", "3-5") as server:
        said, usage = ask(server, other)
    assert said == afresh(other)
    assert cached(usage) >= len(alone.chat_ids([SYSTEM])) - 8
