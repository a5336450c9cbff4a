"""The watchdog of callbacks that never come back. What a scenario makes of it: tests/scenarios/test_endless.py."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from sim.clock import SimulationStopped
from sim.kernel import Kernel
from sim.watchdog import Watchdog


def test_somebody_elses_alarm_and_handlers_are_put_back() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with Watchdog(Kernel(), 5.0):
            time.sleep(0.3)
        assert not rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        time.sleep(0.1)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_callback_that_waits_without_a_cpu_is_found_too() -> None:
    kernel = Kernel()
    loop = kernel.new_loop("a")
    loop.call_soon(threading.Event().wait)
    with pytest.raises(SimulationStopped, match="a, task Event.wait: ") as caught, Watchdog(kernel, 0.3):
        kernel.run(lambda: False)
    assert caught.value.reason == "endless_callback"


def test_an_interrupt_that_a_component_swallows_comes_again() -> None:
    kernel = Kernel()
    loop = kernel.new_loop("a")
    swallowed: list[BaseException] = []

    def swallow() -> None:
        while True:
            try:
                if not swallowed:
                    signal.raise_signal(signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt as error:
                if swallowed:
                    raise
                swallowed.append(error)

    loop.call_soon(swallow)
    with pytest.raises(KeyboardInterrupt), Watchdog(kernel, 2.0):
        kernel.run(lambda: False)
    assert len(swallowed) == 1
