"""Start no more threads than the machine, the process and its control group have cores."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def limit_threads() -> None:
    """Limit the threads of torch to the number of cores. ``OMP_NUM_THREADS`` may ask for fewer."""
    import torch

    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas())]))


def quotas() -> Iterator[float]:
    """Yield the number of cores that each control group allows; ``docker run --cpus 2`` makes one."""
    for folder in cgroup_folders():
        try:  # version 2, where "max" means no limit
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
        except (OSError, ValueError):
            pass
        try:  # version 1, where -1 means no limit
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            pass


def cgroup_folders() -> Iterator[Path]:
    """Yield the folders of the control groups of this process, and of the groups that contain them."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()  # hierarchy:controllers:/path
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / "cpu" if controllers else CGROUPS
        inside = root / path.lstrip("/")
        yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(root))
    yield CGROUPS  # in a container, the path above may be a path of the host
