"""Bodies of `/v1/completions` (docs/spec/server-and-cli.md#request-fields, #prompts item 7).

Owns: their members. Refuses to know: tokens, templates, replies. Invariant: as in `api.json_body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds4py.config import SamplingParams
from ds4py.errors import RequestError
from ds4py.server.api.json_body import count, decode, wrong
from ds4py.server.api.options import OpenAi, Options, openai_options


class _CompletionBody(OpenAi):
    prompt: str | list[Any] | None = None
    raw: bool | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked body.

    Args:
        prompt: Text, or token ids not yet in range.
        options: What it says about its answer.
        raw: The text is a whole prompt as the model reads it, an addition of ds4py.
    """

    prompt: str | tuple[int, ...]
    options: Options
    raw: bool = False


def read_completion(body: bytes, defaults: SamplingParams) -> CompletionRequest:
    """Check a body.

    Args:
        body: The bytes that came.
        defaults: Sampling of requests that name no value.

    Raises:
        RequestError: Status 400; the sentence says what was found and what was expected.
    """
    parsed = decode(body, _CompletionBody)
    if parsed.prompt is None:
        raise RequestError("missing prompt", param="prompt")
    budget = count("max_tokens", parsed.max_tokens)
    options = openai_options(parsed, body, budget, defaults)
    return CompletionRequest(_prompt(parsed.prompt), options, bool(parsed.raw))


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
