"""What `ds4py-cli` shows of a model instead of an answer: `--inspect`, the dumps, perplexity.

Owns: the flags, what excludes what, where results go. Refuses to know: formats, how a node is
opened. Invariant: `--inspect` and `--dump-tokens` load no weight and take no lock; a file that can
not be written is told before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click

from ds4py.cli import exits
from ds4py.cli.chat.printing import Question
from ds4py.cli.flags.question import read_text
from ds4py.cli.nodes import NodeOpener
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import progress_bar, prompt_progress
from ds4py.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_MAX_TOP_K: Final = 128
_FILE: Final = click.Path(path_type=Path)


def diagnostic_options(function: F) -> F:
    """Add the flags of `DiagnosticFlags`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS: Final = (
    click.option("--inspect", is_flag=True, help="Show what the model file holds."),
    click.option(
        "--dump-tokens",
        is_flag=True,
        help="Show the prompt's tokens: of the text as it is written, or of --raw's whole prompt.",
    ),
    click.option("--dump-logits", type=_FILE, help="Write the logits after the prompt as JSON."),
    click.option(
        "--dump-logprobs", type=_FILE, help="Write the greedy answer's log probabilities as JSON."
    ),
    click.option(
        "--logprobs-top-k",
        type=click.IntRange(1),
        default=20,
        help="Tokens listed at each step, at most 128 [20].",
    ),
    click.option(
        "--perplexity-file", type=_FILE, help="Score a text; its first 32 tokens are only read."
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticFlags:
    """Values of `diagnostic_options`."""

    inspect: bool
    dump_tokens: bool
    dump_logits: Path | None
    dump_logprobs: Path | None
    logprobs_top_k: int
    perplexity_file: Path | None

    @property
    def wanted(self) -> str | None:
        """The flag that names what to show; None if an answer is wanted.

        Raises:
            ConfigError: There are several.
        """
        flags = {
            "--inspect": self.inspect,
            "--dump-tokens": self.dump_tokens,
            "--dump-logits": self.dump_logits,
            "--dump-logprobs": self.dump_logprobs,
            "--perplexity-file": self.perplexity_file,
        }
        given = [flag for flag, value in flags.items() if value]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} exclude each other: give one of them")
        return given[0] if given else None


def diagnose(flags: DiagnosticFlags, opener: NodeOpener, ask: Callable[[], Question]) -> int:
    """Do what a flag wants to see.

    Args:
        flags: One of them is wanted.
        opener: Opens the model where logits are needed.
        ask: Reads the prompt.

    Returns:
        The exit status.

    Raises:
        Ds4Error: It cannot be done.
    """
    if flags.inspect:
        _inspect(opener)
        return exits.OK
    if flags.dump_tokens:
        _dump_tokens(opener, ask())
        return exits.OK
    if flags.perplexity_file is not None:
        return _perplexity(opener, read_text(flags.perplexity_file, "--perplexity-file"))
    return _dump(flags, opener, ask())


def _inspect(opener: NodeOpener) -> None:
    from ds4py.cli.diagnostics.inspect import inspect

    model = opener.model.engine(opener.environment).model
    inspect.main([str(model)], prog_name=opener.program, standalone_mode=False)


def _dump_tokens(opener: NodeOpener, question: Question) -> None:
    from ds4py.cli.diagnostics.dumps import token_lines
    from ds4py.runtime import load_text

    tokenizer = load_text(opener.model.engine(opener.environment)).tokenizer
    ids = question.ids
    if ids is None:
        assert question.text is not None
        text = question.text
        ids = tuple(
            tokenizer.prompt_ids(text) if question.raw else tokenizer.encode(text, special=False)
        )
    for line in token_lines(tokenizer, ids):
        click.echo(line)


def _dump(flags: DiagnosticFlags, opener: NodeOpener, question: Question) -> int:
    path = flags.dump_logits or flags.dump_logprobs
    assert path is not None
    with _written(path) as out, opener.open() as node, stop_signal() as stopping:
        from ds4py.cli.chat.local import prompt_ids
        from ds4py.cli.diagnostics.dumps import DumpRun, dump_logits, dump_logprobs

        with prompt_progress() as progress:
            run = DumpRun(
                node=node,
                prompt=prompt_ids(node, question),
                cancelled=stopping.is_set,
                progress=progress,
            )
            if flags.dump_logits is not None:
                model = opener.model
                done = dump_logits(run, out, model=str(model.model), backend=model.device)
            else:
                top_k = min(flags.logprobs_top_k, _MAX_TOP_K)
                done = dump_logprobs(run, out, top_k=top_k, max_tokens=question.max_tokens)
    return exits.OK if done else exits.INTERRUPTED


def _perplexity(opener: NodeOpener, text: str) -> int:
    with opener.open() as node, stop_signal() as stopping:
        from ds4py.cli.diagnostics.perplexity import score

        ids = node.text.tokenizer.prompt_ids(text, special=False)
        with progress_bar("scoring", unit="tokens") as progress:
            found = score(node, ids, cancelled=stopping.is_set, progress=progress)
    click.echo(found.line)
    return exits.OK


@contextmanager
def _written(path: Path) -> Iterator[IO[str]]:
    """Open a file for a result."""
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    with file:
        yield file
