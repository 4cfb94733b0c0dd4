"""What a container lets this process use: cores and memory of its control groups.

Owns: finding the groups of the process and reading their limits, both versions, all levels. Refuses
to know: what is done with them. Invariant: what cannot be read is no limit, and nothing raises; the
tightest level of the hierarchy counts, since the system enforces every one.

A machine tells a process how many cores and how much memory *it* has, also inside a container that
gives less: threads without cores of their own stand in each other's way, and memory beyond the
limit ends the process without a word. Files of the page cache count as used there, though the
system gives them back when it must, so they are taken off.

Sources: the kernel's admin guide, cgroup-v2.rst and cgroup-v1/{memory,cpusets}.rst, and
proc_pid_mountinfo(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_NO_LIMIT: Final = 1 << 60
"""Version 1 says "none" by a number near 2^63, rounded to pages."""


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What the control groups of a process leave it; None where they set no limit.

    Args:
        cores: Processor time per time, such as 0.5.
        memory_left: Bytes that may still be taken, the page cache counted as free.
    """

    cores: float | None = None
    memory_left: int | None = None

    def __str__(self) -> str:
        cores = None if self.cores is None else f"{self.cores:g} cores"
        left = None if self.memory_left is None else f"{self.memory_left / 2**20:.0f} MiB left"
        return " and ".join(part for part in (cores, left) if part is not None)


class _Mount(NamedTuple):
    """A mounted hierarchy.

    Args:
        version: 1 or 2.
        controllers: Of version 1; empty for version 2, which has all of them.
        root: The group that is mounted.
        point: Where.
    """

    version: int
    controllers: frozenset[str]
    root: str
    point: Path


def read_limits(proc: Path = Path("/proc/self"), base: Path = Path("/")) -> ContainerLimits:
    """Return the limits of this process.

    Args:
        proc: Its folder in the proc file system.
        base: Below which the mount points lie.
    """
    mounts, groups = list(_mounts(proc, base)), dict(_groups(proc))
    cores: list[float] = []
    left: list[int] = []
    for mount in mounts:
        for controller in mount.controllers or {""}:
            group = groups.get(controller)
            if group is None:
                continue
            for level in _levels(mount, group):
                cores += _quota(level)
                left += _memory_left(level)
    return ContainerLimits(min(cores, default=None), min(left, default=None))


def _mounts(proc: Path, base: Path) -> Iterator[_Mount]:
    """Yield the mounted hierarchies that may limit cores or memory."""
    for line in _text(proc / "mountinfo").splitlines():
        mounted, _, kind = line.partition(" - ")
        fields, options = mounted.split(), kind.split()
        if len(fields) < 5 or len(options) < 3:
            continue
        point = base / _unescaped(fields[4]).lstrip("/")
        if options[0] == "cgroup2":
            yield _Mount(2, frozenset(), _unescaped(fields[3]), point)
        elif options[0] == "cgroup":
            controllers = frozenset(options[2].split(",")) & {"cpu", "memory"}
            if controllers:
                yield _Mount(1, controllers, _unescaped(fields[3]), point)


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, in which blanks are octal numbers."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def _groups(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield the process's group of each controller of version 1, and of version 2 for ""."""
    for line in _text(proc / "cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                yield controller, parts[2]


def _levels(mount: _Mount, group: str) -> Iterator[Path]:
    """Yield the folders of a group and of all above it that can be seen.

    Without a namespace of its own, a container is told a group of the host, but sees its own one as
    the root of the mount.
    """
    if group == mount.root or not _is_below(group, mount.root):
        yield mount.point
        return
    folder = mount.point / group[len(mount.root.rstrip("/")) :].lstrip("/")
    while folder != mount.point:
        yield folder
        folder = folder.parent
    yield mount.point


def _is_below(group: str, root: str) -> bool:
    return group.startswith(root.rstrip("/") + "/") and ".." not in group.split("/")


def _quota(level: Path) -> list[float]:
    """Return the cores that one level allows, if it limits them."""
    quota, _, period = _text(level / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")
    micro, per = _number(quota), _number(period)
    return [micro / per] if micro and per else []


def _memory_left(level: Path) -> list[int]:
    """Return the bytes that one level has left, if it limits them."""
    limit = _number(_text(level / "memory.max") or _text(level / "memory.limit_in_bytes"))
    used = _number(_text(level / "memory.current") or _text(level / "memory.usage_in_bytes"))
    if limit is None or used is None or limit >= _NO_LIMIT:
        return []
    return [max(0, limit - used + _page_cache(level))]


def _page_cache(level: Path) -> int:
    """Return the bytes of files that one level counts as used."""
    lines = (line.split() for line in _text(level / "memory.stat").splitlines())
    stat = {line[0]: _number(line[1]) or 0 for line in lines if len(line) == 2}
    # version 1 has totals besides, with the groups below, as version 2's numbers are
    total = "total_" if "total_inactive_file" in stat else ""
    return sum(stat.get(f"{total}{name}", 0) for name in ("inactive_file", "active_file"))


def _number(text: str) -> int | None:
    """Return a number above 0; "max" and -1 are none."""
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
