"""Which device computes, with how many threads, in which precision.

Owns: turning the words of a config into torch's values. Refuses to know: models. Invariant: a
device that is returned exists.
"""

from __future__ import annotations

from typing import Final

import psutil  # type: ignore[import-untyped]  # the package has no annotations
import torch

from ds4py.config import ActQuant, Precision
from ds4py.engine.container_limits import ContainerLimits, read_limits
from ds4py.errors import ConfigError

MAX_AUTO_THREADS: Final = 12


def choose_device(name: str) -> torch.device:
    """Return the device of "auto", "cpu", "cuda" or "cuda:N"; "auto" prefers CUDA.

    Raises:
        ConfigError: The device does not exist here, or the name has another form.
    """
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not n_cuda):
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind not in {"auto", "cuda"} or (number and not number.isdecimal()):
        raise ConfigError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    index = int(number or 0)
    if index >= n_cuda:
        found = f"CUDA devices 0-{n_cuda - 1}" if n_cuda else "no CUDA device that torch can use"
        raise ConfigError(f"device {name!r}: this machine has {found}; choose another, or cpu")
    return torch.device("cuda", index)


def choose_dtype(precision: Precision) -> torch.dtype:
    """Return the type of products and caches."""
    return torch.float32 if precision == "f32" else torch.bfloat16


def rounds_activations(choice: ActQuant, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether activations are rounded as the C engine does on the CPU."""
    if choice == "auto":
        return device.type == "cpu" and dtype is torch.float32
    return choice == "cpu"


def set_threads(n_threads: int | None) -> int:
    """Set torch's threads for the whole process and return their number.

    None takes the processor's cores that this process and its container may use, at most 12: more
    threads than free cores slow the CPU's small products down by a factor of ten.
    """
    count = n_threads if n_threads is not None else min(usable_cores(), MAX_AUTO_THREADS)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    return count


def usable_cores(limits: ContainerLimits | None = None) -> int:
    """Return the cores that this process may keep busy, at least 1.

    Args:
        limits: Of its container; None reads them.
    """
    try:
        allowed = len(psutil.Process().cpu_affinity())
    except AttributeError:  # systems without affinity
        allowed = psutil.cpu_count() or 1
    cores = (limits or read_limits()).cores
    if cores is not None:
        allowed = min(allowed, int(cores))
    return max(min(allowed, psutil.cpu_count(logical=False) or allowed), 1)
