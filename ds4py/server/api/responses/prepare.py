"""`/v1/responses`: body to plan.

Owns: the binding of `request` to `response`, and going on by results of tools
alone. Refuses to know: their contents. Invariant: as in `api.prepared`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ds4py.server.api.prepared import (
    PreparedRequest,
    Service,
    constraint_of,
    converse,
    gone_on,
    keeping,
)
from ds4py.server.api.responses.request import ResponsesRequest, read_responses
from ds4py.server.api.responses.response import ResponsesReply
from ds4py.server.api.responses.tools import read_tools


def prepare_responses(service: Service, body: bytes) -> PreparedRequest:
    """Read a body; see `api.prepared.Dialect`."""
    asked = _read(service, body)
    conversation = converse(
        service, asked.messages, asked.options, tools=asked.toolbox.texts, param="input"
    )
    return PreparedRequest(
        prompt=conversation.prompt,
        options=asked.options,
        reply=lambda _, at, name: ResponsesReply(
            created=at, model=name, toolbox=asked.toolbox, summary=asked.summary
        ),
        thinking=conversation.thinking,
        may_think=conversation.may_think,
        calls=conversation.calls,
        retry=conversation.retry,
        constraint=constraint_of(service, asked.options),
        conclude=keeping(service, conversation, asked.toolbox.sources),
        prefix_length=conversation.prefix_length,
    )


def _read(service: Service, body: bytes) -> ResponsesRequest:
    asked = read_responses(body, service.config.sampling)
    whole = gone_on(service, asked.messages, id_name="call_id", history="input history")
    if whole is None:
        return asked
    toolbox = asked.toolbox
    if not asked.names_tools:
        toolbox = read_tools([msgspec.Raw(text.encode()) for text in whole.tools])
    return replace(asked, messages=whole.messages, toolbox=toolbox)
