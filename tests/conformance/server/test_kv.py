"""C58 to C62: what is reused of earlier requests, in memory and from disk."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4py.snapshot.disk_cache import CacheIdentity, DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import ABI_OWN
from tests.conformance.server.peer import (
    CHAT,
    MESSAGES,
    RESPONSES,
    THINK_END,
    WEATHER,
    asking,
    model,
    post,
    served,
    turns,
)
from tests.conformance.server.replies import DIALECTS, calls, follow_up, texts, usage
from tests.support.fakes import FakeBackend
from tests.unit.server import support

N_CTX = 8192
IDENTITY = CacheIdentity(
    model_id=0x80000001, quant_bits=4, abi=ABI_OWN, n_ctx=N_CTX, model="m" * 8, tokenizer="t" * 8
)
OPTIONS = DiskCacheOptions(min_tokens=16, boundary_align_tokens=1, boundary_trim_tokens=0)


def cache(folder: Path, *, identity: CacheIdentity = IDENTITY, **options: Any) -> DiskCache:
    return DiskCache(folder, replace(OPTIONS, **options), identity)


# --- in memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("returns_reasoning", [True, False])
def test_c58_the_second_turn_reuses_the_first(path: str, returns_reasoning: bool) -> None:
    fake = model(turns(f"Think first.{THINK_END}It is warm.", f"Again.{THINK_END}Yes."))
    with served(fake) as (_, port):
        first = post(port, path, asking(path, reasoning={"summary": "auto"})).json
        body = follow_up(path, first, [], tools=False)
        if not returns_reasoning:
            _forget_reasoning(path, body)
        name = "input" if path == RESPONSES else "messages"
        if path == MESSAGES:
            body[name].pop()  # the turn without results
        body[name].append({"role": "user", "content": "Sure?"})
        second = post(port, path, body).json
    n_first, _, n_said = usage(path, first)
    n_second, n_cached, _ = usage(path, second)
    assert texts(path, second)[1] == "Yes."
    assert n_cached >= n_first + n_said - 1
    assert n_cached < n_second


def _forget_reasoning(path: str, body: Any) -> None:
    """Leave out what many clients do not send back."""
    if path == CHAT:
        body["messages"][1].pop("reasoning_content")
    elif path == RESPONSES:
        body["input"] = [item for item in body["input"] if item.get("type") != "reasoning"]
    else:
        content = body["messages"][1]["content"]
        body["messages"][1]["content"] = [one for one in content if one["type"] != "thinking"]


def test_c58_other_formats_reuse_too() -> None:
    """A prompt that goes on from what was sampled says the same as one that is written again.

    ChatML ends questions and answers by one token, and the answer was sampled byte by byte.
    """
    said = "an answer in bytes"
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And then?"},
    ]
    prompts = []
    for n_before in (0, 1):
        fake = support.backend(said, n_ctx=1000)
        with support.server(fake) as (_, port):
            for messages in [history[:1]] * n_before:
                first = post(port, CHAT, {"messages": messages}).json
            last = post(port, CHAT, {"messages": history}).json
        session = fake.sessions[0]
        spell = support.text_stack().tokenizer.token_bytes
        prompt = session.tokens[: session.n_prompt]
        prompts.append(b"".join(spell(token, special=True) for token in prompt))
    assert prompts[0] == prompts[1]
    assert usage(CHAT, last)[1] >= usage(CHAT, first)[0] + len(said)


def results_only(path: str, name: str) -> Any:
    if path == RESPONSES:
        return {"input": [{"type": "function_call_output", "call_id": name, "output": "9 C"}]}
    result = {"type": "tool_result", "tool_use_id": name, "content": "9 C"}
    return {"messages": [{"role": "user", "content": [result]}], "max_tokens": 100}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("disturbed", [False, True])
def test_c59_results_alone_go_on(path: str, disturbed: bool) -> None:
    """A request with nothing but results of tools goes on where their calls were made.

    Differs from ds4: it still does after an unrelated request, since the turns are kept and not the
    session; 409 does not occur.
    """
    fake = model(turns(f"Hm{THINK_END}" + WEATHER, f"So{THINK_END}Cold."))
    with served(fake) as (_, port):
        first = post(port, path, asking(path, tools=True)).json
        (found,) = calls(path, first)
        if disturbed:
            assert post(port, CHAT, asking(CHAT, "Something else")).status == 200
        second = post(port, path, results_only(path, found[0]))
    assert texts(path, second.json)[1] == "Cold."
    n_prompt, n_cached, _ = usage(path, second.json)
    n_first, _, n_said = usage(path, first)
    assert n_prompt > n_first + n_said
    if not disturbed:
        assert n_cached >= n_first + n_said - 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_c59_results_of_unknown_calls_are_refused(path: str) -> None:
    with served(model(turns(f"Hm{THINK_END}" + WEATHER))) as (_, port):
        (found,) = calls(path, post(port, path, asking(path, tools=True)).json)
        answer = post(port, path, results_only(path, "call_other"))
        whole = post(port, path, results_only(path, found[0]))  # and nothing is lost by that
    assert answer.status == 400
    said = answer.json["error"]["message"]
    assert "call_other" in said
    assert "replay the full" in said
    assert whole.status == 200


# --- on disk --------------------------------------------------------------------------------------

LONG = "Tell me of whales and of all that lives in the sea. " * 8
OTHER = "Write a poem on stones, and on what they think of us. " * 8


def cached(port: int, path: str, body: Any) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were not evaluated."""
    n_prompt, n_cached, _ = usage(path, post(port, path, body).json)
    return n_prompt, n_cached


def further(first: Any, text: str) -> Any:
    """A second question behind a first one and its answer."""
    said = first["choices"][0]["message"]["content"]
    turns_so_far = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And then?"},
    ]
    return {"messages": turns_so_far}


def talking() -> FakeBackend:
    return model(f"A thought.{THINK_END}An answer.", n_ctx=N_CTX)


@pytest.mark.parametrize("restarted", [False, True])
def test_c60_a_conversation_comes_back_from_disk(tmp_path: Path, restarted: bool) -> None:
    """A, then B, then A again: A is read from disk, also by another server after a clean stop."""
    with served(talking(), disk=cache(tmp_path)) as (_, port):
        first = post(port, CHAT, asking(CHAT, LONG)).json
        n_first, _, n_said = usage(CHAT, first)
        if not restarted:
            cached(port, CHAT, asking(CHAT, OTHER))
            n_prompt, n_cached = cached(port, CHAT, further(first, LONG))
    if restarted:
        fake = talking()
        with served(fake, disk=cache(tmp_path)) as (_, port):
            cached(port, CHAT, asking(CHAT, OTHER))
            n_prompt, n_cached = cached(port, CHAT, further(first, LONG))
    assert n_cached >= n_first + n_said - 1  # with the reasoning, which the client left out
    assert n_prompt > n_cached


def test_c60_calls_are_repeated_after_a_restart(tmp_path: Path) -> None:
    spaced = WEATHER.replace("\n\n", "\n").replace(">3<", "> 3 <")
    script = turns(f"Look:{spaced}", "Cold.")
    with served(model(script, n_ctx=N_CTX), disk=cache(tmp_path)) as (_, port):
        first = post(port, CHAT, asking(CHAT, tools=True, think=False)).json
        n_first, _, n_said = usage(CHAT, first)
        (found,) = calls(CHAT, first)
    body = follow_up(CHAT, first, [(found[0], "9 C")], think=False)
    with served(model(script, n_ctx=N_CTX), disk=cache(tmp_path)) as (_, port):
        second = post(port, CHAT, body).json
    assert texts(CHAT, second)[1] == "Cold."
    assert usage(CHAT, second)[1] >= n_first + n_said - 1


def test_c61_the_folder_stays_within_its_budget(tmp_path: Path) -> None:
    def size() -> int:
        return sum(file.stat().st_size for file in tmp_path.glob("*.kv"))

    with served(talking(), disk=cache(tmp_path)) as (_, port):
        post(port, CHAT, asking(CHAT, LONG))
    budget = 2 * size()
    kept = set()
    with served(talking(), disk=cache(tmp_path, space_bytes=budget)) as (_, port):
        for n in range(8):
            post(port, CHAT, asking(CHAT, f"{n} {LONG}"))
            assert size() <= budget
            kept.add(frozenset(file.name for file in tmp_path.glob("*.kv")))
    assert size() <= budget
    assert len(kept) > 3  # new files take the place of old ones


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def _cut_to_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    (n_key,) = struct.unpack_from("<I", data, 48)
    data[52 + n_key + 9] ^= 4  # in the payload
    file.write_bytes(data)


def _flip_the_text(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)


def _replace_by_noise(file: Path) -> None:
    file.write_bytes(b"KVC" + bytes(range(256)) * 8)


DAMAGES: list[Callable[[Path], None]] = [
    _cut,
    _cut_to_the_header,
    _flip,
    _flip_the_text,
    _replace_by_noise,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_c62_damaged_files_cost_a_cold_start(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with served(talking(), disk=cache(tmp_path)) as (_, port):
        first = post(port, CHAT, asking(CHAT, LONG)).json
    files = list(tmp_path.glob("*.kv"))
    assert files
    for file in files:
        damage(file)
    with served(talking(), disk=cache(tmp_path)) as (_, port):
        again = post(port, CHAT, asking(CHAT, LONG)).json
    assert usage(CHAT, again)[1] == 0
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, model="n" * 8),
        replace(IDENTITY, tokenizer="u" * 8),
        replace(IDENTITY, model_id=0x80000002),
        replace(IDENTITY, n_ctx=N_CTX - 1),
    ],
)
def test_c62_files_of_others_are_not_loaded(tmp_path: Path, other: CacheIdentity) -> None:
    with served(talking(), disk=cache(tmp_path)) as (_, port):
        first = post(port, CHAT, asking(CHAT, LONG)).json
    assert list(tmp_path.glob("*.kv"))
    with served(talking(), disk=cache(tmp_path, identity=other)) as (_, port):
        again = post(port, CHAT, asking(CHAT, LONG)).json
    assert usage(CHAT, again)[1] == 0
    assert again["choices"] == first["choices"]
