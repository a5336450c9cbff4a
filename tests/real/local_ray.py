"""A Ray of this machine's own for tests: no dashboard, no token file, logical GPUs, gone when the test session ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def environment() -> dict[str, str]:
    """Variables that Ray's processes must inherit."""
    path = os.environ.get("PYTHONPATH", "")
    if str(ROOT) not in path.split(os.pathsep):
        path = os.pathsep.join(filter(None, [str(ROOT), path]))
    # Without RAY_AUTH_MODE Ray writes a token file under the home folder; without the last one its workers lower
    # themselves by 15, and starve beside any other process of the machine.
    return {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": path,
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),
    }


@contextlib.contextmanager
def local_ray(num_gpus: int) -> Iterator[None]:
    """Start Ray, or use the one that another fixture of this process has started."""
    os.environ.update(environment())
    import ray

    if ray.is_initialized():
        yield
        return
    # CPUs are logical: an actor takes none, but Ray starts no more processes at once than there are.
    # "local": without it Ray joins whatever cluster it finds on this machine, one of another test or of a user.
    ray.init(
        "local", num_cpus=64, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        yield
    finally:
        ray.shutdown()
