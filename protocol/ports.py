"""What a world must offer. `sim` and `real` implement these ports; a component is written against them alone.

A component reaches its world through :func:`backend`, and other components through the handles it was given. It never
asks which world it is in. The rules behind every method are in DESIGN.md ("The central idea"), and
``tests/contract`` pins them with one body and two arms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from protocol.messages import (
    AdminReply,
    EngineAddress,
    GenerateRequest,
    GenerateResult,
    HttpHead,
    ObjectRef,
    RawRequest,
    WeightUpdate,
    message,
)

F = TypeVar("F", bound=Callable[..., Any])

Signal = Literal["SIGKILL", "SIGSTOP", "SIGCONT"]
PlacementState = Literal["PENDING", "CREATED", "REMOVED"]


def data_call(method: F) -> F:
    """Declare an actor's method a *data call*: bounded by ``Limits.data_calls`` in the wrapper of either world.

    Methods without it are control calls and never wait behind data calls (DESIGN.md, "One process, one loop").
    """
    method.__seatrial_data_call__ = True  # type: ignore[attr-defined]  # a mark, looked for by name
    return method


@message
class Limits:
    """Concurrency of one actor. ``data_calls``: how many data calls run at once; further ones queue, FIFO."""

    data_calls: int = 1_000_000


@message
class Placement:
    """A bundle of a placement group to run in."""

    group_id: str
    bundle: int = 0


class Call(Protocol):
    """A call under way. Sent when the handle's method is called, not when awaited.

    Awaiting gives the result or raises. Cancelling or timing out the wait never cancels the callee: the outcome is
    then unknown. ``handle.cancel(call)`` asks the callee to stop.

    A call may be awaited again after an abandoned wait, and after it has answered: the outcome is kept. Arguments are
    serialised when the call is made; one that cannot be serialised raises there, and nothing is sent.
    """

    def __await__(self) -> Generator[Any, None, Any]: ...


@runtime_checkable
class ActorHandle(Protocol):
    """An actor by (name, incarnation). After that incarnation's death every call raises ActorDied, for ever.

    A handle knows the remote methods of the class that was spawned: its public ``async def`` methods and async
    generators. Anything else (unknown, ``_private``, synchronous, a plain attribute) raises AttributeError *at the
    handle*, when it is looked up and before anything is sent, in whichever process the handle is.
    Two handles are equal when name and incarnation are. A call made when this process has already seen the
    incarnation dead is not sent: ActorDied with outcome *not done*; every other ActorDied is *unknown*.
    """

    @property
    def name(self) -> str:
        """Of the actor, in this run."""
        ...

    @property
    def incarnation(self) -> int:
        """0 for the first process of that name, one more with every restart or new actor of the name."""
        ...

    def ordered(self) -> ActorHandle:
        """The same actor, with this view's calls started in the order they were made (sequence numbers).

        Each ``ordered()`` makes a new, empty sequence. A call that has to wait for a data-call slot holds back the
        later ones of its view, control calls too: whoever asks for order gets it.
        """
        ...

    def cancel(self, call: Call) -> None:
        """Ask the callee to cancel one call. The caller then sees CallCancelled, the result, or ActorDied."""
        ...

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """``handle.method(*args, **kwargs)`` sends the call; an async generator method gives an async iterator.

        The generator runs from the moment of the call and may run ahead of its reader. ``aclose()`` of the iterator
        (leaving ``contextlib.aclosing``) stops it: its ``finally`` blocks run in the callee. An error in it, or the
        callee's death, is raised after the items sent before.
        """
        ...


class PlacementGroups(Protocol):
    """Ray's placement groups: PENDING -> CREATED -> REMOVED, and REMOVED rows stay (tombstones)."""

    async def create(self, bundles: tuple[tuple[tuple[str, float], ...], ...], *, strategy: str, name: str) -> str:
        """Ask for a group; returns its id at once, PENDING. ``bundles``: per bundle, (resource, amount) pairs."""
        ...

    async def wait_created(self, group_id: str, timeout_s: float) -> None:
        """Raises PlacementError when REMOVED or not CREATED in time (the group itself stays as it is)."""
        ...

    async def remove(self, group_id: str) -> None:
        """Submit the removal. Returning is not proof of removal: read the table."""
        ...

    async def table(self) -> dict[str, PlacementState]:
        """Every group ever made, tombstones included."""
        ...


class EngineClient(Protocol):
    """One replica's HTTP API as a caller sees it.

    Every method may raise ConnectTimeout or ConnectionRefused (not done), ReadTimeout or ConnectionLost (unknown) and
    HttpError (4xx not done, 5xx unknown). Times in seconds; None or infinity is no limit of the caller's own.
    """

    @property
    def address(self) -> EngineAddress:
        """Where it is reached. A port is used again: later on another process may answer there (hazard H5)."""
        ...

    async def generate(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> GenerateResult:
        """One generation, to its end. One attempt."""
        ...

    def stream(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AsyncIterator[int]:
        """Cumulative counts of output tokens, as SGLang's stream is cumulative."""
        ...

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AdminReply:
        """An admin POST: /pause_generation, /continue_generation, /flush_cache, /abort_request, ... One attempt."""
        ...

    async def update_weights(
        self, update: WeightUpdate, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AdminReply:
        """POST /update_weights_from_disk: load an export. One attempt. ``success`` is the engine's word alone."""
        ...

    async def get(
        self, route: str, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> tuple[int, str]:
        """GET of /ready, /health, /metrics, /server_info, /v1/loads, ...: status and body. No status raises."""
        ...

    async def forward(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> str:
        """POST a client's JSON text as it is (/generate, /v1/chat/completions, ...): the text of a 2xx answer.

        Any other status raises HttpError with the answer's text in ``body``. One attempt. The key ``rid`` of the JSON
        object names the request to the engine.
        """
        ...

    def forward_stream(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """As ``forward`` of a body with ``"stream": true``: the data of each server-sent event, ``[DONE]`` included.

        An answer that is no 2xx raises HttpError before the first item. One that ends without ``[DONE]`` raises
        ConnectionLost after the items that came. ``read_timeout_s`` is for the whole answer. Closing the iterator
        (``contextlib.aclosing``) closes the connection.
        """
        ...

    def exchange(
        self,
        request: RawRequest,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        """One HTTP exchange as it is: the head of the answer, then its body in pieces as they come.

        No status raises. An answer that ends before its end raises ConnectionLost after the pieces that came.
        ``read_timeout_s`` is for the whole answer. Closing the iterator closes the connection.
        """
        ...


@message
class EngineOptions:
    """How an engine is set up to compute, where that is not left to its profile (scaling.md 8)."""

    deterministic: bool = False
    """``--enable-deterministic-inference``: an answer does not depend on what else is in the batch."""
    attention_backend: str = ""
    """``--attention-backend``; empty: the engine's own choice."""
    gpu: str = ""
    """Generation of its GPU, as ``protocol.serving.determinism.GENERATIONS`` names them; empty: not known."""
    random_seed: int | None = None
    """``--random-seed`` of every replica; None: of its rank, as a launcher that numbers its engines gives it."""
    startup_s: float | None = None
    """Time to start, instead of the profile's (sim, emulated)."""


@message
class EngineSpec:
    """How to start a replica. ``profile``: engine profile (sim, emulated) or model name (SGLang)."""

    profile: str
    weights_path: str = ""
    """Export in storage that must be loaded at start; empty: the profile's own weights, version ``"0"``."""
    num_gpus: float = 1.0
    options: EngineOptions | None = None
    """None: as the profile (or the operator's arguments) has it."""


class Engines(Protocol):
    """Serving engine processes: each a process of its own, with an address."""

    async def launch(
        self, spec: EngineSpec, *, name: str, node: str | None = None, placement: Placement | None = None
    ) -> EngineAddress:
        """Start the process and return its address at once; it answers /ready with 503 until it has loaded.

        Raises NameTaken (not done) when a living engine has the name, or one that is being started; PlacementError (not
        done); SpawnFailed (unknown) when its node is lost before it has answered. The incarnation rises with every
        launch of a name.
        """
        ...

    async def alive(self, name: str) -> bool:
        """Whether the process exists (a wedged or stopped one does). What a process supervisor knows, no more.

        One on a node that has fallen silent does until that node is declared dead, and then does not, though it may
        act on there as a zombie, beside a later one of its name.
        """
        ...

    async def terminate(self, name: str) -> None:
        """SIGKILL the process if there is one, and free its port and resources. Silent when there is none.

        Returns when it is obeyed or, on a node that is out of reach, when that is declared dead: until then the process
        is alive and has its name (``alive``). Whoever has no such patience bounds the wait.
        """
        ...

    def client(self, address: EngineAddress) -> EngineClient:
        """A client of the process at an address. Nothing is sent; whether it lives shows with the first call."""
        ...


class Storage(Protocol):
    """Shared storage for exports. Paths are '/'-separated strings.

    What was written survives its writer's death; what was not fsynced is lost when the node is. A rename is atomic.
    """

    async def write(self, path: str, data: bytes, *, size_bytes: int | None = None, fsync: bool = True) -> None:
        """Write a whole file. ``size_bytes``: what it costs to write (and read) where the bytes stand for more."""
        ...

    async def read(self, path: str) -> bytes:
        """Raises StorageNotFound."""
        ...

    async def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing one that is there, or a folder with everything under it.

        Raises StorageNotFound; StorageError when ``new`` is a folder with something in it.
        """
        ...

    async def list(self, prefix: str) -> tuple[str, ...]:
        """Sorted paths that start with ``prefix``."""
        ...

    async def delete(self, path: str) -> None:
        """Delete a file, or a folder with everything under it. Raises StorageNotFound."""
        ...


class Objects(Protocol):
    """The object store: values too large for a message, put once and read by reference.

    A value belongs to the process that put it and dies with it. It lives until somebody frees it, or until everybody
    who held it has given it back. A hold is one process's, under a name that evidence shows.
    """

    async def put(self, data: bytes, holder: str, *, size_bytes: int | None = None) -> ObjectRef:
        """Store a value, held by this process under the name ``holder``. ``size_bytes``: what it costs to move."""
        ...

    async def get(self, ref: ObjectRef) -> bytes:
        """Raises ObjectFreed, ObjectLost (*not done*)."""
        ...

    async def borrow(self, ref: ObjectRef, holder: str) -> None:
        """Hold it in this process too. Whoever passes a reference on keeps his hold until the receiver has borrowed.

        Raises ObjectFreed, ObjectLost (*not done*).
        """
        ...

    def give_back(self, ref: ObjectRef, holder: str) -> None:
        """End one hold of this process; the last one anywhere ends the value. An instruction: it never raises."""
        ...

    def free(self, refs: tuple[ObjectRef, ...]) -> None:
        """End the values, whoever holds them. An instruction: that a value is gone already is passed over in silence.

        Who frees must be the only one who ever does, and the last who reads: nobody is told but by a failing read.
        """
        ...


class Trainer(Protocol):
    """The learner as its control plane sees it."""

    async def step(self) -> int:
        """One optimizer step; returns the new model_step."""
        ...

    async def shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        """The weights as (file name, content, nominal bytes). Same version, same bytes."""
        ...


class Backend(Protocol):
    """A world, as seen by the actor (or driver) that holds it."""

    @property
    def me(self) -> ActorHandle:
        """The running actor's own handle; for the driver, a handle named ``driver``."""
        ...

    @property
    def node(self) -> str:
        """Name of the node that this actor runs on."""
        ...

    @property
    def placement_groups(self) -> PlacementGroups:
        """Placement groups, as this process reaches them."""
        ...

    @property
    def engines(self) -> Engines:
        """Serving engines, as this process starts and calls them."""
        ...

    @property
    def storage(self) -> Storage:
        """The shared storage, as this process reads and writes it."""
        ...

    @property
    def objects(self) -> Objects:
        """The object store, with this process as the holder."""
        ...

    async def spawn(
        self,
        cls: type,
        *args: Any,
        name: str,
        node: str | None = None,
        placement: Placement | None = None,
        limits: Limits = Limits(),
        **kwargs: Any,
    ) -> ActorHandle:
        """Start ``cls(*args, **kwargs)`` as an actor, and await its ``start()`` if it has one.

        An actor outlives its spawner. With a group that is PENDING it waits until the group is CREATED.
        Raises NameTaken (not done), PlacementError (not done: group unknown or REMOVED, no such node), SpawnFailed
        with the reason attached (the name is free again then).
        """
        ...

    async def kill(self, handle: ActorHandle) -> None:
        """SIGKILL: no ``finally`` runs. Silent when that incarnation is dead already. May be the caller itself."""
        ...

    async def signal(self, handle: ActorHandle, signal: Signal) -> None:
        """Send a signal to an actor's process. SIGKILL is ``kill``; SIGSTOP freezes it until SIGCONT, and its callers
        only notice by their own time-outs. Silent when that incarnation is dead."""
        ...

    async def restart(self, handle: ActorHandle) -> ActorHandle:
        """Kill it if alive, then run the constructor again with the same serialised arguments: incarnation + 1.

        Raises NameTaken (not done) when ``handle`` is dead and a later incarnation of its name is alive.
        """
        ...

    async def lookup(self, name: str) -> ActorHandle:
        """The living incarnation of a name; raises NoSuchActor."""
        ...

    async def nodes(self) -> tuple[str, ...]:
        """Names of the living nodes, in creation order."""
        ...

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        """Run ``function`` every ``interval_s`` in the background. It is no progress for the deadlock detector.

        The first run is one interval from now. An exception of ``function`` is a failed background task: the actor's
        crash. Cancelling the task (as ``stop()`` does) is no failure.
        """
        ...

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """A background task owned by this actor: if it fails, the actor crashes; it counts as progress."""
        ...

    async def blocking(self, duration_s: float) -> None:
        """Occupy the whole actor (its one thread) for that long."""
        ...

    def wall_time(self) -> float:
        """Seconds since the epoch by this node's clock, which may be skewed or stepped. Never for durations."""
        ...

    def new_id(self, prefix: str) -> str:
        """A run-unique id of fixed width (engines match request ids as prefixes, so none may extend another)."""
        ...

    def emit(self, kind: str, **fields: Any) -> None:
        """Record evidence (a *component* event: a claim). Kinds are declared in ``protocol.evidence``."""
        ...


_process_backend: list[Backend] = []  # set once per OS process by `real`, which has no loop object of its own


def backend() -> Backend:
    """The backend of the running actor.

    Raises:
        RuntimeError: called outside of any actor or driver.
    """
    loop: Any = asyncio.get_running_loop()
    try:
        found: Backend | None = loop.seatrial_backend
    except AttributeError:  # a loop of the real world
        found = None
    if found is not None:
        return found
    if _process_backend:
        return _process_backend[-1]
    raise RuntimeError("protocol.ports.backend() was called outside of an actor; spawn the class through a Backend")
