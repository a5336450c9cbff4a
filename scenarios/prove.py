"""The replay proof: the same seed, again and again in different ways, must leave the same digest.

The ways: again in this process; with declared immutable messages copied or not; in a new process under another
PYTHONHASHSEED, after the other seeds in reverse; with the garbage collector at every allocation; in other interpreters.
The last three are gone both with the default orders and, as every run of a sweep is, with orders and delays drawn from
the seed. A difference is named by the first iteration, event or draw that differs, both sides shown. A run that did not
complete is told: what would have come later has not been replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from analysis.errors import BadInput
from scenarios.load import Scenario
from scenarios.replay import Replay, replay

OTHER_HASH_SEED = "4242"
COLLECTED_SEEDS = 3
"""Collecting at every allocation costs several times the run, so only so many seeds are replayed that way."""

NO_OPTIONS: Final[dict[str, Any]] = {}
EXPLORED: Final[dict[str, Any]] = {"explore": True}
"""Options of a replay whose orders and delays are drawn from the seed."""

Result = Literal["pass", "fail", "inconclusive"]

_SIDE = 240  # characters shown of each side, and of why a run did not complete


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where two runs of one seed part. ``where`` names it; the two sides are lines of the replayed runs."""

    seed: int
    way: str
    where: str
    reference: str
    other: str


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A run that ended before it was complete. ``explored``: its orders and delays were drawn from the seed."""

    seed: int
    explored: bool
    reason: str
    detail: str

    def line(self) -> str:
        drawn = ", orders and delays drawn" if self.explored else ""
        return f"seed {self.seed}{drawn}: the run did not complete: {self.reason}: {self.detail}"


@dataclasses.dataclass
class Proof:
    """What was replayed, where it parted, and which runs did not complete."""

    scenario: str
    seeds: list[int]
    ways: dict[str, int]
    """Way to number of seeds that it covered."""
    divergences: list[Divergence]
    events: int
    unfinished: list[Unfinished] = dataclasses.field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Every run of every seed completed, and all of them are equal."""
        return self.result == "pass"

    @property
    def result(self) -> Result:
        if self.divergences:
            return "fail"
        return "inconclusive" if self.unfinished else "pass"

    def lines(self) -> Iterator[str]:
        """For people."""
        for way, count in self.ways.items():
            parted = sum(divergence.way == way for divergence in self.divergences)
            yield f"{'differs' if parted else 'equal':<8} {way}: {count} seeds" + (
                f", {parted} differ" if parted else ""
            )
        for one in self.divergences[:5]:
            yield f"seed {one.seed}, {one.way}: {one.where}"
            yield f"  reference: {one.reference}"
            yield f"  other:     {one.other}"
        for one_run in self.unfinished[:5]:
            yield _cut(one_run.line())
        if len(self.unfinished) > 5:
            yield f"{len(self.unfinished) - 5} more runs did not complete"
        span = f"{self.seeds[0]} to {self.seeds[-1]}" if len(self.seeds) > 1 else str(self.seeds[0])
        yield f"{self.result.upper()}: {self.scenario}, seeds {span}, {self.events} events a side"

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "seeds": self.seeds,
            "result": self.result,
            "ways": self.ways,
            "events": self.events,
            "divergences": [dataclasses.asdict(one) for one in self.divergences],
            "unfinished": [dataclasses.asdict(one) for one in self.unfinished],
        }


class Way:
    """A way to replay seeds in this process, held against a replay in this process.

    Args:
        scenario: what is replayed.
        name: how the way is called.
        options: of ``replay``, for both sides or for this one alone.
        against: of ``replay``, for the reference.
    """

    limit: int | None = None
    """At most this many seeds."""

    def __init__(self, scenario: Scenario, name: str, options: dict[str, Any], against: dict[str, Any]) -> None:
        self.scenario = scenario
        self.name = name
        self.options = options
        self.against = against

    def replays(self, seeds: Sequence[int]) -> Iterator[Replay]:
        """The seeds, replayed this way, in any order."""
        for seed in seeds:
            yield replay(self.scenario, seed, **self.options)

    def spool(self, seed: int, path: pathlib.Path) -> None:
        """Replay a seed once more, every step of it written to a file."""
        with open(path, "wb") as file:
            replay(self.scenario, seed, spool=file, **self.options)


class OtherProcess(Way):
    """A way that replays seeds in a new process under another hash seed, the last one first.

    Args:
        python: the interpreter.
        options, against: as of every way.
        collect: with the collector at every allocation, as many seeds as that is for.
        rest: and the other seeds without; else the way is for those alone.
    """

    def __init__(
        self,
        scenario: Scenario,
        name: str,
        python: str,
        options: dict[str, Any] = NO_OPTIONS,
        against: dict[str, Any] = NO_OPTIONS,
        *,
        collect: bool = False,
        rest: bool = False,
    ) -> None:
        super().__init__(scenario, name, options, against)
        self._python = python
        self._collect = collect
        self._collected: Sequence[int] = ()
        self.limit = COLLECTED_SEEDS if collect and not rest else None

    def replays(self, seeds: Sequence[int]) -> Iterator[Replay]:
        self._collected = seeds[:COLLECTED_SEEDS] if self._collect else ()
        yield from self._ask(seeds[::-1], "")

    def spool(self, seed: int, path: pathlib.Path) -> None:
        list(self._ask([seed], str(path)))

    def _ask(self, seeds: Sequence[int], spool: str) -> Iterator[Replay]:
        request = {
            "text": self.scenario.text,
            "source": self.scenario.source,
            "folder": str(self.scenario.folder),
            "seeds": list(seeds),
            "collected": list(self._collected),
            "options": self.options,
            "spool": spool,
        }
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            try:
                child = subprocess.Popen(
                    [self._python, "-m", "scenarios.replay"], env=_environment(), text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                )  # fmt: skip
            except OSError as error:
                raise _not_started(self._python, error) from error
            out = ""
            # On the way out its stdin is closed, which ends it. A broken pipe, at the write or at the closing with what
            # could not be written: it has ended already, and said why.
            with contextlib.suppress(BrokenPipeError), child:
                assert child.stdin is not None and child.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(json.dumps(request) + "\n")
                    child.stdin.flush()
                out = child.stdout.read()
            if child.returncode:
                said.seek(0)
                last = said.read().strip().splitlines()[-1:] or ["no message"]
                raise BadInput(f"{self._python}: the replay failed there: {last[0]}")
        for line in out.splitlines():
            done = json.loads(line)
            checkpoints = tuple((events, digest) for events, digest in done["checkpoints"])
            yield Replay(**{**done, "checkpoints": checkpoints})


def _environment() -> dict[str, str]:
    """Of a replay in a process of its own."""
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONHASHSEED": OTHER_HASH_SEED, "PYTHONPATH": os.pathsep.join(paths)}


def _not_started(python: str, error: OSError) -> BadInput:
    return BadInput(f"{python}: cannot be started ({error.strerror}); name a Python interpreter")


def check_interpreter(python: str) -> None:
    """Have an interpreter import what a replay needs: better now than after the proof of a hundred seeds.

    Raises:
        BadInput: it cannot be started, has not got what is needed, or is no Python.
    """
    try:
        done = subprocess.run(
            [python, "-c", "import scenarios.replay; print('ready')"], env=_environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise _not_started(python, error) from error
    if done.returncode or done.stdout.strip() != "ready":
        last = done.stderr.strip().splitlines()[-1:] or ["it is no Python interpreter"]
        raise BadInput(f"{python}: cannot replay: {last[0]}")


def ways_of(scenario: Scenario, pythons: Sequence[str]) -> list[Way]:
    """Every way of the proof."""
    here = sys.executable
    elsewhere = f"new process, PYTHONHASHSEED={OTHER_HASH_SEED}, seeds in reverse"
    collecting = "collection at every allocation"
    drawn = "orders and delays drawn"
    as_swept = {**EXPLORED, "copy_always": False}  # as a sweep runs its seeds
    swept = f"{elsewhere}, {drawn} as in a sweep (the first {COLLECTED_SEEDS} with {collecting})"
    ways = [
        Way(scenario, "again in this process, after the other seeds", {}, {}),
        Way(scenario, "declared immutable messages not copied", {"copy_always": False}, {}),
        OtherProcess(scenario, elsewhere, here),
        OtherProcess(scenario, swept, here, as_swept, EXPLORED, collect=True, rest=True),
        OtherProcess(scenario, f"new process, {collecting}", here, collect=True),
    ]
    for path in pythons:
        ways.append(OtherProcess(scenario, f"interpreter {path}", path))
        ways.append(OtherProcess(scenario, f"interpreter {path}, {drawn}", path, as_swept, EXPLORED))
    return ways


def prove_scenario(
    scenario: Scenario, first: int, count: int, pythons: Sequence[str], note: Callable[[str], None]
) -> Proof:
    """Replay ``count`` seeds from ``first`` on, in every way.

    Args:
        pythons: further interpreters; each must have the package's dependencies.
        note: takes lines about the progress.

    Raises:
        BadInput: an interpreter cannot run the replay.
    """
    for python in pythons:
        check_interpreter(python)
    seeds = list(range(first, first + count))
    proof = Proof(scenario.name, seeds, {}, [], 0)
    references: dict[str, dict[int, Replay]] = {}
    for way in ways_of(scenario, pythons):
        note(f"{scenario.name}: {way.name}")
        against = references.setdefault(json.dumps(way.against), {})
        chosen = seeds[: way.limit]
        for seed in chosen:
            if seed not in against:
                against[seed] = done = replay(scenario, seed, **way.against)
                if done.reason != "completed":
                    explored = bool(way.against.get("explore"))
                    proof.unfinished.append(Unfinished(seed, explored, done.reason, done.detail))
        proof.events = sum(one.events for one in references["{}"].values())
        replayed = 0
        for other in way.replays(chosen):
            replayed += 1
            found = _compare(scenario, way, against[other.seed], other)
            if found is not None:
                proof.divergences.append(found)
        if replayed < len(chosen):
            raise BadInput(f"{way.name}: only {replayed} of {len(chosen)} seeds came back")
        proof.ways[way.name] = replayed
    return proof


def _compare(scenario: Scenario, way: Way, reference: Replay, other: Replay) -> Divergence | None:
    if other.digest == reference.digest and other.checkpoints == reference.checkpoints:
        return None
    with tempfile.TemporaryDirectory(prefix="seatrial-prove-") as folder:
        ours, theirs = pathlib.Path(folder, "reference"), pathlib.Path(folder, "other")
        with open(ours, "wb") as file:
            replay(scenario, reference.seed, spool=file, **way.against)
        way.spool(reference.seed, theirs)
        found = first_difference(ours, theirs)
    if found is None:
        # A second try agreed: what is left of the first are its checkpoints.
        found = (_bracket(reference, other), reference.digest, other.digest)
    return Divergence(reference.seed, way.name, *found)


def first_difference(ours: pathlib.Path, theirs: pathlib.Path) -> tuple[str, str, str] | None:
    """Where two spools part: (what and after which event, our line, their line); None when they are equal."""
    events = 0
    with open(ours, "rb") as one, open(theirs, "rb") as other:
        while True:
            left, right = one.readline(), other.readline()
            if left != right:
                what = "draws" if left.startswith(b"draws") else "iteration" if left.startswith(b"iter") else "event"
                return f"first different {what} after event {events}", _shown(left), _shown(right)
            if not left:
                return None
            events += left.startswith(b"{")


def _shown(line: bytes) -> str:
    return _cut(line.decode(errors="replace").rstrip("\n") or "(the run has ended)")


def _cut(text: str) -> str:
    return text if len(text) <= _SIDE else text[:_SIDE] + "..."


def _bracket(reference: Replay, other: Replay) -> str:
    before = 0
    for (events, digest), (_, other_digest) in zip(reference.checkpoints, other.checkpoints, strict=False):
        if digest != other_digest:
            return f"parted between events {before} and {events}, and not again in a second try"
        before = events
    return f"parted after event {before}, and not again in a second try"
