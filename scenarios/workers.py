"""Worker processes of a sweep: each runs many seeds. None outlives the sweep, and one that dies costs one seed.

A worker reads a JSON line with seeds on its stdin and writes one for each result. It ends when its stdin does, so also
when the sweep is killed. Ctrl-C reaches every process of a terminal, but only the sweep answers it: its workers are
started with SIGINT blocked, from their first instruction on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import IO, Any

from analysis.errors import BadInput

_PIECE = 1 << 16
_LAST_BREATH_S = 10.0  # from the end of its output to that of the process
_STILLBORN = 5
"""So many workers may be killed before they have begun: somebody may do that once; more will never begin."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """A seed whose worker died. ``how``: of what."""

    seed: int
    how: str


class Worker:
    """One process, as the sweep sees it."""

    def __init__(self, request: dict[str, Any]) -> None:
        root = str(pathlib.Path(__file__).resolve().parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scenarios.workers"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._commands: IO[bytes] = self.process.stdin
        self.results: IO[bytes] = self.process.stdout
        self.open: deque[int] = deque()  # seeds that it was given, in order, without those that it has done
        self.ready = False
        self._rest = b""
        self._write(request)

    def give(self, seeds: Sequence[int]) -> None:
        self.open.extend(seeds)
        self._write(list(seeds))

    def _write(self, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: its stdout says so next
            self._commands.write(json.dumps(value).encode() + b"\n")
            self._commands.flush()

    def read(self) -> list[Any] | None:
        """What it has said since, or None at its end."""
        piece = os.read(self.results.fileno(), _PIECE)
        if not piece:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Kill it and wait for it."""
        self.process.kill()
        self.buried()

    def buried(self) -> int:
        """Wait for one whose results have ended. Returns its exit code, of a signal the negative number."""
        try:
            code = self.process.wait(_LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.results.close()
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        return code


def run_in_workers(
    request: dict[str, Any], seeds: range, jobs: int, batch: int
) -> Generator[dict[str, Any] | Lost, None, None]:
    """The results of seeds as they come; a seed whose worker died is :class:`Lost`, and the others go on.

    Args:
        request: what a worker needs to know, see :func:`main`.
        seeds: to run.
        jobs: worker processes at a time.
        batch: seeds that a worker is given at once.

    Raises:
        BadInput: workers cannot be started.
    """
    todo: deque[int] = deque(seeds)
    workers: dict[int, Worker] = {}  # by descriptor
    stillborn = 0
    selector = selectors.DefaultSelector()
    try:
        while todo or workers:
            while todo and len(workers) < jobs:
                with _interrupts_wait():
                    worker = Worker(request)
                    workers[worker.results.fileno()] = worker
                    selector.register(worker.results, selectors.EVENT_READ, worker)
                _give(worker, todo, batch)
            for key, _ in selector.select():
                worker = key.data
                said = worker.read()
                if said is None:
                    with _interrupts_wait():
                        selector.unregister(worker.results)
                        del workers[key.fd]
                        code = worker.buried()
                    if not worker.ready:
                        stillborn += 1
                        if code >= 0 or stillborn >= _STILLBORN:
                            how = how_it_ended(code)
                            raise BadInput(f"a worker process ended before it began ({how}); what it said is above")
                    elif worker.open:
                        yield Lost(worker.open.popleft(), how_it_ended(code))
                    todo.extendleft(reversed(worker.open))
                    continue
                for result in said:
                    if not worker.ready:
                        worker.ready = True  # its first line says that it could read the scenario
                        continue
                    worker.open.popleft()
                    yield result
                if worker.ready and not worker.open:
                    if todo:
                        _give(worker, todo, batch)
                    else:
                        with _interrupts_wait():
                            selector.unregister(worker.results)
                            del workers[key.fd]
                            worker.end()
    finally:
        with _interrupts_wait():
            for worker in workers.values():
                worker.end()
            selector.close()


def _give(worker: Worker, todo: deque[int], batch: int) -> None:
    worker.give([todo.popleft() for _ in range(min(batch, len(todo)))])


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits until the block is over; a process started in it never hears one.

    The mask is for that process. This one may have further threads (NumPy's), which take the signal all the same.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if main:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came and callable(handler):
            handler(signal.SIGINT, None)


# --- in the worker ---


def main() -> None:
    """The worker process: a request, then lists of seeds, a JSON line each, on stdin; a result a seed on stdout."""
    # Kept from what a component reads or prints: its stdin is empty, and its stdout is stderr.
    with open(os.devnull, "rb") as nothing:
        commands = os.fdopen(os.dup(0), "rb")
        results = os.fdopen(os.dup(1), "wb")
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def say(value: Any) -> None:
        try:
            results.write(json.dumps(value).encode() + b"\n")
            results.flush()
        except BrokenPipeError:
            os._exit(0)  # the sweep is dead

    from scenarios.load import parse
    from scenarios.seeds import run_seeds

    line = commands.readline()
    if not line:  # the sweep has ended already
        return
    request = json.loads(line)
    try:
        scenario = parse(request["text"], request["source"], pathlib.Path(request["folder"]))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    batches: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    threading.Thread(target=_take, args=(commands, batches.put), daemon=True).start()
    say("ready")
    seeds = (seed for batch in iter(batches.get, None) for seed in batch)
    for result in run_seeds(scenario, seeds, hang_after_s=request["hang_after_s"]):
        say(dataclasses.asdict(result))


def _take(commands: IO[bytes], put: Callable[[list[int]], None]) -> None:
    for line in commands:
        put(json.loads(line))
    os._exit(0)  # the sweep is over, or dead


if __name__ == "__main__":
    main()
