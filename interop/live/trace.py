"""What ds4py answers in one process, token by token, and how sure it was of each.

Owns: the questions, and greedy answers of a model whose layers are cut as on a route. Refuses to
know: sockets, processes. Invariant: between two parts hidden states take the width of the route,
packed by the reference codec of `ds4py.activations`, which no route uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from typing import Final

import numpy as np

from ds4py.activations import F32, HiddenBatch
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, ModelRunner, OutputKind, SessionId
from ds4py.engine.open import open_runner
from ds4py.layer_range import LayerSpec
from ds4py.runtime import load_text
from ds4py.text.tokenizer.tokenizer import Tokenizer

Messages = Sequence[dict[str, str]]

_STORY: Final = (
    "The river rises in the hills, passes three old mills and two towns, and reaches the sea "
    "behind a long island. "
)
BRIEF: Final = "brief"
LONG: Final = "long"
LATER: Final = "later"
_LONG: Final = {"role": "user", "content": 2 * _STORY + "What does it pass in 1952?"}
QUESTIONS: Final[Mapping[str, Messages]] = {
    BRIEF: [{"role": "user", "content": "Tell me about room 196."}],
    LONG: [_LONG],
    LATER: [
        _LONG,
        {"role": "assistant", "content": "Mills."},
        {"role": "user", "content": "And in 2276?"},
    ],
}
"""The numbers are such that the default model is sure of the first four tokens of each answer.
`LATER` goes on where `LONG` ends, whatever was answered."""

_SESSION: Final = SessionId(1)


@dataclass(frozen=True, slots=True)
class Trace:
    """A greedy answer.

    Args:
        text: All of it.
        ends: Characters of the text that each token completes.
        gaps: Before each token, by how much the best logit exceeds the next one.
    """

    text: str
    ends: tuple[int, ...]
    gaps: tuple[float, ...]


def traces(
    engine: EngineConfig, cuts: Sequence[str], bits: int, *, chunk: int, n_tokens: int
) -> dict[str, Trace]:
    """Answer all questions in this process.

    Args:
        engine: With the arithmetic of `commands.ours`.
        cuts: The layers of each part.
        bits: Width of the hidden states between two parts.
        chunk: Prompt tokens per chunk.
        n_tokens: Budget of each answer.
    """
    text = load_text(engine)
    with ExitStack() as stack:
        parts = [open_runner(engine, LayerSpec.parse(layers)) for layers in cuts]
        for part in parts:
            stack.callback(part.close)
        model = _Model(parts, bits)
        prompts = {
            name: text.chat.render_ids(list(messages), think="none")
            for name, messages in QUESTIONS.items()
        }
        return {
            name: _trace(text.tokenizer, islice(model.greedy(prompt, chunk), n_tokens))
            for name, prompt in prompts.items()
        }


class _Model:
    """Parts of a model, one after the other.

    Args:
        parts: In layer order; the last one has the output head.
        bits: Width of the hidden states between two of them.
    """

    def __init__(self, parts: Sequence[ModelRunner], bits: int):
        self._parts, self._bits = parts, bits

    def greedy(self, prompt: Sequence[int], chunk: int) -> Iterator[tuple[int, float]]:
        """Yield tokens without end, each with the gap between the two best logits."""
        for start in range(0, len(prompt) - chunk, chunk):
            self._logits(prompt[start : start + chunk], start)
        last = (len(prompt) - 1) // chunk * chunk
        logits = self._logits(prompt[last:], last)
        for position in count(len(prompt)):
            second, best = np.partition(logits, -2)[-2:]
            token = int(np.argmax(logits))
            yield token, float(best - second)
            logits = self._logits([token], position)

    def _logits(self, tokens: Sequence[int], pos0: int) -> F32:
        span = ForwardRequest(
            session=_SESSION, tokens=tuple(tokens), pos0=pos0, hidden=None, reset=pos0 == 0
        )
        for part in self._parts[:-1]:
            hidden = _run(part, span).hidden
            assert hidden is not None
            span = replace(span, hidden=HiddenBatch.pack(hidden.unpack(), self._bits))
        logits = _run(self._parts[-1], replace(span, output_kind=OutputKind.LOGITS)).logits
        assert logits is not None
        return logits


def _run(part: ModelRunner, span: ForwardRequest) -> ForwardOutput:
    (output,) = part.run([span])
    if not isinstance(output, ForwardOutput):
        raise output
    return output


def _trace(tokenizer: Tokenizer, steps: Iterable[tuple[int, float]]) -> Trace:
    answered = list(takewhile(lambda step: step[0] not in tokenizer.eos_ids, steps))
    ids = [token for token, _ in answered]
    said = [tokenizer.decode(ids[:n]).decode(errors="replace") for n in range(len(ids) + 1)]
    # a character of several tokens counts for the last of them
    ends = tuple(len(text.rstrip("\ufffd")) for text in said[1:])
    return Trace(said[-1], ends, tuple(gap for _, gap in answered))
