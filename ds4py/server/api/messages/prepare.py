"""`/v1/messages` and its counting of tokens: body to plan.

Owns: the binding of `request` to `response`, and going on by results of tools
alone. Refuses to know: their contents. Invariant: as in `api.prepared`.
"""

from __future__ import annotations

from dataclasses import replace

from ds4py.server.api.messages.request import MessagesRequest, read_messages
from ds4py.server.api.messages.response import MessagesReply
from ds4py.server.api.prepared import (
    PreparedConversation,
    PreparedRequest,
    Service,
    constraint_of,
    converse,
    gone_on,
    keeping,
)
from ds4py.server.requests.prompts import excess


def prepare_messages(service: Service, body: bytes) -> PreparedRequest:
    """Read a body; see `api.prepared.Dialect`."""
    asked = _read(service, body)
    conversation = _converse(service, asked, param="messages")
    return PreparedRequest(
        prompt=conversation.prompt,
        options=asked.options,
        reply=lambda n, _, name: MessagesReply(id=f"msg_{n:024d}", model=name),
        thinking=conversation.thinking,
        may_think=conversation.may_think,
        calls=conversation.calls,
        call_prefix="toolu_",
        retry=conversation.retry,
        constraint=constraint_of(service, asked.options),
        conclude=keeping(service, conversation, asked.tools),
        prefix_length=conversation.prefix_length,
    )


def count_tokens(service: Service, body: bytes) -> int:
    """Return the tokens of the prompt that a body of `/v1/messages` makes, however many.

    The number is rough where the prompt is so long that it was not written.
    """
    asked = _read(service, body)
    far_too_many = excess(service.text, asked.messages, asked.tools, service.backend.n_ctx)
    if far_too_many is not None:
        return far_too_many
    return len(_converse(service, asked, param=None).prompt)


def _read(service: Service, body: bytes) -> MessagesRequest:
    asked = read_messages(body, service.config.sampling)
    whole = gone_on(service, asked.messages, id_name="tool_use_id", history="messages history")
    if whole is None:
        return asked
    tools = asked.tools if asked.names_tools else whole.tools
    return replace(asked, messages=whole.messages, tools=tools)


def _converse(
    service: Service, asked: MessagesRequest, *, param: str | None
) -> PreparedConversation:
    return converse(service, asked.messages, asked.options, tools=asked.tools, param=param)
