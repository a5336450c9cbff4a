"""The facts about engines as a table, and where an arm deviates from one. docs/engines.md is made from both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.contract.engine_facts import ENDING, SHARED
from tests.contract.engine_stage import Stage

Fact = Callable[[Stage], Awaitable[None]]

DEVIATIONS: dict[tuple[str, str], str] = {
    ("sglang-cpu", "a_missing_path_takes_a_second"): "At once: it is started with HF_HUB_OFFLINE, so it asks no hub.",
    ("sglang-cpu", "sigkill_of_the_scheduler"): (
        "Broken after about 0.5 s: it is started with SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0 and waits for no core dump."
    ),
    ("sglang-cpu", "sigkill_of_the_detokenizer"): "Broken after about 1 s, for the same reason.",
}
"""(arm, fact) -> what the arm does instead. A deviation is asserted: one that has disappeared fails."""


def name_of(fact: Fact) -> str:
    return fact.__name__.removeprefix("fact_")


def facts_table() -> str:
    rows = [f"| `{name_of(fact)}` | {(fact.__doc__ or '').partition(chr(10))[0]} |" for fact in (*SHARED, *ENDING)]
    return "\n".join(["| fact | what is so |", "| --- | --- |", *rows])


def deviations_table() -> str:
    rows = [f"| {arm} | `{name}` | {text} |" for (arm, name), text in DEVIATIONS.items()]
    return "\n".join(["| kind | fact | what it does instead |", "| --- | --- | --- |", *rows])
