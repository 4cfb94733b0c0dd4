"""`/v1/chat/completions`: body to plan.

Owns: the binding of `bodies.chat` to `replies.openai`. Refuses to know: their contents. Invariant:
as in `plan`.
"""

from __future__ import annotations

from ds4py.server.bodies.chat import read_chat
from ds4py.server.dialects.plan import Plan, Service, constraint_of, converse, keeping
from ds4py.server.replies.openai import ChatReply


def chat_dialect(service: Service, body: bytes) -> Plan:
    """Read a body; see `plan.Dialect`."""
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
    return Plan(
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
        head=conversation.head,
    )
