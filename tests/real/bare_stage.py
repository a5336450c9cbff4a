"""The driver's side of a real run without a Ray, for what can be seen of it alone."""

from __future__ import annotations

import pathlib
import sys
from types import SimpleNamespace
from typing import Any

from real.census import Census
from scenarios.load import parse
from tests.scenarios.conftest import SMALL


def bare_stage(folder: pathlib.Path, census: Census | None = None, **more: Any) -> Any:
    """A stage whose run began five seconds ago. ``more``: of its arguments."""
    from real.engines.settings import EngineSettings
    from scenarios.real_world import RealStage

    arguments = {"run": "run", "engines": EngineSettings("emulated", sys.executable), "machines": None, **more}
    stage = RealStage(parse(SMALL, "small.yaml", folder, []), 1, folder=str(folder), **arguments)
    backend: Any = SimpleNamespace(
        census=Census(str(folder)) if census is None else census, me=SimpleNamespace(name="driver"),
        log=SimpleNamespace(now_ns=lambda: 5_000_000_000),
    )  # fmt: skip
    stage._backend = backend
    return stage
