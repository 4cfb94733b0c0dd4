"""The demo behind ./tools/demo: a coordinator and two workers on loopback, one question.

The three processes are started exactly as on three machines; only the addresses differ.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BIN = Path(sys.executable).parent
QUESTION = "Explain in three sentences why the sky is blue."
START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(name: str, folder: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ds4py-server with these arguments; its log goes to a file."""
    threads = max(1, min(12, (os.cpu_count() or 2) // 2))
    command = [str(BIN / "ds4py-server"), *args, "--model", str(MODEL), "--threads", str(threads)]
    print("$", " ".join(["ds4py-server", *args, "--model", MODEL.name]))
    with (folder / f"{name}.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def wait_ready(client: httpx.Client, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    logs = "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(folder.glob("*.log")))
    sys.exit(f"the cluster was not ready after {START_SECONDS:.0f} s\n{logs}")


def show_stages(health: dict) -> None:
    table = Table("process", "layers", "weights", "prefill", "decode", "hop")
    for stage in health["stages"]:
        head = " + head" if stage["has_output"] else ""
        own = stage["layers"] is not None
        table.add_row(
            stage["name"],
            f"{stage['layers']}{head}" if own else "none",
            f"{(stage['weight_bytes'] or 0) / 1e6:.1f} MB",
            f"{stage['prefill_per_second']:.0f} t/s" if own else "",
            f"{stage['decode_per_second']:.0f} t/s" if own else "",
            f"{stage['decode_hop_usec'] / 1000:.2f} ms" if own else "",
        )
    Console().print(table)
    print("prefill, decode: each stage by its own clock; hop: a token's way between stages")


def main() -> int:
    question = " ".join(sys.argv[1:]) or QUESTION
    ports = [free_port() for _ in range(3)]
    here, first, second = (f"127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = ("--dist-role", "worker", "--dist-listen")
        coordinator = ("--dist-role", "coordinator", "--dist-listen", here)
        with (
            process("worker1", folder, *worker, first, "--dist-layers", "0-14"),
            process("worker2", folder, *worker, second, "--dist-layers", "15-29"),
            process("coordinator", folder, *coordinator, "--dist-route", f"{first},{second}"),
            httpx.Client(base_url=f"http://{here}", timeout=10, trust_env=False) as client,
        ):
            wait_ready(client, folder)
            ask = ["ds4py-cli", "--host", here, "--prompt", question, "--max-tokens", "200"]
            print("$", " ".join(ask[:3]), "--prompt", f'"{question}"', "--max-tokens 200\n")
            sys.stdout.flush()
            status = subprocess.run([str(BIN / ask[0]), *ask[1:]], check=False).returncode
            print()
            show_stages(client.get("/health").json())
    return status


if __name__ == "__main__":
    sys.exit(main())
