"""The gateway's page of Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from protocol.serving.pick_set import Replica


def page(replicas: Collection[Replica], retries: Mapping[str, int], failures: Mapping[str, int]) -> str:
    """Prometheus text.

    Args:
        replicas: those with counters, in the order of the page.
        retries: calls moved to another replica, by cause.
        failures: attempts that failed, by cause.
    """
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: list[tuple[str, int]]) -> None:
        lines.append(f"# HELP seatrial_gateway_{name} {text}")
        lines.append(f"# TYPE seatrial_gateway_{name} {kind}")
        lines.extend(f"seatrial_gateway_{name}{{{labels}}} {value}" for labels, value in samples)

    def by_replica(value: Callable[[Replica], int]) -> list[tuple[str, int]]:
        return [(f'replica="{_escape(r.name)}",incarnation="{r.incarnation}"', int(value(r))) for r in replicas]

    def by_cause(counts: Mapping[str, int]) -> list[tuple[str, int]]:
        return [(f'cause="{_escape(cause)}"', counts[cause]) for cause in sorted(counts)]

    family("in_flight", "gauge", "Calls open on a replica.", by_replica(lambda r: r.in_flight))
    family("routable", "gauge", "Whether a replica is picked from.", by_replica(lambda r: r.routable))
    family("served_total", "counter", "Successful calls of a replica.", by_replica(lambda r: r.served))
    family("retries_total", "counter", "Calls moved to another replica.", by_cause(retries))
    family("failed_attempts_total", "counter", "Attempts that failed.", by_cause(failures))
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
