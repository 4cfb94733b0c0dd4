"""`-h [TOPIC]`: every flag in one section, and no topic is an error."""

from __future__ import annotations

import re

import pytest

from ds4py.cli import exits
from ds4py.cli.chat.loop import WORDS
from ds4py.cli.client import client


def shown(capsys, *args: str) -> str:
    assert exits.exit_status(client, "ds4py-cli", list(args)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("args", [("-h",), ("--help",), ("-h", "all"), ("-p", "x", "--help")])
def test_without_a_topic_everything_is_shown(args: tuple[str, ...], capsys) -> None:
    out = shown(capsys, *args)
    assert out.startswith("Usage: ds4py-cli")
    for section in ("Prompt", "Runtime", "Sampling", "Distributed", "Diagnostics"):
        assert out.count(f"\n{section}:\n") == 1


def test_every_visible_flag_stands_in_exactly_one_section(capsys) -> None:
    out = shown(capsys, "--help")
    for param in client.params:
        if not getattr(param, "hidden", False):
            assert len(re.findall(rf"(?m)^ +.*{param.opts[-1]}\b(?!-)", out)) >= 1, param.opts
    flags = re.findall(r"(?m)^  (-\S+?),? ", out)
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("topic", "there", "not_there"),
    [
        ("prompt", "--prompt-file", "--temp"),
        ("runtime", "--kv-type", "--temp"),
        ("sampling", "--min-p", "--kv-type"),
        ("distributed", "--dist-route", "--temp"),
        ("diagnostics", "--dump-logprobs", "--dist-route"),
        ("commands", "/ctx N", "--temp"),
        ("steering", "not built", "--temp"),
    ],
)
def test_a_topic_is_one_section(topic: str, there: str, not_there: str, capsys) -> None:
    out = shown(capsys, "-h", topic)
    assert there in out
    assert not_there not in out
    assert "Usage:" not in out


def test_the_commands_of_a_chat_are_a_topic(capsys) -> None:
    out = shown(capsys, "--help", "commands")
    assert all(word in out for word in WORDS)


def test_an_unknown_topic_is_a_notice_and_the_whole_help(capsys) -> None:
    out = shown(capsys, "--help", "non\x1bsense")
    assert out.startswith("No help on non\\x1bsense; here is all there is.\n\nUsage: ds4py-cli")
