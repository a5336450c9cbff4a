"""Work on a cluster that loses actors in any order: every item has one result. Ray is played by the test."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayTaskError

from real import slots
from real.slots import Abandoned, HeadLost, WorkFailed, in_slots


class FakeRay:
    """Answers, keeps waiting and loses actors, one or all, as a seed draws it. ``deadly``: items that none survives."""

    def __init__(self, seed: int, losses: int, deadly: frozenset[int] = frozenset()) -> None:
        self.draws = random.Random(seed)
        self.losses = losses
        self.deadly = deadly
        self.most = 0
        self.alive: set[Actor] = set()

    def remote(self, **_: Any) -> Any:
        return lambda work: Kind(self, work)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(self.draws.randrange(1, 4))}}, {"Alive": False}]

    def wait(self, watched: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        if not watched or not self.draws.randrange(5):
            return [], watched
        one = self.draws.choice(watched)
        dying = isinstance(one, Stream) and one.actor.has_one_of(self.deadly)
        if dying or (self.losses and not self.draws.randrange(6)):
            self.losses -= not dying
            one.actor.dead = True
            if not dying and self.draws.randrange(2):  # its node, and all others with it
                for actor in self.alive:
                    actor.dead = True
        return [one], [other for other in watched if other is not one]

    def get(self, reference: Any) -> Any:
        if reference.actor.dead:
            raise ActorDiedError()
        return reference.value()

    def kill(self, actor: Actor, **_: Any) -> None:
        self.alive.discard(actor)


class Kind:
    def __init__(self, ray: FakeRay, work: type) -> None:
        self._ray = ray
        self._work = work

    def remote(self, *arguments: Any) -> Actor:
        actor = Actor(self._work(*arguments))
        self._ray.alive.add(actor)
        self._ray.most = max(self._ray.most, len(self._ray.alive))
        return actor


class Actor:
    """A handle: what is called on it is asked of ``work`` when its result is."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.dead = False
        self.todo: list[int] = []
        self.begin = self.answer = self

    def options(self, **_: Any) -> Actor:
        return self

    def remote(self, items: list[int] | None = None) -> Any:
        if items is None:
            return Reference(self)
        self.todo = list(items)
        return Stream(self, self.work.answer(items))

    def has_one_of(self, items: frozenset[int]) -> bool:
        """At work on it, or soon: the answers before it may be lost on their way."""
        return not items.isdisjoint(self.todo)


class Reference:
    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def value(self) -> Any:
        return None


class Stream:
    def __init__(self, actor: Actor, results: Iterator[Any]) -> None:
        self.actor = actor
        self._results = results

    def __next__(self) -> Stream:
        return self

    def value(self) -> Any:
        try:
            result = next(self._results)
        except ValueError as error:
            raise RayTaskError("answer", "", error) from error
        self.actor.todo.pop(0)
        return result


class Doubles:
    def __init__(self, wrong: int = -1) -> None:
        self._wrong = wrong

    def answer(self, items: list[int]) -> Iterator[int]:
        for item in items:
            if item == self._wrong:
                raise ValueError("no")
            yield 2 * item


def played(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> FakeRay:
    monkeypatch.setattr(slots, "ray", ray)
    monkeypatch.setattr(slots._Pool, "_head_answers", lambda *_: True)
    monkeypatch.setattr(slots, "_LOOK_S", 0.0)
    return ray


@pytest.mark.parametrize("most", [None, 1, 3])
def test_each_item_counts_once_in_every_order(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    lost = 0
    for seed in range(150):
        told: list[str] = []
        ray = played(monkeypatch, FakeRay(seed, losses=2))  # fewer than would give an item up
        results = list(in_slots(Doubles, (), range(23), most, 1 + seed % 7, told.append))
        assert sorted(results) == [(item, 2 * item) for item in range(23)], seed
        assert not ray.alive and ray.most <= (most or 3), seed
        lost += len(told)
    assert lost > 200


def test_a_node_lost_at_the_end_blames_nobody_for_the_actors_that_had_nothing_left_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LosesAllWithTheLastItem(FakeRay):
        def wait(self, watched: list[Any], **more: Any) -> tuple[list[Any], list[Any]]:
            if self.losses and sum(len(actor.todo) for actor in self.alive) == 1:
                self.losses -= 1
                for actor in self.alive:
                    actor.dead = True
                return watched, []
            losses, self.losses = self.losses, 0
            found = super().wait(watched, **more)
            self.losses = losses
            return found

    lost = 0
    for seed in range(40):
        told: list[str] = []
        played(monkeypatch, LosesAllWithTheLastItem(seed, losses=1))
        results = list(in_slots(Doubles, (), range(12), 4, 3, told.append))
        assert sorted(results) == [(item, 2 * item) for item in range(12)], seed
        lost += len(told)
    assert lost >= 30


def test_an_item_that_no_actor_survives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(80):
        played(monkeypatch, FakeRay(seed, losses=0, deadly=frozenset({4, 9})))
        results = list(in_slots(Doubles, (), range(12), 2, 4))
        assert len(results) == 12
        found = dict(results)
        assert found.pop(4) == found.pop(9) == Abandoned(3, "ActorDiedError"), seed
        assert found == {item: 2 * item for item in range(12) if item not in (4, 9)}, seed


def test_work_that_raises_and_actors_that_never_begin_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, FakeRay(1, losses=0))
    with pytest.raises(WorkFailed, match="no"):
        list(in_slots(Doubles, (3,), range(6), 2, 2))
    ray = played(monkeypatch, FakeRay(1, losses=0))
    ray.wait = lambda watched, **_: (_dead(watched[0]), [])  # type: ignore[method-assign]  # every actor dies at once
    with pytest.raises(WorkFailed, match="5 workers were lost before they began"):
        list(in_slots(Doubles, (), range(6), 2, 2))
    assert not ray.alive


def test_a_cluster_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = played(monkeypatch, FakeRay(1, losses=0))
    ray.wait = lambda watched, **_: ([], watched)  # type: ignore[method-assign]  # none is ever placed
    monkeypatch.setattr(slots, "_STARTS_WITHIN_S", 0.05)
    with pytest.raises(WorkFailed, match="free CPUs"):
        list(in_slots(Doubles, (), range(6), 2, 2))
    assert not ray.alive


def test_a_head_that_has_gone_is_told_before_ray_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = slots._Pool._head_answers
    ray = played(monkeypatch, FakeRay(1, losses=0))
    monkeypatch.setattr(slots._Pool, "_head_answers", answers)
    monkeypatch.setattr(slots, "_HEAD_GONE_S", 0.05)
    ray.wait = lambda watched, **_: ([], watched)  # type: ignore[method-assign]  # nothing comes any more
    with socket.create_server(("127.0.0.1", 0)) as head:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{head.getsockname()[1]}")
        ray.get_runtime_context = lambda: context  # type: ignore[attr-defined]  # a stand-in for the module
        results = in_slots(Doubles, (), range(6), 2, 2)
        threading.Timer(0.2, lambda: (head.shutdown(socket.SHUT_RDWR), head.close())).start()
        with pytest.raises(HeadLost, match="has gone"):
            next(results)


def _dead(one: Any) -> list[Any]:
    one.actor.dead = True
    return [one]
