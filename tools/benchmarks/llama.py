"""llama.cpp as the baseline: which interpreter or program has it, and how it is started.

Owns: finding it, its RPC servers, the `llama-bench` program. Refuses to know: what is compared with
it. Invariant: it computes with one thread a process, on the cores of its counterparts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ds4py.config import Address, SocketConfig
from ds4py.errors import ClusterError, ConfigError, ConnectError
from ds4py.transport.sockets import Listener, connect
from tools.benchmarks.processes import LOOPBACK, Running, TimedProcess, child, running
from tools.benchmarks.timers import DECODE_CONTEXT, TimedJob

NAME: Final = "llama.cpp"
NO_LLAMA: Final = (
    "needs llama.cpp: pip install -e '.[baselines]', or name another interpreter that has "
    "llama_cpp with --llama-python, or a program with --llama-bench"
)
NO_RPC: Final = (
    "needs llama.cpp with RPC: CMAKE_ARGS=-DGGML_RPC=on pip install --no-binary llama-cpp-python "
    "llama-cpp-python, in any environment; name its interpreter with --llama-python"
)
_SCRIPT: Final = Path(__file__).with_name("llama_child.py")
_IMPORT_SECONDS: Final = 60.0
_CONNECT_ROUNDS: Final = 2400  # of 25 ms


@dataclass(frozen=True, slots=True)
class Llama:
    """An interpreter that has llama.cpp's Python package.

    Args:
        python: The interpreter.
        has_rpc: Whether the package was built with RPC.
    """

    python: Path
    has_rpc: bool

    def command(self, *arguments: object) -> list[object]:
        """Return the command of the script that drives llama.cpp."""
        return [self.python, _SCRIPT, *arguments]


def find_llama(python: Path | None) -> Llama | None:
    """Look for llama.cpp's Python package.

    Args:
        python: Interpreter that must have it; None takes this one, which need not.

    Raises:
        ConfigError: The given interpreter does not have it.
    """
    if python is None and find_spec("llama_cpp") is None:
        return None
    command = [str(python or sys.executable), str(_SCRIPT), "--supports-rpc"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_IMPORT_SECONDS
        )
    except subprocess.CalledProcessError as e:
        said = (e.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"--llama-python {command[0]}: no usable llama_cpp: {said}") from e
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"--llama-python {command[0]}: cannot be run: {e}") from e
    return Llama(Path(command[0]), answer.stdout.split()[-1:] == ["True"])


@contextmanager
def one_process(llama: Llama, model: Path, *, n_ctx: int) -> Iterator[TimedProcess]:
    """Start llama.cpp with one thread on the first core."""
    with child(NAME, llama.command("--model", model, "--ctx", n_ctx)) as subject:
        yield subject


@contextmanager
def over_rpc(llama: Llama, model: Path, n_servers: int, *, n_ctx: int) -> Iterator[TimedProcess]:
    """Start RPC servers with one thread each, the i-th on core i, and a process that drives them.

    Each server has an equal part of the layers; the process that drives them may use any core.
    """
    addresses = [_free_address() for _ in range(n_servers)]
    with ExitStack() as stack:
        for core, address in enumerate(addresses):
            command = llama.command("--serve", address)
            server = stack.enter_context(running(f"RPC server {address}", command, core))
            _wait_listening(server, address)
        servers = ",".join(map(str, addresses))
        command = llama.command("--model", model, "--ctx", n_ctx, "--rpc", servers)
        name = f"{NAME}, {n_servers} RPC servers"
        yield stack.enter_context(child(name, command, core=None))


def _wait_listening(server: Running, address: Address) -> None:
    def ended() -> bool:
        return server.process.poll() is not None

    try:
        connect(address, SocketConfig(), rounds=_CONNECT_ROUNDS, stopped=ended).close()
    except ConnectError as e:
        raise server.failed("does not listen") from e


def _free_address() -> Address:
    """Return an address that nobody uses now; the server must be told one."""
    listener = Listener(Address(LOOPBACK, 0), SocketConfig())
    listener.close()
    return listener.address


def llama_bench(program: Path, model: Path) -> TimedProcess:
    """Return llama.cpp's own benchmark program as something to time; it loads the model again."""
    return TimedProcess(f"{NAME} (llama-bench)", lambda job: _bench_seconds(program, model, job))


def _bench_seconds(program: Path, model: Path, job: TimedJob) -> float:
    sizes: Sequence[object] = ("-p", job.n, "-n", 0)
    if job.what == "decode":
        sizes = ("-p", 0, "-n", job.n, "-d", DECODE_CONTEXT)
    command = [program, "-m", model, "-t", 1, "-r", 1, *sizes, "-o", "json"]
    with running(program.name, command, 0) as process:
        output, _ = process.process.communicate()
        try:
            (row,) = json.loads(output)
            return job.n / float(row["avg_ts"])
        except (ValueError, KeyError, ZeroDivisionError) as e:
            raise ClusterError(f"{program}: unexpected output of llama-bench: {e}") from e
