"""Who reads what components say of themselves."""

from __future__ import annotations

import pytest

from analysis.checks import INVARIANTS, Check, Ledger
from analysis.rundir import Preregistered
from protocol.evidence import KINDS


@pytest.mark.parametrize("check", INVARIANTS, ids=lambda check: check.name)
def test_an_invariant_that_reads_claims_says_so(check: type[Check]) -> None:
    """Either it is a claim itself and decides nothing, or it says what it takes from them; no other one reads any."""
    reads = [kind for kind in check(Ledger(Preregistered())).handlers() if KINDS[kind].observer == "component"]
    assert bool(check.believes) == bool(reads and check.group != "claim"), reads
