"""Limits of control groups: both versions, every level, whatever stands in the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.engine.container_limits import ContainerLimits, read_limits
from ds4py.engine.device import usable_cores
from ds4py.engine.kv_pool import default_budget

MIB = 1 << 20
V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1 = "3{n} 31 0:3{n} {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
NONE_OF_V1 = "9223372036854771712"


class System:
    """A proc folder and mounted groups below one folder."""

    def __init__(self, base: Path):
        self.base = base
        self.proc = base / "proc"
        self.proc.mkdir(parents=True)

    def says(self, cgroup: str, mountinfo: str) -> None:
        (self.proc / "cgroup").write_text(cgroup)
        (self.proc / "mountinfo").write_text(mountinfo)

    def group(self, path: str, **files: str) -> None:
        folder = self.base / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def limits(self) -> ContainerLimits:
        return read_limits(self.proc, self.base)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_version_2_is_read_at_every_level_and_the_tightest_counts(system: System) -> None:
    system.says("0::/pod/box\n", V2.format(root="/"))
    system.group("", memory__stat="file 5")
    system.group(
        "pod",
        cpu__max="50000 100000",
        memory__max=str(900 * MIB),
        memory__current=str(100 * MIB),
        memory__stat="anon 1\ninactive_file 0\nactive_file 0",
    )
    system.group(
        "pod/box",
        cpu__max="max 100000",
        memory__max=str(1000 * MIB),
        memory__current=str(700 * MIB),
        memory__stat=f"inactive_file {300 * MIB}\nactive_file {100 * MIB}\nfile {400 * MIB}",
    )
    assert system.limits() == ContainerLimits(cores=0.5, memory_left=700 * MIB)


def test_version_1_has_a_hierarchy_for_each_controller(system: System) -> None:
    mounts = V1.format(n=2, root="/", name="cpu") + V1.format(n=5, root="/", name="memory")
    system.says("4:memory:/a/b\n1:cpu,cpuacct:/c\n0::/\n", mounts)
    system.group("cpu/c", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    system.group("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    system.group("memory/a/b", memory__limit_in_bytes=NONE_OF_V1, memory__usage_in_bytes="5")
    system.group(
        "memory/a",
        memory__limit_in_bytes=str(64 * MIB),
        memory__usage_in_bytes=str(40 * MIB),
        memory__stat=f"inactive_file 7\ntotal_inactive_file {8 * MIB}\ntotal_active_file {2 * MIB}",
    )
    assert system.limits() == ContainerLimits(cores=2.5, memory_left=34 * MIB)


@pytest.mark.parametrize(
    ("cgroup", "root"),
    [("0::/\n", "/"), ("0::/host/of/it\n", "/host/of/it"), ("0::/host\n", "/host/of/it"),
     ("0::/../x\n", "/")],
)  # fmt: skip
def test_a_container_sees_its_own_group_as_the_root_of_the_mount(
    system: System, cgroup: str, root: str
) -> None:
    system.says(cgroup, V2.format(root=root))
    system.group("", cpu__max="300000 100000")
    assert system.limits() == ContainerLimits(cores=3.0)


def test_a_use_beyond_the_limit_leaves_nothing(system: System) -> None:
    system.says("0::/\n", V2.format(root="/"))
    system.group("", memory__max="100", memory__current="250")
    assert system.limits() == ContainerLimits(memory_left=0)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu__max": "max 100000", "memory__max": "max", "memory__current": "5"},
        {"cpu__max": "half a core", "memory__max": "-1"},
        {"cpu__max": "50000 0", "memory__max": "10"},
        {"cpu__max": "", "memory__max": f"{'9' * 5000}", "memory__current": "1"},
    ],
)
def test_what_sets_no_limit_or_cannot_be_read_is_none(system: System, files) -> None:
    system.says("0::/\n", V2.format(root="/"))
    system.group("", **files)
    assert system.limits() == ContainerLimits()


@given(st.text(max_size=200), st.text(max_size=400))
def test_whatever_the_system_says_nothing_raises(tmp_path_factory, cgroup, mountinfo) -> None:
    system = System(tmp_path_factory.mktemp("system"))
    system.says(cgroup, mountinfo)
    assert isinstance(system.limits(), ContainerLimits)


def test_a_machine_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "none", tmp_path) == ContainerLimits()


def test_limits_decide_threads_and_the_budget_of_the_cache() -> None:
    assert usable_cores(ContainerLimits(cores=0.5)) == 1
    assert usable_cores(ContainerLimits(cores=1.9)) == 1
    assert usable_cores(ContainerLimits(cores=1e6)) == usable_cores(ContainerLimits())
    cpu = torch.device("cpu")
    assert default_budget(1 << 60, cpu, ContainerLimits(memory_left=64 * MIB)) == 32 * MIB
    assert default_budget(MIB, cpu, ContainerLimits(memory_left=64 * MIB)) == MIB


def test_limits_are_told_in_one_line() -> None:
    assert str(ContainerLimits(0.5, 1500 * MIB)) == "0.5 cores and 1500 MiB left"
    assert str(ContainerLimits(cores=2.0)) == "2 cores"


# --- a real one -----------------------------------------------------------------------------------

TOLD = """
import json, torch
from ds4py.engine.container_limits import read_limits
from ds4py.engine.device import usable_cores
from ds4py.engine.kv_pool import default_budget
limits = read_limits()
print(json.dumps([limits.cores, usable_cores(), default_budget(1 << 60, torch.device("cpu"))]))
"""


@contextmanager
def group_of_our_own(controller: str, files: dict[str, str]) -> Iterator[Path]:
    """Make a group of version 1, or skip: it takes root and a hierarchy that may be written."""
    folder = Path("/sys/fs/cgroup") / controller / f"ds4py-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e.strerror}")
    try:
        for name, text in files.items():
            (folder / name).write_text(text)
        yield folder
    except OSError as e:
        pytest.skip(f"the limits of a control group cannot be set here: {e.strerror}")
    finally:
        with suppress(OSError):
            folder.rmdir()


def test_a_process_in_a_group_takes_no_more_than_that_leaves() -> None:
    limit = 1500 * MIB
    half = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    with (
        group_of_our_own("memory", {"memory.limit_in_bytes": str(limit)}) as memory,
        group_of_our_own("cpu", half) as cpu,
    ):
        joins = [f"echo $$ > {folder}/cgroup.procs" for folder in (memory, cpu)]
        command = "; ".join([*joins, f'exec {sys.executable} -c "$0"'])
        told = subprocess.run(
            ["/bin/sh", "-c", command, TOLD],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
    cores, threads, budget = json.loads(told)
    assert (cores, threads) == (0.5, 1)
    assert 0 < budget < limit // 2
