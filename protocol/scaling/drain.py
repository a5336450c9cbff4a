"""Drain at the gateway: admission closed for one incarnation, then the proof that nothing is in flight on it.

The proof is made of one answer: the gateway lists this very incarnation as not routable, with no call in flight. A
gateway that does not know the replica (one that started anew, say) proves nothing, and neither does one that does not
answer (scaling.md 5.2; 1.5 for what a reconcile makes of that).
"""

from __future__ import annotations

from protocol.messages import EngineAddress
from protocol.scaling.contract import Victim
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST, Peer


class DrainGate:
    """Closes victims at one gateway and looks whether they are idle.

    Args:
        gateway: the Gateway that routes to them.
    """

    def __init__(self, gateway: Peer) -> None:
        self._gateway = gateway

    async def close(self, victim: Victim) -> bool:
        """No further pick of this incarnation, for ever. False: the gateway does not know it, or does not answer."""
        try:
            return bool(await self._gateway.call("close_admission", victim.address, "drain"))
        except PEER_LOST:
            return False

    async def in_flight(self, address: EngineAddress) -> int | None:
        """Calls in flight on an incarnation that is closed; None: it is not known to be closed, so nothing is known."""
        try:
            views: tuple[ReplicaView, ...] = await self._gateway.call("engines")
        except PEER_LOST:
            return None
        found = next((view for view in views if view.address == address), None)
        return None if found is None or found.routable else found.in_flight

    async def idle(self, victim: Victim) -> bool:
        """Close the victim and look once: whether it is proven idle."""
        return await self.close(victim) and await self.in_flight(victim.address) == 0
