"""How a process of each kind of engine is started: its command line and its environment."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

from protocol.messages import replica_of
from protocol.ports import EngineSpec
from real.engines import sglang_flags
from real.engines.settings import EngineSettings
from real.engines.weights import Weights
from real.sglang_cpu.environment import SERVER

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def own_version(spec: EngineSpec) -> tuple[str, str]:
    """(version, weight hash) of an engine that was given no weights: SGLang's name for the model's own."""
    return "default", f"{spec.profile}:default"


def command(
    settings: EngineSettings, spec: EngineSpec, weights: Weights | None, *, name: str, port: int, temporary: str
) -> list[str]:
    """The command line of an engine that is to listen on 127.0.0.1:``port``.

    Args:
        temporary: a folder of the engine's own, gone with it.

    Raises:
        ValueError: the arguments ask for what the GPU cannot do.
    """
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if settings.kind == "emulated":
        loaded = []
        if weights is not None:
            loaded = ["--weights-version", weights.version, "--weights-hash", weights.weight_hash]
            loaded += ["--weights-bytes", str(weights.size_bytes)]
        start = [settings.python, "-m", "real.emulated", "--name", name, "--profile", spec.profile]
        if spec.options is not None:
            start += ["--options", json.dumps(dataclasses.asdict(spec.options)), "--rank", str(rank_of(name))]
        return [*start, *where, *loaded, *settings.arguments]
    version = weights.version if weights is not None else own_version(spec)[0]
    served = ["--model-path", _model(settings, spec, weights, temporary), "--weight-version", version, *where]
    # After our own arguments and before the operator's: repetitions of an option win.
    asked = () if spec.options is None else sglang_flags.of_options(spec.options, rank_of(name), settings.kind)
    if settings.kind == "sglang-cpu":
        return [settings.python, str(SERVER), *served, *sglang_flags.CPU_ARGUMENTS, *asked, *settings.arguments]
    if spec.num_gpus > 1:
        served += ["--tp-size", str(int(spec.num_gpus))]
    given = (*asked, *settings.arguments)
    capability = sglang_flags.gpu_capability() if sglang_flags.DETERMINISTIC in given else None
    arguments = sglang_flags.gpu_arguments(given, capability)
    return [settings.python, "-m", "sglang.launch_server", *served, *arguments]


def rank_of(name: str) -> int:
    """A replica's rank, which its server's seed is unless another one is asked for."""
    found = replica_of(name)
    return 0 if found is None else found[1]


def _model(settings: EngineSettings, spec: EngineSpec, weights: Weights | None, temporary: str) -> str:
    if weights is not None:
        return weights.folder
    if settings.kind == "sglang-cpu" and not settings.model:
        # A profile names a model of its own size, which is not at hand and which a CPU could not serve.
        from real import tiny_model  # needs safetensors, which other kinds of engines do without

        return str(tiny_model.write(pathlib.Path(temporary, "model"), own_version(spec)[0]))
    return settings.model or spec.profile


def environment(settings: EngineSettings, python_path: tuple[str, ...], temporary: str) -> dict[str, str]:
    """The environment of an engine: this process's, and what its kind needs.

    Args:
        python_path: where this run's processes find the project.
        temporary: a folder of the engine's own, gone with it.
    """
    found = dict(os.environ)
    found.pop("PYTHONPATH", None)  # of the environment that Ray runs in, which is not the engine's
    if settings.kind == "emulated":
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_ROOT), *python_path]))
    elif settings.kind == "sglang-cpu":
        found |= sglang_flags.cpu_environment(temporary)
    else:
        found |= sglang_flags.gpu_environment()
    found["PYTHONUNBUFFERED"] = "1"  # its last words must be in the log when it is killed
    return found
