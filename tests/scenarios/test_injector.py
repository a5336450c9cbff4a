"""When steps fire, at whom, and when the run is quiet, against a port of our own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protocol.evidence import Event
from scenarios.injector import NS, Aim, Injector, SeenReplica, StepRefused
from scenarios.load import parse
from tests.scenarios.conftest import ROOT, SMALL


class Port:
    """A world of its own: a clock, hooks, and faults that only take note."""

    def __init__(self) -> None:
        self.now = 1_000
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.hooks: dict[str, list[Callable[[Event], None]]] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.injected: list[tuple[str, Aim, dict[str, Any], float | None]] = []
        self.in_force = 0
        self.seen: list[SeenReplica] = []
        self.verbs: list[str] = []
        self.effects: list[str] = []

    def now_ns(self) -> int:
        return self.now

    def at(self, t_ns: int, fire: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (t_ns, next(self.number), fire))

    def run(self, until_s: float) -> None:
        while self.queue and self.queue[0][0] <= 1_000 + until_s * NS:
            self.now, _, fire = heapq.heappop(self.queue)
            fire()

    def hook(
        self, kind: str, see: Callable[[Event], None], *, where: dict[str, Any], from_ns: int, wait: bool
    ) -> Callable[[], None]:
        self.hooks.setdefault(kind, []).append(see)
        return lambda: self.hooks[kind].remove(see)

    def emit(self, kind: str, actor: str, **data: Any) -> None:
        for see in list(self.hooks.get(kind, ())):
            see(Event(1, self.now, kind, actor, 0, 1, 1, None, data))
        self.effects.append(f"{kind} took effect")

    def observe(self, kind: str, **data: Any) -> None:
        self.log.append((kind, data))

    def replicas(self, service: str) -> Sequence[SeenReplica]:
        return self.seen

    def below(self, n: int) -> int:
        return n - 1

    def inject(
        self, name: str, aim: Aim, params: dict[str, Any], *, must_hit: Any, for_s: Any, transient: bool
    ) -> None:
        if aim.name == "chat-1":
            raise StepRefused("it is dead already")
        self.effects.append(f"{name} injected")
        self.injected.append((name, aim, must_hit, for_s))
        self.in_force += not transient

    def heal_all(self) -> None:
        self.in_force = 0

    def active(self) -> int:
        return self.in_force

    def timed(self) -> int:
        return self.in_force

    def verb(self, name: str, params: Any) -> None:
        self.verbs.append(name)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data in self.log if name == kind]


def _injector(*steps: str) -> tuple[Injector, Port]:
    port = Port()
    text = SMALL.replace("acceptance:", "steps:\n" + "".join(f"  - {step}\n" for step in steps) + "acceptance:")
    injector = Injector(parse(text, "f.yaml", ROOT), port, lambda: None)
    injector.begin()
    return injector, port


def test_times_count_from_the_start_of_the_workload() -> None:
    injector, port = _injector("{at_s: 2, do: note, with: {text: a}}", "{at_s: 1, do: note, with: {text: b}}")
    port.run(1.5)
    assert [step["step"] for step in port.of("run.step")] == [1] and not injector.quiet()
    port.run(3)
    assert port.of("run.step")[1] == {
        "step": 0, "do": "note", "asked_ns": 1_000 + 2 * NS, "trigger": None, "phase": None, "held": False,
        "late_ns": 0,
    }  # fmt: skip
    assert injector.quiet() and port.verbs == ["note", "note"]


def test_the_nth_event_that_matches_fires_with_its_id() -> None:
    when = "when: {event: engine.accepted, where: {running: 3, actor: chat-0}, nth: 2}"
    _, port = _injector(f"{{{when}, do: sigkill, target: replica_of_trigger}}")
    for actor, running in (("chat-0", 3), ("chat-1", 3), ("chat-0", 2), ("chat-0", 3), ("chat-0", 3)):
        port.emit("engine.accepted", actor, request="r", running=running, queued=0)
        port.run(0)
    assert [step["trigger"] for step in port.of("run.step")] == ["chat-0/0/1"]
    assert [aim.name for _, aim, _, _ in port.injected] == ["chat-0"]


def test_only_events_of_the_named_service_count_for_a_fault_of_their_replica() -> None:
    target = "{process: replica_of_trigger, service: chat}"
    _, port = _injector(f"{{when: {{event: engine.accepted, nth: 2}}, do: sigkill, target: {target}}}")
    for actor in ("policy-0", "chat-0", "gateway-chat-0", "policy-0", "chat-2"):
        port.emit("engine.accepted", actor, request="r", running=1, queued=0)
        port.run(0)
    assert [aim.name for _, aim, _, _ in port.injected] == ["chat-2"]


@pytest.mark.parametrize(
    ("phase", "order"),
    [
        ("before", ["sigkill injected", "engine.accepted took effect"]),
        ("after", ["engine.accepted took effect", "sigkill injected"]),
    ],
)
def test_phase_is_before_or_after_the_effect(phase: str, order: list[str]) -> None:
    _, port = _injector(f"{{when: {{event: engine.accepted, phase: {phase}}}, do: sigkill, target: chat-0}}")
    port.emit("engine.accepted", "chat-0", request="r", running=1, queued=0)
    port.run(0)
    assert port.effects == order


def test_events_before_from_s_do_not_count_and_after_s_waits() -> None:
    step = "{when: {event: engine.ready, from_s: 1}, after_s: 2, do: note, with: {text: a}}"
    _, port = _injector(step)
    port.emit("engine.ready", "chat-0", version="", weight_hash="")
    port.now = 1_000 + NS
    port.emit("engine.ready", "chat-0", version="", weight_hash="")
    port.run(2.9)
    assert not port.verbs
    port.run(3)
    assert port.verbs == ["note"]


def test_events_before_the_one_that_it_comes_after_do_not_count() -> None:
    after = "after: {event: actor.died, where: {actor: chat-1}}"
    _, port = _injector(f"{{when: {{event: engine.accepted, nth: 2, {after}}}, do: note, with: {{text: a}}}}")
    for _ in range(3):
        port.emit("engine.accepted", "chat-0", request="r", running=1, queued=0)
    port.emit("actor.died", "chat-2", reason="killed", detail="")
    port.emit("engine.accepted", "chat-0", request="r", running=1, queued=0)
    port.emit("actor.died", "chat-1", reason="killed", detail="")
    port.emit("engine.accepted", "chat-0", request="r", running=1, queued=0)
    port.run(0)
    assert not port.verbs and not port.hooks["actor.died"]
    port.emit("engine.accepted", "chat-0", request="r", running=1, queued=0)
    port.run(0)
    assert port.verbs == ["note"]


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [("busiest_replica", "b"), ("newest_replica", "c"), ("oldest_replica", "a"), ("any_replica", "c")],
)
def test_selectors(selector: str, chosen: str) -> None:
    _, port = _injector(f"{{at_s: 1, do: sigkill, target: {selector}}}")
    port.seen = [SeenReplica("a", 1, 1), SeenReplica("b", 4, 2), SeenReplica("c", 4, 3)]
    port.run(1)
    assert port.injected[0][1] == Aim(name=chosen)


def test_no_replica_alive_and_a_dead_target_are_told_and_count_as_not_injected() -> None:
    injector, port = _injector("{at_s: 1, do: sigkill, target: any_replica}", "{at_s: 2, do: sigkill, target: chat-1}")
    port.run(2)
    assert not port.injected and injector.refused == [
        "steps[0] sigkill: no replica is alive for 'any_replica'",
        "steps[1] sigkill: it is dead already",
    ]
    assert not port.of("run.healed")


def test_links_and_paths_and_what_must_be_hit() -> None:
    _, port = _injector(
        "{at_s: 1, do: reply_lost, target: {link: {from: gateway-chat-0, to: busiest_replica}}, with: {count: 2}}",
        "{at_s: 2, do: slow_export, target: {path: exports}, for_s: 3, must_hit: {hits: {at_least: 4}}}",
    )
    port.seen = [SeenReplica("chat-0", 0, 0)]
    port.run(2)
    assert port.injected == [
        ("reply_lost", Aim(source="gateway-chat-0", destination="chat-0"), {"hits": {"at_least": 1}}, None),
        ("slow_export", Aim(prefix="exports"), {"hits": {"at_least": 4}}, 3.0),
    ]


def test_healed_is_told_once_after_the_last_fault() -> None:
    injector, port = _injector(
        "{at_s: 1, do: sigkill, target: chat-0}", "{at_s: 2, do: wedge, target: chat-0, for_s: 9}"
    )
    port.run(1)
    assert not port.of("run.healed")
    port.run(2)
    assert not injector.quiet()
    injector.end()
    injector.look()
    assert port.of("run.healed") == [{"faults": 2}] and injector.quiet()


def test_steps_whose_event_never_came_are_told_and_fire_no_more() -> None:
    injector, port = _injector("{when: {event: engine.paused}, do: sigkill, target: chat-0}")
    assert injector.quiet()
    injector.end()
    port.emit("engine.paused", "chat-0", mode="abort")
    port.run(9)
    assert injector.refused == ["steps[0] sigkill: its event did not come"] and not port.injected
