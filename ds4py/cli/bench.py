"""`ds4py-bench`: prefill and decode rates at growing context.

Owns: the flags of the benchmark, where rows, tables and pictures go. Refuses to know: how anything
is measured. Invariant: stdout has the CSV, or one JSON object, and nothing else; `--help` imports
nothing heavy.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

import click

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.flags.shared import (
    CONTEXT_SETTINGS,
    DistributedFlags,
    ModelFlags,
    distributed_options,
    local_config,
    model_options,
    take,
)
from ds4py.cli.lock import exclusive
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import Progress, progress_bar, start_logging
from ds4py.config import CoordinatorConfig, EngineConfig, Environment
from ds4py.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from ds4py.bench.context_sweep import ContextSweep, Frontier, SweepPlan
    from ds4py.contracts import ModelCard, Session
    from ds4py.runtime import Node
    from ds4py.tracing.events import TraceRecorder

PROGRAM: Final = "ds4py-bench"
_LEFT_OUT: Final = {"sessions": 1, "dist_trace": None}
"""Flags of other programs without a meaning here, and their values."""

_WIDTH: Final = 160  # of tables that go to a file
_FILE: Final = click.Path(path_type=Path)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--prompt-file", type=_FILE, help="A long text.")
@click.option("--chat-prompt-file", type=_FILE, help="The same, as one turn of a chat.")
@click.option("-sys", "--system", default="You are a helpful assistant.", help="Of the chat.")
@click.option("--ctx-start", type=int, default=2048, help="First frontier, tokens [2048].")
@click.option("--ctx-max", type=int, default=32768, help="Last frontier [32768].")
@click.option("--step-incr", type=int, default=2048, help="From frontier to frontier [2048].")
@click.option("--step-mul", type=float, default=1.0, help="The same as a factor; 1 adds [1].")
@click.option("--ctx-alloc", type=int, help="Context size [ctx-max + gen-tokens + 1].")
@click.option(
    "-n", "--gen-tokens", "--tokens", type=int, default=128, help="Decoded at a frontier [128]."
)
@click.option("--csv", type=_FILE, help="Write the rows to a file [stdout].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--png", type=_FILE, help="Draw the rates against context (needs matplotlib).")
@click.option("--dump-frontier-logits-dir", "logits_dir", type=_FILE, help="A file per frontier.")
@model_options
@distributed_options
@click.version_option(__version__, prog_name=PROGRAM)
def bench(**flags: Any) -> int:
    """Measure prefill and decode at growing context; rows are ds4-bench's CSV.

    \b
    A model in this process, or over workers that this process coordinates:
      ds4py-bench -m M.gguf --prompt-file book.txt --ctx-max 16384 --png rates.png
      ds4py-bench -m M.gguf --prompt-file book.txt --dist-route worker1:8001,worker2:8002
    """  # noqa: D301 - click wants the backspace character itself
    start_logging(PROGRAM, level=logging.DEBUG if flags.pop("debug") else logging.WARNING)
    flags |= _LEFT_OUT
    model = ModelFlags(**take(flags, ModelFlags))
    distributed = DistributedFlags(**take(flags, DistributedFlags))
    return _walk(model, distributed, Wanted.read(flags))


bench.params = [param for param in bench.params if param.name not in _LEFT_OUT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure and where to write it.

    Args:
        plan: The frontiers.
        prompt: A file of text.
        system: Of a chat whose user says the prompt; None takes the prompt as it is.
        n_ctx: Context size; None takes the plan's own.
        csv: A file for the rows; None is stdout.
        as_json: Print one JSON object.
        png: A file for the picture.
        logits_dir: A folder for logits.
    """

    plan: SweepPlan
    prompt: Path
    system: str | None
    n_ctx: int | None
    csv: Path | None
    as_json: bool
    png: Path | None
    logits_dir: Path | None

    @classmethod
    def read(cls, flags: dict[str, Any]) -> Wanted:
        """Check the flags.

        Raises:
            ConfigError: They do not fit together, or a picture cannot be drawn.
        """
        from ds4py.bench.context_sweep import SweepPlan

        raw, chat = flags["prompt_file"], flags["chat_prompt_file"]
        if (raw is None) == (chat is None):
            raise ConfigError("give one of --prompt-file and --chat-prompt-file")
        if flags["png"] is not None and find_spec("matplotlib") is None:
            raise ConfigError("--png needs matplotlib: pip install 'ds4py[bench]'")
        return cls(
            plan=SweepPlan(
                start=flags["ctx_start"],
                stop=flags["ctx_max"],
                step=flags["step_incr"],
                factor=flags["step_mul"],
                gen_tokens=flags["gen_tokens"],
            ),
            prompt=raw or chat,
            system=None if chat is None else flags["system"],
            n_ctx=flags["ctx_alloc"],
            csv=flags["csv"],
            as_json=flags["as_json"],
            png=flags["png"],
            logits_dir=flags["logits_dir"],
        )

    def context(self, model: ModelFlags) -> int:
        """Return the context size.

        Raises:
            ConfigError: It is named twice, or the frontiers do not fit.
        """
        if self.n_ctx is not None and model.ctx is not None:
            raise ConfigError("--ctx-alloc and --ctx say the same: give one of them")
        n_ctx = self.n_ctx or model.ctx or self.plan.n_ctx
        if n_ctx < self.plan.n_ctx - 1:
            raise ConfigError(
                f"--ctx-alloc {n_ctx}: expected at least --ctx-max and --gen-tokens, "
                f"{self.plan.n_ctx - 1}"
            )
        return n_ctx


def _walk(model: ModelFlags, distributed: DistributedFlags, wanted: Wanted) -> int:
    from ds4py.bench.context_sweep import CSV_HEADER
    from ds4py.bench.report import share_table

    if distributed.role == "worker":
        raise ConfigError("ds4py-bench measures; start workers with ds4py-server")
    environment = distributed.environment()
    model = replace(model, ctx=wanted.context(model))
    engine, config = model.engine(environment), local_config(environment, 1)
    if distributed.role == "coordinator":
        config = distributed.coordinator_config(environment, 1)
    frontiers: list[Frontier] = []
    with stop_signal() as stopping, ExitStack() as stack:
        text = _read(wanted.prompt)
        out = stack.enter_context(_rows(wanted))
        node, recorder = stack.enter_context(_node(engine, config, environment, stopping.is_set))
        prompt = _prompt(node, text, wanted.system)
        progress = stack.enter_context(_shown_progress(out))
        session = stack.enter_context(node.backend.lease(()))
        walk = _new_walk(node, session, recorder, progress, stopping.is_set)
        _write(out, CSV_HEADER)
        for frontier in walk.measure(prompt, wanted.plan):
            frontiers.append(frontier)
            _write(out, frontier.row.csv)
            _dump(wanted, model, node, frontier, len(prompt))
    _print_table(share_table(frontiers[-1]), sys.stderr)
    _finish(wanted, node.backend.card, frontiers)
    return exits.OK


def _new_walk(
    node: Node,
    session: Session,
    recorder: TraceRecorder,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> ContextSweep:
    from ds4py.bench.context_sweep import ContextSweep
    from ds4py.bench.node import is_whole

    portable = is_whole(node.coordinator.config) and node.backend.card.cache_form is not None
    return ContextSweep(
        session,
        recorder,
        eos_ids=node.text.tokenizer.eos_ids,
        portable=portable,
        progress=progress,
        cancelled=cancelled,
    )


def _finish(wanted: Wanted, card: ModelCard, frontiers: list[Frontier]) -> None:
    """Write what needs all frontiers."""
    from ds4py.bench.report import json_object

    if wanted.png is not None:
        from ds4py.bench.plot import draw

        draw(wanted.png, [frontier.row for frontier in frontiers], card.name)
    if wanted.as_json:
        click.echo(json.dumps(json_object(card, frontiers)))


@contextmanager
def _node(
    engine: EngineConfig,
    config: CoordinatorConfig,
    environment: Environment,
    cancelled: Callable[[], bool],
) -> Iterator[tuple[Node, TraceRecorder]]:
    """Open a node with a bar for its loading."""
    from ds4py.bench.node import ready_node

    with ExitStack() as stack:
        stack.enter_context(exclusive(environment.lock_file))
        with progress_bar("loading", unit="bytes") as loaded:
            opened = ready_node(
                engine,
                config,
                environment.socket,
                loaded=loaded,
                cancelled=cancelled,
                missing=_say_missing,
            )
            ready = stack.enter_context(opened)
        yield ready


def _say_missing(missing: str) -> None:
    click.echo(f"{PROGRAM}: waiting for workers: nobody serves {missing}", err=True)


def _read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start})") from e


def _prompt(node: Node, text: str, system: str | None) -> tuple[int, ...]:
    """Return the ids of a text, as one turn of a chat if there is a system text."""
    if system is None:
        return tuple(node.text.tokenizer.prompt_ids(text))
    turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return tuple(node.text.chat.render_ids(turns, think="none"))


@contextmanager
def _rows(wanted: Wanted) -> Iterator[IO[str] | None]:
    """Open what the rows go to; None if nobody wants them."""
    if wanted.csv is None:
        yield None if wanted.as_json else sys.stdout
        return
    try:
        file = wanted.csv.open("w", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--csv {wanted.csv}: {e.strerror}") from e
    with file:
        yield file


def _write(out: IO[str] | None, line: str) -> None:
    if out is not None:
        out.write(f"{line}\n")
        out.flush()


@contextmanager
def _shown_progress(out: IO[str] | None) -> Iterator[Progress]:
    """Show a bar, unless rows appear on the same terminal."""
    if out is not None and out.isatty():
        yield lambda _, __: None
        return
    with progress_bar("measuring", unit="tokens") as progress:
        yield progress


def _dump(wanted: Wanted, model: ModelFlags, node: Node, frontier: Frontier, n_prompt: int) -> None:
    """Write the logits of a frontier if somebody wants them."""
    if wanted.logits_dir is None:
        return
    from ds4py.bench.report import logits_object

    told = logits_object(
        node.backend.card,
        frontier,
        n_prompt=n_prompt,
        n_ctx=node.backend.n_ctx,
        device=model.device,
    )
    path = wanted.logits_dir / f"frontier_{frontier.row.ctx_tokens:06}.logits.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--dump-frontier-logits-dir {path}: {e.strerror}") from e


def _print_table(table: Table, out: IO[str]) -> None:
    from rich.console import Console

    width = None if out.isatty() else _WIDTH
    Console(file=out, width=width).print(table)


def main() -> NoReturn:
    """Run `ds4py-bench`."""
    exits.run(bench, PROGRAM)
