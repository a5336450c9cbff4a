"""What the real world cannot do, told by name before anything is started. Imports no Ray."""

from __future__ import annotations

from typing import Any, NamedTuple


class AskedFault(NamedTuple):
    """A fault as a step asks for it. ``node``: its target, where that is a node."""

    name: str
    params: dict[str, Any]
    node: str | None = None


def why_not(asked: AskedFault, *, nodes: int, own_cluster: bool) -> str:
    """Why a fault cannot be done, and what to do instead; empty when it can.

    Args:
        nodes: how many the run has; named node-0 and so on.
        own_cluster: whether the run starts its own Ray.
    """
    params = asked.params
    if asked.name == "node_loss":
        if params.get("zombie"):
            return "Ray ends the processes of a node that it declares dead, so there are no zombies; use --backend sim"
        if not own_cluster:
            return "the cluster is not the run's to end nodes of; leave out --ray"
        if nodes < 2:
            return "the one node has Ray's head, and Ray ends with it; set topology.nodes to 2"
        if asked.node == "node-0":
            return f"node-0 has Ray's head, and Ray ends with it; take node-{nodes - 1}"
    if asked.name in ("slow", "slow_export") and params.get("percent", 100) <= 100:
        return f"percent {params['percent']} makes nothing slower, and a real process cannot be made faster"
    return ""
