"""The two child processes that SGLang has beside its main one, so that signals sent to them mean what they mean there.

Each only sleeps, under the title of SGLang's own (``sglang::scheduler``, ``sglang::detokenizer``). Their death and, of
the scheduler, SIGSTOP and SIGCONT are seen by the main process and handed to the model.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Literal

Part = Literal["scheduler", "detokenizer"]
PARTS: tuple[Part, ...] = ("scheduler", "detokenizer")
_PR_SET_PDEATHSIG = 1


class Children:
    """Start them early: a child is a copy of the process until it has replaced itself.

    Args:
        on_death, on_stop: called with the part, and for ``on_stop`` whether it is stopped or goes on.
    """

    def __init__(self, on_death: Callable[[Part], None], on_stop: Callable[[Part, bool], None]) -> None:
        sleep = shutil.which("sleep")
        if sleep is None:
            raise RuntimeError("an emulated engine needs the program `sleep` for its child processes")
        self._on_death = on_death
        self._on_stop = on_stop
        libc = ctypes.CDLL(None)
        self._pids = {
            part: subprocess.Popen(
                [f"sglang::{part}", "2147483647"],
                executable=sleep,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            ).pid
            for part in PARTS
        }

    def watch(self) -> None:
        """Begin to tell, in the running loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._look)
        self._look()

    def _look(self) -> None:
        flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        for part, pid in list(self._pids.items()):
            while part in self._pids and (seen := os.waitid(os.P_PID, pid, flags)) is not None:
                if seen.si_code == os.CLD_STOPPED:
                    self._on_stop(part, True)
                elif seen.si_code == os.CLD_CONTINUED:
                    self._on_stop(part, False)
                else:
                    del self._pids[part]
                    self._on_death(part)
