"""One replayed run with a rolling digest of (time, actor, event, draw), and the child process that makes some.

A checkpoint is taken at every write of the world (some hundred events). It chains the lines, the (time, actor) of
every iteration and the draws of every stream so far, so that the first one that differs brackets the divergence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from scenarios.load import Scenario, parse


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a run left behind for comparison. ``checkpoints``: (events so far, digest).

    ``reason`` and ``detail``: how it ended, as run.finished says it.
    """

    seed: int
    digest: str
    events: int
    checkpoints: tuple[tuple[int, str], ...]
    reason: str
    detail: str


def replay(
    scenario: Scenario,
    seed: int,
    *,
    copy_always: bool = True,
    explore: bool = False,
    collect: bool = False,
    spool: BinaryIO | None = None,
) -> Replay:
    """Run a seed without a judge.

    Args:
        copy_always: copy declared immutable messages too.
        explore: draw orders and delays from the seed.
        collect: run the garbage collector at every allocation.
        spool: takes a line for every iteration, event and batch of draws, to find the first one that differs.
    """
    from scenarios.sim_world import SimStage

    checkpoints: list[tuple[int, str]] = []
    chain = hashlib.sha256()

    def write(data: bytes) -> None:
        world = stage.world
        draws = world.streams.draws()
        chain.update(data)
        chain.update(f"{world.kernel.mix} {draws}".encode())
        checkpoints.append((world.seq, chain.hexdigest()[:16]))
        if spool is not None:
            spool.write(data)
            spool.write(f"draws {json.dumps(draws, sort_keys=True)}\n".encode())

    stage = SimStage(scenario, seed, write=write, explore=explore, copy_always=copy_always)
    if spool is not None:
        stage.world.kernel.trace = _tracer(spool)
    # A component may print; stdout is for results.
    with stage, contextlib.redirect_stdout(sys.stderr), _collecting() if collect else contextlib.nullcontext():
        result = stage.run()
    return Replay(seed, result.digest, result.events, tuple(checkpoints), result.reason, result.detail)


def _tracer(spool: BinaryIO) -> Callable[[int, Any, Any], None]:
    last = (-1, "")

    def trace(t_ns: int, loop: Any, handle: Any) -> None:
        nonlocal last
        if (t_ns, loop.name) != last:
            last = (t_ns, loop.name)
            spool.write(f"iteration at {t_ns} ns of {loop.name}\n".encode())

    return trace


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    """The collector at every allocation. The kernel switches it off for the length of a run; here it must not."""
    disable, thresholds, enabled = gc.disable, gc.get_threshold(), gc.isenabled()
    gc.disable = lambda: None
    gc.set_threshold(1)
    gc.enable()
    try:
        yield
    finally:
        gc.disable = disable
        gc.set_threshold(*thresholds)
        if not enabled:
            gc.disable()


def _end_with(stdin: int) -> None:
    os.read(stdin, 1)
    os._exit(1)


def main() -> None:
    """The child process: a request as a line of JSON on stdin, a Replay a line as JSON on stdout."""
    line = sys.stdin.readline()
    if not line:  # the proof has ended already
        return
    request = json.loads(line)
    # Its stdin ends when the proof is interrupted or killed, and it must not outlive that. A read, not a loop that
    # sleeps: what a thread allocates would set off collections of its own.
    threading.Thread(target=_end_with, args=(os.dup(0),), daemon=True).start()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a component that reads its stdin finds nothing there
    scenario = parse(request["text"], request["source"], pathlib.Path(request["folder"]))
    for seed in request["seeds"]:
        with contextlib.ExitStack() as stack:
            spool = stack.enter_context(open(request["spool"], "wb")) if request["spool"] else None
            done = replay(scenario, seed, collect=seed in request["collected"], spool=spool, **request["options"])
        print(json.dumps(dataclasses.asdict(done)), flush=True)


if __name__ == "__main__":
    main()
