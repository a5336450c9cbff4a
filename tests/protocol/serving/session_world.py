"""A session server in the simulated world: engine, gateway, gate, trace store, and a client that reads bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Coroutine
from typing import Any

from protocol.config import EntrypointConfig, GateConfig, GatewayConfig, SessionServerConfig
from protocol.errors import NetworkError
from protocol.messages import EngineAddress, HttpHead, RawRequest
from protocol.ports import ActorHandle, EngineSpec, backend
from protocol.rollout.trace_store import RolloutTraceStore
from protocol.serving.gate import RequestGate
from protocol.serving.gateway import Gateway
from protocol.serving.session_server import SessionServer
from protocol.serving.turn_hooks import NoHooks, TraceHooks
from sim.answer_faults import AnswerFault
from sim.simulation import Simulation
from tests.sim.worlds import Evidence

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PATHS = (CHAT, MESSAGES)
SETTINGS = SessionServerConfig(forward_timeout_s=60, gated_streams=True)


@dataclasses.dataclass
class Seen:
    """What a client has read of one answer."""

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    error: str = ""
    """Class of the error with which the connection broke."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of the events."""
        return [
            line[6:]
            for event in self.body.decode().split("\n\n")
            for line in event.split("\n")
            if line.startswith("data: ")
        ]

    @property
    def ended(self) -> bool:
        """Whether a stream has its end marker."""
        return bool(self.events) and ("[DONE]" in self.events[-1] or "message_stop" in self.events[-1])


@dataclasses.dataclass
class Stage:
    """What a test has to work with."""

    server: ActorHandle
    store: ActorHandle
    gate: ActorHandle | None
    engine: EngineAddress
    simulation: Simulation

    def spoil(self, what: str, count: int = 1, path: str = "/v1/*") -> None:
        """The next answers of the engine to generations are bad."""
        fault = AnswerFault(what, "*", "*", path, count, 1.0, lambda _: None)
        self.simulation.engines.answer_faults.append(fault)

    async def ask(
        self, request: RawRequest, leave_after: int | None = None, leave_after_s: float | None = None
    ) -> Seen:
        """Send, read, and leave after so many pieces (the head is one) or so many seconds."""
        seen = Seen()
        stream = self.server.http(request)

        async def read() -> None:
            count = 0
            async for piece in stream:
                if isinstance(piece, HttpHead):
                    seen.status, seen.headers = piece.status, piece.headers
                else:
                    seen.body += piece
                count += 1
                if count == leave_after:
                    break

        async with contextlib.aclosing(stream):
            try:
                if leave_after_s is None and leave_after != 0:
                    await read()
                else:
                    async with asyncio.timeout(leave_after_s or 0.001):
                        await read()
            except TimeoutError:
                pass
            except NetworkError as error:
                seen.error = type(error).__name__
        return seen


def turn(path: str, text: str = "Say something.", session: Any = "s-1", tokens: int = 20, **more: Any) -> RawRequest:
    """A turn of one user message, or of the messages in ``more``."""
    body = {
        "model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True,
        **({} if session is None else {"session_id": session}), **more,
    }  # fmt: skip
    return RawRequest("POST", path, (("content-type", "application/json"),), json.dumps(body).encode())


def prompt(text: str) -> str:
    """The prompt of ``turn`` as text."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def staged(
    body: Callable[[Stage], Coroutine[Any, Any, Any]],
    *,
    server: type = SessionServer,
    hooks: Any = None,
    gated: bool = False,
    config: SessionServerConfig = SETTINGS,
    **world: Any,
) -> Evidence:
    """Run a test's body; ``hooks``: called with the store's handle, TraceHooks by default."""
    evidence = Evidence()
    simulation = Simulation(seed=world.pop("seed", 1), nodes=1, gpus_per_node=8, sinks=[evidence.record], **world)

    async def driver(port: Any) -> None:
        gateway = await port.spawn(Gateway, GatewayConfig(), name="gateway")
        address = await port.engines.launch(EngineSpec("tiny-cpu"), name="policy-0")
        await _ready(address)
        await gateway.add_replica(address)
        store = await port.spawn(RolloutTraceStore, name="trace")
        gate = None
        if gated:
            config_of_gate = GateConfig(initially_closed=False, initial_model_step=0)
            gate = await port.spawn(RequestGate, config_of_gate, name="gate")
        made = (hooks or TraceHooks)(store)
        serving = await port.spawn(server, config, address, gateway, gate, made, name="server")
        await body(Stage(serving, store, gate, address, simulation))
        await asyncio.sleep(6.0)  # an engine notices within four seconds that a client has gone

    with simulation:
        simulation.run(driver, time_limit_s=600.0)
    return evidence


async def _ready(address: EngineAddress) -> None:
    while True:
        with contextlib.suppress(NetworkError):
            if (await backend().engines.client(address).get("/ready"))[0] == 200:
                return
        await asyncio.sleep(0.1)


__all__ = ["CHAT", "MESSAGES", "PATHS", "EntrypointConfig", "NoHooks", "Seen", "Stage", "prompt", "staged", "turn"]
