"""The control groups around this process, by which a container or a batch system limits it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def at_the_top(folder: Path) -> list[tuple[str, Path]]:
    """Return (kind, folder) of the groups at the top, where `folder` stands for /sys/fs/cgroup."""
    return [("cgroup2", folder), ("cgroup", folder / "memory")]


def control_groups(process: Path) -> Iterator[tuple[str, Path]]:
    """Yield (kind, folder) of this process's memory groups and of all above them, that are visible
    here. The process says which group it is in, the mounts where groups are.
    """
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        yield from at_the_top(Path("/sys/fs/cgroup"))
        return
    paths = {}
    for line in memberships:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        fields, kind = mount.split(), system.split()[0] if system.split() else ""
        if kind not in paths or len(fields) < 5:
            continue
        if kind == "cgroup" and "memory" not in system.split()[-1].split(","):
            continue
        root, top = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        own = Path(paths[kind])
        # a group outside the mount (another namespace) shows itself as the mount's own root
        inside = own.relative_to(root) if own.is_relative_to(root) else Path()
        folder = top if ".." in inside.parts else top / inside
        while True:
            yield kind, folder
            if folder == top:
                break
            folder = folder.parent


def _unescaped(path: str) -> str:
    """A path of mountinfo, which writes blanks as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
