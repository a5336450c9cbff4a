"""A small run with a fault in it, as evidence, and the command line of the analysis."""

from __future__ import annotations

from click.testing import CliRunner, Result

from analysis.__main__ import main
from tests.analysis.history import History


def faulty(healthy: bool = True) -> History:
    """Two replicas; one is killed with a request in flight and comes back. Not healthy: one request is lost too."""
    h = History()
    for name in ("e0", "e1"):
        h("actor.spawned", at=f"{name}/1", cls="Engine", node="n0", role="engine")
        h.ready(at=f"{name}/1")
    h.served("r1", at="e0/1")
    sent = h.sent("r2")
    call = h("call.sent", call=2, target="gw", method="generate", cause=None)
    h("gateway.picked", at="gw/1", request="r2", replica="e0", replica_inc=1, in_flight=1, cause=call)
    h.accepted("r2", at="e0/1", cause=call)
    must_hit = {"in_flight": {"at_least": 1}}
    h(
        "fault.injected",
        at="world/0",
        fault=1,
        name="sigkill",
        target="e0",
        must_hit=must_hit,
        observed={"in_flight": 1},
    )
    h("actor.died", at="e0/1", reason="killed")
    h("gateway.released", at="gw/1", request="r2", replica="e0", replica_inc=1, in_flight=0)
    h("call.done", call=2, outcome="unknown", error="ConnectionLost")
    h.done("r2", outcome="unknown", status=0, error="ConnectionLost", tokens=0, at_engine="e0/1")
    h("fault.healed", at="world/0", fault=1, name="sigkill", target="e0", hits=1, satisfied=True)
    h("run.healed", at="world/0", faults=1)
    h("actor.spawned", at="e0/2", cls="Engine", node="n0", role="engine")
    h.ready(at="e0/2")
    if not healthy:
        h.sent("r<3>")
        h("call.sent", call=3, target="gw", method="generate", cause=sent)
    h.served("r4", at="e0/2")
    return h.end("completed" if healthy else "deadlock")


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
