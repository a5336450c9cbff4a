"""Worker processes of a sweep on a Ray cluster. A node that is lost costs no seed, and no seed is counted twice.

On each CPU of the cluster an actor holds one worker process (`scenarios.workers`), so that here too a seed that takes
its process with it costs one seed. What an actor had not answered when it was lost is run by others: a seed has the
same result wherever it runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

from analysis.errors import BadInput
from scenarios.load import Scenario
from scenarios.workers import Lost, Worker, how_it_ended

_STILLBORN = 3
_BATCH = 16  # seeds that an actor is given at once: what is run again when it is lost in the middle of one is but one


def run_on_ray(
    scenario: Scenario, request: dict[str, Any], seeds: range, address: str, most: int | None
) -> Generator[dict[str, Any] | Lost, None, None]:
    """The results of seeds as they come, of each exactly one.

    Args:
        scenario: whose components the nodes must have.
        request: what a worker needs to know, see `scenarios.workers.main`.
        seeds: to run.
        address: ``host:port`` of the cluster's head, or ``auto``: the cluster that runs on this machine.
        most: workers at a time; None: one a CPU of the cluster.

    Raises:
        BadInput: there is no such cluster, or workers cannot be started there.
    """
    with _connected(scenario, address):
        from real.slots import Abandoned, WorkFailed, cpus, in_slots

        batch = max(1, min(_BATCH, len(seeds) // (4 * (most or max(1, cpus())))))
        try:
            with contextlib.closing(in_slots(SeedHost, (request,), seeds, most, batch, _tell)) as results:
                for seed, result in results:
                    if isinstance(result, Abandoned):
                        yield Lost(seed, f"{result.losses} actors were lost at work on it, at last by {result.how}")
                    else:
                        yield result
        except WorkFailed as error:
            raise BadInput(f"--ray {address}: {error}") from error


def check_address(address: str) -> None:
    """Whether there can be a cluster at an address; told before anything runs.

    Raises BadInput: Ray is not installed, or of another version; the address is none; nobody answers there.
    """
    try:
        from real.cluster import ClusterFailed, head_of_this_machine, head_problem, version_problem
    except ImportError as error:
        raise BadInput(f"--ray: {error}; pip install -e '.[real]'") from error
    if problem := version_problem():
        raise BadInput(f"--ray: {problem}")
    if address == "auto":
        try:
            found = head_of_this_machine()
        except ClusterFailed as error:
            raise BadInput(f"--ray auto: {error}; start one with: ray start --head") from error
        if problem := head_problem(found):  # of one that is gone, Ray itself would ask for minutes
            where = "RAY_ADDRESS names" if os.environ.get("RAY_ADDRESS", "auto") != "auto" else "'ray start' noted"
            raise BadInput(f"--ray auto: {where} {found}, and {problem}; start one with: ray start --head")
    elif problem := head_problem(address):
        raise BadInput(f"--ray {address}: {problem}; 'auto' takes the cluster of this machine")


@contextlib.contextmanager
def _connected(scenario: Scenario, address: str) -> Iterator[None]:
    """Raises BadInput."""
    from real.cluster import ClusterFailed, connect, disconnect
    from scenarios.real_run import packages_of

    before = signal.getsignal(signal.SIGTERM)
    # Ray prints on stdout what it thinks of the death of a node; stdout is for results.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            connect(address, "", packages_of(scenario))
        except ClusterFailed as error:
            raise BadInput(f"{error}; start one with: ray start --head") from error
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray takes it to itself: a stack of its own, and exit code 15
            yield
        finally:
            disconnect()


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


class SeedHost:
    """One CPU of a cluster: holds a worker process and gives its results, a seed at a time. An actor of Ray's own.

    Args:
        request: what the worker needs to know.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._worker: Worker | None = None

    def begin(self) -> None:
        """Start the worker."""
        self._worker = Worker(self._request)

    def answer(self, seeds: list[int]) -> Iterator[dict[str, Any] | Lost]:
        """The results of seeds, in their order. A worker that dies costs the seed that it was at work on.

        Raises RuntimeError when workers end before they begin.
        """
        todo = deque(seeds)
        stillborn = 0
        while todo:
            worker = self._worker = self._worker or Worker(self._request)
            if not worker.open:
                worker.give(todo)
            said = worker.read()
            if said is None:
                self._worker = None
                how = how_it_ended(worker.buried())
                if worker.ready:
                    yield Lost(todo.popleft(), how)
                elif (stillborn := stillborn + 1) >= _STILLBORN:
                    raise RuntimeError(f"worker processes end before they begin ({how}); see the logs of Ray")
                continue
            for result in said:
                if worker.ready:
                    todo.popleft()
                    worker.open.popleft()
                    yield result
                worker.ready = True  # its first line says that it could read the scenario
