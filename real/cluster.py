"""The Ray of a run: head and raylets of its own on this machine, or a cluster that somebody else has started.

A cluster of its own lies whole in the run's temporary folder (sockets, logs, addresses), writes no token file and no
usage statistics, and has no dashboard. Its end is the warden's (`real.warden`): its daemons carry the run's mark.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from real.warden import MARK, Sweeper

RAY_VERSION: Final = "2.60"
_LONGEST_SOCKET: Final = 107  # bytes of a Unix socket's path
_RAYS_OWN: Final = len("/ray/session_2026-11-29_19-38-14_626265_4194304/sockets/plasma_store.99")
NICENESS: Final = "RAY_worker_niceness"
_LOGICAL_CPUS: Final = 64  # an actor takes none, but Ray starts no more processes at once than there are
_OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024  # the least that Ray takes; messages of a run are small
_RAYS_WORDS: Final = 600  # characters of an error, which may bring the whole log of a worker
_ERROR: Final = re.compile(r"\[[0-9][0-9 ,.:-]+ [EC] [0-9]+ [0-9]+\] ")  # C: it is what the daemon has died of
_VITAL: Final = ("gcs_server", "raylet")
ROOT: Final = pathlib.Path(__file__).resolve().parent.parent


class ClusterFailed(Exception):
    """There is no Ray to run on; the text says why, and what to do."""


def version_problem() -> str:
    """What is wrong with the installed Ray; empty when nothing is. Imports nothing."""
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return "Ray is not installed; pip install 'ray==2.60.*' (or -e '.[real]')"
    if not found.startswith(f"{RAY_VERSION}."):
        return f"Ray {found} is installed, this version of seatrial is for {RAY_VERSION}; pip install 'ray==2.60.*'"
    return ""


def last_words(folder: pathlib.Path) -> list[str]:
    """The last error that each of Ray's daemons has logged, as far as they did: the logs go with the run's folder.

    Args:
        folder: that of the sessions.
    """
    found = []
    for log in sorted(folder.glob("session_2*/logs/*.out")):
        errors = [line for line in log.read_text("utf-8", "replace").splitlines() if _ERROR.match(line)]
        if errors:
            found.append(errors[-1][:_RAYS_WORDS])
    return found


def folder_problem(folder: str) -> str:
    """Why Ray's sockets would not fit below a folder; empty when they do."""
    if len(os.fsencode(folder)) + _RAYS_OWN > _LONGEST_SOCKET:
        most = _LONGEST_SOCKET - _RAYS_OWN
        return f"{folder} is too long a path for Ray's sockets (at most {most} bytes); set TMPDIR to a shorter one"
    return ""


def environment(run: str, folder: str, *, own_cluster: bool) -> dict[str, str]:
    """Variables that Ray's daemons and everything below them must inherit.

    Args:
        run: the mark of the run's processes.
        folder: of the run; Ray's files go there.
        own_cluster: the run starts its own Ray, whose daemons listen on the machine's address: nobody without the run's
            secret may use them. It lies in no file. To another's Ray the operator has a key, or needs none.
    """
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if own_cluster else {}
    # Ray's workers lower themselves by 15, and engines are their children: beside the driver and any other process of
    # the machine they would starve, and latencies would be those of the kernel's scheduler.
    even = {NICENESS: os.environ.get(NICENESS, "0")} if own_cluster else {}
    return {
        MARK: run,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        **even,
        "SPT_NOENV": "1",  # a title that overwrites the environment would hide the mark
        **secret,
    }


@contextlib.contextmanager
def imports_of_ray(*, own_cluster: bool) -> Iterator[None]:
    """Around what may be the first to import Ray, as a component may: it reads then, for good, whether there is a
    secret, though the secret itself only later."""
    before = os.environ.get("RAY_AUTH_MODE")
    if own_cluster:
        os.environ["RAY_AUTH_MODE"] = "token"
    try:
        yield
    finally:
        if own_cluster:
            del os.environ["RAY_AUTH_MODE"]
            if before is not None:
                os.environ["RAY_AUTH_MODE"] = before


class LocalCluster:
    """Head and raylets on this machine, named node-0 and so on.

    Args:
        gpus: of each node: how many, and which devices where they are real ones (else they are a number that Ray
            counts with, and need no hardware).
    """

    def __init__(self, run: str, gpus: list[tuple[float, str | None]]) -> None:
        self._run = run
        self._gpus = gpus
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}
        self._births = 0

    def start(self) -> None:
        """Start it, and connect this process to it.

        Raises:
            ClusterFailed: what did start is the warden's to end.
        """
        import ray
        from ray.cluster_utils import Cluster

        # Ray notes the address of the latest cluster there, which must not be /tmp/ray: it would be left behind.
        folder = pathlib.Path(os.environ["RAY_TMPDIR"], "ray")
        folder.mkdir(exist_ok=True)
        logging.getLogger("ray").setLevel(logging.ERROR)  # what keeps it from starting is told once, below
        try:
            self._cluster = Cluster(initialize_head=False, shutdown_at_exit=False)
            for number in range(len(self._gpus)):
                self._add(f"node-{number}")
            ray.init(
                address=self._cluster.address, log_to_driver=False, configure_logging=False, logging_level="ERROR"
            )  # fmt: skip
        except Exception as error:  # whatever Ray raises: none of it is a bug of the caller's
            said = f"Ray did not start: {type(error).__name__}: {error}"
            raise ClusterFailed("\n".join([said, *last_words(folder)])) from error

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{number}" for number in range(len(self._gpus)))

    def lose(self, name: str) -> None:
        """SIGKILL a node: its raylet and every process below it. The head cannot be lost.

        Raises:
            ClusterFailed: the head, or no such node.
        """
        if name == "node-0" or name not in self._nodes:
            raise ClusterFailed(
                f"{name} cannot be lost: " + ("it has Ray's head" if name == "node-0" else "no such node")
            )
        node = self._nodes.pop(name)
        roots = {info.process.pid for infos in node.all_processes.values() for info in infos}
        sweeper = Sweeper(self._run, "")
        lost = set(roots)
        while living := sweeper.below(roots | lost):
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            lost |= set(living)
        self._cluster.worker_nodes.discard(node)
        _reap(node)

    def restore(self, name: str) -> None:
        """Start a lost node again, empty, under the name that it had. Blocks until it is there, a second or two."""
        self._add(name)

    def ended(self) -> str:
        """The daemon that has ended although nobody lost its node: its name and the node; empty while all run."""
        for name, node in list(self._nodes.items()):
            for daemon, infos in node.all_processes.items():
                if daemon in _VITAL and any(info.process.poll() is not None for info in infos):
                    return f"{daemon} of {name}"
        return ""

    def reap(self) -> None:
        """Collect the daemons, which the warden has ended: else they would stay zombies of this process."""
        for node in self._nodes.values():
            _reap(node)

    def _add(self, name: str) -> None:
        from real.nodes import BIRTH, LABEL

        self._births += 1
        count, devices = self._gpus[int(name.removeprefix("node-"))]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices  # a raylet hands out those that it was started with
        try:
            self._nodes[name] = self._cluster.add_node(
                num_cpus=_LOGICAL_CPUS, num_gpus=count, object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False, include_log_monitor=False, no_monitor=True,
                labels={LABEL: name, BIRTH: str(self._births)},
            )  # fmt: skip
        finally:
            if devices is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if visible is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible


_ANSWERS_WITHIN_S = 5.0
_HEAD_ANSWERS_WITHIN_S = 30.0
"""A Python that imports Ray on a busy machine, and one question."""
_ASK_HEAD = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def head_problem(address: str) -> str:
    """Why nothing can be run on the cluster whose head is at ``host:port``; empty when a head answers there."""
    host, _, port = address.rpartition(":")
    if "/" in host or not (host and port.isascii() and port.isdigit() and int(port) < 65536):
        return "write it as host:port, the address of the cluster's head"
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except (OSError, UnicodeError) as error:  # the latter: a name that no host has
        return f"nobody answers there ({getattr(error, 'strerror', None) or error})"
    # Ray itself asks for minutes whatever listens there, with lines of its own on stderr; so another process asks.
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_HEAD, address], capture_output=True, text=True, timeout=_HEAD_ANSWERS_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return f"what answers there is no head of a Ray cluster (it did not say so in {_HEAD_ANSWERS_WITHIN_S:g} s)"
    if asked.returncode:
        return f"no head of a Ray cluster answers there ({(asked.stderr.strip().splitlines() or ['no word'])[-1]})"
    return ""


def head_of_this_machine() -> str:
    """``host:port`` of what Ray takes for ``auto``: what RAY_ADDRESS names, runs here, or was noted by ``ray start``.

    Raises:
        ClusterFailed: there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterFailed(str(error)) from error
    if found is None:  # Ray would start one, and end it with this process
        raise ClusterFailed("RAY_ADDRESS is 'local', which is no cluster that runs; name one as host:port")
    return str(found)


def connect(address: str, run: str, packages: list[str]) -> None:
    """Connect this process to a cluster that somebody else has started.

    Args:
        address: of its head, ``host:port``.
        run: the mark of the run's processes there.
        packages: folders of Python packages that the cluster's workers are to have.

    Raises:
        ClusterFailed: nobody answers there, or it is of another version.
    """
    import ray

    given: dict[str, Any] = {"env_vars": {MARK: run}}  # Ray's own raylets give their workers SPT_NOENV
    if packages:  # an empty list is an error where an actor has variables of its own
        given["py_modules"] = packages
    try:
        ray.init(
            address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR",
            runtime_env=given,
        )  # fmt: skip
    except Exception as error:
        raise ClusterFailed(f"--ray {address}: no connection: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def errors_of_ray(address: str) -> Iterator[None]:
    """What the connected cluster starts for a run does not come up there, or somebody ends it: no bug of the caller's.

    Raises:
        ClusterFailed: instead of any error of Ray's.
    """
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        words = " ".join(str(error).split())[:_RAYS_WORDS]
        said = f"it starts nothing for this run: {type(error).__name__}: {words}"
        raise ClusterFailed(f"--ray {address}: {said}") from error


def disconnect() -> None:
    """Take this process off its cluster; idempotent."""
    import ray

    ray.shutdown()


def connected_problem(nodes: int, gpus_per_node: float, folder: str) -> str:
    """What the connected cluster lacks for a run; empty when it suffices.

    Args:
        nodes, gpus_per_node: of the topology.
        folder: of the run, which every node must see.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from real.nodes import name_nodes

    named = name_nodes()
    if len(named) < nodes:
        return f"the cluster has {len(named)} nodes, the scenario needs {nodes}"
    rows = {row["NodeID"]: row for row in ray.nodes()}
    for name, ray_id in named[:nodes]:
        have, where = rows[ray_id]["Resources"].get("GPU", 0.0), rows[ray_id]["NodeManagerAddress"]
        if have < gpus_per_node:
            return f"{name} ({where}) has {have:g} GPUs, the scenario needs {gpus_per_node:g}"
    look = ray.remote(num_cpus=0)(os.path.isdir)
    for name, ray_id in named[:nodes]:
        there = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        if not ray.get(look.options(scheduling_strategy=there).remote(folder), timeout=120):
            return f"{name} does not see {folder}; set TMPDIR to a folder that every node mounts"
    return ""


def _reap(node: Any) -> None:
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(Exception):  # a Popen that somebody has waited for already
                info.process.wait(timeout=5)
