"""How genuine SGLang is started: arguments and environment on a CPU, and what deterministic mode needs on each GPU.

Facts behind the choices, with figures: docs/sglang_cpu.md and docs/gpu.md. Read from SGLang 0.5.23.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from protocol.ports import EngineOptions

DETERMINISTIC = "--enable-deterministic-inference"

_DUMPS = ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH")

# Before ``settings.arguments``, whose repetitions of an option win.
CPU_ARGUMENTS = (
    "--device", "cpu",
    "--dtype", "float32",
    # The default on x86 is intel_amx, which needs the real sgl_kernel.
    "--attention-backend", "torch_native",
    "--grammar-backend", "none",
    # The pool of keys and values: 64 MB for the tiny model, twice its longest request.
    "--max-total-tokens", "65536",
    # A table of this many rows of the context's length is allocated: 2,048 by default, which is 256 MB.
    "--max-running-requests", "256",
    "--chunked-prefill-size", "8192",
    "--random-seed", "1",
    "--enable-metrics",
    # Without it the scheduler polls: one full core, always.
    "--sleep-on-idle",
    # A line for every request (and every probe) would push the last words of a dying engine out of its log.
    "--log-level-http", "warning",
)  # fmt: skip


def of_options(options: EngineOptions, rank: int, kind: str) -> tuple[str, ...]:
    """The arguments that say what a scenario's ``engine_options`` say.

    On a CPU no attention backend is named: there is one, which knows no deterministic mode; only seeds have an effect.
    """
    found = ["--random-seed", str(rank if options.random_seed is None else options.random_seed)]
    if options.deterministic:
        found.append(DETERMINISTIC)
    if options.attention_backend and kind != "sglang-cpu":
        found += ["--attention-backend", options.attention_backend]
    return tuple(found)


GPU_ARGUMENTS = ("--enable-metrics", "--log-level-http", "warning")

OURS = (
    "--model-path", "--model", "--weight-version", "--host", "--port", "--tp-size", "--tensor-parallel-size",
    "--device", "--base-gpu-id", "--config", "--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile",
)  # fmt: skip
"""What the project says itself, or what would shut its own client out."""

_CHECKER = pathlib.Path(__file__).with_name("flag_check.py")
_CHECK_S = 120


class BadArgument(ValueError):
    """An argument that a genuine engine cannot be given; the text says why, and what to do instead."""


def named_argument(text: str) -> str:
    """An argument as a person writes it (``page-size=16``, ``--disable-radix-cache``) as SGLang's command line has it.

    Raises:
        BadArgument: it is no option, or one that the project sets itself.
    """
    name, equals, value = text.strip().partition("=")
    name = "--" + name.lstrip("-").replace("_", "-")
    if name == "--" or any(character.isspace() for character in name):
        raise BadArgument(f"{text!r} is no option of SGLang; write one NAME or NAME=VALUE at a time")
    if name in OURS:
        raise BadArgument(f"{name} is set by the project; leave it out")
    return name + equals + value


def check_arguments(python: str, arguments: Sequence[str], *, cpu: bool) -> None:
    """Have SGLang's own parser look at arguments, in the engine's environment. Takes some seconds.

    Args:
        python: interpreter of that environment.
        arguments: as :func:`named_argument` gives them.
        cpu: it has SGLang without what only GPUs need.

    Raises:
        BadArgument: SGLang does not take them, or could not be asked.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="seatrial-") as folder:
            variables = dict(os.environ)
            variables.pop("PYTHONPATH", None)
            variables |= cpu_environment(folder) if cpu else {}
            command = [python, str(_CHECKER), *(["--cpu"] if cpu else []), "--", *arguments]
            asked = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_CHECK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadArgument(f"{python} could not be asked for SGLang's options: {error}") from error
    if asked.returncode:
        said = (asked.stdout.strip() or asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        raise BadArgument(f"SGLang of {python} refuses {' '.join(arguments)}: {said}")


def cpu_environment(temporary: str | os.PathLike[str]) -> dict[str, str]:
    """What SGLang on a CPU needs in its environment.

    Args:
        temporary: folder for all that it writes (SGLang would write to the home folder); unix sockets go there too, so
            its path must be short (under some 80 characters).
    """
    folder = os.fspath(temporary)
    return {
        **_without_dumps(),
        "TMPDIR": folder,
        "SGLANG_CACHE_DIR": os.path.join(folder, "sglang"),
        "SGLANG_USE_CPU_ENGINE": "1",
        # Other models' modules stay unimported: a fifth of the start, 80 MB. Any model still loads.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_model_only",
        # The sampler is compiled otherwise, for which a CPU machine would need a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def gpu_environment() -> dict[str, str]:
    """What SGLang on a GPU is given beside the operator's environment. Its caches stay: they are dear."""
    return _without_dumps()


def _without_dumps() -> dict[str, str]:
    """A child's death ends the engine in a second, not after 5 s of sleep and 60 s for a core dump."""
    return {name: os.environ.get(name, "0") for name in _DUMPS}


class Generation(NamedTuple):
    """A generation of GPUs. ``deterministic``: the attention backend for deterministic mode, "" where there is none.

    ``default`` is what SGLang chooses by itself outside that mode (dense models): to be read, set nowhere.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    default: str
    deterministic: str


# Deterministic mode without a backend named takes fa3 up to Hopper and flashinfer on Blackwell. fa3, fa4 and triton
# keep the radix cache, flashinfer switches it off: so Blackwell is given triton. bfloat16, which the batch-invariant
# kernels are written for, begins with Ampere.
GENERATIONS = (
    Generation("Turing", ((7, 5),), "flashinfer", ""),
    Generation("Ampere", ((8, 0), (8, 6), (8, 7)), "flashinfer", "fa3"),
    Generation("Ada", ((8, 9),), "flashinfer", "fa3"),
    Generation("Hopper", ((9, 0),), "fa3", "fa3"),
    Generation("Blackwell", ((10, 0), (10, 3)), "trtllm_mha", "triton"),
    Generation("Blackwell (workstation)", ((12, 0), (12, 1)), "flashinfer", "triton"),
)


def generation(capability: tuple[int, int]) -> Generation | None:
    """The generation of a compute capability such as (9, 0); None for one that is not in the table."""
    return next((found for found in GENERATIONS if capability in found.capabilities), None)


def gpu_arguments(arguments: Sequence[str], capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The arguments of a GPU engine, with the attention backend that deterministic mode needs where none is named.

    Args:
        arguments: the operator's; what they name is left as it is.
        capability: of the engine's GPU; None where it is not known, and SGLang chooses.

    Raises:
        ValueError: deterministic mode was asked for on a generation that has none.
    """
    named = any(argument.partition("=")[0] == "--attention-backend" for argument in arguments)
    if DETERMINISTIC not in arguments or named or capability is None:
        return (*GPU_ARGUMENTS, *arguments)
    found = generation(capability)
    if found is None:
        return (*GPU_ARGUMENTS, *arguments)
    if not found.deterministic:
        raise ValueError(
            f"{DETERMINISTIC}: {found.name} GPUs (compute capability {capability[0]}.{capability[1]}) have no backend "
            f"for it; leave it out, or name one with --attention-backend"
        )
    return (*GPU_ARGUMENTS, "--attention-backend", found.deterministic, *arguments)


def gpu_capability() -> tuple[int, int] | None:
    """The compute capability of the first GPU that ``nvidia-smi`` shows; None where it shows none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        major, minor = done.stdout.split()[0].split(".")
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
