"""`python -m interop.clients.run_agents`: agent programs at work, on a model that is scripted.

The model asks for a file to be written, then to be run, and tells what was printed. The programs
are those that the caller names; they get the settings of docs/clients, word for word except for the
address.

Owns: the task, the script, how each program is started. Refuses to know: how programs are
installed. Invariant: a program sees a home and a folder that exist for one run only.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.conformance.server.peer import THINK_END, block, call, model, served, tokens
from tests.unit.text import tiny_deepseek4 as tiny

PAGES: Final = Path(__file__).parents[2] / "docs" / "clients"
TASK: Final = "Write answer.py, a program that prints 6 * 7, run it, and tell me what it printed."
PROGRAM: Final = "print(6 * 7)\n"
ANSWER: Final = "The program printed 42."
DEADLINE: Final = 180.0
"""Seconds for one program."""


# --- the model ------------------------------------------------------------------------------------


@dataclass
class Script:
    """What the model says, by what its prompt holds.

    Args:
        folder: Where the program works.
        prompts: All that came, as text.
    """

    folder: Path
    prompts: list[str] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a reply."""
        spelled = (tiny.tokenizer().token_bytes(token, special=True) for token in prompt)
        text = b"".join(spelled).decode(errors="replace")
        self.prompts.append(text)
        said = self._steps(set(re.findall(r'"name":\s*"(\w+)"', text)))
        reply = said[min(text.count("<tool_result>"), len(said) - 1)]
        # without thinking the prompt has the end of the thought already
        return tokens(reply.partition(THINK_END)[2] if text.endswith(THINK_END) else reply)

    def _steps(self, offered: set[str]) -> list[str]:
        """Return the replies of a task; without tools, as where a title is wanted, only one."""
        path = str(self.folder / "answer.py")
        run = f"python3 {path}"
        patch = f"*** Begin Patch\n*** Add File: {path}\n+{PROGRAM}*** End Patch"
        if "Write" in offered:
            calls = call("Write", file_path=path, content=PROGRAM), call("Bash", command=run)
        elif "apply_patch" in offered:
            calls = call("apply_patch", input=patch), call("exec_command", cmd=run)
        elif "exec_command" in offered:
            write = f"echo '{PROGRAM.strip()}' > {path}"
            calls = call("exec_command", cmd=write), call("exec_command", cmd=run)
        elif "write" in offered:
            more = {"description": "Run the program"}
            calls = call("write", filePath=path, content=PROGRAM), call("bash", command=run, **more)
        else:
            return [f"No tools.{THINK_END}Six times seven"]
        return [
            f"First the file.{THINK_END}I write the file.\n\n{block(calls[0])}",
            f"Now to run it.{THINK_END}\n\n{block(calls[1])}",
            f"It says 42.{THINK_END}{ANSWER}",
        ]

    @property
    def was_run(self) -> bool:
        """Whether a result of the program came back."""
        results = re.findall(r"<tool_result>(.*?)</tool_result>", "".join(self.prompts), re.DOTALL)
        return any(re.search(r"^42$", result, re.MULTILINE) for result in results)


# --- the programs ---------------------------------------------------------------------------------

Start = Callable[[str, Path, str], tuple[list[str], dict[str, str]]]
"""Program, home and address to a command without the task, and variables; writes settings."""


def _settings(page: str, language: str, address: str) -> str:
    """Return the first block of a page, for another address."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page}.md has no block of {language}"
    return found[1].replace("127.0.0.1:8000", address)


def _claude(program: str, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    del home
    exports = _settings("claude-code", "sh", address)
    may = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash,Write"]
    return [program, *may, "-p"], dict(re.findall(r"^export (\w+)=(.*)$", exports, re.MULTILINE))


def _codex(program: str, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "ds4py-models.json").write_text(_settings("codex-cli", "json", address))
    (folder / "config.toml").write_text(_settings("codex-cli", "toml", address))
    may = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return [program, "exec", *may], {"DS4PY_API_KEY": "unused"}


def _opencode(program: str, home: Path, address: str) -> tuple[list[str], dict[str, str]]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(_settings("opencode", "json", address))
    return [program, "run"], {}


STARTS: Final[dict[str, Start]] = {"claude": _claude, "codex": _codex, "opencode": _opencode}


def work(name: str, program: str) -> bool:
    """Let a program do the task, print what happened, and return whether it was done."""
    with tempfile.TemporaryDirectory() as folder:
        home, place = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        place.mkdir()
        script = Script(place)
        fake = model(script, n_ctx=1_000_000, n_sessions=4, chunk=4096)
        with served(fake, system_in_place=name == "claude") as (_, port):
            command, variables = STARTS[name](program, home, f"127.0.0.1:{port}")
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
            version = _told([program, "--version"], place, environment).splitlines()[-1]
            print(f"== {name}: {version}", flush=True)
            said = _told([*command, TASK], place, environment)
        file = place / "answer.py"
        findings = {
            "the file was written": file.is_file() and file.read_text() == PROGRAM,
            "what it printed came back": script.was_run,
            "the answer was shown": ANSWER in said,
        }
    for finding, holds in findings.items():
        print(f"{'yes' if holds else 'NO '}  {finding}", flush=True)
    if not all(findings.values()):
        print(said)
    return all(findings.values())


def _told(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a program to its end and return what it said."""
    done = subprocess.run(  # noqa: S603 - the caller's own programs
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for name in STARTS:
        if getattr(options, name):
            yield name, str(Path(getattr(options, name)).resolve())


def main() -> int:
    """Run the programs that are named; 0 if all did the task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name in STARTS:
        parser.add_argument(f"--{name}", metavar="PATH", help="the program")
    chosen = list(_chosen(parser.parse_args()))
    if not chosen:
        parser.error("name at least one program")
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("ds4py.server.http.endpoint").setLevel(logging.INFO)
    done = [work(name, program) for name, program in chosen]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
