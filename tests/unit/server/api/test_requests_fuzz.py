"""Whatever a client sends, a body is read or refused in one sentence; nothing else ever happens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.messages.request import read_messages
from ds4py.server.api.responses.request import read_responses

READERS = [read_chat, read_completion, read_messages, read_responses]
NAMES = st.sampled_from(
    [
        "arguments",
        "call_id",
        "chat_template_kwargs",
        "content",
        "conversation",
        "effort",
        "enable_thinking",
        "format",
        "frequency_penalty",
        "function",
        "id",
        "include_usage",
        "input",
        "input_schema",
        "instructions",
        "json_schema",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "model",
        "name",
        "namespace",
        "output",
        "output_config",
        "parameters",
        "presence_penalty",
        "previous_response_id",
        "prompt",
        "raw",
        "reasoning",
        "reasoning_content",
        "reasoning_effort",
        "regex",
        "response_format",
        "role",
        "schema",
        "seed",
        "status",
        "stop",
        "stop_sequences",
        "stream",
        "stream_options",
        "strict",
        "summary",
        "system",
        "temperature",
        "text",
        "think",
        "thinking",
        "thinking_budget",
        "tool_call_id",
        "tool_calls",
        "tool_choice",
        "tool_use_id",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "type",
    ]
)
WORDS = st.sampled_from(
    [
        "assistant",
        "auto",
        "custom",
        "developer",
        "disabled",
        "enabled",
        "function",
        "function_call",
        "function_call_output",
        "high",
        "input_image",
        "input_text",
        "json_object",
        "json_schema",
        "message",
        "namespace",
        "none",
        "output_text",
        "reasoning",
        "required",
        "system",
        "text",
        "thinking",
        "tool",
        "tool_result",
        "tool_search",
        "tool_search_output",
        "tool_use",
        "user",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | WORDS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=25,
)


def refusal(read, body):
    """The refusal of a body; None for one that is read."""
    try:
        read(body, ServerConfig())
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("read", READERS)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=8))
def test_any_json_is_read_or_refused(read, fields):
    refused = refusal(read, json.dumps(fields).encode())
    if refused is not None:
        assert refused.status == 400
        assert 0 < len(refused.message) < 2000
        assert "\n" not in refused.message


@pytest.mark.parametrize("read", READERS)
@given(body=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()[:-1]))
def test_any_bytes_are_read_or_refused(read, body):
    refused = refusal(read, body)
    assert refused is None or refused.status == 400


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("inside", ["messages", "input", "prompt", "tools", "metadata"])
def test_deep_nesting_is_refused_and_never_a_crash(read, inside):
    body = f'{{"{inside}":{"[" * 100_000}{"]" * 100_000}}}'
    assert refusal(read, body.encode()) is not None
