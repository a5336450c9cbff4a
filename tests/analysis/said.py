"""A pytest plugin: what each hand-written history had a check say, and which of them are copies of one another.

``SEATRIAL_SAID=FILE python -m pytest -p tests.analysis.said tests/analysis/test_checks_*.py`` writes it as JSON:
``said`` has check -> result -> tests, and ``copies`` the pairs of tests that judge equal histories by one check.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from analysis.checks import CheckResult
from tests.analysis.history import History

_said: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
_first: dict[tuple[str, str], str] = {}
_copies: list[tuple[str, str, str]] = []


def _noting(history: History, name: str, **preregistered: Any) -> CheckResult:
    row = _judged(history, name, **preregistered)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    tests = _said[name][row.result]
    if test not in tests:
        tests.append(test)
    events = [(e.t_ns, e.kind, e.actor, e.inc, e.cause, sorted(e.data.items())) for e in history.events]
    key = (name, repr((events, preregistered)))
    other = _first.setdefault(key, test)
    if other != test and (other, test, name) not in _copies:
        _copies.append((other, test, name))
    return row


_judged = History.judged
History.judged = _noting  # type: ignore[method-assign]  # this is what the plugin is for


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    Path(os.environ["SEATRIAL_SAID"]).write_text(json.dumps({"said": _said, "copies": _copies}))
