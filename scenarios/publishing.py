"""A service that publishes weights under live agents: its deployment, and the operator who publishes.

Runs in the driver, in either world. The operator is an ordinary client at the edge, so that verdicts need not believe
what components say of themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.config import TraceStoreConfig
from protocol.errors import GatePoisoned, Outcome, SeatrialError
from protocol.evidence import observer
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, backend
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.serving.affinity import AffinitySnapshot, SessionAffinityRouter
from protocol.serving.barrier import Member
from protocol.serving.controller import RolloutController
from protocol.serving.entrypoint import Entrypoint
from protocol.serving.gate import RequestGate
from protocol.serving.peer import Peer
from protocol.serving.session_server import SessionServer
from protocol.serving.turn_hooks import TraceHooks
from protocol.training.publication import WeightPublisher
from protocol.training.ranks import TrainingRank
from protocol.training.rendezvous import Rendezvous
from protocol.training.weight_sync import WeightSync
from scenarios.faults import PublishParams
from scenarios.proxy import Front, deploy_proxy
from scenarios.routing import living
from scenarios.schema import PublishingModel, ServiceModel

_ANSWER_S = 30.0
_LOOK_S = 0.5


@dataclasses.dataclass(slots=True)
class Publishing:
    """What a service has for its agents, once it is up."""

    entrypoints: list[ActorHandle]
    gates: list[ActorHandle]
    controller: ActorHandle
    router: ActorHandle
    publisher: ActorHandle
    operator: PublicationOperator
    ranks: tuple[ActorHandle, ...] = ()
    """Training ranks and where they meet."""
    front: Front | None = None
    """The routed proxy, where there is one."""
    store: ActorHandle | None = None
    """The trace store of session servers."""

    @property
    def entry(self) -> ActorHandle:
        """Whom agents talk to."""
        return self.router if self.front is None else self.front.proxy

    async def actors(self) -> list[ActorHandle]:
        """Every actor of it in its present incarnation, who is asked first to stop first."""
        front = () if self.front is None else (self.front.registrations, self.front.proxy)
        first = (*front, self.publisher, self.router, self.controller)
        last = () if self.store is None else (self.store,)
        return await living((*first, *self.ranks, *self.entrypoints, *self.gates, *last))


async def deploy_publishing(
    service: str,
    spec: ServiceModel,
    classes: dict[str, type],
    addresses: list[EngineAddress],
    homes: dict[str, str],
    gateway: ActorHandle,
    prober: ActorHandle,
    exporter: ActorHandle,
    trainer: ActorHandle,
) -> Publishing:
    """Start an entrypoint (and gate) before each replica, and who is over them; the first version is published.

    Raises:
        SeatrialError: an actor could not be spawned, or the first publication failed.
    """
    model = spec.publishing
    assert model is not None
    port = backend()
    node = (await port.nodes())[0]
    store = None
    if model.session_server is not None:
        store = await spawn_store(f"traces-{service}", model.trace_store, classes, node)
    pairs = await asyncio.gather(
        *(
            _entrypoint(f"{service}-{number}", model, classes, address, homes[address.name], gateway, store)
            for number, address in enumerate(addresses)
        )
    )
    entrypoints = [entrypoint for entrypoint, _ in pairs]
    gates = [gate for _, gate in pairs if gate is not None]
    backends = tuple((address.name, entrypoint) for address, (entrypoint, _) in zip(addresses, pairs, strict=True))
    router = await port.spawn(
        classes.get("affinity", SessionAffinityRouter), model.affinity, backends, gateway,
        name=f"affinity-{service}", node=node,
    )  # fmt: skip
    members = tuple(
        Member(address.name, gate, entrypoint)
        for address, (entrypoint, gate) in zip(addresses, pairs, strict=True)
        if gate is not None
    )
    controller = await port.spawn(
        classes.get("controller", RolloutController), model.controller, spec.admin, members, gateway, prober, router,
        name=f"controller-{service}", node=node,
    )  # fmt: skip
    ranks: tuple[ActorHandle, ...] = ()
    further: dict[str, Any] = {}  # a publisher of the user's own need not know what it does not need
    if model.update.transport != "disk":
        ranks = await _training(service, spec, classes, trainer)
        sync = classes.get("weight_sync", WeightSync)
        further["sync"] = sync(model.update, spec.admin, ranks[1:], ranks[0])
    if not model.update.flush:
        further["flush"] = False
    if model.controller.fence:
        further["fence"] = True
    publisher = await port.spawn(
        classes.get("publisher", WeightPublisher), spec.admin, controller, exporter,
        name=f"publisher-{service}", node=node, **further,
    )  # fmt: skip
    operator = PublicationOperator(service, publisher, router)
    port.emit(
        "publishing.deployed",
        service=service,
        entrypoints=[
            [entrypoint.name, "" if gate is None else gate.name, address.name]
            for address, (entrypoint, gate) in zip(addresses, pairs, strict=True)
        ],
        controller=controller.name,
        router=router.name,
        prepare_timeout_s=model.controller.prepare_timeout_s,
        resume_timeout_s=model.controller.resume_timeout_s,
    )
    if store is not None:
        servers = [entrypoint.name for entrypoint in entrypoints]
        port.emit("session_servers.deployed", service=service, servers=servers, store=store.name)
    if gates:
        await operator.publish(PublishParams(model_step=0))
    front = None
    if model.proxy is not None:
        front = operator.front = await deploy_proxy(
            service, model.proxy, classes, backends, router, controller, gateway, node
        )  # fmt: skip
    return Publishing(entrypoints, gates, controller, router, publisher, operator, ranks, front, store)


async def spawn_store(
    name: str, config: TraceStoreConfig, classes: dict[str, type], node: str | None = None
) -> ActorHandle:
    """A trace store, ours or the user's own, which need not know of a config that the scenario leaves as it is."""
    given = () if config == TraceStoreConfig() else (config,)
    return await backend().spawn(classes.get("trace_store", RolloutTraceStore), *given, name=name, node=node)


async def _training(
    service: str, spec: ServiceModel, classes: dict[str, type], trainer: ActorHandle
) -> tuple[ActorHandle, ...]:
    """Where the ranks meet, and the training ranks, spread over the nodes."""
    assert spec.publishing is not None
    model = spec.publishing.update
    port = backend()
    nodes = await port.nodes()
    meeting = await port.spawn(Rendezvous, name=f"rendezvous-{service}", node=nodes[0])
    ranks = await asyncio.gather(
        *(
            port.spawn(
                classes.get("rank", TrainingRank), model, spec.admin, number, trainer, meeting,
                name=f"rank-{service}-{number}", node=nodes[number % len(nodes)],
            )
            for number in range(model.ranks)
        )
    )  # fmt: skip
    port.emit(
        "weights.deployed",
        service=service,
        transport=model.transport,
        ranks=[rank.name for rank in ranks],
        trainer=trainer.name,
        timeout_s=model.timeout_s,
    )
    return (meeting, *ranks)


async def _entrypoint(
    suffix: str,
    model: PublishingModel,
    classes: dict[str, type],
    address: EngineAddress,
    node: str,
    gateway: ActorHandle,
    store: ActorHandle | None,
) -> tuple[ActorHandle, ActorHandle | None]:
    port = backend()
    gate = None
    if model.gates:
        gate = await port.spawn(classes.get("gate", RequestGate), model.gate, name=f"gate-{suffix}", node=node)
    name = f"entrypoint-{suffix}"
    if model.session_server is not None:
        hooks = classes.get("turn_hooks", TraceHooks)(store)
        entrypoint = await port.spawn(
            classes.get("session_server", SessionServer), model.session_server, address, gateway, gate, hooks,
            name=name, node=node,
        )  # fmt: skip
    else:
        entrypoint = await port.spawn(
            classes.get("entrypoint", Entrypoint), model.entrypoint, address, gateway, gate, name=name, node=node
        )  # fmt: skip
    return entrypoint, gate


@observer
class PublicationOperator:
    """Publishes, and says at the end what the router still holds.

    Args:
        service: its name in the scenario.
        publisher: handle of the WeightPublisher, waited for as long as it takes: its deadlines are what is tried.
        router: handle of the SessionAffinityRouter.
    """

    def __init__(self, service: str, publisher: ActorHandle, router: ActorHandle) -> None:
        self._service = service
        self._publisher = Peer(publisher, None)
        self._router = router
        self.front: Front | None = None

    async def publish(self, params: PublishParams) -> None:
        """Publish a version, with further tries after failures that permit one. Failures are recorded."""
        for attempt in range(params.attempts):
            if attempt:
                await asyncio.sleep(params.retry_s)
            backend().emit("publication.asked", service=self._service, model_step=params.model_step)
            failure: SeatrialError | None = None
            try:
                await self._publisher.call("publish", params.model_step)
            except SeatrialError as error:
                failure = error
            backend().emit(
                "publication.ended",
                service=self._service,
                model_step=params.model_step,
                outcome=Outcome.DONE.value if failure is None else failure.outcome.value,
                error="" if failure is None else type(failure).__name__,
            )
            if failure is None or isinstance(failure, GatePoisoned):
                return

    async def snapshot(self, within_s: float) -> None:
        """Record what the router holds, once nothing is in flight there or the time is up; and what the proxy has."""
        if self.front is not None:
            await self.front.snapshot(within_s)
        ends = asyncio.get_running_loop().time() + within_s
        while True:
            seen = await self._ask()
            if seen is None:
                return
            in_flight = sum(one.in_flight for one in seen.backends)
            if not in_flight or asyncio.get_running_loop().time() >= ends:
                break
            await asyncio.sleep(_LOOK_S)
        backend().emit(
            "affinity.snapshot",
            service=self._service,
            bindings=seen.bindings,
            tombstones=seen.tombstones,
            in_flight=in_flight,
            assigned=sum(one.assigned for one in seen.backends),
        )

    async def _ask(self) -> AffinitySnapshot | None:
        """None: a router of the user's own that has no snapshot, or one that does not answer."""
        asked: Any = getattr(self._router, "snapshot", None)
        if asked is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                seen: AffinitySnapshot = await asked()
                return seen
        except (SeatrialError, TimeoutError):
            return None
