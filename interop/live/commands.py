"""Commands that start programs: templates with placeholders, filled in for one process.

Owns: the placeholders, ds4py's own templates, the example for ds4. Refuses to know: whether a
program exists. Invariant: no shell is involved; a path with spaces stays one argument.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Final

from ds4py.errors import ConfigError

COORDINATOR: Final = "coordinator"
WORKER: Final = "worker"

_BOTH: Final = {
    "model": "the GGUF file",
    "ctx": "tokens per session",
    "layers": "A:B or A:output",
    "host": "of the coordinator, where workers dial it",
    "port": "the same",
}
PLACEHOLDERS: Final[Mapping[str, Mapping[str, str]]] = {
    COORDINATOR: _BOTH
    | {
        "http_host": "where it must answer /v1/chat/completions",
        "http_port": "the same",
        "bits": "per value between machines",
        "chunk": "prompt tokens per chunk",
    },
    WORKER: _BOTH
    | {"worker_host": "where the worker listens", "worker_port": "the same, also after a restart"},
}

_FLAGS: Final = {
    COORDINATOR: "-m {model} -c {ctx} --role coordinator --layers {layers} --listen {host} {port}"
    " --host {http_host} --port {http_port} --dist-activation-bits {bits}"
    " --dist-prefill-chunk {chunk}",
    WORKER: "-m {model} -c {ctx} --role worker --layers {layers} --coordinator {host} {port}"
    " --listen {worker_host} {worker_port}",
}
EXAMPLES: Final = {
    COORDINATOR: f"./ds4-server {_FLAGS[COORDINATOR]}",
    WORKER: f"./ds4 {_FLAGS[WORKER]}",
}
"""For ds4, whose flags docs/spec/wire-protocol.md#command-line lists."""

_EXACT: Final = "-t 1 --device cpu --precision f32 --act-quant cpu"


def ours(role: str) -> str:
    """Return the template of a ds4py program, in the arithmetic that can be compared to the bit."""
    server = shlex.quote(str(Path(sys.executable).with_name("ds4py-server")))
    return f"{server} {_FLAGS[role]} {_EXACT}"


def check(template: str, role: str) -> str:
    """Return a template that can be filled in.

    Raises:
        ConfigError: It is empty, quoted wrongly, or has a placeholder that nobody knows.
    """
    known = PLACEHOLDERS[role]
    try:
        parts = shlex.split(template)
        used = {name for part in parts for _, name, _, _ in Formatter().parse(part) if name}
    except ValueError as e:
        raise ConfigError(f"--c-{role} {template!r}: {e}") from e
    if not parts or used - known.keys():
        got = ", ".join(f"{{{name}}}" for name in sorted(used - known.keys())) or "no command"
        expected = " ".join(f"{{{name}}}" for name in known)
        raise ConfigError(f"--c-{role}: got {got}, expected a command with some of {expected}")
    return template


def fill(template: str, values: Mapping[str, object]) -> list[str]:
    """Return the arguments of one process."""
    return [part.format(**values) for part in shlex.split(template)]
