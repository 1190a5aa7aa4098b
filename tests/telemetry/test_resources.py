"""Limits of control groups in made-up trees of files: versions 1 and 2, both, nested, and none."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.telemetry import resources
from node.telemetry.resources import GroupMemory, core_quotas, cores, left_by, memory_limits

MIB = 1 << 20
UNLIMITED = "9223372036854771712"
"""The text of version 1 for no limit."""
V2 = "30 23 0:26 {top} {point} rw,nosuid - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 {top} {point} rw,relatime - cgroup cgroup rw,{controllers}"


def tree(root: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A root directory with this process's groups, the mounted hierarchies, and their files."""
    written = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts), **files}
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def v2(top: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return V2.format(top=top, point=point)


def v1(controllers: str, top: str = "/", point: str | None = None) -> str:
    return V1.format(
        top=top, point=point or f"/sys/fs/cgroup/{controllers}", controllers=controllers
    )


S = "sys/fs/cgroup"
CASES = [
    pytest.param("0::/", [], {}, [], [], id="nothing is mounted"),
    pytest.param("", [v2()], {}, [], [], id="no group is told"),
    pytest.param(
        "0::/a/b/c",
        [v2()],
        {
            f"{S}/a/b/c/memory.max": "max",
            f"{S}/a/b/memory.max": str(512 * MIB),
            f"{S}/a/b/memory.current": str(300 * MIB),
            f"{S}/a/b/memory.stat": f"anon 1\ninactive_file {100 * MIB}",
            f"{S}/a/memory.max": str(900 * MIB),
            f"{S}/a/b/c/cpu.max": "max 100000",
            f"{S}/a/b/cpu.max": "400000 100000",
            f"{S}/a/cpu.max": "150000 100000",
        },
        [(512, 200), (900, 0)],
        [4.0, 1.5],
        id="v2, limited two and three levels up",
    ),
    pytest.param(
        "0::/",
        [v2()],
        {f"{S}/memory.max": str(64 * MIB), f"{S}/cpu.max": "50000 100000"},
        [(64, 0)],
        [0.5],
        id="v2, a container with a namespace of its own",
    ),
    pytest.param(
        "0::/a",
        [v2()],
        {f"{S}/a/memory.high": str(70 * MIB), f"{S}/a/memory.max": str(80 * MIB)},
        [(70, 0)],
        [],
        id="v2, memory is taken back above a lower mark",
    ),
    pytest.param(
        "0::/slice/unit",
        [v2("/slice", "/mnt/my\\040groups")],
        {
            "mnt/my groups/unit/memory.max": str(32 * MIB),
            "mnt/my groups/memory.max": str(48 * MIB),
        },
        [(32, 0), (48, 0)],
        [],
        id="v2, a part is mounted, at a path with a space",
    ),
    pytest.param(
        "0::/../other", [v2()], {f"{S}/memory.max": str(9 * MIB)}, [(9, 0)], [], id="v2, outside"
    ),
    pytest.param(
        "4:memory:/d/e\n3:cpu,cpuacct:/d\n0::/",
        [v1("memory"), v1("cpu,cpuacct"), v2(point="/sys/fs/cgroup/unified")],
        {
            f"{S}/memory/d/e/memory.limit_in_bytes": UNLIMITED,
            f"{S}/memory/d/memory.limit_in_bytes": str(256 * MIB),
            f"{S}/memory/d/memory.usage_in_bytes": str(90 * MIB),
            f"{S}/memory/d/memory.stat": f"total_inactive_file {40 * MIB}",
            f"{S}/memory/memory.limit_in_bytes": UNLIMITED,
            f"{S}/cpu,cpuacct/d/cpu.cfs_quota_us": "250000",
            f"{S}/cpu,cpuacct/d/cpu.cfs_period_us": "100000",
            f"{S}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            f"{S}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        [(256, 50)],
        [2.5],
        id="hybrid, the limits are in version 1",
    ),
    pytest.param(
        "4:memory:/\n0::/user/job",
        [v1("memory"), v2(point="/sys/fs/cgroup/unified")],
        {
            f"{S}/memory/memory.limit_in_bytes": UNLIMITED,
            f"{S}/unified/user/cpu.max": "300000 100000",
            f"{S}/unified/user/job/memory.max": "max",
        },
        [],
        [3.0],
        id="hybrid, a limit is in version 2",
    ),
    pytest.param(
        "4:memory:/docker/f00d",
        [v1("memory", "/docker/f00d")],
        {f"{S}/memory/memory.limit_in_bytes": str(128 * MIB)},
        [(128, 0)],
        [],
        id="v1, a container that sees the host's path",
    ),
    pytest.param(
        "4:memory:/docker/f00d",
        [v1("memory", "/elsewhere")],
        {
            f"{S}/memory/memory.limit_in_bytes": UNLIMITED,
            f"{S}/memory/memory.stat": f"hierarchical_memory_limit {77 * MIB}",
        },
        [(77, 0)],
        [],
        id="v1, limited above what is mounted",
    ),
    pytest.param(
        "0::/a\nnonsense\n:::::",
        [v2(), "short", "1 2 3 4 5 - cgroup"],
        {f"{S}/a/memory.max": "many", f"{S}/a/cpu.max": "100000 0", f"{S}/cpu.max": "x y z"},
        [],
        [],
        id="text that is no limit",
    ),
]


@pytest.mark.parametrize(("groups", "mounts", "files", "memory", "quotas"), CASES)
def test_limits_of_every_level_are_found(tmp_path, groups, mounts, files, memory, quotas) -> None:
    root = tree(tmp_path, groups, mounts, files)
    assert memory_limits(root) == [GroupMemory(a * MIB, b * MIB) for a, b in memory]
    assert core_quotas(root) == quotas


@pytest.mark.parametrize(
    ("allowed", "quotas", "found"),
    [
        (8, [], 8),
        (8, [2.0], 2),
        (8, [16.0, 2.5], 3),
        (1, [4.0], 1),
        (8, [0.1], 1),
    ],
)
def test_cores_are_those_of_affinity_and_quota(monkeypatch, allowed, quotas, found) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(resources, "core_quotas", lambda: quotas)
    assert cores() == found


def test_the_lowest_limit_counts(monkeypatch) -> None:
    before = resources.memory_total()
    groups = [GroupMemory(9 * MIB, 2 * MIB), GroupMemory(8 * MIB, 7 * MIB), GroupMemory(1 << 60, 0)]
    monkeypatch.setattr(resources, "memory_limits", lambda: groups)
    assert resources.memory_total() == 8 * MIB < before
    assert resources.memory_free() == MIB
    monkeypatch.setattr(resources, "memory_limits", lambda: [GroupMemory(MIB, 2 * MIB)])
    assert resources.memory_free() == 0


def test_daemons_outside_of_a_control_group_take_nothing_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = 1000 * MIB
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: SimpleNamespace(total=machine))
    ours = GroupMemory(100 * MIB, 0, tmp_path / "ours")
    monkeypatch.setattr(resources, "memory_limits", lambda: [ours])
    groups = {1: {tmp_path, tmp_path / "ours"}, 2: {tmp_path}}
    monkeypatch.setattr(resources, "memory_groups", lambda pid: groups[pid])
    assert left_by({}) == 0
    assert left_by({1: 30 * MIB, 2: 500 * MIB}) == 30 * MIB
    assert left_by({2: 950 * MIB}) == 50 * MIB, "the machine has no more than 50 MiB for us"
    monkeypatch.setattr(resources, "memory_limits", list)
    assert left_by({1: 30 * MIB, 2: 500 * MIB}) == 530 * MIB


def test_the_groups_of_another_process_are_found(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", [v2()], {"proc/7/cgroup": "0::/a/b"})
    ours = resources.memory_groups(os.getpid(), root)
    assert ours == set(), "it is not in this tree"
    theirs = resources.memory_groups(7, root)
    assert {path.relative_to(root).as_posix() for path in theirs} == {f"{S}/a/b", f"{S}/a", S}
