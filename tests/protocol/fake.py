"""A small world for unit tests of protocol/: one asyncio loop whose clock jumps, engines and storage that do as told.

It has no latency and no faults of its own; the simulated world is where those are. Here a test says what each call to
an engine gives, one after another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import selectors
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protocol.errors import ActorDied, ConnectionRefused, NameTaken, NoSuchActor, Outcome, StorageNotFound
from protocol.evidence import Event, encode
from protocol.messages import AdminReply, EngineAddress, GenerateRequest, GenerateResult, VersionSpan, WeightUpdate
from protocol.ports import EngineSpec, Limits, Placement
from protocol.training.checkpoint import MANIFEST, decode_manifest, hash_weights

W = TypeVar("W", bound="FakeBackend")


class _JumpSelector(selectors.SelectSelector):
    """Instead of waiting, the clock goes forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for something that nobody will do")
        self.now += max(timeout, 0.0)
        return super().select(0)


class JumpLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(body: Callable[[FakeBackend], Coroutine[Any, Any, Any]], *, limit_s: float = 10_000.0) -> Any:
    """Run a test's body in a fresh world. A failed background task fails the test."""
    return run_in(FakeBackend, body, limit_s)


def run_in(make: Callable[[], W], body: Callable[[W], Coroutine[Any, Any, Any]], limit_s: float) -> Any:
    """As ``run``, in a world of another class."""
    loop = JumpLoop()
    world = make()
    loop.seatrial_backend = world  # type: ignore[attr-defined]

    async def bounded() -> Any:
        async with asyncio.timeout(limit_s):
            result = await body(world)
        await world.shut_down()
        return result

    try:
        return loop.run_until_complete(bounded())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class FakeHandle:
    """Calls the object itself. ``fail_next``: what the next calls raise instead; ``lose_next``: never answered."""

    def __init__(self, world: FakeBackend, name: str, incarnation: int, target: Any) -> None:
        self.name = name
        self.incarnation = incarnation
        self.target = target
        self.dead = False
        self.fail_next: list[BaseException] = []
        self.lose_next = 0
        self.cancelled = 0
        self.world = world

    def __getattr__(self, method: str) -> Callable[..., Any]:
        bound = getattr(self.target, method)
        if inspect.isasyncgenfunction(bound):
            return bound

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise ActorDied(f"{self.name}/{self.incarnation} is dead", outcome=Outcome.NOT_DONE)
            if self.fail_next:
                raise self.fail_next.pop(0)
            if self.lose_next:
                self.lose_next -= 1
                await bound(*args, **kwargs)  # the effect happens, its answer is lost
                await asyncio.get_running_loop().create_future()
            return await bound(*args, **kwargs)

        return call

    def cancel(self, call: Any) -> None:
        """A call is a coroutine of the caller's here, so it has been cancelled with its wait."""
        self.cancelled += 1


class FakeStorage:
    """Files in memory. ``tear``: paths (by ending) of which the next write keeps half, and says success."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tear: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.reads: list[str] = []

    async def write(self, path: str, data: bytes, *, size_bytes: int | None = None, fsync: bool = True) -> None:
        await asyncio.sleep(0)
        for ending in [e for e in self.fail if path.endswith(e)]:
            raise self.fail.pop(ending)
        for ending in [e for e in self.tear if path.endswith(e)]:
            self.tear.remove(ending)
            data = data[: len(data) // 2]
        self.files[path] = data

    async def read(self, path: str) -> bytes:
        await asyncio.sleep(0)
        self.reads.append(path)
        if path not in self.files:
            raise StorageNotFound(f"nothing at {path}", path=path)
        return self.files[path]

    async def rename(self, old: str, new: str) -> None:
        moved = [p for p in self.files if p == old or p.startswith(old + "/")]
        if not moved:
            raise StorageNotFound(f"nothing at {old}", path=old)
        for path in moved:
            self.files[new + path[len(old) :]] = self.files.pop(path)

    async def list(self, prefix: str) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return tuple(sorted(p for p in self.files if p.startswith(prefix)))

    async def delete(self, path: str) -> None:
        self.files.pop(path, None)


class FakeTrainer:
    """Two shards whose bytes follow from the version."""

    async def step(self) -> int:
        raise NotImplementedError

    async def shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        return tuple((f"model-{i}.bin", f"weights {version} shard {i}".encode() * 4, 1_000) for i in range(2))


Script = Callable[[GenerateRequest], Awaitable[GenerateResult]]


@dataclasses.dataclass
class FakeEngine:
    """One engine process. Every list ``*_script`` gives what the next calls do: an error to raise, or "hang"."""

    name: str
    incarnation: int
    spec: EngineSpec
    world: FakeBackend
    alive: bool = True
    stopped: bool = False
    wedged: bool = False
    paused: bool = False
    starting_until: float = 0.0
    version: str = "0"
    weight_hash: str = "base"
    tokens: int = 0
    running: int = 0
    duration_s: float = 0.01
    stream_tokens: int = 3
    generate_script: list[Any] = dataclasses.field(default_factory=list)
    post_script: list[Any] = dataclasses.field(default_factory=list)
    get_script: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    posts: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    gets: list[str] = dataclasses.field(default_factory=list)
    generated: list[str] = dataclasses.field(default_factory=list)
    no_metrics: bool = False
    nan_metrics: bool = False
    odd_metrics: str = ""
    """A page of metrics in place of its own."""
    flush_answer: int = 0
    """What /flush_cache answers; 0: 200, or 400 while something runs."""
    post_delay_s: float = 0.0

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.name, self.incarnation, "host", 30_000)


class FakeClient:
    """``EngineClient`` of one incarnation."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    @property
    def address(self) -> EngineAddress:
        return self.engine.address

    async def _reach(self, read_timeout_s: float | None, what: str) -> None:
        from protocol.errors import ReadTimeout

        engine = self.engine
        await asyncio.sleep(0)
        if not engine.alive:
            raise ConnectionRefused(f"{engine.name} is dead")
        if asyncio.get_running_loop().time() < engine.starting_until:
            raise ConnectionRefused(f"{engine.name} is starting")
        if engine.stopped:
            await asyncio.sleep(read_timeout_s or 1e6)
            raise ReadTimeout(what)

    async def _script(self, script: list[Any], read_timeout_s: float | None) -> None:
        from protocol.errors import ReadTimeout

        if script:
            step = script.pop(0)
            if step == "hang":
                await asyncio.sleep(read_timeout_s or 1e6)
                raise ReadTimeout("no answer")
            if callable(step):
                step = step()
            if isinstance(step, BaseException):
                raise step

    async def _work(self, seconds: float, read_timeout_s: float | None) -> None:
        """Takes as long as the generation does, and breaks off when the process dies."""
        from protocol.errors import ConnectionLost, ReadTimeout

        loop = asyncio.get_running_loop()
        begun, done = loop.time(), 0.0
        while done < seconds:
            await asyncio.sleep(min(0.05, seconds))
            if not self.engine.alive:
                raise ConnectionLost(f"{self.engine.name} died")
            if not (self.engine.stopped or self.engine.wedged or self.engine.paused):
                done += min(0.05, seconds)
                self.engine.tokens += 1
            if read_timeout_s is not None and loop.time() - begun >= read_timeout_s:
                raise ReadTimeout("no answer")

    async def generate(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> GenerateResult:
        engine = self.engine
        await self._script(engine.generate_script, read_timeout_s)
        if not engine.alive:
            raise ConnectionRefused(f"{engine.name} is dead")
        engine.generated.append(request.request_id)
        engine.running += 1
        try:
            await self._work(engine.duration_s, read_timeout_s)
        finally:
            engine.running -= 1
        tokens = request.max_new_tokens
        return GenerateResult(
            request.request_id,
            "length",
            request.prompt_tokens,
            tokens,
            weight_version=engine.version,
            spans=(VersionSpan(engine.version, 0, tokens, engine.weight_hash),),
            engine=engine.name,
            engine_incarnation=engine.incarnation,
        )

    async def stream(self, request: GenerateRequest, **_: Any) -> AsyncIterator[int]:
        raise NotImplementedError
        yield 0

    async def forward(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> str:
        """Echoes the body, after what ``generate_script`` says."""
        engine = self.engine
        await self._script(engine.generate_script, read_timeout_s)
        if not engine.alive:
            raise ConnectionRefused(f"{engine.name} is dead")
        engine.generated.append(json.loads(body).get("rid", ""))
        engine.running += 1
        try:
            await self._work(engine.duration_s, read_timeout_s)
        finally:
            engine.running -= 1
        return json.dumps({"route": route, "engine": engine.name, "body": json.loads(body)})

    async def forward_stream(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """``stream_tokens`` events and ``[DONE]``; a step of ``generate_script`` before each event."""
        engine = self.engine
        if not engine.alive:
            raise ConnectionRefused(f"{engine.name} is dead")
        engine.generated.append(json.loads(body).get("rid", ""))
        engine.running += 1
        try:
            for number in range(engine.stream_tokens):
                await self._script(engine.generate_script, read_timeout_s)
                await self._work(engine.duration_s, read_timeout_s)
                yield json.dumps({"engine": engine.name, "token": number})
            yield "[DONE]"
        finally:
            engine.running -= 1

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AdminReply:
        await self._script_before_effect(read_timeout_s)
        await self._reach(read_timeout_s, route)
        self.engine.posts.append((route, dict(body)))
        self.engine.world.posting += 1
        self.engine.world.most_posting = max(self.engine.world.most_posting, self.engine.world.posting)
        await asyncio.sleep(self.engine.post_delay_s)
        self.engine.world.posting -= 1
        if route == "/pause_generation":
            self.engine.paused = True
        elif route == "/continue_generation":
            self.engine.paused = False
        await self._script(self.engine.post_script, read_timeout_s)
        if route == "/flush_cache":
            status = self.engine.flush_answer or (400 if self.engine.running else 200)
            return AdminReply(status, success=status == 200)
        return AdminReply(200)

    async def _script_before_effect(self, read_timeout_s: float | None) -> None:
        """An error that is *not done* comes before the effect, any other one after it."""
        script = self.engine.post_script
        if script and getattr(script[0], "outcome", None) is Outcome.NOT_DONE:
            await self._script(script, read_timeout_s)

    async def update_weights(
        self, update: WeightUpdate, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AdminReply:
        await self._script_before_effect(read_timeout_s)
        await self._reach(read_timeout_s, "update")
        engine, storage = self.engine, self.engine.world.storage
        engine.posts.append(("/update_weights_from_disk", update))
        manifest = decode_manifest(storage.files[f"{update.path}/{MANIFEST}"])
        import hashlib

        engine.version = update.version
        engine.weight_hash = hash_weights(
            hashlib.sha256(storage.files[f"{update.path}/{name}"]).hexdigest() for name, _, _ in manifest.shards
        )
        await self._script(engine.post_script, read_timeout_s)
        return AdminReply(200)

    async def get(
        self, route: str, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> tuple[int, str]:
        engine = self.engine
        await self._reach(read_timeout_s, route)
        engine.gets.append(route)
        script = engine.get_script.get(route, [])
        if script and isinstance(script[0], tuple):
            answer: tuple[int, str] = script.pop(0)
            return answer
        await self._script(script, read_timeout_s)
        if route == "/ready":
            return (503 if engine.paused else 200), ""
        if route == "/model_info":
            return 200, json.dumps({"weight_version": engine.version})
        if route == "/health_generate":
            await self._work(1.0, 20.0 if read_timeout_s is None else min(20.0, read_timeout_s))
            return 200, ""
        if route == "/metrics":
            if engine.no_metrics:
                return 404, ""
            if engine.odd_metrics:
                return 200, engine.odd_metrics
            tokens = "NaN" if engine.nan_metrics else f"{engine.tokens}.0"
            return 200, (
                "# TYPE sglang:generation_tokens counter\n"
                f'sglang:generation_tokens_total{{model_name="m"}} {tokens}\n'
                "# TYPE sglang:num_running_reqs gauge\n"
                f'sglang:num_running_reqs{{model_name="m"}} {engine.running}.0\n'
                "# TYPE sglang:num_queue_reqs gauge\n"
                'sglang:num_queue_reqs{model_name="m"} 0.0\n'
                "# TYPE sglang:http_requests_active gauge\n"
                'sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0\n'
                f'sglang:http_requests_active{{endpoint="/generate",method="POST"}} {engine.running}.0\n'
            )
        return 404, ""


class FakeEngines:
    """Launches FakeEngines; ``every`` has all incarnations ever."""

    def __init__(self, world: FakeBackend) -> None:
        self.world = world
        self.every: list[FakeEngine] = []
        self.startup_s = 0.0
        self.launched_with: list[tuple[str, EngineSpec, str | None]] = []
        self.immortal: set[str] = set()
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None

    def latest(self, name: str) -> FakeEngine | None:
        return next((e for e in reversed(self.every) if e.name == name), None)

    async def launch(
        self, spec: EngineSpec, *, name: str, node: str | None = None, placement: Placement | None = None
    ) -> EngineAddress:
        old = self.latest(name)
        if old is not None and old.alive:
            raise NameTaken(name)
        engine = FakeEngine(name, 0 if old is None else old.incarnation + 1, spec, self.world)
        engine.starting_until = asyncio.get_running_loop().time() + self.startup_s
        self.every.append(engine)
        self.launched_with.append((name, spec, node))
        self.prepare(engine)
        return engine.address

    async def alive(self, name: str) -> bool:
        engine = self.latest(name)
        return engine is not None and engine.alive

    async def terminate(self, name: str) -> None:
        engine = self.latest(name)
        if engine is not None and name not in self.immortal:
            engine.alive = False

    def client(self, address: EngineAddress) -> FakeClient:
        found = next(e for e in self.every if (e.name, e.incarnation) == (address.name, address.incarnation))
        return FakeClient(found)


class FakeBackend:
    """Everything in one process; ``events`` are checked against their declaration as they are emitted."""

    placement_groups: Any = None

    def __init__(self) -> None:
        self.engines = FakeEngines(self)
        self.storage = FakeStorage()
        self.events: list[Event] = []
        self.handles: dict[str, FakeHandle] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.node = "node-0"
        self.incarnation = 0
        """Of whoever asks who it is."""
        self._ids = 0
        self.posting = 0
        self.most_posting = 0
        self.on_emit: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None

    @property
    def me(self) -> FakeHandle:
        return FakeHandle(self, "driver", self.incarnation, None)

    async def spawn(self, cls: type, *args: Any, name: str, limits: Limits = Limits(), **kwargs: Any) -> FakeHandle:
        target = cls(*args, **kwargs)
        if hasattr(target, "start"):
            await target.start()
        old = self.handles.get(name)
        self.handles[name] = FakeHandle(self, name, 0 if old is None else old.incarnation + 1, target)
        return self.handles[name]

    async def lookup(self, name: str) -> FakeHandle:
        handle = self.handles.get(name)
        if handle is None or handle.dead:
            raise NoSuchActor(name)
        return handle

    async def nodes(self) -> tuple[str, ...]:
        return ("node-0", "node-1")

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        async def forever() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await function()

        return self.background(forever(), name=name)

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self.tasks.append(task)
        return task

    def new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}-{self._ids:06d}"

    def emit(self, kind: str, **fields: Any) -> None:
        t_ns = int(asyncio.get_running_loop().time() * 1e9)
        event = Event(len(self.events), t_ns, kind, "driver", 0, len(self.events), len(self.events), None, fields)
        encode(event)  # raises for what is not declared
        self.events.append(event)
        self.on_emit(kind, fields)

    def of(self, kind: str, **where: Any) -> list[dict[str, Any]]:
        """Data of the events of a kind whose fields are as given."""
        return [
            e.data
            for e in self.events
            if e.kind == kind and all(e.data[field] == value for field, value in where.items())
        ]

    async def shut_down(self) -> None:
        for handle in self.handles.values():
            if hasattr(handle.target, "stop"):
                await handle.target.stop()
        for task in self.tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError(f"background task {task.get_name()} failed") from task.exception()
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def fleet(world: FakeBackend, count: int, profile: str = "fake") -> tuple[FakeEngine, ...]:
    """Launch engines named engine-0, engine-1, ..."""
    for index in range(count):
        await world.engines.launch(EngineSpec(profile), name=f"engine-{index}")
    return tuple(world.engines.every[-count:])
