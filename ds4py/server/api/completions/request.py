"""Bodies of `/v1/completions` (docs/spec/server-and-cli.md#request-fields, #prompts item 7).

Owns: their members. Refuses to know: tokens, templates, replies. Invariant: as in `api.json_body`.
"""

from __future__ import annotations

from typing import Any

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.json_body import count, decode, wrong
from ds4py.server.api.options import OpenAi, openai_request
from ds4py.server.requests.request import CompletionPrompt, GenerationRequest


class _CompletionBody(OpenAi):
    prompt: str | list[Any] | None = None
    raw: bool | None = None


def read_completion(body: bytes, config: ServerConfig) -> GenerationRequest:
    """Check a body.

    Args:
        body: The bytes that came.
        config: What holds for requests that name no value.

    Raises:
        RequestError: Status 400; the sentence says what was found and what was expected.
    """
    parsed = decode(body, _CompletionBody)
    given = parsed.prompt
    if given is None:
        raise RequestError("missing prompt", param="prompt")
    budget = count("max_tokens", parsed.max_tokens)
    return openai_request(
        parsed, body, budget, config, lambda: CompletionPrompt(_prompt(given), bool(parsed.raw))
    )


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """Read a prompt: text, the first text of a list, or token ids (also as the first list)."""
    if isinstance(prompt, str):
        return prompt
    for element in prompt:
        if isinstance(element, str):
            return element
    ids = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
    bad = next((type(one).__name__ for one in ids if type(one) is not int), None)
    if bad is not None:
        got = f"a list that holds {bad}"
        raise wrong("prompt", got, "a string, a list of strings, or a list of token ids")
    return tuple(ids)
