"""The memory that a process can have, within the limits on it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p_diloco.memory.available import free_memory, total_memory

GB = 10**9


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 * GB, available=12 * GB))
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(free=1 * GB))
    monkeypatch.setattr(sys, "platform", "linux")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


GROUP = "sys/fs/cgroup/user.slice/job"
OF_ANCESTOR = {
    "proc/self/cgroup": "0::/user.slice/job\n",
    f"{GROUP}/memory.max": "max\n",
    f"{GROUP}/memory.current": f"{GB}\n",
    "sys/fs/cgroup/user.slice/memory.max": f"{4 * GB}\n",
    "sys/fs/cgroup/user.slice/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/user.slice/memory.stat": "".join(
        f"{name} {GB // 2}\n" for name in ("anon", "active_file", "inactive_file", "slab_reclaimable")
    ),
}
OF_A_CONTAINER = {
    "proc/self/cgroup": "12:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/docker/1\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GB // 2}\ntotal_active_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 16.0, 13.0),
        ({"proc/self/cgroup": "0::/\n"}, 16.0, 13.0),
        (OF_ANCESTOR, 4.0, 3.5),
        (OF_A_CONTAINER, 2.0, 2.5),
        (OF_A_CONTAINER | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 16.0, 13.0),
    ],
    ids=["none", "group without limit", "limit of an ancestor", "container, version 1", "no limit, version 1"],
)
def test_limits_of_control_groups_count(tmp_path: Path, files: dict[str, str], total: float, free: float) -> None:
    write(tmp_path, files)
    assert (total_memory(tmp_path) / GB, free_memory(tmp_path) / GB) == (total, free)


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GB, resource.RLIM_INFINITY))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=2 * GB)))
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (3 * GB, 2 * GB), "with the swap"


def test_where_swap_grows_as_needed_all_memory_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert free_memory(tmp_path) == 16 * GB
