"""`ds4py-cli`: ask a question and stream the answer, or chat.

Owns: the flags of the client, which of the three ways it takes: a server, this process, or this
process as coordinator of workers; and what it does there: answer, chat, diagnose. Refuses to know:
how any of them works. Invariant: Ctrl+C ends an answer cleanly; `--help` imports nothing heavy.
"""

from __future__ import annotations

import logging
import sys
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.chat.conversation import ChatHistory, Partner
from ds4py.cli.chat.loop import WORDS, ChatLoop, command_list
from ds4py.cli.chat.printing import Question, awaited, show
from ds4py.cli.diagnostics.diagnose import DiagnosticFlags, diagnose, diagnostic_options
from ds4py.cli.flags.ds4 import Ds4Flags, ds4_options
from ds4py.cli.flags.help import TopicalCommand, help_option
from ds4py.cli.flags.question import read_question
from ds4py.cli.flags.shared import (
    CONTEXT_SETTINGS,
    DistributedFlags,
    ModelFlags,
    distributed_options,
    model_options,
    sampling,
    sampling_options,
    take,
)
from ds4py.cli.nodes import NodeOpener
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import prompt_progress, start_logging
from ds4py.config import Address, SamplingParams
from ds4py.errors import ConfigError

PROGRAM: Final = "ds4py-cli"
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "seed")
_TOPICS: Final = {
    "prompt": (),  # and whatever stands in no other
    "runtime": [field.name for kind in (ModelFlags, Ds4Flags) for field in fields(kind)],
    "sampling": ("max_tokens", *_SAMPLING),
    "distributed": [field.name for field in fields(DistributedFlags)],
    "diagnostics": (*(field.name for field in fields(DiagnosticFlags)), "debug"),
}
_TEXTS: Final = {
    "commands": f"What can be typed in a chat:\n\n{command_list()}",
    "steering": "Directional steering is not built: the --dir-steering flags of ds4 are refused.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """What is asked and how the answer is shown.

    Args:
        host: Server that answers; None answers here.
        api_key: What it wants to know of its clients.
        interactive: Chat, also over a pipe.
        prompt: A question.
        prompt_file: A file with one.
        prompt_ids: Token ids instead.
        print_ids: Show the answer's ids instead of its text.
        system: System text.
        raw: The question is a whole prompt.
        think: How much to reason.
        max_tokens: Output budget.
    """

    host: str | None
    api_key: str | None
    interactive: bool
    prompt: str | None
    prompt_file: Path | None
    prompt_ids: str | None
    print_ids: bool
    system: str | None
    raw: bool
    think: str | None
    max_tokens: int | None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens}: expected at least 1")
        if self.interactive and (self.asks or self.raw):
            raise ConfigError("--interactive reads its questions itself: drop --prompt and --raw")

    @property
    def asks(self) -> bool:
        """Whether a flag names a question."""
        sources = (self.prompt, self.prompt_file, self.prompt_ids)
        return any(source is not None for source in sources)

    @property
    def chats(self) -> bool:
        """Whether questions are typed: nothing is asked, and nothing piped in."""
        return self.interactive or not (self.asks or self.raw or not sys.stdin.isatty())

    def question(self, given: dict[str, float | int]) -> Question:
        """Read the question; see `read_question`."""
        return read_question(
            given,
            prompt=self.prompt,
            prompt_file=self.prompt_file,
            prompt_ids=self.prompt_ids,
            system=self.system,
            raw=self.raw,
            think=self.think,
            max_tokens=self.max_tokens,
        )


@click.command(cls=TopicalCommand, topics=_TOPICS, texts=_TEXTS, context_settings=CONTEXT_SETTINGS)
@click.option("-p", "--prompt", help="The question.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="The question, from a file.")
@click.option("--prompt-ids", metavar="N,N,...", help="Raw token ids instead of a text.")
@click.option("-i", "--interactive", is_flag=True, help="Chat, though stdin is no terminal.")
@click.option("--print-ids", is_flag=True, help="Print token ids instead of text.")
@click.option("-sys", "--system", help="System text; '' is none [the model's usual one].")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--think", "think", flag_value="high", help="Reason first [if the model can].")
@click.option("--think-max", "think", flag_value="max", help="The same, as much as possible.")
@click.option("--nothink", "think", flag_value="none", help="Answer without reasoning.")
@click.option("-n", "--max-tokens", "--tokens", type=int, help="Output budget [the context].")
@click.option("--host", metavar="HOST:PORT", help="Ask this server; no model is loaded here.")
@click.option("--api-key", envvar="DS4PY_API_KEY", help="What the server at --host asks for.")
@sampling_options
@model_options
@ds4_options
@distributed_options
@diagnostic_options
@help_option
@click.version_option(__version__, prog_name=PROGRAM)
def client(**flags: Any) -> int:
    """Ask a model a question and stream the answer to stdout, or chat with it.

    The question comes from --prompt, --prompt-file, --prompt-ids or a pipe; without any, questions
    are typed one after the other.

    \b
    From a server:
      ds4py-cli --host coordinator-host:8000 --prompt "Explain the architecture"
    From a model in this process:
      ds4py-cli -m M.gguf -p "Explain the architecture" -n 200
    From workers that this process coordinates:
      ds4py-cli -m M.gguf --dist-route worker1:8001,worker2:8002 -p "Explain the architecture"
    A chat:
      ds4py-cli -m M.gguf
    """  # noqa: D301 - click wants the backspace character itself
    debug = flags.pop("debug")
    inherited = Ds4Flags(**take(flags, Ds4Flags))
    inherited.enter()
    model = ModelFlags(**take(flags, ModelFlags))
    distributed = DistributedFlags(**take(flags, DistributedFlags))
    diagnostic = DiagnosticFlags(**take(flags, DiagnosticFlags))
    asked = PromptFlags(**take(flags, PromptFlags))
    given = {name: value for name, value in flags.items() if value is not None}
    params = sampling(SamplingParams(), **given)
    environment = distributed.environment()
    traced = environment.decode_profile or environment.socket.connect_trace
    quiet = logging.INFO if traced else logging.WARNING
    start_logging(PROGRAM, level=logging.DEBUG if debug else quiet)
    if asked.host is not None:
        if model.model or distributed.role != "none" or diagnostic.wanted:
            raise ConfigError("--host asks a server: drop --model, --dist-* and diagnostics")
        return _ask_server(Address.parse(asked.host), asked, given)
    for told in inherited.without_effect():
        exits.complain(PROGRAM, told)
    opener = NodeOpener(PROGRAM, inherited.model(model), distributed, environment)
    if diagnostic.wanted:
        if diagnostic.perplexity_file and asked.asks:
            raise ConfigError("--perplexity-file scores a text: drop the prompt")
        return diagnose(diagnostic, opener, lambda: asked.question(given))
    return _ask_here(opener, asked, given, params)


def _ask_server(server: Address, asked: PromptFlags, given: dict[str, float | int]) -> int:
    """Ask or chat; Ctrl+C interrupts the wait, and leaving the stream makes the server stop."""
    from ds4py.cli.chat.remote import RemotePartner, ask

    key, want_ids = asked.api_key, asked.print_ids
    if asked.chats:
        partner = RemotePartner(server, given, asked.max_tokens, want_ids=want_ids, api_key=key)
        return _chat(partner, asked)
    question = asked.question(given)
    told = ask(server, question, want_ids=want_ids, want_progress=True, api_key=key)
    with prompt_progress(f"prompt at {server}") as progress:
        show(awaited(told, progress), ids_only=want_ids)
    return exits.OK


def _ask_here(
    opener: NodeOpener, asked: PromptFlags, given: dict[str, float | int], params: SamplingParams
) -> int:
    """Ask or chat with a model that this process loads or coordinates."""
    if asked.chats:
        from ds4py.cli.chat.local import LocalPartner

        def tell(line: str) -> None:
            exits.complain(PROGRAM, line)

        return _chat(LocalPartner(opener.open, params, asked.max_tokens, tell), asked)
    question = asked.question(given)
    with opener.open() as node, stop_signal() as stopping, prompt_progress() as progress:
        from ds4py.cli.chat.local import ask

        events = ask(node, question, params, cancelled=stopping.is_set, progress=progress)
        show(events, ids_only=asked.print_ids)
        return exits.INTERRUPTED if stopping.is_set() else exits.OK


def _chat(partner: Partner, asked: PromptFlags) -> int:
    from ds4py.cli.chat.line_history import LineHistory, default_path
    from ds4py.cli.chat.line_input import open_lines

    with closing(partner):
        lines = open_lines(LineHistory(default_path()), WORDS)
        talk = ChatHistory(asked.system, asked.think)
        return ChatLoop(partner, lines, talk, program=PROGRAM, ids_only=asked.print_ids).run()


def main() -> NoReturn:
    """Run `ds4py-cli`."""
    exits.run(client, PROGRAM)
