"""How a process of each kind of engine is started: its command line and its environment."""

from __future__ import annotations

import os
import pathlib

from protocol.ports import EngineSpec
from real.engines.settings import EngineSettings
from real.engines.weights import Weights

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def own_version(spec: EngineSpec) -> tuple[str, str]:
    """(version, weight hash) of an engine that was given no weights: SGLang's name for the model's own."""
    return "default", f"{spec.profile}:default"


def command(settings: EngineSettings, spec: EngineSpec, weights: Weights | None, *, name: str, port: int) -> list[str]:
    """The command line of an engine that is to listen on 127.0.0.1:``port``."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if settings.kind == "emulated":
        loaded = []
        if weights is not None:
            loaded = ["--weights-version", weights.version, "--weights-hash", weights.weight_hash]
            loaded += ["--weights-bytes", str(weights.size_bytes)]
        start = [settings.python, "-m", "real.emulated", "--name", name, "--profile", spec.profile]
        return [*start, *where, *loaded, *settings.arguments]
    model = weights.folder if weights is not None else settings.model or spec.profile
    version = weights.version if weights is not None else own_version(spec)[0]
    served = ["--model-path", model, "--weight-version", version, *where]
    if settings.kind == "sglang-cpu":
        start = [settings.python, str(_ROOT / "real" / "sglang_cpu" / "server.py")]
        return [*start, *served, *settings.arguments]
    return [settings.python, "-m", "sglang.launch_server", *served, "--enable-metrics", *settings.arguments]


def environment(settings: EngineSettings, python_path: tuple[str, ...]) -> dict[str, str]:
    """The environment of an engine: this process's, with the paths of the project for the kinds that need them."""
    found = dict(os.environ)
    found.pop("PYTHONPATH", None)  # of the environment that Ray runs in, which is not the engine's
    if settings.kind == "emulated":
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_ROOT), *python_path]))
    found["PYTHONUNBUFFERED"] = "1"  # its last words must be in the log when it is killed
    return found
