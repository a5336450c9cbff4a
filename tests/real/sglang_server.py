"""Genuine SGLang servers on this CPU, started and spoken to without the project's own client."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from real.engines import sglang_flags
from real.sglang_cpu import environment

START_S = 180  # 13 s on an idle machine of two cores


class GenuineServer:
    """One server with its processes. ``folder`` takes its log, its home and its temporary files."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, version: str, *arguments: str) -> None:
        self.log = folder / "log"
        self.home = folder / "home"
        self.home.mkdir()
        temporary = folder / "tmp"
        temporary.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {**sglang_flags.cpu_environment(temporary), "HOME": str(self.home)}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    str(environment.interpreter()), str(environment.SERVER), "--model-path", str(model),
                    "--weight-version", version, "--host", "127.0.0.1", "--port", str(self.port),
                    *sglang_flags.CPU_ARGUMENTS, *arguments,
                ],
                env={**inherited, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self) -> float:
        """Seconds it took; fails with the last lines of the log."""
        begun = time.monotonic()
        while time.monotonic() - begun < START_S:
            assert self.process.poll() is None, f"exit code {self.process.returncode}\n{self.last_words()}"
            with contextlib.suppress(OSError):
                if self.call("/ready", timeout=5)[0] == 200:
                    return time.monotonic() - begun
            time.sleep(0.1)
        raise AssertionError(f"not ready in {START_S} s\n{self.last_words()}")

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-25:])

    def call(self, route: str, body: Any = None, *, timeout: float = 60) -> tuple[int, Any]:
        """(status, body); OSError where the connection fails. GET without a body, else POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def generate(self, prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
        status, answer = self.call("/generate", {"input_ids": prompt, "sampling_params": parameters})
        assert status == 200, answer
        return answer

    def load(self, model: pathlib.Path, version: str) -> tuple[int, Any]:
        return self.call("/update_weights_from_disk", {"model_path": str(model), "weight_version": version})

    def parts(self) -> dict[str, int]:
        """Process ids by what they are: main, scheduler, detokenizer, and SGLang's helpers."""
        found = {"main": self.process.pid}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                name = (entry / "comm").read_text().strip()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    # The kernel cuts a name after 15 characters: "sglang::schedul".
                    known = [part for part in ("scheduler", "detokenizer") if name == f"sglang::{part}"[:15]]
                    found[known[0] if known else f"{name}-{entry.name}"] = int(entry.name)
        return found

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes."""
        total = 0
        for pid in self.parts().values():
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total

    def close(self) -> None:
        """SIGKILL all of it, and remove its shared memory."""
        if self.process.poll() is not None:
            return  # its pid may be another's by now
        parts = self.parts()
        shared = {
            line.split()[-1]
            for pid in parts.values()
            for line in _lines(pathlib.Path(f"/proc/{pid}/maps"))
            if "/dev/shm/sglang_" in line and not line.endswith("(deleted)")
        }
        for pid in parts.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        for path in shared:
            pathlib.Path(path).unlink(missing_ok=True)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@contextlib.contextmanager
def serving(folder: pathlib.Path, model: pathlib.Path, version: str, *arguments: str) -> Iterator[GenuineServer]:
    """A server that has answered /ready, ended at the end."""
    server = GenuineServer(folder, model, version, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Keeper:
    """One server with version 1 of the tiny model, shared by tests for as long as it lives: a start takes a while."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path) -> None:
        self._folder = folder
        self._model = model
        self._servers: list[GenuineServer] = []

    def server(self) -> GenuineServer:
        """The one that lives, else a new one. A test may end it; else it leaves it with version 1 and nothing to do."""
        if not self._servers or self._servers[-1].process.poll() is not None:
            folder = self._folder / str(len(self._servers))
            folder.mkdir()
            self._servers.append(GenuineServer(folder, self._model, "1"))
            self._servers[-1].wait_ready()
        return self._servers[-1]

    def close(self) -> None:
        for server in self._servers:
            server.close()
