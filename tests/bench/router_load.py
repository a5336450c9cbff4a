"""One run of the comparison with sglang-router: fresh engines, one front, a seeded load and a script of faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import pathlib
import random
import signal
import time
from typing import Any

import aiohttp

from tests.bench.router_counts import Figures, Marks, Seen, Sent, counts, quantile
from tests.bench.router_fleet import Arm, Engine, Front, front

ENGINES = 3
PROMPT, NEW = 128, 128
RATE = 24.0
"""Requests a second of the open load; its arrivals are a Poisson stream of the seed, the same for every front."""
CLOSED_S, CLOSED_AT_ONCE, CLOSED_NEW = 4.0, 32, 4
DRAIN_S = 15.0
"""For answers after the last request was sent; what has none by then is lost."""


@dataclasses.dataclass(frozen=True)
class Script:
    """Seconds from the first request to each event."""

    kill: float = 5.0
    restart: float = 6.0
    stop: float = 12.0
    cont: float = 18.0
    start_new: float = 20.0
    replace: float = 22.5
    kill_old: float = 24.0
    end: float = 26.0


async def _one(session: aiohttp.ClientSession, url: str, rid: str, new: int) -> Sent:
    body = {
        "rid": rid,
        "input_ids": [1 + (int(rid[-6:]) * 7 + k * k) % 900 for k in range(PROMPT)],
        "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "temperature": 0},
    }
    sent = time.monotonic()
    try:
        async with session.post(f"{url}/generate", json=body) as answer:
            document: Any = await answer.json(content_type=None)
            ended = time.monotonic()
            if answer.status != 200:
                return Sent(rid, sent, ended, False, f"status {answer.status}: {str(document)[:80]}")
            tokens = len(document["output_ids"])
            return Sent(rid, sent, ended, tokens == new, "" if tokens == new else f"{tokens} tokens")
    except (aiohttp.ClientError, ConnectionError, ValueError, KeyError, TypeError) as error:
        return Sent(rid, sent, time.monotonic(), False, type(error).__name__)
    except asyncio.CancelledError:
        return Sent(rid, sent, math.inf, False, "no answer")


async def closed(session: aiohttp.ClientSession, served: Front) -> Figures:
    """So many requests at once for a while: requests a second, latencies, the front's processor time."""
    answers: list[Sent] = []
    began, cpu = time.monotonic(), served.cpu_s()
    number = iter(range(10**6))

    async def worker() -> None:
        while time.monotonic() - began < CLOSED_S:
            n = next(number)
            answers.append(await _one(session, served.urls[n % len(served.urls)], f"closed-{n:06d}", CLOSED_NEW))

    await asyncio.gather(*(worker() for _ in range(CLOSED_AT_ONCE)))
    took = time.monotonic() - began
    good = [one.latency for one in answers if one.ok]
    return {
        "closed requests": len(answers),
        "closed lost": len(answers) - len(good),
        "requests/s": len(good) / took,
        "closed p50": quantile(good, 0.5),
        "closed p99": quantile(good, 0.99),
        "front CPU ms/request": 1000 * (served.cpu_s() - cpu) / len(answers),
    }


async def faulted(
    session: aiohttp.ClientSession,
    served: Front,
    engines: list[Engine],
    folder: pathlib.Path,
    seed: int,
    script: Script,
) -> Figures:
    """The open load with the script; ``engines`` grows by those that are started. RuntimeError if a step fails."""
    draw = random.Random(seed)
    began = time.monotonic()
    before = served.retries()
    tasks: list[asyncio.Task[Sent]] = []
    first, second, third = engines[:3]

    async def until(after: float) -> None:
        await asyncio.sleep(max(0.0, began + after - time.monotonic()))

    async def load() -> None:
        after = 0.0
        while (after := after + draw.expovariate(RATE)) < script.end:
            await until(after)
            rid = f"load-{len(tasks):06d}"
            url = served.urls[len(tasks) % len(served.urls)]
            tasks.append(asyncio.create_task(_one(session, url, rid, NEW)))

    async def faults() -> Marks:
        await until(script.kill)
        killed = time.monotonic()
        second.process.kill()
        await until(script.restart)
        second.end()
        again = Engine(folder, "second again", second.port)
        engines.append(again)
        await until(script.stop)
        listening = again.listening()
        if listening is None:
            raise RuntimeError(f"the restarted engine did not listen in time\n{again.words()}")
        stopped = time.monotonic()
        first.process.send_signal(signal.SIGSTOP)
        await until(script.cont)
        continued = time.monotonic()
        first.process.send_signal(signal.SIGCONT)
        await until(script.start_new)
        new = Engine(folder, "new", None)
        engines.append(new)
        await until(script.replace)
        await asyncio.to_thread(new.wait)
        await asyncio.to_thread(served.replace, third, new)
        told = time.monotonic()
        await until(script.kill_old)
        third.process.kill()
        await until(script.end)
        return Marks(
            began=began, killed=killed, restarted=again.name, listening=listening, stopped=stopped,
            stopped_engine=first.name, continued=continued, told=told, new=new.name, removed=third.name,
            ended=time.monotonic(),
        )  # fmt: skip

    _, marks = await asyncio.gather(load(), faults())
    _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
    for task in late:
        task.cancel()
    sent = [await task for task in tasks]
    retries = served.retries() - before
    seen: list[Seen] = [one for engine in engines for one in engine.seen("load-")]
    found = counts(sent, seen, marks)
    for why in sorted({one.why for one in sent if not one.ok}):
        print(f"    lost: {sum(one.why == why for one in sent)} x {why}", flush=True)
    return {**found, "sends repeated": retries}


async def _run(served: Front, engines: list[Engine], folder: pathlib.Path, seed: int, script: Script | None) -> Figures:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        found = await closed(session, served)
        if script is not None:
            found |= await faulted(session, served, engines, folder, seed, script)
        return found


def measure(arm: Arm, folder: pathlib.Path, python: str, seed: int, script: Script | None = None) -> Figures:
    """One run of one arm with engines of its own. Without anything in front there are no faults.

    Raises:
        RuntimeError, ValueError: a process did not do its part, or the records do not fit.
    """
    script = script or Script()
    with contextlib.ExitStack() as stack:
        engines: list[Engine] = []
        stack.callback(lambda: [engine.end() for engine in engines])
        for name in ("first", "second", "third"):
            engines.append(Engine(folder, name))
        for engine in engines:
            engine.wait()
        served = front(arm, folder, engines, python)
        stack.callback(served.end)
        return asyncio.run(_run(served, engines, folder, seed, None if arm.kind == "direct" else script))
