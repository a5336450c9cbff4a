"""Names of nodes: ``node-0`` and so on, in the order in which they joined, the head first; Ray knows ids alone.

A node that this package has started carries its name as a label, so that one that comes back has it again. Of a
cluster that somebody else has started, names are given once a run: the head first, then by address, then by id.
"""

from __future__ import annotations

from typing import Any, Final

import ray

LABEL: Final = "seatrial-node"
BIRTH: Final = "seatrial-birth"
"""Label: how many nodes the cluster had started before. Ray lists a node that was lost as alive for some 15 s, and by
then the node that took its name may be there."""

Named = tuple[tuple[str, str], ...]
"""(name, Ray's id) of nodes without a label."""


def name_nodes() -> Named:
    """Names for the living nodes of a cluster, for a run that begins."""
    living = sorted((row for row in ray.nodes() if row["Alive"]), key=_rank)
    return tuple((_label(row) or f"node-{number}", row["NodeID"]) for number, row in enumerate(living))


def living_nodes(given: Named) -> dict[str, str]:
    """The living nodes: name to Ray's id, in the order of names. ``given``: as ``name_nodes`` has made it."""
    known = {ray_id: name for name, ray_id in given}
    found = {}
    for row in sorted(ray.nodes(), key=lambda row: int(row.get("Labels", {}).get(BIRTH, 0))):
        name = _label(row) or known.get(row["NodeID"])
        if row["Alive"] and name is not None:
            found[name] = row["NodeID"]
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def own_node(given: Named) -> str:
    """The name of the node on which the calling process runs."""
    return name_of(ray.get_runtime_context().get_node_id(), given)


def name_of(ray_id: str, given: Named) -> str:
    """The name of a node, dead or alive; Ray's id where it has none."""
    known = {known_id: name for name, known_id in given}
    if ray_id in known:
        return known[ray_id]
    return next((_label(row) or ray_id for row in ray.nodes() if row["NodeID"] == ray_id), ray_id)


def gpus() -> tuple[float, float]:
    """GPUs of the whole cluster: (free, there are). Ray learns of freed ones a moment later."""
    return ray.available_resources().get("GPU", 0.0), ray.cluster_resources().get("GPU", 0.0)


def _rank(row: dict[str, Any]) -> tuple[bool, int, str, str, str]:
    label = _label(row)
    head = "node:__internal_head__" in row["Resources"]
    return (not head, len(label), label, row["NodeManagerAddress"], row["NodeID"])


def _label(row: dict[str, Any]) -> str:
    return str(row.get("Labels", {}).get(LABEL, ""))
