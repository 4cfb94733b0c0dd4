"""`/v1/chat/completions`: body to plan.

Owns: the binding of `request` to `api.openai_reply`. Refuses to know: their contents. Invariant:
as in `api.prepared`.
"""

from __future__ import annotations

from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.chat.response import ChatReply
from ds4py.server.api.prepared import PreparedRequest, Service, constraint_of, converse, keeping


def prepare_chat(service: Service, body: bytes) -> PreparedRequest:
    """Read a body; see `api.prepared.Dialect`."""
    asked = read_chat(body, service.config.sampling)
    options = asked.options
    conversation = converse(
        service,
        asked.messages,
        options,
        tools=asked.tools,
        param="messages",
        default_system=asked.default_system,
    )
    return PreparedRequest(
        prompt=conversation.prompt,
        options=options,
        reply=lambda n, at, name: ChatReply(
            id=f"chatcmpl-{n}", created=at, model=name, include_usage=options.include_usage
        ),
        thinking=conversation.thinking,
        may_think=conversation.may_think,
        calls=conversation.calls,
        retry=conversation.retry,
        constraint=constraint_of(service, asked.options),
        conclude=keeping(service, conversation, asked.tools),
        prefix_length=conversation.prefix_length,
    )
