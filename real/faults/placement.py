"""Groups that cannot be placed, and removals that come late (``placement_stuck``, ``removal_fails``), across processes.

A stuck group asks Ray for a resource that no node has, so it is PENDING for as long as Ray is asked. Ray cannot be made
to change a request: at healing the group is asked for anew without that resource, and whoever knows the id of the
first one is led to the second. All of it is in files of the run, for any process may ask for any group.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import time
from typing import Final, NamedTuple

Bundles = tuple[tuple[tuple[str, float], ...], ...]

NOWHERE: Final = "seatrial_nowhere"
"""The resource that no node has."""


class Request(NamedTuple):
    """What a group was asked for as. ``name``: as Ray knows it."""

    bundles: Bundles
    strategy: str
    name: str


class GroupNotes:
    """The notes of one run about its groups, those of faults and what its processes have told of them.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str) -> None:
        self._stuck = pathlib.Path(folder, "faults", "stuck")
        self._instead = pathlib.Path(folder, "faults", "instead")
        self._late = pathlib.Path(folder, "faults", "late")
        self._told = pathlib.Path(folder, "groups")

    # ---- what is told of groups ----

    def is_news(self, group_id: str, state: str) -> bool:
        """Whether no process has told yet that a group is in a state. From now on one has: of several at once, one."""
        self._told.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._told / group_id, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given up by the kernel when its holder dies
            if file.read() in (state, "REMOVED"):  # nothing comes after that: who says otherwise has looked before
                return False
            file.seek(0)
            file.truncate()
            file.write(state)
            return True

    # ---- stuck groups ----

    def note_stuck(self, group_id: str, request: Request) -> None:
        _write(self._stuck / group_id, json.dumps(request))

    def stuck(self) -> dict[str, Request]:
        """Those that have not been asked for anew."""
        found = {}
        for path in _files(self._stuck):
            bundles, strategy, name = json.loads(path.read_text())
            found[path.name] = Request(
                tuple(tuple((key, amount) for key, amount in one) for one in bundles), strategy, name
            )
        return found

    def replaced(self, group_id: str, by: str) -> None:
        """From now on ``group_id`` means the group that Ray calls ``by``."""
        _write(self._instead / group_id, by)
        os.unlink(self._stuck / group_id)

    def forget(self, group_id: str) -> None:
        os.unlink(self._stuck / group_id)

    def ray_id(self, group_id: str) -> str:
        """What Ray calls the group that was first asked for under this id."""
        try:
            return (self._instead / group_id).read_text()
        except FileNotFoundError:
            return group_id

    def first_ids(self) -> dict[str, str]:
        """Ray's id of every group that was asked for anew, to the id that callers know."""
        return {path.read_text(): path.name for path in _files(self._instead)}

    # ---- late removals ----

    def note_removal(self, group_id: str, late_s: float) -> None:
        """Have the driver remove it so much later. A second request for one that waits changes nothing."""
        if not (self._late / group_id).exists():
            _write(self._late / group_id, repr(time.monotonic() + late_s))

    def due(self) -> list[str]:
        """Groups whose removal is due; each is told once."""
        now = time.monotonic()
        found = [path for path in _files(self._late) if float(path.read_text()) <= now]
        for path in found:
            os.unlink(path)
        return [path.name for path in found]

    def removal_waits(self) -> bool:
        return bool(_files(self._late))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if path.suffix != ".new")
    return []


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")  # others may write it, too
    fresh.write_text(text)
    os.replace(fresh, path)
