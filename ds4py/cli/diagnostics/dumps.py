"""Files that show what a model makes of a prompt: tokens, logits, log probabilities.

Owns: ds4's three formats (docs/spec/server-and-cli.md#dumps), byte for byte except for the name of
the source. Refuses to know: how a node is opened, flags. Invariant: a file is valid JSON even if it
was interrupted; `bytes` is what a token stands for, `text` only shows it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from ds4py.cli.exits import printable
from ds4py.generation.choice import Choice
from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.loop import generate
from ds4py.generation.sampling import F32, greedy
from ds4py.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ds4py.runtime import Node

SOURCE: Final = "ds4py"
_PER_LINE: Final = 8
_BROKEN: Final = re.compile("[\udc80-\udcff]")

Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]


def token_lines(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Yield `--dump-tokens`: the list, and a line for each token."""
    yield f"[{', '.join(map(str, ids))}]"
    for token in ids:
        piece = tokenizer.token_bytes(token, special=True).decode("utf-8", "surrogateescape")
        shown = _BROKEN.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", piece)
        yield f"{token:>6}  {printable(shown)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRun:
    """What is looked at, and what may stop or follow it.

    Args:
        node: Ready to serve.
        prompt: Token ids.
        cancelled: Polled between chunks and tokens.
        progress: Told (prompt tokens done, prompt tokens).
    """

    node: Node
    prompt: Sequence[int]
    cancelled: Cancelled
    progress: Progress

    def choose(self, chooser: _Greedy, max_tokens: int | None) -> bool:
        """Let a chooser see logits, one row after the other.

        Returns:
            Whether it came to its end; False if it was cancelled.
        """
        with self.node.backend.lease(self.prompt, cancelled=self.cancelled) as session:
            for _ in generate(
                session,
                self.prompt,
                sampler=chooser,
                eos_ids=self.node.text.tokenizer.eos_ids,
                max_tokens=max_tokens,
                progress=self.progress,
                cancelled=self.cancelled,
            ):
                pass
        return not self.cancelled()


class _Greedy:
    """A chooser that takes the most probable token, and shows the logits to somebody."""

    def __init__(self, shown: Callable[[F32, int], None]) -> None:
        self._shown = shown

    def choose(self, logits: F32) -> Choice:
        token = greedy(logits)
        self._shown(logits, token)
        return Choice(token)


def dump_logits(run: DumpRun, out: IO[str], *, model: str, backend: str) -> bool:
    """Write `--dump-logits`: the logits after the prompt.

    Args:
        run: What is looked at.
        out: A text file.
        model: The name that the user gave.
        backend: Where it is computed.

    Returns:
        Whether it was written; False if it was cancelled.
    """
    card = run.node.backend.card

    def show(logits: F32, best: int) -> None:
        head = {
            "source": SOURCE,
            "model": model,
            "backend": backend,
            "quant_bits": card.quant_bits,
            "prompt_tokens": len(run.prompt),
            "ctx": run.node.backend.n_ctx,
            "vocab": len(logits),
        }
        out.write(f"{_opened(head)},\n")
        out.write(f' "argmax_token":{_token(run.node.text.tokenizer, best)},\n')
        out.write(f' "argmax_logit":{_number(logits[best])},\n "logits":[\n')
        out.write(",\n".join(_rows(logits)))
        out.write("\n]}\n")

    return run.choose(_Greedy(show), 1)


def dump_logprobs(run: DumpRun, out: IO[str], *, top_k: int, max_tokens: int | None) -> bool:
    """Write `--dump-logprobs`: the greedy answer and what else each of its tokens might have been.

    Args:
        run: What is looked at.
        out: A text file.
        top_k: Tokens to list at each step.
        max_tokens: Steps; None goes on to the end token, which is listed, or the context.

    Returns:
        As `dump_logits`.
    """
    tokenizer = run.node.text.tokenizer
    head = {
        "source": SOURCE,
        "prompt_tokens": len(run.prompt),
        "ctx": run.node.backend.n_ctx,
        "top_k": top_k,
    }
    n_steps = 0

    def show(logits: F32, chosen: int) -> None:
        nonlocal n_steps
        ranked = top_logprobs(logits, chosen, top_k).ranked
        listed = ",\n   ".join(
            f'{{"token":{_token(tokenizer, token)},"logit":{_number(logits[token])},'
            f'"logprob":{_number(logprob)}}}'
            for token, logprob in ranked
        )
        out.write(",\n" if n_steps else "\n")
        out.write(f'  {{"step":{n_steps},"selected":{_token(tokenizer, chosen)},\n')
        out.write(f'   "top_logprobs":[{listed}]}}')
        n_steps += 1

    out.write(f'{_opened(head)},\n "steps":[')
    try:
        return run.choose(_Greedy(show), max_tokens)
    finally:
        out.write("]}\n")


def _opened(fields: Mapping[str, object]) -> str:
    """Return an object to which further fields can be appended."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[:-1]


def _token(tokenizer: Tokenizer, token: int) -> str:
    raw = tokenizer.token_bytes(token, special=True)
    shown = json.dumps(raw.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    shown = _BROKEN.sub(lambda found: f"\\u{ord(found[0]) - 0xDC00:04x}", shown)
    return f'{{"id":{token},"text":{shown},"bytes":[{",".join(map(str, raw))}]}}'


def _rows(logits: F32) -> Iterable[str]:
    for start in range(0, len(logits), _PER_LINE):
        yield ",".join(map(_number, logits[start : start + _PER_LINE]))


def _number(value: float) -> str:
    """Return a JSON number of up to 9 digits: enough for a float32 to come back as it was."""
    return f"{float(value):.9g}" if math.isfinite(value) else "null"
