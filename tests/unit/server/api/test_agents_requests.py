"""Members that agents and SDKs send and that must not go unheard."""

import json

import anthropic
import pytest

from ds4py.config import ServerConfig
from ds4py.generation.grammar import GrammarKind
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.messages.request import read_messages
from tests.unit.server.support import backend, server

TOOL = '{"name":"f","input_schema":{"type":"object"}}'
SCHEMA = '{"type":"object","properties":{"a":{"enum":[1]}},"required":["a"]}'
FORMAT = f'{{"type":"json_schema","schema":{SCHEMA}}}'


def messages(*members):
    said = '"messages":[{"role":"user","content":"a"}]'
    return read_messages(f"{{{','.join((said, *members))}}}".encode(), ServerConfig())


@pytest.mark.parametrize(
    "member", [f'"output_config":{{"format":{FORMAT}}}', f'"output_format":{FORMAT}']
)
def test_messages_may_ask_for_a_form(member):
    form = messages(member).output_format
    assert (form.kind, form.text, form.strict) == (GrammarKind.JSON_SCHEMA, SCHEMA, False)
    with_tools = messages(member, f'"tools":[{TOOL}]')
    assert (with_tools.output_format, len(with_tools.prompt.tools.sources)) == (None, 1)


def test_the_official_client_gets_the_form_that_it_asks_for():
    with server(backend("nothing of that form")) as (_, port):
        client = anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="x", max_retries=0
        )
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        reply = client.messages.create(
            model="m",
            max_tokens=100,
            messages=[{"role": "user", "content": "a"}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert json.loads(reply.content[0].text) == {"a": 1}


@pytest.mark.parametrize(
    ("kwargs", "think"),
    [
        ('{"thinking":false}', "none"),
        ('{"thinking":true}', "high"),
        ('{"enable_thinking":false,"thinking":true}', "none"),
        ('{"thinking":null}', None),
    ],
)
def test_templates_are_told_to_think_in_either_word(kwargs, think):
    body = f'{{"messages":[{{"content":"a"}}],"chat_template_kwargs":{kwargs}}}'
    assert read_chat(body.encode(), ServerConfig()).think == think
