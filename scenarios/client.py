"""The client at the edge: sends a workload's requests to a gateway and records what became of each.

An ordinary actor. ``request.sent`` and ``request.done`` are what most verdicts stand on: a scenario cannot replace it.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Iterator

from protocol.errors import ActorDied, NoSuchActor, Outcome, SeatrialError
from protocol.evidence import observer
from protocol.messages import GenerateRequest, GenerateResult, message
from protocol.ports import ActorHandle, backend
from protocol.serving.judge import JudgeReply
from scenarios.schema import WorkloadModel
from scenarios.workloads.arrival import Arrival
from scenarios.workloads.source import closed_loop, open_loop


@message
class ClientReport:
    """What a client has done: requests sent, and how many of them were answered."""

    sent: int
    answered: int


class _Open:
    """A request under way."""

    __slots__ = ("task", "patience_ends", "gave_up")

    def __init__(self, task: asyncio.Task[bool], patience_ends: float) -> None:
        self.task = task
        self.patience_ends = patience_ends
        self.gave_up = False


@observer
class LoadClient:
    """Sends one client's share of a workload. An actor.

    Args:
        workload: what to send; ``clients`` of them share it.
        number: of the workload in the scenario.
        share: which of the clients this is, from 0.
        seed: of the draws.
        trace: path of the trace file, where the workload is one.
        gateways: handles of the gateways that this client talks to, in turn.
        block_tokens: tokens of a prefix block of the engines, where the workload has phases.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        share: int,
        seed: int,
        trace: str | None,
        gateways: tuple[ActorHandle, ...],
        block_tokens: int = 0,
    ) -> None:
        self._workload = workload
        self._block_tokens = block_tokens
        self._number = number
        self._share = share
        self._seed = seed
        self._trace = None if trace is None else pathlib.Path(trace)
        self._gateways = list(gateways)
        self._open: dict[str, _Open] = {}  # in the order of sending, which is the order in which patience ends
        self._patience: asyncio.TimerHandle | None = None
        self._sent = 0
        self._answered = 0
        self._loop: asyncio.AbstractEventLoop
        self._new_id: Callable[[str], str]
        self._emit: Callable[..., None]

    async def start(self) -> None:
        port = backend()
        self._loop, self._new_id, self._emit = asyncio.get_running_loop(), port.new_id, port.emit

    async def run(self) -> ClientReport:
        """Send everything, wait for every answer, and report.

        Raises:
            BadInput (as RemoteError): a bad row in the trace.
        """
        from sim.random import Streams  # the draws are the same in both worlds

        await wait_to_begin(self._workload)
        streams = Streams(self._seed)
        prefix = f"workload.{self._number}."
        stream = lambda name: streams.stream(prefix + name)  # noqa: E731
        arrivals = self._workload.arrivals
        if arrivals is not None and arrivals.closed_loop is not None:
            sessions = range(self._share, arrivals.closed_loop.sessions, self._workload.clients)
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    turns = closed_loop(self._workload, stream, session, self._block_tokens)
                    group.create_task(self._session(turns, arrivals.closed_loop.think_s), name=f"session-{session}")
        else:
            await self._send_all(open_loop(self._workload, self._trace, stream, self._share))
        return ClientReport(self._sent, self._answered)

    async def _send_all(self, arrivals: Iterator[Arrival]) -> None:
        """Open loop: each request at its time, whatever became of those before it."""
        loop = self._loop
        origin = loop.time()
        all_sent = loop.create_future()

        def send(due: Arrival | None) -> None:
            # A callback of the timer, not a task that sleeps: that would take a future and an iteration more a request.
            if all_sent.done():
                return  # run() was cancelled
            try:
                if due is not None:
                    self._begin(due)
                for arrival in arrivals:
                    wait = origin + arrival.t_ns / 1e9 - loop.time()
                    if wait > 0:
                        loop.call_later(wait, send, arrival)
                        return
                    self._begin(arrival)
            except Exception as error:  # a bad row of a trace: run() raises it
                all_sent.set_exception(error)
            else:
                all_sent.set_result(None)

        send(None)
        await all_sent
        while self._open:
            await next(iter(self._open.values())).task

    async def _session(self, phases: list[tuple[float, Iterator[Arrival]]], think_s: float) -> None:
        """Closed loop: the next request follows the answer."""
        loop = self._loop
        for_s = self._workload.for_s
        began = loop.time()
        ends = None if for_s is None else began + for_s
        present = 0
        while True:
            while present + 1 < len(phases) and loop.time() - began >= phases[present + 1][0]:
                present += 1
            arrival = next(phases[present][1], None)
            if arrival is None or (ends is not None and loop.time() >= ends):
                return
            await self._begin(arrival)
            if think_s:
                await asyncio.sleep(think_s)

    def _begin(self, arrival: Arrival) -> asyncio.Task[bool]:
        workload = self._workload
        name = self._new_id("req")
        request = GenerateRequest(
            name,
            arrival.prompt_tokens,
            arrival.output_tokens,
            workload.ignore_eos,
            arrival.prefix_blocks,
            arrival.session,
            workload.idempotent,
        )
        loop = self._loop
        task = loop.create_task(self._one(request), name=name)
        self._open[name] = _Open(task, loop.time() + workload.patience_s)
        if self._patience is None:
            self._patience = loop.call_later(workload.patience_s, self._give_up)
        return task

    def _give_up(self) -> None:
        """End the waits whose patience is over. One timer for all: the oldest request is the first of the open ones."""
        loop = self._loop
        self._patience = None
        now = loop.time()
        for waiting in self._open.values():
            if waiting.patience_ends > now:
                self._patience = loop.call_at(waiting.patience_ends, self._give_up)
                return
            waiting.gave_up = True
            waiting.task.cancel()

    async def _one(self, request: GenerateRequest) -> bool:
        """Send one request; returns whether it was answered."""
        name = request.request_id
        emit = self._emit
        emit(
            "request.sent",
            request=name,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            idempotent=request.idempotent,
        )
        gateways = self._gateways
        turn = self._sent % len(gateways)
        self._sent += 1
        try:
            try:
                result: GenerateResult = await gateways[turn].generate(request)
            except ActorDied as error:
                result = await self._generate_again(request, turn, error)
        except SeatrialError as error:
            record_error(emit, name, error)
            return False
        except asyncio.CancelledError:
            if not self._open[name].gave_up:
                raise
            record_gave_up(emit, name)
            return False
        else:
            if not record_answer(emit, name, result):
                return False
            self._answered += 1
            return True
        finally:
            # Here and not in a callback of the task, which would run after those who wait for the task.
            del self._open[name]

    async def _generate_again(self, request: GenerateRequest, turn: int, error: ActorDied) -> GenerateResult:
        """Where nothing was sent: perhaps a new incarnation has the gateway's name."""
        if error.outcome is not Outcome.NOT_DONE:
            raise error
        try:
            self._gateways[turn] = await backend().lookup(self._gateways[turn].name)
        except NoSuchActor:
            raise error from None
        result: GenerateResult = await self._gateways[turn].generate(request)
        return result


async def wait_to_begin(workload: WorkloadModel) -> None:
    """Sleep until a workload begins, ``from_s`` after the run's. Every client begins with it."""
    if workload.from_s:
        await asyncio.sleep(workload.from_s)


def record_answer(emit: Callable[..., None], request: str, answer: GenerateResult | JudgeReply) -> bool:
    """``request.done`` of a request that was answered; whether it was.

    A component of the user's may return something else, None where a ``return`` was forgotten. That is held against it
    and not against who asked, which would fall over it.
    """
    try:
        said = {
            "completion_tokens": answer.completion_tokens,
            "version": answer.weight_version,
            "replica": answer.engine,
            "replica_inc": answer.engine_incarnation,
            "attempts": answer.attempts,
        }
    except AttributeError:
        record_failure(emit, request, Outcome.UNKNOWN.value, 0, f"NoAnswer: {type(answer).__name__}", 0)
        return False
    emit("request.done", request=request, outcome="done", status=200, error="", **said)
    return True


def record_error(emit: Callable[..., None], request: str, error: SeatrialError, attempts: int | None = None) -> None:
    """``request.done`` of a request that ended in an error. ``attempts``: None: as the error says it."""
    status = int(error.fields.get("status", 0))
    tried = int(error.fields.get("attempts", 0)) if attempts is None else attempts
    record_failure(emit, request, error.outcome.value, status, type(error).__name__, tried)


def record_gave_up(emit: Callable[..., None], request: str) -> None:
    """``request.done`` of a request whose client has waited for as long as it would."""
    record_failure(emit, request, Outcome.UNKNOWN.value, 0, "GaveUp", 0)


def record_failure(
    emit: Callable[..., None], request: str, outcome: str, status: int, error: str, attempts: int
) -> None:
    """``request.done`` of a request that was not answered."""
    emit(
        "request.done",
        request=request,
        outcome=outcome,
        status=status,
        error=error,
        completion_tokens=0,
        version="",
        replica="",
        replica_inc=-1,
        attempts=attempts,
    )
