"""CPython's own asyncio tests on the simulated loop: ``python -m sim.conformance [--canary] [--json] [modules...]``.

The tests come from the ``test`` package of the running interpreter. For their length our loop stands in for
``asyncio.new_event_loop``, the policy, what a Runner makes, and the loops that the tests build for themselves
(``test_utils.TestLoop``, ``BaseEventLoop``, ``SelectorEventLoop``). A test counts as *on our loop* only if callbacks
ran there, by the kernel's counter. A failing test is a *deviation* if ``sim/conformance_deviations.py`` gives the
reason, else unexplained; unexplained failures and reasons that no longer apply make the command fail.

With ``--canary`` the ready queue is turned around, and the command succeeds only if many tests then fail: the tests see
the order of callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import json
import platform
import signal
import subprocess
import sys
import types
import unittest
import warnings
from asyncio import base_events, events
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sim.clock import NodeClock
from sim.conformance_deviations import DEVIATIONS, Deviation
from sim.conformance_report import markdown, plain
from sim.kernel import Kernel
from sim.loop import ActorLoop

MODULES = (
    "test_locks",
    "test_queues",
    "test_taskgroups",
    "test_timeouts",
    "test_tasks",
    "test_waitfor",
    "test_futures",
    "test_runners",
)
CANARY_MUST_FAIL = 50
_TEST_LIMIT_S = 20.0  # of wall time: nothing here takes a second, but a turned-around queue may never end


class _Counted:
    """Callbacks run on our loops since the start, whichever kernel ran them; and whether the queue is turned around."""

    def __init__(self, canary: bool) -> None:
        self.callbacks = 0
        self.canary = canary


class _TestKernel(Kernel):
    def __init__(self, counted: _Counted) -> None:
        super().__init__()
        self._counted = counted

    def _iterate(self, loop: ActorLoop) -> None:
        if self._counted.canary and not loop._todo:
            loop._ready.reverse()
        before = self.callbacks
        try:
            super()._iterate(loop)
        finally:
            self._counted.callbacks += self.callbacks - before
        if isinstance(loop, _TimeChecked):
            loop.check_timers()


class _ExceptionHandling:
    """``call_exception_handler`` is ours, except where a test has put its mock in place of BaseEventLoop's."""

    def __get__(self, loop: ActorLoop, owner: type) -> Any:
        mocked = base_events.BaseEventLoop.call_exception_handler
        return mocked if isinstance(mocked, mock.Mock) else ActorLoop.call_exception_handler.__get__(loop)


class _Substitute(ActorLoop):
    """Our loop with what the tests expect to find on one of asyncio's: it logs, and has these private names."""

    counted: _Counted  # set on the subclass that `substituted` makes

    def __init__(self) -> None:
        kernel = _TestKernel(self.counted)
        super().__init__(kernel, "test", 0, NodeClock())
        kernel.loops.append(self)
        self._default_executor = None
        self._current_handle = None
        self.slow_callback_duration = 0.1

    # The reports that a run takes as anomalies go to asyncio's logger, where the tests look for them.
    # mypy: the base is no loop of CPython's, whose handling this is.
    default_exception_handler = base_events.BaseEventLoop.default_exception_handler  # type: ignore[assignment]

    call_exception_handler = _ExceptionHandling()  # type: ignore[assignment]  # as above

    def _run_once(self) -> None:
        self._kernel.run(lambda: True)


class _TimeChecked(_Substitute):
    """In place of ``test_utils.TestLoop``.

    TestLoop is told by the test's generator how far to move time, timer by timer. Here time moves by itself, as in a
    run; the generator is sent the same times of the same timers and makes its assertions, what it yields is not used,
    so that the times at the end come out of our own scheduling.
    """

    def __init__(self, gen: Callable[[], Iterator[Any]] | None = None) -> None:
        super().__init__()
        self._gen: Any = None
        self._timers: list[float] = []
        if gen is not None:
            self._gen = gen()
            next(self._gen)

    # mypy: they give what CPython's loops give, not our handles.

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = super().call_later(delay, callback, *args, context=context)
        self._timers.append(timer.when())
        return timer

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = super().call_at(when, callback, *args, context=context)
        self._timers.append(timer.when())
        return timer

    def advance_time(self, advance: float) -> None:
        self._clock._now += round(advance * 1_000_000_000)

    def check_timers(self) -> None:
        timers, self._timers = self._timers, []
        if self._gen is not None:
            for when in timers:
                try:
                    self._gen.send(when)
                except StopIteration:
                    raise AssertionError(f"the test expects no timer at {when}") from None

    def close(self) -> None:
        super().close()
        if self._gen is not None:
            try:
                self._gen.send(0)
            except StopIteration:
                pass
            else:
                raise AssertionError("the test expects a further timer")


class _TestTime(types.ModuleType):
    """``time`` as the test modules see it: on a running loop the clock is the loop's, and sleeping occupies it."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__("time")
        vars(self).update({name: value for name, value in vars(real).items() if not name.startswith("__")})

        def monotonic() -> float:
            loop = events._get_running_loop()
            return loop.time() if isinstance(loop, ActorLoop) else real.monotonic()

        def sleep(seconds: float) -> None:
            loop = events._get_running_loop()
            if isinstance(loop, ActorLoop):
                loop.occupy(round(seconds * 1_000_000_000))
            else:
                real.sleep(seconds)

        vars(self).update(monotonic=monotonic, perf_counter=monotonic, sleep=sleep)


@contextlib.contextmanager
def substituted(counted: _Counted, modules: Sequence[types.ModuleType]) -> Iterator[None]:
    """Our loop in place of asyncio's, everywhere that the tests make one."""
    from test.test_asyncio import utils as test_utils  # type: ignore[import-not-found]  # some builds leave it out

    substitute = type("Substitute", (_Substitute,), {"counted": counted})
    time_checked = type("TimeChecked", (_TimeChecked,), {"counted": counted})

    class Policy(events.BaseDefaultEventLoopPolicy):
        _loop_factory = substitute

        def get_child_watcher(self) -> Any:
            raise NotImplementedError

        def set_child_watcher(self, watcher: Any) -> None:
            raise NotImplementedError

    with contextlib.ExitStack() as stack:
        for name in ("BaseEventLoop", "SelectorEventLoop", "EventLoop", "DefaultEventLoopPolicy"):
            if hasattr(asyncio, name):
                chosen = Policy if name.endswith("Policy") else substitute
                stack.enter_context(mock.patch.object(asyncio, name, chosen))
        stack.enter_context(mock.patch.object(test_utils, "TestLoop", time_checked))
        for module in modules:
            if isinstance(getattr(module, "time", None), types.ModuleType):
                stack.enter_context(mock.patch.object(module, "time", _TestTime(module.time)))
        policy = vars(events)["_event_loop_policy"]
        asyncio.set_event_loop_policy(Policy())
        try:
            yield
        finally:
            asyncio.set_event_loop_policy(policy)


@dataclass
class ModuleReport:
    """What became of one module's tests: skipped + not_on_loop + passed + deviated + unexplained = collected."""

    module: str
    collected: int = 0
    skipped: int = 0
    not_on_loop: int = 0
    on_loop: int = 0
    passed: int = 0
    deviated: list[tuple[str, str]] = field(default_factory=list)
    unexplained: list[tuple[str, str]] = field(default_factory=list)


class _Result(unittest.TestResult):
    def __init__(self, counted: _Counted) -> None:
        super().__init__()
        self.counted = counted
        self.before = 0
        self.callbacks: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.was_skipped: set[str] = set()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.before = self.counted.callbacks
        signal.setitimer(signal.ITIMER_REAL, _TEST_LIMIT_S)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().stopTest(test)
        self.callbacks[test.id()] = self.counted.callbacks - self.before

    def _fail(self, test: Any, err: Any) -> None:
        # mypy: typeshed does not have unittest's own helper.
        self.failed.setdefault(test.id(), self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addError(self, test: Any, err: Any) -> None:
        self._fail(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._fail(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._fail(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.was_skipped.add(test.id())

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.failed.setdefault(test.id(), "unexpected success")


class _Overdue(KeyboardInterrupt):
    """A KeyboardInterrupt, for neither a task nor the loop catches that."""


def _overdue(signum: int, frame: Any) -> None:
    raise _Overdue(f"the test ran for more than {_TEST_LIMIT_S:.0f} s")


def _tests(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    found: list[unittest.TestCase] = []
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            found += _tests(one)
        else:
            found.append(one)
    return found


def short(test_id: str) -> str:
    """``test_locks.LockTests.test_repr``."""
    return test_id.removeprefix("test.test_asyncio.")


def run_module(name: str, counted: _Counted, deviations: Sequence[Deviation] = DEVIATIONS) -> ModuleReport:
    """Run one module of ``test.test_asyncio`` on our loop."""
    module = importlib.import_module(f"test.test_asyncio.{name}")
    tests = _tests(unittest.TestLoader().loadTestsFromModule(module))
    result = _Result(counted)
    report = ModuleReport(name)
    report.collected = len(tests)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts its background jobs deaf to Ctrl-C; tests of the runner send it to themselves.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    handler = signal.signal(signal.SIGALRM, _overdue)
    try:
        with substituted(counted, [module]), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for test in tests:
                try:
                    unittest.TestSuite([test]).run(result)
                except (Exception, KeyboardInterrupt):  # from tearDown of the Runner, or raised by the test itself
                    result.addError(test, sys.exc_info())
                    result.stopTest(test)
            gc.collect()  # what is destroyed late complains here, not on the user's terminal
    finally:
        signal.signal(signal.SIGALRM, handler)
    ids = [test.id() for test in tests]
    # What failed outside of any test: setUpClass, tearDownModule.
    report.unexplained += [(name, text) for name, text in result.failed.items() if name not in ids]
    for test_id in ids:
        ran = bool(result.callbacks.get(test_id))
        report.on_loop += ran
        if test_id in result.was_skipped:
            report.skipped += 1
        elif test_id in result.failed:
            reason = next((d.reason for d in deviations if d.matches(short(test_id))), None)
            if reason is None:
                report.unexplained.append((short(test_id), result.failed[test_id]))
            else:
                report.deviated.append((short(test_id), reason))
        elif ran:
            report.passed += 1
        else:
            report.not_on_loop += 1
    return report


def stale(reports: Sequence[ModuleReport], deviations: Sequence[Deviation] = DEVIATIONS) -> list[Deviation]:
    """Deviations of the modules that ran, for this Python, that no failing test needed."""
    ran = {report.module for report in reports}
    seen = [test for report in reports for test, _ in report.deviated]
    return [d for d in deviations if d.applies() and d.module in ran and not any(d.matches(test) for test in seen)]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: conforms (canary: red, as it must be); 1: it does not; 2: bad usage."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m sim.conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("--canary", action="store_true", help="turn the ready queue around: tests must fail")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(MODULES)} (default: all)")
    parser.add_argument("--write", metavar="FILE", help="write docs/conformance.md")
    parser.add_argument(
        "--also", metavar="PYTHON", action="append", default=[], help="with --write: and on this Python"
    )
    options = parser.parse_args(argv)
    unknown = [name for name in options.modules if name not in MODULES]
    if unknown:
        parser.error(f"unknown module {unknown[0]!r}; choose from {', '.join(MODULES)}")
    try:
        importlib.import_module("test.test_asyncio.utils")
    except ImportError as error:
        print(
            f"sim.conformance: this Python has no asyncio tests ({error}); install the interpreter's `test` package "
            "(Debian and Ubuntu: libpython3-testsuite)",
            file=sys.stderr,
        )
        return 2
    counted = _Counted(options.canary)
    reports = [run_module(name, counted) for name in options.modules or MODULES]
    old = [] if options.canary else stale(reports)
    if options.canary:
        ok = sum(len(r.unexplained) for r in reports) >= (CANARY_MUST_FAIL if not options.modules else 1)
    else:
        ok = not old and not any(r.unexplained for r in reports) and all(r.on_loop for r in reports)
    outcome = {
        "python": platform.python_version(),
        "canary": options.canary,
        "ok": ok,
        "callbacks": counted.callbacks,
        "modules": [asdict(r) for r in reports],
        "stale": [asdict(d) for d in old],
    }
    if options.json:
        print(json.dumps(outcome, indent=1))
    elif options.write:
        outcomes = [outcome, *(_outcome_of(python) for python in options.also)]
        canaries = [_outcome_of(python, "--canary") for python in (sys.executable, *options.also)]
        Path(options.write).write_text(markdown(outcomes, canaries), encoding="utf-8")
        print(
            f"wrote {options.write}: " + ", ".join(f"{o['python']} {'ok' if o['ok'] else 'NOT OK'}" for o in outcomes)
        )
        return 0 if all(o["ok"] for o in [*outcomes, *canaries]) else 1
    else:
        print(plain(outcome))
    return 0 if ok else 1


def _outcome_of(python: str, *options: str) -> dict[str, Any]:
    command = [python, "-m", "sim.conformance", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
