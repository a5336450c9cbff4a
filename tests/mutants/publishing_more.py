"""More wrong gates, controllers and routers, and publishers that ask for a native pause at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from protocol.config import GateConfig
from protocol.errors import BarrierError, NetworkError, SeatrialError
from protocol.messages import EngineAddress, ExportManifest, GenerateRequest, GenerateResult
from protocol.ports import EngineSpec, backend, data_call
from protocol.serving.admin import AdminResult
from protocol.serving.affinity import SessionAffinityRouter
from protocol.serving.barrier import Barrier, BarrierView
from protocol.serving.controller import PauseMode, RolloutController
from protocol.serving.entrypoint import Entrypoint
from protocol.serving.gate import RequestGate, RequestLease, SettlementReceipt
from protocol.training.checkpoint import exports
from protocol.training.publication import WeightPublisher
from tests.mutants.barriers import BARRIER_MUTANTS
from tests.mutants.registry import Mutant

# --- situations: right publishers that ask for what must be refused ---


class PausesBeside(WeightPublisher):
    """Asks for a native pause while its publication drains, and goes on when it is refused."""

    async def publish(self, model_step: int) -> None:
        beside = asyncio.get_running_loop().create_task(self._pause(), name="pause-beside")
        try:
            await super().publish(model_step)
        finally:
            await beside

    async def _pause(self) -> None:
        while await self._controller.barrier() is None:
            await asyncio.sleep(0.0005)
        try:
            await self._controller.pause_generation("abort")
            await self._controller.continue_generation()
        except SeatrialError:
            return  # refused, as it should be


class PausesAfterFailure(WeightPublisher):
    """Asks for a native pause when a publication has failed."""

    async def publish(self, model_step: int) -> None:
        try:
            await super().publish(model_step)
        except SeatrialError:
            try:
                await self._controller.pause_generation("abort")
                await self._controller.continue_generation()
            except SeatrialError:
                pass  # refused, as it should be
            raise


class PausesInBetween(WeightPublisher):
    """Asks for a native pause, and a continue, before every version after the first."""

    async def publish(self, model_step: int) -> None:
        if model_step:
            await self._controller.pause_generation("abort")
            await self._controller.continue_generation()
        await super().publish(model_step)


class ReplacedInTheBarrier(WeightPublisher):
    """Its first replica is replaced between the update and the resumption of version 1, by one with older weights.

    By an operator, whom no barrier holds. When the resumption is refused for that, the replica is taken out of it.
    """

    replaced = ""

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        await super()._update(path, manifest)
        if manifest.version == "1" and not self.replaced:
            (old, *_) = await self._controller.targets()
            self.replaced = old.name
            await self._replace(old)

    async def _replace(self, old: EngineAddress) -> None:
        port = backend()
        _, before, *_ = await exports(port.storage, "exports")
        await port.engines.terminate(old.name)
        while await port.engines.alive(old.name):
            await asyncio.sleep(0.1)
        new = await port.engines.launch(EngineSpec("tiny-cpu", weights_path=before), name=old.name)
        client = port.engines.client(new)
        while True:
            try:
                status, _ = await client.get("/ready", connect_timeout_s=1, read_timeout_s=1)
            except NetworkError:
                status = 0
            if status == 200:
                break
            await asyncio.sleep(0.1)
        gateway = await port.lookup("gateway-policy-0")
        await gateway.replace_replica(old, new)

    async def publish(self, model_step: int) -> None:
        try:
            await super().publish(model_step)
        except BarrierError:
            await self._controller.fence(((self.replaced, "replaced after the update"),))
            await self._controller.resume_requests(model_step)


class ReplacedInTheResumption(ReplacedInTheBarrier):
    """Its first replica is replaced, in the same way, while the resumption of version 1 waits for another."""

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        await WeightPublisher._update(self, path, manifest)
        if manifest.version == "1" and not self.replaced:
            (old, *_) = await self._controller.targets()
            self.replaced = old.name
            self.replacing = asyncio.get_running_loop().create_task(self._soon(old), name="replacing")

    async def _soon(self, old: EngineAddress) -> None:
        await asyncio.sleep(0.3)
        await self._replace(old)

    async def publish(self, model_step: int) -> None:
        await WeightPublisher.publish(self, model_step)


# --- entrypoints ---


class CountsAbortedAsCompleted(Entrypoint):
    """Hands on what comes back after the abort as if it were complete."""

    async def _forward(self, request: GenerateRequest) -> GenerateResult:
        if self._aborting:
            return await super()._forward(request)  # what is not sent yet is refused, as it should be
        client = await self._replica()
        return await client.generate(
            request,
            connect_timeout_s=self._config.connect_timeout_s,
            read_timeout_s=self._config.forward_timeout_s,
        )


class TellsFailedAsAborted(Entrypoint):
    """Answers a turn that never got to its engine as aborted, as if somebody had asked for that."""

    async def _forward(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super()._forward(request)
        except NetworkError:
            return GenerateResult(request.request_id, "abort", request.prompt_tokens, 0)


class AbortsForEver(Entrypoint):
    """Goes on answering turns as aborted when it is to go on."""

    async def set_aborting(self, aborting: bool) -> None:
        await super().set_aborting(self._aborting or aborting)


# --- gates ---


class WakesAndGrants(RequestGate):
    """Whoever is woken is granted a lease, also when the gate was sealed by then."""

    async def _until(self, reached: Callable[[], bool]) -> None:
        if not reached():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)


class OneLane(RequestGate):
    """Serves requests and what is asked of the gate in one lane of eight."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(config)
        self._lane = asyncio.Semaphore(8)

    @data_call
    async def request(self, session_id: str, timeout_s: float, request_id: str) -> RequestLease:
        async with self._lane:
            return await super().request(session_id, timeout_s, request_id)

    async def settle(self, request_id: str, receipt: SettlementReceipt | None) -> None:
        async with self._lane:
            await super().settle(request_id, receipt)

    async def install_version(self, epoch: int, model_step: int) -> None:
        async with self._lane:
            await super().install_version(epoch, model_step)

    async def reopen(self, epoch: int) -> None:
        async with self._lane:
            await super().reopen(epoch)


# --- controllers ---


class DropsItsBarrier(RolloutController):
    """Forgets the barrier when its preparation fails."""

    async def prepare_pause(self, timeout_s: float | None = None, model_step: int | None = None) -> BarrierView:
        try:
            return await super().prepare_pause(timeout_s, model_step)
        except SeatrialError:
            self._barrier = None
            raise


class ForgetsOneAtResume(RolloutController):
    """Installs, continues and reopens everywhere but at the last entrypoint, which it had sealed and updated."""

    async def _gates(self, members: Any, stage: str, method: str, *further: Any) -> None:
        if method in ("install_version", "reopen"):
            members = members[:-1]
        await super()._gates(members, stage, method, *further)

    async def _post(self, topology: Any, stage: str, route: str, *further: Any) -> tuple[AdminResult, ...]:
        if route == "/continue_generation":
            topology = dict(list(topology.items())[:-1])
        return await super()._post(topology, stage, route, *further)


class FencesOneMore(RolloutController):
    """Takes one more out of the barrier than it was told to: a backend into which the update had got."""

    async def fence(self, failed: tuple[tuple[str, str], ...]) -> None:
        names = {name for name, _ in failed}
        others = [name for name in self._required("fence").active if name not in names]
        await super().fence((*failed, *((name, "beside it") for name in others[1:])))


class PausesInTheBarrier(RolloutController):
    """Pauses natively whoever asks, also in a barrier."""

    def _refuse_in_barrier(self, what: str) -> None:
        return None

    def _alone(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class TakesWhoeverIsThere(RolloutController):
    """Resumes over whoever serves the entrypoints by now, as if they were those that were updated."""

    async def resume_requests(self, model_step: int, timeout_s: float | None = None) -> None:
        if self._barrier is not None:
            self._barrier.topology = await self._topology()
        await super().resume_requests(model_step, timeout_s)

    async def _check_served(self, *_: Any) -> None:
        return None


class LooksOnlyBeforeItWaits(RolloutController):
    """Looks at the topology when a resumption begins, and not again before it reopens."""

    installed = False

    async def _gates(self, members: Any, stage: str, method: str, *further: Any) -> None:
        await super()._gates(members, stage, method, *further)
        self.installed = method == "install_version"

    async def _check_topology(self, barrier: Barrier) -> None:
        if not self.installed:
            await super()._check_topology(barrier)


class FlagsAfterTheAbort(RolloutController):
    """Has the backends abort first, and tells the entrypoints when they have."""

    async def pause_generation(self, mode: PauseMode = "abort") -> tuple[AdminResult, ...]:
        self._refuse_in_barrier("pause_generation")
        topology = await self._topology()
        await self._hold(self._admin.read_timeout_s + self._admin.reconcile_timeout_s)
        results = await self._post(topology, "paused", "/pause_generation", {"mode": mode}, None)
        if mode == "abort":
            await self._set_aborting(True)
        return results


class LetsHealthGoOn(RolloutController):
    """Does not hold health while backends are paused on purpose."""

    async def _hold(self, for_s: float) -> None:
        return None


# --- routers ---


class WaitsForTheTrainer(SessionAffinityRouter):
    """Shares its thread with the trainer, and forwards nothing while that computes."""

    async def _sync(self) -> None:
        await super()._sync()
        await backend().blocking(4.0)


def _of(component: str, twin: type) -> Any:
    def make(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
        return Mutant(name, source, component, twin, cls, scenario, check)

    return make


_gate = _of("gate", RequestGate)
_controller = _of("controller", RolloutController)

MUTANTS = (
    *BARRIER_MUTANTS,
    _gate("granted after the seal", "G-16", WakesAndGrants, "publish_busy", "no_update_under_lease"),
    _gate("one lane for all", "C-10", OneLane, "many_wait", "occurs"),
    _controller("barrier dropped on failure", "C-6", DropsItsBarrier, "native_pause_after_failure", "occurs"),
    _controller("one forgotten at the resumption", "C-I2", ForgetsOneAtResume, "publish", "publication_order"),
    _controller("one fenced too many", "C-I2", FencesOneMore, "ranks_fence", "publication_order"),
    _controller("changed topology resumed", "C-4", TakesWhoeverIsThere, "replaced_in_barrier", "publication_order"),
    _controller(
        "topology looked at once", "C-4", LooksOnlyBeforeItWaits, "replaced_while_resuming", "turn_of_one_version"
    ),
    _controller("flag after the abort", "C-11", FlagsAfterTheAbort, "native_abort_over", "no_turn_into_an_abort"),
    _controller("native pause in a barrier", "C-8", PausesInTheBarrier, "native_pause", "occurs"),
    _controller("health goes on in a barrier", "C-9", LetsHealthGoOn, "slow_load", "occurs"),
    _of("entrypoint", Entrypoint)(
        "aborted counted as completed", "C-12", CountsAbortedAsCompleted, "native_abort", "aborted_is_not_completed"
    ),
    _of("entrypoint", Entrypoint)(
        "failed told as aborted",
        "DESIGN outcomes",
        TellsFailedAsAborted,
        "failed_before_abort",
        "aborted_is_not_completed",
    ),
    _of("entrypoint", Entrypoint)(
        "aborts for ever", "C-12", AbortsForEver, "native_abort_over", "aborted_is_not_completed"
    ),
    _of("affinity", SessionAffinityRouter)(
        "router on the trainer's thread", "A-9", WaitsForTheTrainer, "sessions_quick", "latency_p99"
    ),
)
