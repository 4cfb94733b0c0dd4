"""What is remembered, and for how long something is waited for, has an end."""

import json
import logging

import pytest

from ds4py.config import ServerConfig
from ds4py.server.api.messages.request import read_messages
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.http.app import create_app, queue_of, save_sessions
from ds4py.server.requests.request import ChatMessage, Conversation, PastCall
from ds4py.snapshot.disk_cache import CacheIdentity, DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import ABI_OWN, Reason
from tests.fakes import FakeSession
from tests.unit.server.support import DEADLINE, GREEDY, N_VOCAB, backend, script, text_stack

LONG = "x" * 1000


@pytest.mark.parametrize(
    "turn",
    [
        ChatMessage("assistant", LONG),
        ChatMessage("assistant", "\U0001f40b" * 250),
        ChatMessage("assistant", "", reasoning=LONG),
        ChatMessage("tool", "", call_id=LONG),
        ChatMessage("assistant", "", calls=(PastCall(LONG, "f", "{}"),)),
        ChatMessage("assistant", "", calls=(PastCall("id", LONG, "{}"),)),
        ChatMessage("assistant", "", calls=(PastCall("id", "f", LONG),)),
    ],
)
def test_whatever_is_long_in_a_turn_counts(turn):
    assert Conversation((turn,)).n_bytes > 1000


def test_transcripts_are_bounded_by_what_their_views_hold():
    found = ExactTokens(max_bytes=1000)
    for number in range(5):
        found.keep((number, 9), [lambda number=number: (number,)], 400)
    prompts = [[*found.paths((number, 7))] for number in range(5)]
    assert prompts == [[], [], [], [(3, 9, 7)], [(4, 9, 7)]]
    found.keep((6, 9), [lambda: (6,)], 1001)
    assert [*found.paths((6, 7))] == []


IDENTITY = CacheIdentity(
    model_id=0x80000001, quant_bits=4, abi=ABI_OWN, n_ctx=100, model="m", tokenizer="t"
)
OPTIONS = DiskCacheOptions(min_tokens=8, continued_interval_tokens=0)


def session():
    return FakeSession(n_vocab=N_VOCAB, n_ctx=100)


def test_a_file_whose_hidden_tokens_leave_no_room_is_not_loaded(tmp_path):
    exact_tokens = ExactTokens()
    disk = DiskCache(tmp_path, OPTIONS, IDENTITY)
    disk_prefixes = DiskPrefixCache(disk, text_stack().tokenizer, ToolCallMemory(), exact_tokens)
    seen = tuple(script("What is a whale? An animal.", end=False))
    said = (*seen[:16], *script("hidden reasoning " * 3, end=False), *seen[16:])
    exact_tokens.keep(said, [lambda: seen])
    speaking = session()
    speaking.sync(said)
    disk_prefixes.save(speaking, Reason.SHUTDOWN)
    behind = 100 - len(said)
    fits, too_long = ((*seen, *script("y" * n, end=False)) for n in (behind - 1, behind))
    assert len(disk_prefixes.resume(session(), fits)) == 99
    assert disk_prefixes.resume(session(), too_long) == too_long


def test_the_end_of_a_server_does_not_wait_for_a_session_in_use(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ds4py.server.requests.worker._SAVE_SECONDS", 0.05)
    fake = backend(n_sessions=2, n_ctx=100)
    disk = DiskCache(tmp_path, OPTIONS, IDENTITY)
    config = ServerConfig(sampling=GREEDY)
    app = create_app(fake, text_stack(), config, n_sessions=2, disk=disk)
    fake.sessions[0].sync(range(10, 30))
    fake.sessions[1].sync(range(10, 40))
    with fake.lease(range(10, 40)), caplog.at_level(logging.WARNING):
        save_sessions(app)
    queue_of(app).close(DEADLINE)
    assert "still in use" in caplog.text
    assert len([*tmp_path.glob("*.kv")]) == 1, "the other one is saved"


def messages_body(*blocks, tools=()):
    said = [{"role": "user", "content": list(blocks)}]
    return json.dumps({"messages": said, "tools": list(tools)}).encode()


def test_what_is_no_text_is_left_out_of_messages_with_a_warning(caplog):
    image = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    read = read_messages(messages_body({"type": "text", "text": "a"}, image), ServerConfig())
    assert read.prompt.messages[0].content == "a"
    assert caplog.text.count("are no text") == 1


def test_blocks_that_are_read_give_no_warning(caplog):
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    read_messages(messages_body({"type": "text", "text": "a"}, result), ServerConfig())
    assert not caplog.records


def test_tools_that_only_their_maker_runs_are_left_out(caplog):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    own = {"name": "web_search_own", "input_schema": {"type": "object"}}
    shell = {"type": "bash_20250124", "name": "bash"}
    read = read_messages(messages_body(tools=[search, own, shell]), ServerConfig())
    assert len(read.prompt.tools.sources) == 2
    assert "max_uses" not in "".join(read.prompt.tools.sources)
    assert "web_search_20250305" in caplog.text


def test_what_begins_otherwise_needs_no_look_at_a_conversation():
    written = []
    found = ExactTokens()
    found.keep((1, 2, 3, 90, 4), [lambda: written.append("first") or (1, 2, 3, 4)], n_opening=3)
    found.keep((1, 2, 3, 90, 4, 7, 91, 5), [lambda: written.append("second") or (1, 2, 3, 4, 7, 5)])
    assert [*found.paths((1, 2, 8, 4, 7))] == []
    assert written == [], "the second one has the opening of the first one"
    assert [*found.paths((1, 2, 3, 4, 7, 5, 8))] == [
        (1, 2, 3, 90, 4, 7, 91, 5, 8),
        (1, 2, 3, 90, 4, 7, 5, 8),
    ]


def test_a_conversation_that_came_with_its_past_may_go_on_in_any_way():
    found = ExactTokens()
    found.keep((1, 2, 3), [lambda: (9, 8)])
    assert [*found.paths((9, 8, 7))] == [(1, 2, 3, 7)]
