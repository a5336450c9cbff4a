"""What the processes of a run have told of its placement groups: each state once, whoever sees it at the same time."""

from __future__ import annotations

import pathlib
import threading

from real.faults.placement import GroupNotes


def test_of_many_who_see_a_state_at_once_one_tells_it(tmp_path: pathlib.Path) -> None:
    all_there = threading.Barrier(8, timeout=20)
    told: list[str] = []

    def looker() -> None:
        notes = GroupNotes(str(tmp_path))
        for group in range(40):
            for state in ("PENDING", "CREATED"):
                all_there.wait()
                if notes.is_news(f"g{group}", state):
                    told.append(f"g{group} {state}")

    lookers = [threading.Thread(target=looker) for _ in range(8)]
    for one in lookers:
        one.start()
    for one in lookers:
        one.join()
    assert sorted(told) == sorted(f"g{group} {state}" for group in range(40) for state in ("PENDING", "CREATED"))


def test_nothing_is_told_after_the_end_and_a_state_that_comes_again_is(tmp_path: pathlib.Path) -> None:
    told = [
        GroupNotes(str(tmp_path)).is_news("g", state)
        for state in ("CREATED", "CREATED", "PENDING", "CREATED", "REMOVED", "CREATED", "REMOVED")
    ]
    assert told == [True, False, True, True, True, False, False]
