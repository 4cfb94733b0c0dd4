"""Conversations and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds4py.cli.chat.conversation import ChatHistory
from ds4py.errors import ConfigError


def test_a_saved_conversation_is_the_messages_of_a_request_and_comes_back(tmp_path: Path) -> None:
    talk = ChatHistory("Be brief.", "high")
    talk.add("Hi 🤔", "Hello", "hm")
    talk.add("And?", "So.")
    path = tmp_path / "talk.json"
    talk.save(path)
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 🤔"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "So."},
    ]
    again = ChatHistory()
    again.load(path)
    assert (again.system, again.turns) == (talk.system, talk.turns)


def test_a_file_without_a_system_text_leaves_that_of_the_chat(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    ChatHistory().save(path)
    talk = ChatHistory("mine")
    talk.add("a", "b")
    talk.load(path)
    assert (talk.system, talk.turns) == ("mine", [])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{}", "not a saved conversation"),
        (b"[1]", "not a saved conversation"),
        (b'[{"role": "user"}]', "not a saved conversation"),
        (b'[{"role": "user", "content": [1]}]', "not a saved conversation"),
        (b"\xff", "not a saved conversation"),
        (b"[" * 100000, "not a saved conversation"),
        (b'[{"role": "user", "content": "a"}]', "questions and answers in turn"),
        (b'[{"role": "assistant", "content": "a"}]', "questions and answers in turn"),
        (b'[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]', "in turn"),
    ],
)
def test_another_file_is_refused_and_changes_nothing(
    raw: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(raw)
    talk = ChatHistory("s")
    talk.add("a", "b")
    with pytest.raises(ConfigError, match=words):
        talk.load(path)
    assert (talk.system, len(talk.turns)) == ("s", 2)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        ChatHistory().load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere/x: No such file"):
        ChatHistory().save(tmp_path / "nowhere" / "x")
