"""Which earlier generation a prompt goes on from."""

from __future__ import annotations

from protocol.prompt_memory import PromptMemory


def test_the_longest_beginning_is_found() -> None:
    memory = PromptMemory()
    memory.finished("one", [1, 2, 3])
    memory.finished("two", [1, 2, 3, 4, 5])
    memory.finished("other", [1, 2, 4])
    assert memory.continued([1, 2, 3, 9]) == ("one", 3)
    assert memory.continued([1, 2, 3, 4, 5, 6]) == ("two", 5)
    assert memory.continued([1, 2, 4]) == ("other", 3)
    assert memory.continued([1, 2]) == ("", 0)
    assert memory.continued([]) == ("", 0)


def test_the_oldest_is_forgotten_and_the_latest_of_equals_counts() -> None:
    memory = PromptMemory(kept=2)
    memory.finished("a", [1])
    memory.finished("b", [2])
    memory.finished("again", [1])
    assert memory.continued([1, 7]) == ("again", 1)
    memory.finished("c", [3, 3])
    assert memory.continued([2, 7]) == ("", 0), "it was the oldest"
    assert memory.continued([1, 7]) == ("again", 1)
    assert memory.continued([3, 3, 1]) == ("c", 2)
