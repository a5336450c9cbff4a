"""A Ray of two nodes on this machine that is no run's own: it was there before, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from tests.real.local_ray import ROOT, environment

_NODES = """
import sys
from ray.cluster_utils import Cluster
args = {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=args)
cluster.add_node(**args, **({"node_ip_address": sys.argv[1]} if sys.argv[1:] else {}))
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

_ON_IT = """
import json, ray, sys
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
found = [one["name"] for one in list_named_actors(all_namespaces=True)]
found += [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
print(json.dumps(found))
"""


class OthersCluster(NamedTuple):
    """``temporary``: the temporary folder of its machines; ``ray``: where it keeps its own files."""

    address: str
    temporary: pathlib.Path
    ray: pathlib.Path

    def actors_and_groups(self) -> list[str]:
        """Living actors and placement groups, as Ray's own tools list them."""
        listed = subprocess.run(
            [sys.executable, "-c", _ON_IT, self.address], capture_output=True, text=True, timeout=60, check=True,
            env={**os.environ, **environment()},
        )  # fmt: skip
        found: list[str] = json.loads(listed.stdout.strip().splitlines()[-1])
        return found


def first_line(process: subprocess.Popen[str], within_s: float) -> str:
    """The first line that a process writes to its pipe."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], within_s)[0], f"it said nothing for {within_s:g} s"
    line = process.stdout.readline()
    assert line, "it has ended and said nothing"
    return line


@contextlib.contextmanager
def cluster_of_others(*, second: str = "") -> Iterator[OthersCluster]:
    """Start one; who uses it needs ``RAY_AUTH_MODE=disabled``. ``second``: an address of its second node's own."""
    with tempfile.TemporaryDirectory(prefix="other") as folder, tempfile.TemporaryDirectory(prefix="node") as temporary:
        os.mkdir(os.path.join(folder, "ray"))
        # Nothing of a run's: an operator has another temporary folder than whoever comes by.
        variables = {**os.environ, **environment(), "RAY_TMPDIR": folder, "TMPDIR": temporary}
        holder = subprocess.Popen(
            [sys.executable, "-c", _NODES, *([second] if second else [])], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            yield OthersCluster(first_line(holder, 120).strip(), pathlib.Path(temporary), pathlib.Path(folder))
        finally:
            try:
                holder.communicate(timeout=60)
            finally:  # whatever of it did not end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(holder.pid, signal.SIGKILL)
                holder.wait()
