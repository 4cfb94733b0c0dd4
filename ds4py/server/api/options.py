"""What bodies say about the answer, in whatever API.

Owns: the members that APIs share: sampling, limits, stop texts, reasoning, forms of the answer
(docs/spec/server-and-cli.md#request-fields, #sampling, #thinking-controls). Refuses to know:
messages, tokens, replies. Invariant: what comes out is in range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from ds4py.config import SamplingParams, ServerConfig
from ds4py.generation.grammar import GrammarKind
from ds4py.generation.logits_processors import LogitBias
from ds4py.server.api.json_body import Number, count, is_absent, last_given, source, wrong
from ds4py.server.requests.request import (
    CompletionPrompt,
    Conversation,
    GenerationRequest,
    OutputFormat,
)
from ds4py.text.chat_formats.deepseek4 import EFFORTS

MAX_TOP_LOGPROBS: Final = 20
_MAX_SEED: Final = 2**63 - 1
_MAX_FACTOR: Final = 1_000_000  # larger temperatures change nothing but overflow float32
_MAX_STOPS: Final = 1024
_MAX_STOP_CHARS: Final = 4096  # as many may wait at the end of a reply, searched for every token
_MAX_MODEL_NAME: Final = 512
_MAX_BIASES: Final = 1024
_MAX_BIAS: Final = 100.0
_MAX_PENALTY: Final = 2.0
_THINKING_MODELS: Final = {"deepseek-chat": False, "deepseek-reasoner": True}


class StreamOptions(msgspec.Struct):
    """Member `stream_options`."""

    include_usage: bool | None = None


class Thinking(msgspec.Struct):
    """Member `thinking` in its form as an object."""

    type: str | None = None


class _TemplateKwargs(msgspec.Struct):
    enable_thinking: bool | None = None
    thinking: bool | None = None


class _JsonSchema(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw(b"")
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Member `response_format`, also `text.format` of Responses."""

    type: str | None = None
    json_schema: _JsonSchema | None = None
    schema: msgspec.Raw = msgspec.Raw(b"")
    strict: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class Sampled(msgspec.Struct, kw_only=True):
    """Members that every API has; null means absent everywhere."""

    model: str | None = None
    max_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None


class OpenAi(Sampled, kw_only=True):
    """Members that chat and completions share."""

    top_k: Number | None = None
    min_p: Number | None = None
    seed: Number | None = None
    stop: str | list[Any] | None = None
    stream_options: StreamOptions | None = None
    think: bool | None = None
    thinking: bool | Thinking | None = None
    thinking_budget: Number | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateKwargs | None = None
    response_format: ResponseFormat | None = None
    logprobs: Any = None  # chat says whether, completions say how many
    top_logprobs: Number | None = None
    logit_bias: dict[str, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None


def openai_request(
    parsed: OpenAi,
    body: bytes,
    max_tokens: int | None,
    config: ServerConfig,
    read_prompt: Callable[[], Conversation | CompletionPrompt],
) -> GenerationRequest:
    """Return what a body of chat or completions asks for.

    Args:
        parsed: The body.
        body: Its bytes, for the order of members that contradict each other.
        max_tokens: Which of its budgets counts.
        config: Of requests that name no value.
        read_prompt: Called last: of two faults clients hear of the one in the members read here.

    Raises:
        RequestError: A value is out of range and cannot be brought into it.
    """
    options = parsed.stream_options
    return GenerationRequest(
        model=model_name(parsed.model),
        max_tokens=config.max_tokens if max_tokens is None else max_tokens,
        sampling=sampling_of(
            config.sampling,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            min_p=parsed.min_p,
            seed=parsed.seed,
        ),
        stop=stop_texts("stop", parsed.stop),
        think=_think(parsed, body) or config.think,
        thinking_budget=count("thinking_budget", parsed.thinking_budget),
        output_format=output_format_of(parsed.response_format, "response_format"),
        n_logprobs=_n_logprobs(parsed),
        logit_bias=_logit_bias(parsed),
        token_ids=bool(parsed.return_token_ids),
        stream=bool(parsed.stream),
        include_usage=bool(options and options.include_usage),
        progress=bool(parsed.return_progress and parsed.stream),
        prompt=read_prompt(),
    )


def model_name(name: str | None) -> str | None:
    """Return the name to echo.

    Raises:
        RequestError: It is absurdly long.
    """
    if name is not None and len(name) > _MAX_MODEL_NAME:
        raise wrong("model", f"a name of {len(name)} characters", f"at most {_MAX_MODEL_NAME}")
    return name


def sampling_of(
    defaults: SamplingParams,
    *,
    temperature: Number | None = None,
    top_p: Number | None = None,
    top_k: Number | None = None,
    min_p: Number | None = None,
    seed: Number | None = None,
) -> SamplingParams:
    """Return how tokens are chosen: what a request names, and the defaults for the rest.

    Raises:
        RequestError: A count is no whole number.
    """
    k, number = count("top_k", top_k), count("seed", seed, most=_MAX_SEED)

    def pick(value: Number | None, default: float) -> float:
        return default if value is None else _bounded(value, _MAX_FACTOR)

    return SamplingParams(
        temperature=pick(temperature, defaults.temperature),
        top_k=defaults.top_k if k is None else k,
        top_p=pick(top_p, defaults.top_p),
        min_p=pick(min_p, defaults.min_p),
        seed=defaults.seed if number is None else number,
    )


def stop_texts(param: str, stop: str | Sequence[Any] | None) -> tuple[str, ...]:
    """Read texts that end an answer: elements that are no strings are skipped, empty ones dropped.

    Raises:
        RequestError: There are absurdly many, or one is absurdly long.
    """
    listed = [stop] if isinstance(stop, str) else stop or []
    texts = tuple(text for text in listed if isinstance(text, str) and text)
    if len(texts) > _MAX_STOPS:
        raise wrong(param, f"{len(texts)} texts", f"at most {_MAX_STOPS}")
    longest = max(map(len, texts), default=0)
    if longest > _MAX_STOP_CHARS:
        raise wrong(param, f"a text of {longest} characters", f"at most {_MAX_STOP_CHARS}")
    return texts


def effort_word(param: str, effort: str | None) -> str | None:
    """Check how much to reason.

    Raises:
        RequestError: The word is unknown.
    """
    if effort is not None and effort not in EFFORTS:
        raise wrong(param, f"{effort!a:.40}", f"one of {', '.join(EFFORTS)}")
    return effort


def thinking_word(model: str | None, effort: str | None, *, on: bool | None) -> str | None:
    """Return how much to reason (server-and-cli.md#thinking-controls): off wins over any effort.

    Args:
        model: Two names say something about it, if nothing else does.
        effort: A checked word.
        on: Reasoning was switched on or off.
    """
    if on is None:
        on = _THINKING_MODELS.get(model or "")
    if on is None:
        return effort
    return effort or "high" if on else "none"


def output_format_of(asked: ResponseFormat | None, param: str) -> OutputFormat | None:
    """Read what an answer must look like.

    Raises:
        RequestError: The kind is unknown, or its description is missing.
    """
    if asked is None or asked.type in (None, "text"):
        return None
    match asked.type:
        case "json_object":
            schema = asked.schema
            if is_absent(schema):
                return OutputFormat(GrammarKind.JSON_OBJECT)
            return _schema_form(schema, param, strict=asked.strict)
        case "json_schema":
            described = asked.json_schema or asked
            return _schema_form(described.schema, param, strict=described.strict)
        case "regex" if asked.regex:
            return OutputFormat(GrammarKind.REGEX, asked.regex)
        case "grammar" if asked.grammar:
            return OutputFormat(GrammarKind.LARK, asked.grammar)
    kinds = "text, json_object, json_schema with its schema, regex with a regex, grammar with one"
    raise wrong(f"{param}.type", f"{asked.type!a:.40}", kinds)


def _schema_form(schema: msgspec.Raw, param: str, *, strict: bool | None) -> OutputFormat:
    if is_absent(schema):
        raise wrong(f"{param}.json_schema.schema", "nothing", "a JSON schema")
    return OutputFormat(GrammarKind.JSON_SCHEMA, source(schema, param), strict=bool(strict))


def _think(parsed: OpenAi, body: bytes) -> str | None:
    thinking, kwargs = parsed.thinking, parsed.chat_template_kwargs
    _, on = last_given(
        body,
        think=parsed.think,
        thinking=thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking,
        chat_template_kwargs=_switch(kwargs) if kwargs else None,
    )
    effort = effort_word("reasoning_effort", parsed.reasoning_effort)
    return thinking_word(parsed.model, effort, on=on)


def _switch(kwargs: _TemplateKwargs) -> bool | None:
    """Return what is said to a template, in the words of either family of models."""
    return kwargs.thinking if kwargs.enable_thinking is None else kwargs.enable_thinking


def _n_logprobs(parsed: OpenAi) -> int | None:
    """Read `logprobs`: true with `top_logprobs`, or a number, of which false and null are none."""
    asked = parsed.logprobs
    if asked is None or asked is False:
        return None
    if asked is True:
        return min(count("top_logprobs", parsed.top_logprobs) or 0, MAX_TOP_LOGPROBS)
    if isinstance(asked, int | float):
        return min(count("logprobs", asked) or 0, MAX_TOP_LOGPROBS)
    raise wrong("logprobs", f"{asked!a:.40}", "true, false, or a number of alternatives")


def _logit_bias(parsed: OpenAi) -> LogitBias | None:
    """Read what is added to logits; None if that is nothing."""
    bias = _biases(parsed.logit_bias or {})
    presence = _bounded(parsed.presence_penalty, _MAX_PENALTY)
    frequency = _bounded(parsed.frequency_penalty, _MAX_PENALTY)
    if not (bias or presence or frequency):
        return None
    return LogitBias(bias=bias, presence_penalty=presence, frequency_penalty=frequency)


def _biases(biases: dict[str, Number]) -> dict[int, float]:
    if len(biases) > _MAX_BIASES:
        raise wrong("logit_bias", f"{len(biases)} tokens", f"at most {_MAX_BIASES}")
    bad = next((key for key in biases if not (key.isdecimal() and len(key) < 10)), None)
    if bad is not None:
        raise wrong("logit_bias", f"the key {bad!a:.40}", "token ids")
    return {int(key): _bounded(value, _MAX_BIAS) for key, value in biases.items()}


def _bounded(value: Number | None, most: float) -> float:
    return 0.0 if value is None else float(min(max(value, -most), most))
