"""Time, randomness and ids as a component sees them, so that a user's class runs unmodified.

While a :class:`Virtual` is entered, ``time``, ``random``, ``secrets``, ``uuid``, ``os.urandom``, ``os.getpid``, NumPy's
global generator and the stamps of log records are simulated *inside actors*: each function looks which actor's loop is
running and answers from that node's clock and that actor's streams. Outside of actors everything stays real. Threads,
sockets, subprocesses, host signals and blocking waits are refused by name.

Modules are patched in place; names that a component's module has bound for itself (``from time import monotonic``,
``field(default_factory=time)``, ``datetime``) are replaced by :meth:`Virtual.adopt`, which the actor layer calls at
spawn. Leaving the context restores everything. An actor's local time zone is UTC, whatever the host's is.

Limits (pinned in tests/sim/test_virtual.py): a *lazy* ``import datetime`` inside a function sees the real clock, for
``datetime.datetime`` itself cannot be patched without breaking its pickling; so do references kept in containers or
in C (``CLOCKS = [time.time]``, pydantic's ``default_factory``). ``random``'s gamma, beta, von Mises, Pareto and Weibull
draws go through libm and may differ in the last bit between machines.
"""

from __future__ import annotations

import calendar
import functools
import logging
import os
import random
import time
import types
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from sim.loop import ActorLoop, current_loop
from sim.random import Stream, Streams, exp
from sim.virtual_names import Renamer, virtual_datetime_module
from sim.virtual_refused import is_harmless, refusals

Anomaly = Callable[[ActorLoop | None, str, str], None]

_MARK = "__seatrial_virtual__"
_UUID1_EPOCH = 0x01B21DD213814000  # 100 ns steps from 1582-10-15 to 1970-01-01
_FIRST_PID = 1000


def monotonic_ns(loop: ActorLoop) -> int:
    """The node's monotonic clock as an int: ``loop.time()`` without its rounding to a float."""
    t = loop._clock._now
    if loop.drift_ppb:
        t += t * loop.drift_ppb // 1_000_000_000
    return t + loop.origin_ns


class StreamRandom(random.Random):
    """``random.Random`` on a stream. ``seed(x)`` turns it into the Mersenne Twister of that seed, as users expect."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seeded = False
        super().__init__()

    def seed(self, a: Any = None, version: int = 2) -> None:
        self._seeded = a is not None
        if self._seeded:
            super().seed(a, version)

    def random(self) -> float:
        return super().random() if self._seeded else self._stream.unit()

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k) if self._seeded else self._stream.getrandbits(k)

    # The usual continuous draws, without libm.

    def expovariate(self, lambd: float = 1.0) -> float:
        return super().expovariate(lambd) if self._seeded else self._stream.exponential(1.0 / lambd)

    def normalvariate(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return super().normalvariate(mu, sigma) if self._seeded else mu + sigma * self._stream.normal()

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return super().gauss(mu, sigma) if self._seeded else mu + sigma * self._stream.normal()

    def lognormvariate(self, mu: float, sigma: float) -> float:
        return super().lognormvariate(mu, sigma) if self._seeded else exp(mu + sigma * self._stream.normal())

    def getstate(self) -> Any:
        if not self._seeded:
            raise RuntimeError("random.getstate() is refused in the simulated world until random.seed(x) is called")
        return super().getstate()

    def setstate(self, state: Any) -> None:
        self._seeded = True
        super().setstate(state)


class Virtual:
    """The virtualised standard library of one run: a context manager, exclusive in its process.

    Args:
        streams: of the run; each actor draws from ``virtual.*/<actor>``.
        wall_ns: wall clock of an actor's node, in ns since the epoch (skew included).
        on_anomaly: called as ``(loop or None, what, detail)`` for a coroutine never awaited (``never_awaited``) and for
            a refused call (``refused_call``), which a component might otherwise swallow.

    Raises (on entering):
        RuntimeError: another one is entered in this process.
    """

    def __init__(self, streams: Streams, *, wall_ns: Callable[[ActorLoop], int], on_anomaly: Anomaly) -> None:
        self._streams = streams
        self._wall_ns = wall_ns
        self._on_anomaly = on_anomaly
        self._generators: dict[ActorLoop, StreamRandom] = {}
        self._bytes: dict[ActorLoop, Stream] = {}
        self._actors_named: dict[str, int] = {}
        self._last_uuid1: dict[ActorLoop, int] = {}
        self._replaced: dict[int, tuple[Any, Any]] = {}  # id(real) -> (real, virtual), for names bound elsewhere
        self._undo: list[Callable[[], object]] = []
        self._renamer: Renamer | None = None

    # --- the context ---

    def __enter__(self) -> Virtual:
        if hasattr(time.monotonic, _MARK):
            raise RuntimeError("another simulated run is virtualised in this process; runs cannot be nested")
        try:
            self._virtualise_time()
            self._virtualise_random()
            self._virtualise_ids()
            self._virtualise_logging()
            for holder, name, label, instead in refusals():
                self._refuse(holder, name, label, instead)
            self._patch(warnings, "_warn_unawaited_coroutine", self._never_awaited)
            dates = virtual_datetime_module(self._wall_ns)
            for real, virtual in dates:
                self._replaced[id(real)] = (real, virtual)
            self._renamer = Renamer(self._replaced)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._renamer is not None:
            self._renamer.restore()
            self._renamer = None
        while self._undo:
            self._undo.pop()()
        self._replaced.clear()
        self._generators.clear()
        self._bytes.clear()

    def adopt(self, module: types.ModuleType) -> None:
        """Virtualise the names that a component's module, and those of its own package that it uses, have bound.

        Idempotent within a run. Modules of our own packages and of the standard library are left alone.

        Raises:
            RuntimeError: not entered.
        """
        if self._renamer is None:
            raise RuntimeError("Virtual.adopt() outside of the run's context")
        self._renamer.adopt(module)

    # --- patching ---

    def _patch(self, holder: Any, name: str, value: Any) -> None:
        original = holder.__dict__[name]
        setattr(holder, name, value)
        self._undo.append(lambda: setattr(holder, name, original))

    def _virtualise(self, module: types.ModuleType, name: str, simulated: Callable[..., Any]) -> None:
        """Replace a module's function by one that answers ``simulated(loop, ...)`` inside an actor."""
        real = getattr(module, name, None)
        if real is None:
            return

        @functools.wraps(real)
        def virtual(*args: Any, **kwargs: Any) -> Any:
            loop = current_loop()
            return real(*args, **kwargs) if loop is None else simulated(loop, *args, **kwargs)

        setattr(virtual, _MARK, True)
        self._replaced[id(real)] = (real, virtual)
        self._patch(module, name, virtual)

    def _refuse(self, holder: Any, name: str, label: str, instead: str) -> None:
        real = holder.__dict__[name]

        @functools.wraps(real)
        def refused(*args: Any, **kwargs: Any) -> Any:
            loop = current_loop()
            if loop is None or is_harmless(label, args, kwargs):
                return real(*args, **kwargs)
            message = f"{label} is refused in the simulated world: {instead}"
            self._on_anomaly(loop, "refused_call", message)
            raise RuntimeError(message)

        if isinstance(holder, types.ModuleType):
            self._replaced[id(real)] = (real, refused)
        self._patch(holder, name, refused)

    # --- time ---

    def _virtualise_time(self) -> None:
        wall = self._wall_ns
        real_gmtime, real_strftime, real_asctime = time.gmtime, time.strftime, time.asctime

        def gmtime(loop: ActorLoop, seconds: float | None = None) -> time.struct_time:
            return real_gmtime(wall(loop) // 1_000_000_000 if seconds is None else seconds)

        def clock_ns(loop: ActorLoop, clock: int) -> int:
            return wall(loop) if clock == time.CLOCK_REALTIME else monotonic_ns(loop)

        functions: dict[str, Callable[..., Any]] = {
            "time": lambda loop: wall(loop) / 1_000_000_000,
            "time_ns": wall,
            "gmtime": gmtime,
            "localtime": gmtime,
            "ctime": lambda loop, seconds=None: real_asctime(gmtime(loop, seconds)),
            "asctime": lambda loop, t=None: real_asctime(gmtime(loop) if t is None else t),
            "strftime": lambda loop, text, t=None: real_strftime(text, gmtime(loop) if t is None else t),
            "mktime": lambda loop, t: float(calendar.timegm(t)),
            "clock_gettime": lambda loop, clock: clock_ns(loop, clock) / 1_000_000_000,
            "clock_gettime_ns": clock_ns,
        }
        # CPU time is not modelled: a process is taken to compute all the time.
        for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
            functions[name] = ActorLoop.time
            functions[name + "_ns"] = monotonic_ns
        for name, simulated in functions.items():
            self._virtualise(time, name, simulated)

    # --- randomness ---

    def _key(self, loop: ActorLoop) -> str:
        """The actor's name; a later loop of the same name (none in the actor layer) gets a number of its own."""
        number = self._actors_named.get(loop.name, 0)
        self._actors_named[loop.name] = number + 1
        return loop.name if not number else f"{loop.name}#{number}"

    def _generator(self, loop: ActorLoop) -> StreamRandom:
        generator = self._generators.get(loop)
        if generator is None:
            key = self._key(loop)
            generator = self._generators[loop] = StreamRandom(self._streams.stream(f"virtual.random/{key}"))
            self._bytes[loop] = self._streams.stream(f"virtual.bytes/{key}")
        return generator

    def _urandom(self, loop: ActorLoop, size: int) -> bytes:
        self._generator(loop)
        return self._bytes[loop].bytes(size)

    def _virtualise_random(self) -> None:
        shared = random._inst  # type: ignore[attr-defined]  # the one behind its functions
        for name in sorted(vars(random)):
            real = getattr(random, name)
            if getattr(real, "__self__", None) is shared:
                self._virtualise(random, name, functools.partial(self._call_random, name))

        real_seed = random.Random.seed

        def seed(this: random.Random, a: Any = None, version: int = 2) -> None:
            loop = current_loop()
            if a is None and loop is not None:
                a = self._generator(loop).getrandbits(256)
            real_seed(this, a, version)

        self._patch(random.Random, "seed", seed)
        self._virtualise(os, "urandom", self._urandom)
        self._virtualise(os, "getrandom", lambda loop, size, flags=0: self._urandom(loop, size))
        # random.SystemRandom, and through it secrets and NumPy's unseeded default_rng(), draw from this name.
        self._patch(random, "_urandom", os.urandom)

        # NumPy's global generator is one a process, so it is one a run here: seeded, and put back at the end.
        state = np.random.get_state()
        self._undo.append(lambda: np.random.set_state(state))
        np.random.seed(self._streams.stream("virtual.numpy").next64() >> 32)

    def _call_random(self, name: str, loop: ActorLoop, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._generator(loop), name)(*args, **kwargs)

    # --- ids ---

    def _virtualise_ids(self) -> None:
        def pid(loop: ActorLoop) -> int:
            return _FIRST_PID + loop.index

        def node(loop: ActorLoop) -> int:
            # As a host without a network card: 48 bits, multicast bit set; the same for the life of the process.
            return 0x010000000000 | pid(loop)

        def uuid1(loop: ActorLoop, given: int | None = None, clock_seq: int | None = None, **kw: int) -> uuid.UUID:
            given = kw.get("node", given)
            stamp = max(self._wall_ns(loop) // 100 + _UUID1_EPOCH, self._last_uuid1.get(loop, 0) + 1)
            self._last_uuid1[loop] = stamp
            if clock_seq is None:
                clock_seq = self._generator(loop).getrandbits(14)
            low, mid, high = stamp & 0xFFFFFFFF, (stamp >> 32) & 0xFFFF, (stamp >> 48) & 0x0FFF
            fields = (low, mid, high, (clock_seq >> 8) & 0x3F, clock_seq & 0xFF, node(loop) if given is None else given)
            return uuid.UUID(fields=fields, version=1)

        self._virtualise(os, "getpid", pid)
        self._virtualise(uuid, "getnode", node)
        self._virtualise(uuid, "uuid1", uuid1)  # uuid4 draws from os.urandom

    # --- logging and warnings ---

    def _virtualise_logging(self) -> None:
        make = logging.getLogRecordFactory()

        def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            made = make(*args, **kwargs)
            loop = current_loop()
            if loop is not None:
                now_ns = self._wall_ns(loop)  # not what LogRecord read: versions of Python round it differently
                made.created = now_ns / 1_000_000_000
                made.msecs = float(now_ns // 1_000_000 % 1000)
                made.relativeCreated = loop._clock._now / 1_000_000
                made.process = made.thread = os.getpid()
                made.processName = made.threadName = loop.name
            return made

        logging.setLogRecordFactory(record)
        self._undo.append(lambda: logging.setLogRecordFactory(make))
        self._patch(logging.Formatter, "converter", staticmethod(time.localtime))

    def _never_awaited(self, coroutine: Any) -> None:
        code = coroutine.cr_code
        place = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        self._on_anomaly(current_loop(), "never_awaited", f"{coroutine.__qualname__} ({place}) was never awaited")
