"""Targets that read texts of strangers: bodies of requests, and replies of models.

Owns: what each of them is given and what must hold. Refuses to know: budgets, sockets. Invariant:
`feed` depends on its bytes alone, so a saved input fails again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any, Final

from ds4py.config import ServerConfig
from ds4py.errors import RequestError
from ds4py.server.api.chat.request import read_chat
from ds4py.server.api.completions.request import read_completion
from ds4py.server.api.messages.request import read_messages
from ds4py.server.api.responses.request import read_responses
from ds4py.server.requests.request import Conversation, GenerationRequest
from ds4py.text.reasoning import THINK_END
from interop.fuzz import http_corpus as corpus
from interop.fuzz.damage import damage_bytes, damage_json
from interop.fuzz.target import Target
from tests.unit.text.replies import Reading, read


class Bodies(Target):
    """Bodies of the four dialects: read, or refused in one sentence. The first byte chooses."""

    name = "bodies"
    bytes_allowed = 256 << 10
    _READERS: Final[Sequence[Callable[[bytes, ServerConfig], GenerationRequest]]] = (
        read_chat,
        read_completion,
        read_messages,
        read_responses,
    )
    _MOST: Final = 2000

    def _make(self, rng: Random) -> bytes:
        dialect = rng.randrange(4)
        bodies = [*corpus.BODIES.values()]
        body, stranger = rng.choice(bodies[dialect]), rng.choice(rng.choice(bodies))
        return bytes([dialect]) + damage_json(rng, body, stranger)

    def _feed(self, data: bytes) -> Sequence[str]:
        reader, body = self._READERS[data[0] % 4 if data else 0], data[1:]
        try:
            request = reader(body, ServerConfig())
        except RequestError as e:
            return [self._refused(e)]
        for text in _texts(request):
            text.encode()  # no half of a surrogate pair: it goes to the tokenizer and back
        _check_ranges(request)
        if b"\\ud" not in body.lower():  # else some were mended
            prompt = request.prompt
            for tool in prompt.tools.sources if isinstance(prompt, Conversation) else ():
                assert tool.encode() in body, f"{tool!r} is not what the client wrote"
        return [reader.__name__]

    def _refused(self, error: RequestError) -> str:
        assert error.status == 400, f"status {error.status}"
        assert 0 < len(error.message) < self._MOST, f"a message of {len(error.message)} characters"
        assert error.message.isprintable(), f"not one sentence: {error.message!r}"
        param = (error.param or "JSON").partition("[")[0].partition(".")[0]
        return param if param.isidentifier() and len(param) < 25 else "another member"


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a checked body."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)


def _check_ranges(request: GenerationRequest) -> None:
    """Raise unless everything is in the range that its reader promises."""
    assert 0 <= request.max_tokens < 1 << 31
    assert request.thinking_budget is None or 0 <= request.thinking_budget < 1 << 31
    assert request.n_logprobs is None or 0 <= request.n_logprobs <= 20
    assert all(request.stop)
    if (added := request.logit_bias) is not None:
        assert all(token >= 0 and -100 <= bias <= 100 for token, bias in added.bias.items())
        assert -2 <= added.presence_penalty <= 2
        assert -2 <= added.frequency_penalty <= 2
    sampling = request.sampling
    factors = (sampling.temperature, sampling.top_p, sampling.min_p)
    assert all(abs(factor) <= 1e6 for factor in factors)


class Replies(Target):
    """Replies in every way of writing calls, however they are cut. The first byte chooses."""

    name = "replies"
    bytes_allowed = 256 << 10
    _LONG: Final = 20_000

    def _make(self, rng: Random) -> bytes:
        pieces = [rng.choice(corpus.REPLIES) for _ in range(rng.choice((1, 1, 1, 2)))]
        if rng.random() < 0.3:
            pieces.insert(0, rng.choice(("<think>hm</think>", "hm</think>", "\n<think>")))
        data = "".join(pieces).encode()
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            data = damage_bytes(rng, data)
        if data and rng.random() < 0.004:  # what is read in square time is seen by its deadline
            at, n = rng.randrange(len(data)), rng.randrange(1, 40)
            piece = data[at : at + n]
            data = data[:at] + piece * (self._LONG // len(piece))
        return rng.randbytes(1) + data

    def _feed(self, data: bytes) -> Sequence[str]:
        way, text = (data[0] if data else 0), data[1:].decode(errors="replace")
        how = {"thinking": way & 8 > 0, "may_think": way & 16 > 0, "ended": way & 32 > 0}
        calls = corpus.FORMATS[(way & 7) % len(corpus.FORMATS)]
        whole = read([text], calls, **how)
        step = 1 + zlib.crc32(data) % 9
        cut = [text[at : at + step] for at in range(0, len(text), step)]
        assert read(cut, calls, **how) == whole, f"other parts in pieces of {step}"
        _check_parts(whole, text, thinking=how["thinking"], may_think=how["may_think"])
        return [_outcome(whole)]


def _check_parts(whole: Reading, text: str, *, thinking: bool, may_think: bool) -> None:
    """Raise unless content and block stand in the reply, one behind the other."""
    if thinking:
        reasoning, _, text = text.partition(THINK_END)
        assert whole.reasoning == reasoning, "other reasoning than stands in the reply"
    elif may_think:  # whether it did is the splitter's decision
        text = text[len(text) - len(text.partition(THINK_END)[2]) :] if whole.reasoning else text
    if not (may_think and not thinking and not whole.reasoning):
        assert text.startswith(whole.content), "other content than stands in the reply"
    assert whole.raw_block in text, "another block than stands in the reply"


def _outcome(whole: Reading) -> str:
    if whole.called:
        return f"{min(len(whole.calls), 3)} calls"
    if whole.malformed:
        return "malformed"
    return "broken off" if whole.broken else "content" if whole.content else "nothing"


TEXTS: Final[Sequence[type[Target]]] = (Bodies, Replies)
