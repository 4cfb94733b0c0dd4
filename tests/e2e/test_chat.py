"""A chat as its user sees it: the real program on a pseudo-terminal, keys in, screen out."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4py.api.chat import next_turn_ids
from ds4py.cli.chat.line_history import LIMIT
from tests.e2e.support import Alone
from tests.support.processes import DEADLINE, Launcher, environment, free_port, installed, run

EXACT = ("--precision", "f32", "--temp", 0, "-t", 1)
CTRL_C, CTRL_D, UP, ENTER, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\r", "\x1b\r"
PROMPT, GOES_ON = r"ds4>", r"\.\.\."
UNDER_WAY = r"\d+,\d+,\d+,"
"""An answer of `--print-ids` that is not at its end."""

_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])|\x1b[^\x07@-~]*$|\r|\x07"
)
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl+C becomes a signal of the program
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, args: list[str], home: Path, out: int | None = None):
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        # a terminal that answers no questions of the line editor, as tests do not
        extra = {"HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *args],
            stdin=slave,
            stdout=slave if out is None else out,
            stderr=slave,
            env=environment(extra),
            start_new_session=True,
        )
        os.close(slave)
        self._raw = b""
        self._seen = 0

    @property
    def text(self) -> str:
        """All that was shown, without what only moves and colours."""
        return _ESCAPES.sub(b"", self._raw).decode(errors="replace")

    @property
    def raw(self) -> bytes:
        return self._raw

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for something new; what was shown before it is not looked at again."""
        end = time.monotonic() + DEADLINE
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            assert time.monotonic() < end, f"never shown: {pattern!r}\n{self.text[-2000:]}"
            alive = self._read()
            assert alive, f"ended without {pattern!r}\n{self.text[-2000:]}"
        self._seen = found.end()
        return found

    def say(self, line: str, prompt: str = PROMPT) -> None:
        """Type a line at the prompt and wait until it is taken."""
        self.expect(prompt)
        self.type(line + ENTER)
        self.expect(re.escape(line) + r"\n")

    def leave(self) -> int:
        """Press Ctrl+D at an empty line; the exit status."""
        self.expect(PROMPT)
        self.type(CTRL_D)
        return self.wait_exit()

    def wait_exit(self) -> int:
        """Read to the end; the exit status."""
        end = time.monotonic() + DEADLINE
        while self._read():
            assert time.monotonic() < end, f"never ended\n{self.text[-2000:]}"
        return self._process.wait(DEADLINE)

    def _read(self) -> bool:
        """Take what is there; False at the end."""
        if not select.select([self._master], [], [], 0.05)[0]:
            return True
        try:
            part = os.read(self._master, 65536)
        except OSError:  # how Linux says that the last writer has gone
            return False
        self._raw += part
        return bool(part)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(DEADLINE)
        os.close(self._master)


@contextmanager
def screen(home: Path, *args: object, out: int | None = None) -> Iterator[Screen]:
    """`ds4py-cli` on a terminal."""
    shown = Screen([installed("ds4py-cli"), *map(str, args)], home, out)
    try:
        yield shown
    finally:
        shown.close()


def figures(shown: Screen) -> tuple[int, int, int]:
    """Wait for the end of an answer: tokens of its prompt, those cached, those answered."""
    found = shown.expect(r"prompt: (\d+) tokens(?: \((\d+) cached\))?, answer: (\d+) tokens")
    shown.expect(r"prefill: [\d.]+ t/s, generation: [\d.]+ t/s")
    return int(found[1]), int(found[2] or 0), int(found[3])


def shown_ids(shown: Screen) -> list[int]:
    """Wait for an answer of `--print-ids`."""
    return [int(part) for part in shown.expect(r"(\d+(,\d+)+)\n")[1].split(",")]


def chat_prompt(alone: Alone, *turns: str | list[int]) -> list[int]:
    """The ids of questions, and of answers given as ids, as a chat sends them."""
    chat = alone.node.text.chat
    ids = chat.render_ids([{"role": "user", "content": turns[0]}])
    for turn in turns[1:]:
        ids += turn if isinstance(turn, list) else next_turn_ids(chat, None, turn, None)
    return ids


# --- a model of this process ----------------------------------------------------------------------


def test_a_chat_remembers_its_answers_as_they_were(toy: Path, alone: Alone, tmp_path: Path) -> None:
    """C69 without the interruption: the second answer is the one to exactly this conversation."""
    with screen(tmp_path, "-m", toy, *EXACT, "-n", 12, "--print-ids") as shown:
        shown.expect("/help lists commands")
        shown.say("hello the world")
        first = shown_ids(shown)
        assert figures(shown) == (len(chat_prompt(alone, "hello the world")), 0, 12)
        shown.say("and why")
        second = shown_ids(shown)
        n_prompt, n_cached, _ = figures(shown)
        assert shown.leave() == 0
    asked = chat_prompt(alone, "hello the world")
    assert first == alone.greedy(asked, 12)
    whole = chat_prompt(alone, "hello the world", first, "and why")
    assert (n_prompt, n_cached) == (len(whole), len(asked) + 11)
    assert second == alone.greedy(whole, 12)


def test_ctrl_c_stops_an_answer_and_the_next_turn_remembers_it(
    toy: Path, alone: Alone, tmp_path: Path
) -> None:
    """C69."""
    with screen(tmp_path, "-m", toy, *EXACT, "--print-ids") as shown:
        shown.say("hello the world")
        shown.expect(UNDER_WAY)
        shown.type(CTRL_C)
        n_asked, _, n_said = figures(shown)
        assert 1 <= n_said < 4000
        shown.say("and why")
        shown.expect(UNDER_WAY)
        shown.type(CTRL_C)
        n_prompt, n_cached, _ = figures(shown)
        shown.say("/quit")
        assert shown.wait_exit() == 0
        assert "Traceback" not in shown.text
    appended = next_turn_ids(alone.node.text.chat, None, "and why", None)
    assert n_prompt == n_asked + n_said + len(appended)
    assert n_cached >= n_asked + n_said - 1


def test_keys_at_the_prompt(toy: Path, tmp_path: Path) -> None:
    """Ctrl+C clears the line; Ctrl+D leaves only from an empty one; entries of several lines."""
    with screen(tmp_path, "-m", toy, *EXACT, "-n", 3) as shown:
        shown.expect(PROMPT)
        shown.type("never sent" + CTRL_C)
        shown.expect(r"never sent +\n")
        shown.expect(PROMPT)
        shown.type("/nonsense" + CTRL_D + ENTER)
        shown.expect("/nonsense: no such command, nothing was sent")
        shown.say("hello\\")
        shown.say("the world", GOES_ON)
        two_lines = figures(shown)[0]
        shown.say("/clear")
        shown.expect(PROMPT)
        shown.type("\x1b[200~hello\nthe world\x1b[201~" + ENTER)  # pasted
        assert figures(shown)[0] == two_lines
        shown.say("/clear")
        shown.expect(PROMPT)
        shown.type("hello" + ALT_ENTER + "the world" + ENTER)
        assert figures(shown)[0] == two_lines
        shown.say("/clear")
        shown.say('"""')
        shown.say("hello", GOES_ON)
        shown.say('the world"""', GOES_ON)
        assert figures(shown)[0] == two_lines
        assert shown.leave() == 0


def test_commands(toy: Path, tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("hello the world\n")
    with screen(tmp_path, "-m", toy, "-c", 512, *EXACT, "-n", 5) as shown:
        shown.say("/help")
        shown.expect("/read FILE +ask what stands in a file")
        shown.say(f"/read {question}")
        n_prompt, _, n_said = figures(shown)
        shown.say("/ctx abc")
        shown.expect("/ctx 'abc': expected a number of tokens")
        shown.say("/ctx 300")
        shown.expect("the context has 300 tokens now")
        shown.say("/status")
        shown.expect("model: toy llama, in this process")
        shown.expect(rf"context: {n_prompt + n_said} of 300 tokens used")
        shown.expect(r"coordinator: layers 0-5 \+ head; prefill: ")
        shown.say("hello")
        n_prompt, n_cached, _ = figures(shown)
        assert (n_prompt > 20, n_cached) == (True, 0)  # a new session, the same conversation
        shown.say(f"/save {tmp_path / 'talk.json'}")
        shown.say("/system Be brief.")
        shown.say("/power 50")
        shown.expect("/power has no effect here")
        shown.say("/exit")
        assert shown.wait_exit() == 0
    roles = [turn["role"] for turn in json.loads((tmp_path / "talk.json").read_text())]
    assert roles == ["user", "assistant"] * 2


def test_lines_are_remembered_from_chat_to_chat(toy: Path, tmp_path: Path) -> None:
    """C70."""
    history = tmp_path / ".ds4_history"
    history.write_text("".join(f"line {number}\n" for number in range(LIMIT)))
    with screen(tmp_path, "-m", toy, *EXACT, "-n", 2) as shown:
        shown.say("/think")
        shown.expect(PROMPT)
        assert history.read_text().splitlines()[0] == "line 1"  # saved at once
        assert history.read_text().splitlines()[-1] == "/think"
        shown.type("hello" + ENTER)
        figures(shown)
        assert shown.leave() == 0
    with screen(tmp_path, "-m", toy, *EXACT, "-n", 2) as shown:
        shown.expect(PROMPT)
        shown.type(UP + UP + UP)
        shown.expect("line 511")
        shown.type(CTRL_C)
        assert shown.leave() == 0
    lines = history.read_text().splitlines()
    assert (len(lines), lines[0], lines[-2:]) == (512, "line 2", ["/think", "hello"])


def test_answers_may_go_to_a_file_while_questions_are_typed(
    toy: Path, alone: Alone, tmp_path: Path
) -> None:
    path = tmp_path / "answers"
    with (
        path.open("wb") as out,
        screen(tmp_path, "-m", toy, *EXACT, "-n", 9, "--print-ids", out=out.fileno()) as shown,
    ):
        shown.say("hello")
        figures(shown)
        shown.say("/quit")
        assert shown.wait_exit() == 0
    expected = alone.greedy(chat_prompt(alone, "hello"), 9)
    assert path.read_text() == ",".join(map(str, expected)) + "\n"


def test_a_chat_over_a_pipe(toy: Path, alone: Alone) -> None:
    typed = b"hello the world\n/nonsense\nand why\n"
    answer = run("ds4py-cli", "-m", toy, *EXACT, "-n", 8, "--print-ids", "-i", stdin=typed)
    assert answer.status == 0, answer.err
    first, second = ([int(i) for i in line.split(",")] for line in answer.text.split("\n"))
    assert first == alone.greedy(chat_prompt(alone, "hello the world"), 8)
    assert second == alone.greedy(chat_prompt(alone, "hello the world", first, "and why"), 8)
    assert "processing " in answer.err
    assert "/nonsense: no such command" in answer.err


# --- over workers, and at a server ----------------------------------------------------------------


def test_a_coordinator_waits_for_its_route_and_chats_over_it(
    toy: Path, alone: Alone, tmp_path: Path
) -> None:
    port = free_port()
    given = ("-m", toy, *EXACT, "-n", 8, "--print-ids", "--dist-layers", "0-2")
    with (
        Launcher(tmp_path / "run") as launch,
        screen(tmp_path, *given, "--dist-route", f"127.0.0.1:{port}") as shown,
    ):
        shown.expect("waiting for workers: nobody serves layers 3-5")
        launch.worker(
            *("--dist-role", "worker", "--dist-listen", f"127.0.0.1:{port}"),
            *("-m", toy, "--dist-layers", "3-5", "--precision", "f32"),
        )
        shown.say("hello the world")
        first = shown_ids(shown)
        figures(shown)
        shown.say("and why")
        second = shown_ids(shown)
        assert figures(shown)[1] > 0
        shown.say("/status")
        shown.expect(rf"127.0.0.1:{port}.*: layers 3-5 \+ head")
        shown.say("/quit")
        assert shown.wait_exit() == 0
    assert first == alone.greedy(chat_prompt(alone, "hello the world"), 8)
    assert second == alone.greedy(chat_prompt(alone, "hello the world", first, "and why"), 8)


def test_ctrl_c_over_workers_waits_for_what_they_have_begun(toy: Path, tmp_path: Path) -> None:
    with Launcher(tmp_path / "run") as launch:
        worker = launch.worker(
            *("--dist-role", "worker", "--dist-listen", "127.0.0.1:0"),
            *("-m", toy, "--dist-layers", "0-5", "--precision", "f32"),
        )
        route = ("--dist-route", worker.address)
        with screen(tmp_path, "-m", toy, *EXACT, "--print-ids", *route) as shown:
            shown.say("hello the world")
            shown.expect(UNDER_WAY)
            shown.type(CTRL_C)
            shown.expect("stopping: steps that workers have begun are waited for")
            n_asked, _, n_said = figures(shown)
            shown.say("and why")
            shown.expect(UNDER_WAY)
            shown.type(CTRL_C)
            assert figures(shown)[1] >= n_asked + n_said - 1
            assert shown.leave() == 0
        assert "Traceback" not in worker.program.log


def test_ctrl_c_while_a_route_is_waited_for_leaves(toy: Path, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with screen(tmp_path, "-m", toy, "-t", 1, "--dist-route", nobody) as shown:
        shown.expect("waiting for workers")
        shown.type(CTRL_C)
        assert shown.wait_exit() == 130


def test_a_chat_with_a_server(toy: Path, tmp_path: Path) -> None:
    """C69 at a server: Ctrl+C leaves the stream, and the next request tells what was said."""
    with Launcher(tmp_path / "run") as launch:
        server = launch.server("-m", toy, "--precision", "f32", "--http", "127.0.0.1:0")
        server.wait_ready()
        given = ("--host", server.address, "--temp", 0, "-n", 3000, "--print-ids")
        with screen(tmp_path, *given) as shown:
            shown.say("hello the world")
            shown.expect(UNDER_WAY)
            shown.type(CTRL_C)
            shown.say(f"/save {tmp_path / 'talk.json'}")
            shown.say("/status")
            shown.expect(rf"model: toy llama, at {server.address}")
            shown.expect(r"of 4096 tokens used")
            shown.say("and why")
            shown.expect(UNDER_WAY)
            shown.type(CTRL_C)
            shown.say("/ctx 99")
            shown.expect("context 99: that of")
            assert shown.leave() == 0
            assert "Traceback" not in shown.text
        server.program.stop()
    asked, said = json.loads((tmp_path / "talk.json").read_text())
    assert asked == {"role": "user", "content": "hello the world"}
    assert said["role"] == "assistant"
    assert len(said["content"]) >= 5


def test_a_server_that_is_gone_costs_a_turn(tmp_path: Path) -> None:
    with screen(tmp_path, "--host", f"127.0.0.1:{free_port()}") as shown:
        shown.say("hello")
        shown.expect("no answer: the question is taken back")
        shown.expect("no server answers")
        assert shown.leave() == 1


def test_a_signal_to_end_ends_a_chat(toy: Path, tmp_path: Path) -> None:
    with screen(tmp_path, "-m", toy, *EXACT, "--print-ids") as shown:
        shown.say("hello")
        shown.expect(UNDER_WAY)
        os.kill(shown._process.pid, signal.SIGTERM)
        assert shown.wait_exit() == -signal.SIGTERM
