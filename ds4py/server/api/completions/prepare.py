"""`/v1/completions`: body to plan.

Owns: the binding of `request` to `api.openai_reply`. Refuses to know: their contents.
Invariant: the text of a reply keeps the reasoning and the tag that ends it.
"""

from __future__ import annotations

from ds4py.server.api.chat_messages import ChatMessage
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.completions.response import CompletionReply
from ds4py.server.api.prepared import PreparedRequest, Service, constraint_of
from ds4py.server.requests.prompts import check_fits, completion_prompt, excess, too_long


def prepare_completion(service: Service, body: bytes) -> PreparedRequest:
    """Read a body; see `api.prepared.Dialect`."""
    asked = read_completion(body, service.config.sampling)
    options, n_ctx = asked.options, service.backend.n_ctx
    if isinstance(asked.prompt, str):
        n_far_too_many = excess(service.text, [ChatMessage("user", asked.prompt)], (), n_ctx)
        if n_far_too_many is not None:
            raise too_long(n_far_too_many, n_ctx, param="prompt")
    prompt = completion_prompt(
        service.text,
        service.backend.card,
        asked.prompt,
        think=service.config.think if options.think is None else options.think,
        raw=asked.raw,
    )
    check_fits(prompt, n_ctx, param="prompt")
    return PreparedRequest(
        prompt=prompt,
        constraint=constraint_of(service, options),
        options=options,
        reply=lambda n, at, name: CompletionReply(
            id=f"cmpl-{n}", created=at, model=name, include_usage=options.include_usage
        ),
    )
