"""What an engine leaves on its machine when its host is killed before it can clear up, written down beforehand.

The lists lie in the run's folder and are read at the run's end. Of a driver that was killed they go with that folder;
so an engine's own folder can be found without them: it lies in the run's, or its name says whose it is.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import socket
import tempfile
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
        with contextlib.suppress(FileNotFoundError):  # somebody else does the same
            _clear(listed)


def new_engine_folder(run: str, folder: str) -> str:
    """Make a folder for what an engine keeps while it runs. Its path is short: unix sockets go there (107 bytes).

    Where Ray is the run's own, in the run's folder, which is short enough for Ray's. Else in the temporary folder of
    the machine: the run's may be a long path, or on another machine's disk.
    """
    if os.environ.get("RAY_TMPDIR") == folder:
        return tempfile.mkdtemp(prefix="engine-", dir=folder)
    return tempfile.mkdtemp(prefix=_outside(run))


def clear_engine_folders(run: str) -> None:
    """Remove the folders of a run's engines on this machine that lie outside the run's. As ``clear_leftovers``."""
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{_outside(run)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _outside(run: str) -> str:
    return f"engine-{hashlib.blake2s(run.encode(), digest_size=5).hexdigest()}-"


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
