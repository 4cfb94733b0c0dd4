"""Ctrl+C, SIGTERM and a hang-up: the first asks, the second insists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ds4py.cli.signals import stop_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_sets_the_event(number) -> None:
    inherited = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with stop_signal() as stopping:
            assert not stopping.is_set()
            os.kill(os.getpid(), number)
            assert stopping.wait(10)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_a_program_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signal() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping.wait(0.1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from ds4py.cli.signals import stop_signal\n"
        "with stop_signal() as stopping:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stopping.wait(10)\n"
        "    print('asked', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(20)\n"
        "print('never')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "asked\n", "")
