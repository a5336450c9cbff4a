"""The three arms of the engine contract: simulated, emulated, and genuine SGLang on the CPU."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from protocol.ports import Backend, EngineSpec
from tests.conftest import ROOT, sglang_cpu_python
from tests.contract.engine_stage import BLOCK, Hands, Part

T = TypeVar("T")


@dataclass(frozen=True)
class EngineArm:
    """One kind of engine in its world. ``run(body)`` returns what ``await body(backend)`` returns."""

    name: str
    spec: EngineSpec
    hands: Hands
    run: Callable[[Callable[[Backend], Awaitable[Any]]], Any]


def profile(folder: pathlib.Path) -> str:
    """``tiny-cpu`` with a longer context, for requests of several seconds, and a start-up of 1 s."""
    text = (ROOT / "sim" / "profiles" / "tiny-cpu.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("context_length: {value: 512,", "context_length: {value: 16384,"),
        ("kv_capacity: {value: 4096,", "kv_capacity: {value: 65536,"),
        ("startup: {value: 2,", "startup: {value: 1,"),
        # The linear cost of context would make long requests slower and slower.
        ("decode_step_per_context_token: {value: 100,", "decode_step_per_context_token: {value: 0,"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / "contract.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def simulated(folder: pathlib.Path) -> EngineArm:
    from sim.backend import run_sim

    async def sigterm(backend: Backend, name: str) -> None:
        backend.engines._shared.processes[name].engine.sigterm()  # type: ignore[attr-defined]

    async def kill(backend: Backend, name: str, part: Part) -> None:
        process = backend.engines._shared.processes[name]  # type: ignore[attr-defined]
        process.die("killed") if part == "main" else process.engine.lose_child(part)

    async def main_pid(backend: Backend, name: str) -> None:
        return None

    return EngineArm("sim", EngineSpec(profile(folder)), Hands(sigterm, kill, main_pid), lambda body: run_sim(body))


def on_ray(kind: str, folder: pathlib.Path) -> EngineArm:
    """``emulated`` or ``sglang-cpu``. Ray must be initialised."""
    from real.backend import run_real
    from real.engines.settings import EngineSettings
    from real.engines.tree import pid_of
    from tests.processes import is_running
    from tests.real.engine_world import first_port, until

    async def main_pid(backend: Backend, name: str) -> int:
        found: int = (await backend.engines.describe(name)).main_pid  # type: ignore[attr-defined]  # of the real port alone
        return found

    async def sigterm(backend: Backend, name: str) -> None:
        os.kill(await main_pid(backend, name), signal.SIGTERM)

    async def kill(backend: Backend, name: str, part: Part) -> None:
        pid = pid_of(part, await main_pid(backend, name))
        await backend.engines.signal(name, "SIGKILL", part)  # type: ignore[attr-defined]
        # It needs a processor to die, and until then the others answer as before: 0.09 s was seen on a busy machine.
        await until(lambda: not is_running(pid))

    python = sys.executable if kind == "emulated" else sglang_cpu_python()
    assert python is not None
    settings = EngineSettings(
        kind,  # type: ignore[arg-type]  # one of its two that need no GPU
        python,
        block_tokens=BLOCK,
        first_port=first_port(),
    )
    spec = EngineSpec(profile(folder))
    runs = iter(range(1000))
    return EngineArm(
        kind,
        spec,
        Hands(sigterm, kill, main_pid),
        lambda body: run_real(body, folder=str(folder / f"run-{next(runs)}"), engines=settings),
    )
