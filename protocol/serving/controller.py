"""The rollout controller: pause and continue of a fleet, and the barrier around a publication (serving.md 3).

A publication is one barrier over every entrypoint:

- *prepare_pause*: freeze the topology; seal **all** gates; drain **all**; pause all backends.
- (weights are updated; `protocol.training.publication`)
- *resume_requests*: see that topology is as it was and every backend serves the version; install on **all**; continue
  **all**; reopen **all**; only then is the barrier gone.

A gate knows only what this incarnation of it has granted: one that was restarted counts as drained when its entrypoint
has no turn left from before. A barrier in which one is restarted after the drain, or whose topology changes, cannot be
completed; the next prepare_pause begins another epoch over who is there then. Health is held while there is a barrier:
by each of these calls anew, and in between.

Each of the two has one deadline, looked at before every stage. Whatever fails is raised, the barrier stays, and gates
stay closed. A reopening over many entrypoints is not atomic: some gates may be open when it fails. Each of those has
the version installed and a backend that goes on, and the same call again completes it.

With ``fence`` an entrypoint that is not routed to, or that the update did not get into, is taken out of the barrier by
name: its gate stays closed and nobody is routed to it, while the others go on. It rejoins when its backend serves the
published version, which a recovery loads, or else with the next publication.

Versions never go back: one that is older than what a gate has installed is refused before anything is sealed for it, or
before anything is installed where the barrier is drained already. A newer one goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Literal

from protocol.config import AdminConfig, ControllerConfig
from protocol.errors import BarrierError, GatePoisoned, Outcome, SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, backend
from protocol.serving.admin import AdminResult, reported_weights
from protocol.serving.barrier import Barrier, BarrierView, Member, Stages, Topology, loop_time, nobody, refuse_older
from protocol.serving.gate import GateSnapshot
from protocol.serving.peer import PEER_LOST, Peer

PauseMode = Literal["abort", "retract", "in_place"]


class RolloutController(Stages):
    """Pauses, continues and publishes over a fixed set of entrypoints. An actor.

    Args:
        config: deadlines, and how backends are paused.
        admin: time-outs and attempts of the POSTs to backends.
        members: the entrypoints.
        gateway: handle of the Gateway, whose roster says which process serves each of them.
        prober: handle of the HealthProber, held while a barrier exists so that it changes nothing; None: nobody probes.
        router: handle of the SessionAffinityRouter; None: sessions are not routed.
    """

    def __init__(
        self,
        config: ControllerConfig,
        admin: AdminConfig,
        members: tuple[Member, ...],
        gateway: ActorHandle,
        prober: ActorHandle | None = None,
        router: ActorHandle | None = None,
    ) -> None:
        super().__init__(config, admin, members)
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._prober = None if prober is None else Peer(prober, config.call_timeout_s)
        self._router = None if router is None else Peer(router, config.call_timeout_s)
        self._busy = False
        self._newest = -1
        """The newest version that any gate was ever seen to have, or was given from here."""
        self._fenced: dict[str, tuple[int, int]] = {}
        """Entrypoints out of service since the last publication: its epoch and version."""
        self._held_until = 0.0
        """Health is held for this barrier at least so long."""
        self._standing: object | None = None
        """The hold that was sent last, until it is released: what is sent earlier and heard later does not end it."""
        self._holding: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._rejoin_lock = asyncio.Lock()

    async def start(self) -> None:
        if self._config.fence:
            self._rejoining = backend().periodic(self._config.rejoin_interval_s, self._rejoin, name="rejoin")
        if self._prober is not None:
            self._holding = backend().periodic(self._longest_s / 3, self._hold_on, name="hold")

    async def stop(self) -> None:
        for task in (self._rejoining, self._holding):
            if task is not None:
                task.cancel()

    # --- topology ---

    async def add_entrypoint(self, member: Member) -> None:
        """Take an entrypoint in, or replace the one of its name. Raises BarrierError, *not done*, in a barrier."""
        self._refuse_in_barrier("add_entrypoint")
        self._members[member.name] = member

    async def remove_entrypoint(self, name: str) -> None:
        """Leave an entrypoint out; idempotent. Raises BarrierError, *not done*, in a barrier."""
        self._refuse_in_barrier("remove_entrypoint")
        self._members.pop(name, None)

    async def barrier(self) -> BarrierView | None:
        """The barrier that exists, or None."""
        return None if self._barrier is None else self._barrier.view()

    async def published(self) -> int:
        """The newest version that a gate has, or was given from here; -1 where there is none.

        Raises BarrierError: *not done* while a call is at work on the barrier, which may be about to install one;
        *unknown* when a gate does not answer.
        """
        if self._busy:
            raise BarrierError("published: another call is at work on the barrier", outcome=Outcome.NOT_DONE)
        deadline = self._deadline(None, self._config.call_timeout_s)
        snapshots = await self._snapshots(tuple(self._members.values()), deadline)
        return max(self._newest, *(snapshot.model_step for snapshot in snapshots.values()), -1)

    # --- native pause and continue ---

    async def pause_generation(self, mode: PauseMode = "abort") -> tuple[AdminResult, ...]:
        """Pause every backend, without gates. With ``abort`` the entrypoints answer turns as aborted first (3.1).

        Raises:
            BarrierError: *not done* while a barrier exists, or one is begun: it would abort the turns that it retains.
                *Unknown* when a backend did not pause: whoever updates weights then would do so under running turns.
        """
        self._refuse_in_barrier("pause_generation")
        with self._alone("pause_generation"):
            topology = await self._topology()
            await self._hold(self._admin.read_timeout_s + self._admin.reconcile_timeout_s)
            if mode == "abort":
                await self._set_aborting(True)
            return await self._post(topology, "paused", "/pause_generation", {"mode": mode}, None)

    async def continue_generation(self) -> tuple[AdminResult, ...]:
        """Continue every backend. Health goes on only after that, and not while a barrier exists.

        Raises BarrierError, *unknown*, when a backend did not continue; health stays held then. *Not done* while a
        barrier is worked on: what that has paused would go on.
        """
        with self._alone("continue_generation"):
            topology = await self._topology()
            await self._set_aborting(False)
            results = await self._post(topology, "continued", "/continue_generation", {}, None)
            if self._barrier is None:
                await self._release()
            return results

    # --- the barrier ---

    async def prepare_pause(self, timeout_s: float | None = None, model_step: int | None = None) -> BarrierView:
        """Seal and drain every gate, so that weights may change. One deadline for all of it.

        ``model_step``: the version that will be published, so that an older one is refused before anything is sealed.

        Again after a failure it goes on with the same barrier, where nothing was poisoned and no gate was reopened. It
        begins another epoch where a gate was restarted after the drain, or the topology has changed.

        Raises:
            GatePoisoned: *not done*; there will be no publication until the process of that gate is rebuilt.
            BarrierError: *not done* when a barrier is past this stage, the version is older than an installed one, the
                fleet is not one of entrypoints, or a backend has no way to say whether turns of a dead entrypoint run
                there; else *unknown*. The barrier stays.
        """
        with self._alone("prepare_pause"):
            deadline = self._deadline(timeout_s, self._config.prepare_timeout_s)
            async with self._rejoin_lock:  # none rejoins from here on
                barrier = await self._at_hand(deadline, model_step)
                self._fenced = {}  # they are sealed with all others now
            await self._gates(barrier.members, "sealed", "seal", deadline, lambda _: (barrier.epoch,))
            await self._quiet(barrier.members, deadline)
            barrier.rebuilt = ""  # sealed; one that is restarted from here on is not, and does not pass as drained
            await self._gates(barrier.members, "drained", "drain", deadline, lambda left_s: (barrier.epoch, left_s))
            if self._config.pause_mode != "none":
                mode = {"mode": self._config.pause_mode}
                await self._post(barrier.active, "paused", "/pause_generation", mode, deadline)
            if barrier.rebuilt:
                text = f"{barrier.rebuilt} was restarted before the barrier of epoch {barrier.epoch} was drained"
                raise BarrierError(text)
            barrier.stage = "drained"
            return barrier.view()

    async def fence(self, failed: tuple[tuple[str, str], ...]) -> None:
        """Take entrypoints out of the barrier, whose backends an update did not get into: (name, why) of each.

        Nobody is routed to them from now on, and their gates stay closed when the barrier ends.

        Raises BarrierError, *not done*: nothing is drained, or none would be left; or the gateway does not answer.
        """
        barrier = self._required("fence")
        await self._keep_hold(self._config.call_timeout_s)
        if barrier.stage != "drained":
            raise BarrierError(f"fence: epoch {barrier.epoch} is {barrier.stage}", outcome=Outcome.NOT_DONE)
        names = {name for name, _ in failed}
        if not barrier.active.keys() - names:
            raise BarrierError(f"no entrypoint would be left without {', '.join(sorted(names)[:8])}",
                               outcome=Outcome.NOT_DONE)  # fmt: skip
        for name, why in failed:
            try:
                await self._gateway.call("set_routable", barrier.topology[name], False, why)
            except PEER_LOST as error:
                raise BarrierError(f"{name} cannot be taken out: {error}", outcome=Outcome.NOT_DONE) from error
            self._take_out(barrier, name, why)

    async def targets(self) -> tuple[EngineAddress, ...]:
        """The backends of the barrier that are to be updated, by their present addresses.

        Raises BarrierError, *not done*: nothing is drained, a gate was restarted since, there is no backend at all, or
        the topology has changed.
        """
        barrier = self._required("targets")
        barrier.refuse_undrained()
        await self._check_topology(barrier)
        await self._keep_hold(self._admin.update_timeout_s)
        return tuple(barrier.active.values())

    async def inactive(self) -> tuple[EngineAddress, ...]:
        """The backends of the barrier's fenced entrypoints, as they were when it began. Raises as ``targets``."""
        barrier = self._required("inactive")
        return tuple(barrier.topology[name] for name in barrier.fenced)

    async def resume_requests(self, model_step: int, timeout_s: float | None = None) -> None:
        """Install a version everywhere, then continue everywhere, then reopen everywhere. One deadline for all of it.

        Again with the same version after a failure it completes what is missing.

        Raises:
            BarrierError: *not done*: no drained barrier, another topology, a version that is older than an installed
                one, or a backend that serves something else.
                *Unknown*: a stage failed or the time was up. The barrier stays.
            GatePoisoned: *not done* on that gate. The barrier stays.
        """
        with self._alone("resume_requests"):
            barrier = self._required("resume_requests")
            barrier.refuse_undrained()
            self._refuse_older(model_step, barrier.newest)
            deadline = self._deadline(timeout_s, self._config.resume_timeout_s)
            try:
                await self._keep_hold(deadline - loop_time())
            except BarrierError as error:
                if not nobody(error.__cause__):  # else there is nothing to hold, and gates need not stay closed for it
                    raise
            await self._check_topology(barrier)
            await self._check_served(barrier.active, str(model_step), deadline)
            barrier.stage = "resuming"
            self._newest = barrier.newest = max(self._newest, model_step)
            gates = barrier.going_on
            await self._gates(gates, "installed", "install_version", deadline, lambda _: (barrier.epoch, model_step))
            await self._post(barrier.active, "continued", "/continue_generation", {}, deadline)
            # All that may have taken its time, and another process may have come to the same address meanwhile.
            await self._check_topology(barrier)
            await self._gates(gates, "reopened", "reopen", deadline, lambda _: (barrier.epoch,))
            self._fenced = dict.fromkeys(barrier.fenced, (barrier.epoch, model_step))
            self._barrier = None
            await self._release()

    async def assert_request_gates_healthy(self) -> None:
        """Asked before training goes on.

        Raises GatePoisoned (*not done*) naming the first that is, BarrierError (*unknown*) when one does not answer.
        """
        deadline = self._deadline(None, self._config.call_timeout_s)
        snapshots = await self._snapshots(tuple(self._members.values()), deadline)
        self._refuse_poisoned(snapshots)

    async def closed_gates(self) -> tuple[str, ...]:
        """The entrypoints whose gates are not open now. Raises BarrierError, *unknown*, when one does not answer."""
        deadline = self._deadline(None, self._config.call_timeout_s)
        snapshots = await self._snapshots(tuple(self._members.values()), deadline)
        return tuple(name for name, snapshot in snapshots.items() if not snapshot.open)

    async def retire_route_sessions(self, session_ids: tuple[str, ...]) -> None:
        """The episodes are over: their sessions are routed no more. Idempotent. Raises as a call of the router does."""
        if self._router is not None:
            await self._router.call("retire_sessions", session_ids)

    # --- freezing, fencing, rejoining ---

    async def _at_hand(self, deadline: float, model_step: int | None) -> Barrier:
        """The barrier to seal: a new one, or the one that exists, where that can still be completed."""
        barrier = self._barrier
        if barrier is None:
            return await self._freeze(deadline, model_step)
        self._refuse_older(model_step, barrier.newest)
        if barrier.stage != "sealing" and not (barrier.changed or barrier.rebuilt):
            raise BarrierError(
                f"the barrier of epoch {barrier.epoch} is {barrier.stage}: complete it with resume_requests",
                outcome=Outcome.NOT_DONE,
            )
        if barrier.stage != "sealing" or self._differ(barrier, await self._topology()):
            return await self._freeze(deadline, model_step, barrier.epoch)
        await self._keep_hold(deadline - loop_time())
        return barrier

    async def _freeze(self, deadline: float, model_step: int | None, above: int = 0) -> Barrier:
        """Begin a barrier. ``above``: epoch of the one whose place it takes."""
        topology = await self._topology()
        # What gates are at is asked, never assumed: a barrier before this process may have left some open, some not.
        snapshots = await self._snapshots(tuple(self._members.values()), deadline)
        self._refuse_poisoned(snapshots)
        self._newest = max(self._newest, *(snapshot.model_step for snapshot in snapshots.values()))
        self._refuse_older(model_step, self._newest)
        members = tuple(self._members.values())
        latest = max(above, *(snapshot.epoch for snapshot in snapshots.values()))
        # Never sealed, while others were: it was restarted, perhaps before this process was.
        self._unquiet |= {name: None for name, snapshot in snapshots.items() if not snapshot.epoch and latest}
        epoch = 1 + latest
        await self._keep_hold(deadline - loop_time())
        out: list[tuple[str, str]] = []
        if self._config.fence:
            try:
                out = await self._inactive(topology)
                if len(out) == len(topology):  # there is no barrier without anybody in it, and health is to mend that
                    raise BarrierError("no entrypoint is routed to", outcome=Outcome.NOT_DONE)
            except BarrierError:
                if self._barrier is None:
                    await self._release()
                raise
        self._barrier = barrier = Barrier(epoch, members, topology, self._newest)
        self._emit("frozen", f"{len(members)} entrypoints")
        for name, why in out:
            self._take_out(barrier, name, why)
        return barrier

    async def _inactive(self, topology: Topology) -> list[tuple[str, str]]:
        """The entrypoints of which nobody is routed to the backend, and why."""
        try:
            views = await self._gateway.call("engines")
        except PEER_LOST as error:
            raise BarrierError(f"the gateway does not say who is routed to: {error}") from error
        routable = {view.address for view in views if view.routable}
        return [(name, "not routed to") for name, address in topology.items() if address not in routable]

    def _take_out(self, barrier: Barrier, name: str, why: str) -> None:
        barrier.fenced[name] = why
        backend().emit("controller.fenced", epoch=barrier.epoch, replica=name, what="fenced", why=why)

    async def _rejoin(self) -> None:
        """Open the gates of fenced entrypoints whose backends serve the published version by now."""
        async with self._rejoin_lock:
            if not self._fenced or self._barrier is not None or self._busy:
                return
            try:
                views = await self._gateway.call("engines")
            except PEER_LOST:
                return
            routed = {view.address.name: view.address for view in views if view.routable}
            for name, (epoch, model_step) in tuple(self._fenced.items()):
                if name in routed and name in self._members:
                    await self._rejoin_one(self._members[name], routed[name], epoch, model_step)

    async def _rejoin_one(self, member: Member, address: EngineAddress, epoch: int, model_step: int) -> None:
        limit_s = self._config.call_timeout_s
        deadline = self._deadline(None, limit_s)
        try:
            served, _ = await reported_weights(
                backend().engines.client(address), connect_timeout_s=limit_s, read_timeout_s=limit_s
            )
            if served != str(model_step):
                return  # it was started from an older export: the next publication brings it up
            await self._ask(member.gate, "install_version", (epoch, model_step), deadline)
            await self._ask(member.gate, "reopen", (epoch,), deadline)
        except SeatrialError:
            return  # the next look tries again; everything asked of a gate is idempotent
        self._fenced.pop(member.name, None)
        backend().emit("controller.fenced", epoch=epoch, replica=member.name, what="rejoined", why="")

    def _refuse_older(self, model_step: int | None, newest: int) -> None:
        if model_step is not None:
            refuse_older(model_step, newest)

    def _refuse_poisoned(self, snapshots: dict[str, GateSnapshot]) -> None:
        poisoned = [f"{name}: {snapshot.failures[0]}" for name, snapshot in snapshots.items() if snapshot.failures]
        if poisoned:
            raise GatePoisoned(f"{len(poisoned)} of {len(snapshots)} gates are poisoned; {poisoned[0]}")

    # --- inside ---

    async def _topology(self) -> Topology:
        """Which process serves each entrypoint now. Raises BarrierError, *not done*, when roster and members differ."""
        try:
            roster: tuple[EngineAddress, ...] = await self._gateway.call("roster")
        except PEER_LOST as error:
            raise BarrierError(f"the gateway does not name the replicas: {error}", outcome=Outcome.NOT_DONE) from error
        topology = {address.name: address for address in roster}
        if not topology or sorted(topology) != sorted(self._members):
            odd = sorted(topology.keys() ^ self._members.keys())
            what = f"{odd[0]} is not in both" if odd else "there is none"
            raise BarrierError(f"entrypoints and roster differ: {what}", outcome=Outcome.NOT_DONE)
        return topology

    async def _check_topology(self, barrier: Barrier) -> None:
        changed = self._differ(barrier, await self._topology())
        barrier.changed = ", ".join(changed[:8])
        if changed:
            raise BarrierError(
                f"the topology changed in the barrier of epoch {barrier.epoch}: {barrier.changed}",
                outcome=Outcome.NOT_DONE,
            )

    def _differ(self, barrier: Barrier, now: Topology) -> list[str]:
        """The entrypoints that another process serves than when the barrier began."""
        return [name for name, address in barrier.active.items() if now.get(name) != address]

    def _required(self, what: str) -> Barrier:
        if self._barrier is None:
            raise BarrierError(f"{what}: there is no barrier", outcome=Outcome.NOT_DONE)
        return self._barrier

    def _refuse_in_barrier(self, what: str) -> None:
        if self._barrier is not None or self._busy:
            raise BarrierError(f"{what}: a publication barrier exists", outcome=Outcome.NOT_DONE)

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call that pauses or continues at a time: a second one, perhaps a duplicate, is refused."""
        if self._busy:
            raise BarrierError(f"{what}: another call is at work on the barrier", outcome=Outcome.NOT_DONE)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _set_aborting(self, aborting: bool) -> None:
        async def one(member: Member) -> None:
            await Peer(member.server, self._config.call_timeout_s).call("set_aborting", aborting)

        await self._stage("flagged", tuple(self._members.values()), one)

    @property
    def _longest_s(self) -> float:
        """How long a barrier may take whose first try succeeds."""
        config = self._config
        return config.prepare_timeout_s + self._admin.update_timeout_s + config.resume_timeout_s

    async def _keep_hold(self, own_s: float) -> None:
        """Hold health for a call that may take so long, and for whatever of the barrier comes after it.

        A barrier may end meanwhile, and the prober hear of that first: it is told again then.

        Raises BarrierError, *not done*, when the prober does not hear of it, and what was held runs out in that time.
        """
        barrier, now = self._barrier, loop_time()
        try:
            mine = await self._hold(own_s + self._longest_s)
        except BarrierError:
            if self._held_until < now + own_s:
                raise
            return
        if self._barrier is barrier:
            self._held_until = now + own_s + self._longest_s
        elif self._barrier is None and self._standing in (None, mine):  # and nothing else is held since then
            await self._release()

    async def _hold_on(self) -> None:
        """Between two calls on a barrier, whose caller may be a while: nobody may replace what is paused on purpose."""
        if self._barrier is not None:
            with contextlib.suppress(BarrierError):
                await self._keep_hold(0.0)

    async def _hold(self, for_s: float) -> object:
        mine = self._standing = object()
        if self._prober is not None:
            try:
                await self._prober.call("hold", for_s)  # bounded: should this process die, health judges again
            except PEER_LOST as error:
                raise BarrierError(f"health cannot be held: {error}", outcome=Outcome.NOT_DONE) from error
        return mine

    async def _release(self) -> None:
        self._standing, self._held_until = None, 0.0
        if self._prober is not None:
            with contextlib.suppress(*PEER_LOST):  # lost: the hold ends by itself
                await self._prober.call("resume")
