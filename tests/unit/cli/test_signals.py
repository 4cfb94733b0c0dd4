"""Ctrl+C and SIGTERM: the first asks, the second insists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ds4py.cli.signals import stop_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_event(number) -> None:
    before = signal.getsignal(number)
    with stop_signal() as stopping:
        assert not stopping.is_set()
        os.kill(os.getpid(), number)
        assert stopping.wait(10)
    assert signal.getsignal(number) is before


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
