"""Exit statuses and the one line on stderr, for every program."""

import subprocess
import sys

import click
import pytest

from ds4py.cli import exits
from ds4py.errors import CancelledError, ConfigError, Ds4Error, GgufError, UnsupportedQuantError


def command_raising(error: BaseException) -> click.Command:
    @click.command()
    def fails() -> None:
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("layers 5:3: reversed"), 2, "prog: layers 5:3: reversed\n"),
        (GgufError("not a GGUF file", path="m.gguf"), 1, "prog: m.gguf: not a GGUF file\n"),
        (UnsupportedQuantError("type 99"), 1, "prog: type 99\n"),
        (Ds4Error("two\nlines  and \x1b[31mred"), 1, "prog: two lines and \\x1b[31mred\n"),
        (click.UsageError("no such thing"), 2, "prog: no such thing Try 'prog --help'.\n"),
        (click.ClickException("click's own"), 1, "prog: click's own\n"),
        (CancelledError("interrupted"), 130, "prog: interrupted\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_an_error_becomes_a_status_and_one_line(capsys, error, status: int, line: str):
    assert exits.exit_status(command_raising(error), "prog", []) == status
    out, err = capsys.readouterr()
    # click ends the echoed ^C of an interrupt with an empty line
    assert (out, err.lstrip("\n")) == ("", line)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exits.exit_status(command_raising(ZeroDivisionError()), "prog", [])


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_may_choose_its_status(result: int | None, status: int):
    @click.command()
    def returns() -> int | None:
        return result

    assert exits.exit_status(returns, "prog", []) == status


def test_bad_usage_points_to_the_help_of_the_subcommand(capsys):
    group = click.Group("prog", commands={"sub": command_raising(ConfigError("unused"))})
    assert exits.exit_status(group, "prog", ["sub", "--nonsense"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("prog: No such option")
    assert err.endswith("Try 'prog sub --help'.\n")
    assert err.count("\n") == 1


def test_run_ends_the_process_with_the_status_and_all_output_whatever_threads_do():
    code = (
        "import click, threading\n"
        "from ds4py.cli import exits\n"
        "from ds4py.errors import ConfigError\n"
        "def command():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"  # no daemon: waited for
        "    print('all of it', end='')\n"
        "    raise ConfigError('bad')\n"
        "exits.run(click.command()(command), 'prog', [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, b"all of it", b"prog: bad\n")


def test_text_that_the_terminal_can_not_show_is_no_crash():
    code = (
        "import click\n"
        "from ds4py.cli import exits\n"
        "exits.run(click.command()(lambda: print('caf\\u00e9 \\udcff')), 'prog', [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9 \\udcff\n")


def test_printable_text_stays_as_it_is():
    assert exits.printable("Größe 日本") == "Größe 日本"
    assert exits.printable("a\tb\x9b\udcff\u202e") == "a\\tb\\x9b\\udcff\\u202e"
