"""What a test may need beyond the core install, and what happens where it is absent.

A test says what it needs by a marker (pyproject.toml lists them). Absent: the test is skipped and counted in the
summary. Absent but *required*: the test fails. Required are ray, the shared inputs and the CPU SGLang under
``CI=true``; ``SEATRIAL_REQUIRE=ray,shared`` names another set.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import pathlib
import signal
from collections.abc import Callable

import pytest

from real.sglang_cpu import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PRIORITY = os.getpriority(os.PRIO_PROCESS, 0)
REQUIRED_IN_CI = ("ray", "shared", "sglang_cpu")


def shared_folder() -> pathlib.Path | None:
    """The folder of public inputs: ``SEATRIAL_SHARED``, else ``../shared`` beside the checkout. None where absent."""
    folder = pathlib.Path(os.environ.get("SEATRIAL_SHARED") or ROOT.parent / "shared")
    return folder if (folder / "data").is_dir() else None


def sglang_cpu_python() -> str | None:
    """The interpreter of an environment with an SGLang that runs on the CPU, as a run would find it; None: absent."""
    try:
        return str(environment.interpreter())
    except environment.EnvironmentFailed:
        return None


def _installed(*modules: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(module) is not None for module in modules)


# marker -> (is it here?, how to get it)
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "shared": (
        lambda: shared_folder() is not None,
        "put the shared folder beside the checkout or name it in SEATRIAL_SHARED",
    ),
    "ray": (_installed("ray"), "pip install -e '.[test]'"),
    "sglang_cpu": (
        lambda: sglang_cpu_python() is not None,
        "python -m real.engines install sglang-cpu, or name its interpreter in SEATRIAL_SGLANG_PYTHON",
    ),
    "dev_tools": (_installed("importlinter", "ruff"), "pip install -e '.[dev]'"),
}


def required() -> frozenset[str]:
    """The needs whose absence is a failure."""
    named = os.environ.get("SEATRIAL_REQUIRE")
    if named is None:
        return frozenset(REQUIRED_IN_CI if os.environ.get("CI") == "true" else ())
    names = frozenset(name.strip() for name in named.split(",") if name.strip())
    unknown = sorted(names - NEEDS.keys())
    if unknown:
        raise pytest.UsageError(f"SEATRIAL_REQUIRE: unknown {', '.join(unknown)}; known: {', '.join(NEEDS)}")
    return names


def pytest_configure(config: pytest.Config) -> None:
    required()  # a misspelt name stops the run here, not at the first test
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts jobs in the background, and children would inherit it; tests interrupt their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def group_of(item: pytest.Item) -> str | None:
    """Which tests share a process where several run side by side (``-n 3 --dist loadgroup``); None: any of them.

    ``ray``: those of one Ray that they share; ``clusters``: those whose runs have clusters of their own; those with
    genuine engines, and others of the real world, by file, for the engines and servers that they share. All of these
    wait more than they compute: for processes, time-outs and Ray.
    """
    if item.get_closest_marker("own_cluster"):
        return "clusters"
    if item.get_closest_marker("sglang_cpu"):
        return f"sglang_cpu_{item.path.stem}"
    if item.get_closest_marker("ray"):
        return "ray"
    return item.path.stem if "/tests/real/" in item.path.as_posix() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # first: pytest-xdist reads the groups in a hook of its own
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))


def _yield_to_the_real_world(item: pytest.Item) -> None:
    """Side by side, tests that only compute give way to those whose engines and time-outs run in real time."""
    if os.environ.get("PYTEST_XDIST_WORKER") and os.geteuid() == 0:  # nobody else could raise it again
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY if group_of(item) else min(19, _PRIORITY + 5))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _yield_to_the_real_world(item)
    for name, (present, remedy) in NEEDS.items():
        if item.get_closest_marker(name) is None or present():
            continue
        if name in required():
            pytest.fail(f"{name} is required here and absent: {remedy}", pytrace=False)
        pytest.skip(f"{name} is absent: {remedy}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Counted from the reports, which also arrive from the workers of pytest-xdist.
    absent: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for name in NEEDS:
            if f"{name} is absent: " in reason:
                absent[name] += 1
    for name, count in sorted(absent.items()):
        terminalreporter.write_line(f"not run because {name} is absent: {count} tests ({NEEDS[name][1]})")


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of public inputs, for tests marked ``shared``."""
    folder = shared_folder()
    assert folder is not None, "mark the test with @pytest.mark.shared"
    return folder
