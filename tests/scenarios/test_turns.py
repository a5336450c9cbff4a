"""What an agent does at the end of its episode."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import BarrierError, ReadTimeout
from scenarios.turns import retire


class Controller:
    """Answers with these errors, one a call, and then well."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.told = 0

    async def retire_route_sessions(self, sessions: tuple[str, ...]) -> None:
        self.told += 1
        if self.errors:
            raise self.errors.pop(0)


def test_a_retirement_of_which_nobody_has_heard_is_told_again() -> None:
    lost: Any = Controller(ReadTimeout("lost"), ReadTimeout("lost"))
    assert asyncio.run(retire(lost, "s")) and lost.told == 3
    refused: Any = Controller(BarrierError("no"))
    assert not asyncio.run(retire(refused, "s")) and refused.told == 1
