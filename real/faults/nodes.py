"""``node_loss``: a node of the run's own cluster ends without grace, and is back, empty, at healing."""

from __future__ import annotations

import contextlib
import os
import signal

from protocol.faulting import FaultRefused
from real.faults.kinds import Fault, Machines


class NodeLoss(Fault):
    machines: Machines

    def look(self) -> dict[str, int]:
        site, name = self.site, self.target.name
        if self.params.get("zombie"):
            raise FaultRefused("node_loss with zombie: Ray ends the processes of a node that it declares dead")
        if site.machines is None:
            raise FaultRefused("node_loss: this Ray cluster was not started by the run, which may not end its nodes")
        nodes = site.node_names()
        if name not in nodes:
            raise FaultRefused(f"target {name!r}: no such node; there are {', '.join(nodes)}")
        if name == nodes[0]:
            raise FaultRefused(f"target {name!r}: it is Ray's head node, and Ray ends with it; take {nodes[-1]!r}")
        if name == site.backend.node:
            raise FaultRefused(f"target {name!r}: the driver runs there")
        self.machines = site.machines
        self._lost = [card for card in site.census.living() if card.node == name]
        return {"processes": len(self._lost)}

    def inject(self) -> None:
        log, caller = self.site.backend.log, self.site.backend.caller
        log.emit("node.lost", node=self.target.name, zombie=False)
        # By their cards: who has ended since ``look`` has no parent that could be asked for.
        keepers = [card.keeper for card in self._lost]
        _send_all(keepers, signal.SIGSTOP)  # they write for the lost, and do nothing any more once it is done here
        for card in self._lost:
            log.emit_for(card.name, card.incarnation, caller.next_number(), "actor.died", reason="node_lost", detail="")
        _send_all(keepers, signal.SIGKILL)
        self.machines.lose(self.target.name)
        for card in self._lost:
            self.site.backend.bury(card.name, card.incarnation)
        self.hit(f"node {self.target.name}")

    def heal(self) -> None:
        self.machines.restore(self.target.name)
        self.site.backend.log.emit("node.restored", node=self.target.name)


def _send_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
