"""What an engine leaves on its machine when its host is killed before it can clear up, written down beforehand.

The standard library alone: the warden of a run reads it too, when nothing else of the run is left.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import urllib.parse


class Leftovers:
    """The list of one engine: files and folders outside the run's folder that must not outlive it.

    Args:
        folder: of the run.
        name, incarnation: of the engine.
    """

    def __init__(self, folder: str, name: str, incarnation: int) -> None:
        self._list = pathlib.Path(folder, "engines", f"{urllib.parse.quote(name, safe='')}-{incarnation}.leftovers")
        self._list.parent.mkdir(parents=True, exist_ok=True)
        self._list.write_text(f"{socket.gethostname()}\n")

    def add(self, path: str) -> None:
        with open(self._list, "a") as file:
            file.write(f"{path}\n")

    def clear(self) -> None:
        """Remove what is listed, and the list."""
        _clear(self._list)


def clear_leftovers(folder: str) -> None:
    """Remove what the engines of a run have left on this machine. Only when none of them lives any more."""
    for listed in sorted(pathlib.Path(folder, "engines").glob("*.leftovers")):
        _clear(listed)


def _clear(listed: pathlib.Path) -> None:
    machine, *paths = listed.read_text().splitlines() or [""]
    if machine != socket.gethostname():
        return
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    listed.unlink()
