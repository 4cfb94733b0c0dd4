"""`ds4py-cli`: ask one question and stream the answer.

Owns: the flags of the client, where the prompt comes from, which of the three ways it takes: a
server, this process, or this process as coordinator of workers. Refuses to know: how any of them
works. Invariant: Ctrl+C ends the answer cleanly; `--help` imports nothing heavy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.answer import Event, Question, awaited, show
from ds4py.cli.lock import exclusive
from ds4py.cli.options import (
    CONTEXT_SETTINGS,
    DistributedFlags,
    ModelFlags,
    distributed_options,
    local_config,
    model_options,
    sampling,
    sampling_options,
    take,
)
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import progress_bar, start_logging
from ds4py.config import Address, Environment, SamplingParams
from ds4py.errors import CancelledError, ConfigError

if TYPE_CHECKING:
    from ds4py.runtime import Node

PROGRAM: Final = "ds4py-cli"
_MAX_PROMPT_BYTES: Final = 64 << 20


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("-p", "--prompt", help="The question.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="The question, from a file.")
@click.option("--prompt-ids", metavar="N,N,...", help="Raw token ids instead of a text.")
@click.option("--print-ids", is_flag=True, help="Print token ids instead of text.")
@click.option("-sys", "--system", help="System text; '' is none [the model's usual one].")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--think", "think", flag_value="high", help="Reason first [if the model can].")
@click.option("--think-max", "think", flag_value="max", help="The same, as much as possible.")
@click.option("--nothink", "think", flag_value="none", help="Answer without reasoning.")
@click.option("-n", "--max-tokens", "--tokens", type=int, help="Output budget [the context].")
@click.option("--host", metavar="HOST:PORT", help="Ask this server; no model is loaded here.")
@sampling_options
@model_options
@distributed_options
@click.version_option(__version__, prog_name=PROGRAM)
def client(**flags: Any) -> int:
    """Ask a model one question and stream the answer to stdout.

    The question comes from --prompt, --prompt-file, --prompt-ids or, without any, from stdin.

    \b
    From a server:
      ds4py-cli --host coordinator-host:8000 --prompt "Explain the architecture"
    From a model in this process:
      ds4py-cli -m M.gguf -p "Explain the architecture" -n 200
    From workers that this process coordinates:
      ds4py-cli -m M.gguf --dist-route worker1:8001,worker2:8002 -p "Explain the architecture"
    """  # noqa: D301 - click wants the backspace character itself
    debug = flags.pop("debug")
    model = ModelFlags(**take(flags, ModelFlags))
    distributed = DistributedFlags(**take(flags, DistributedFlags))
    environment = distributed.environment()
    traced = environment.decode_profile or environment.socket.connect_trace
    quiet = logging.INFO if traced else logging.WARNING
    start_logging(PROGRAM, level=logging.DEBUG if debug else quiet)
    host, print_ids = flags.pop("host"), flags.pop("print_ids")
    chosen = {k: flags.pop(k) for k in ("temperature", "top_k", "top_p", "min_p", "seed")}
    given = {name: value for name, value in chosen.items() if value is not None}
    params = sampling(SamplingParams(), **given)
    remote = None if host is None else Address.parse(host)
    if remote is not None and (model.model or distributed.role != "none"):
        raise ConfigError("--host asks a server: drop --model and the --dist-* options")
    question = _question(given, **flags)
    if remote is not None:
        from ds4py.cli.remote import ask

        # Ctrl+C interrupts the wait for the server; leaving the stream makes it stop
        told = ask(remote, question, want_ids=print_ids, want_progress=sys.stderr.isatty())
        with progress_bar(f"prompt at {remote}", unit="tokens") as progress:
            show(awaited(told, progress), ids_only=print_ids)
        return exits.OK
    with stop_signal() as stopping, ExitStack() as stack:
        node = _open(stack, model, distributed, environment, stopping.is_set)
        events = _local(stack, node, question, params, stopping.is_set)
        show(events, ids_only=print_ids)
        return exits.INTERRUPTED if stopping.is_set() else exits.OK


def _question(given: dict[str, float | int], **flags: Any) -> Question:
    """Take the prompt from the one place that was named.

    A text that spells DeepSeek's first token is a whole prompt, as in ds4.

    Raises:
        ConfigError: Several places, none, an unreadable file, or ids that are no numbers.
    """
    prompt, path, ids = flags["prompt"], flags["prompt_file"], flags["prompt_ids"]
    if sum(value is not None for value in (prompt, path, ids)) > 1:
        raise ConfigError("give one of --prompt, --prompt-file and --prompt-ids")
    if flags["max_tokens"] is not None and flags["max_tokens"] < 1:
        raise ConfigError(f"--max-tokens {flags['max_tokens']}: expected at least 1")
    text = None if ids is not None else prompt
    if path is not None:
        text = _read_file(path)
    elif text is None and ids is None:
        text = _read_stdin()
    from ds4py.text.deepseek4_tokens import Marker

    return Question(
        text=text,
        ids=None if ids is None else _parse_ids(ids),
        system=flags["system"],
        raw=flags["raw"] or (text or "").startswith(Marker.BOS),
        max_tokens=flags["max_tokens"],
        sampling=given,
        think=flags["think"],
    )


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _text(file.read(_MAX_PROMPT_BYTES + 1), str(path))
    except OSError as e:
        raise ConfigError(f"--prompt-file {path}: {e.strerror}") from e


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("no question: give --prompt, --prompt-file, --prompt-ids or pipe one in")
    return _text(sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1), "stdin")


def _text(raw: bytes, source: str) -> str:
    if len(raw) > _MAX_PROMPT_BYTES:
        raise ConfigError(f"{source}: more than {_MAX_PROMPT_BYTES >> 20} MiB of prompt")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{source}: not UTF-8 text (byte {e.start}); convert it first") from e
    if not text.strip():
        raise ConfigError(f"{source}: the question is empty")
    return text


def _parse_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise ConfigError(f"--prompt-ids {text!r}: expected token ids such as 0,108")
    return tuple(int(part) for part in parts)


def _open(
    stack: ExitStack,
    model: ModelFlags,
    distributed: DistributedFlags,
    environment: Environment,
    cancelled: Callable[[], bool],
) -> Node:
    """Load what this process owns and wait for the workers of the rest."""
    role, engine = distributed.role, model.engine(environment)
    if role == "worker":
        raise ConfigError("ds4py-cli asks questions; start workers with ds4py-server")
    config = local_config(environment, 1)
    if role == "coordinator":
        config = distributed.coordinator_config(environment, 1)
    from ds4py.runtime import join_cluster, open_doors, open_node

    stack.enter_context(exclusive(environment.lock_file))
    doors = stack.enter_context(open_doors(config, None, environment.socket))
    with progress_bar("loading", unit="bytes") as loaded:
        node = stack.enter_context(
            open_node(engine, config, environment.socket, whole=role == "none", progress=loaded)
        )
    stack.enter_context(join_cluster(node, doors, environment.socket))
    if not node.coordinator.wait_ready(cancelled, _say_missing):
        raise CancelledError("interrupted while waiting for workers")
    return node


def _local(
    stack: ExitStack,
    node: Node,
    question: Question,
    params: SamplingParams,
    cancelled: Callable[[], bool],
) -> Iterator[Event]:
    from ds4py.cli.local import ask

    prefilled = stack.enter_context(progress_bar("prompt", unit="tokens"))
    return ask(node, question, params, cancelled=cancelled, progress=prefilled)


def _say_missing(missing: str) -> None:
    click.echo(f"{PROGRAM}: waiting for workers: nobody serves {missing}", err=True)


def main() -> NoReturn:
    """Run `ds4py-cli`."""
    exits.run(client, PROGRAM)
