"""Work on a Ray cluster: every item has one result, whatever becomes of actors."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from real.slots import Abandoned, WorkFailed, in_slots

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


class Squares:
    """Squares its items. ``deadly`` kills its process each time, ``once`` the first time only."""

    def __init__(self, folder: str, deadly: int = -1, once: int = -1, wrong: int = -1) -> None:
        self._marker = pathlib.Path(folder, "once")
        self._deadly = deadly
        self._once = once
        self._wrong = wrong

    def begin(self) -> None:
        return

    def answer(self, items: list[int]) -> Iterator[int]:
        for item in items:
            if item == self._wrong:
                raise ValueError(f"{item} cannot be squared")
            if item == self._deadly or (item == self._once and not self._marker.exists()):
                self._marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item * item


def test_an_actor_that_is_lost_costs_no_item_and_repeats_no_result(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    results = list(in_slots(Squares, (str(tmp_path), -1, 7), range(20), 2, 5, told.append))
    assert sorted(results) == [(item, item * item) for item in range(20)]
    assert len(told) == 1 and told[0].startswith("a worker is lost (ActorDiedError)")


def test_an_item_that_takes_every_actor_along_is_given_up_and_the_others_go_on(tmp_path: pathlib.Path) -> None:
    results = dict(in_slots(Squares, (str(tmp_path), 7), range(12), 2, 4))
    assert results.pop(7) == Abandoned(3, "ActorDiedError")
    assert results == {item: item * item for item in range(12) if item != 7}


def test_work_that_raises_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkFailed, match="3 cannot be squared"):
        list(in_slots(Squares, (str(tmp_path), -1, -1, 3), range(6), 2, 2))


def test_no_item_is_no_work(tmp_path: pathlib.Path) -> None:
    assert list(in_slots(Squares, (str(tmp_path),), range(0), 2, 2)) == []
