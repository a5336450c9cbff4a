"""A disk that fills up during a real run: no half line in the evidence, no half run directory."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
from typing import Any, NoReturn

import pytest

from analysis.errors import BadInput
from protocol.evidence import decode
from real.evidence import evidence_is_lost
from scenarios import real_run
from scenarios.load import load
from scenarios.real_preflight import RealOptions, plan
from tests.real.local_ray import ROOT

FILLS_UP = """
import resource, sys, time
from real.evidence import ProcessLog, begin_evidence
begin_evidence(sys.argv[1])
log = ProcessLog(sys.argv[1], "driver", 0, time.monotonic_ns())
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(100):
    try:
        log.emit("run.anomaly", what="full", detail=str(number))
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.emit("run.anomaly", what="full", detail="free again")
        print(error)
        break
"""


def test_an_event_that_does_not_fit_is_not_written_by_half(tmp_path: pathlib.Path) -> None:
    code = [sys.executable, "-c", FILLS_UP, str(tmp_path)]
    said = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "could not be written" in said.stdout, said.stderr
    assert evidence_is_lost(str(tmp_path))
    events = [decode(line) for line in (tmp_path / "events" / "driver-0.jsonl").read_bytes().splitlines()]
    assert [event.n for event in events] == list(range(1, len(events) + 1))
    assert len(events) > 3 and events[-1].data["detail"] == "free again"


def test_a_run_that_finds_the_disk_full_is_one_message_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    temporary: list[str] = []

    def full(_plan: Any, _seed: int, _run: str, folder: str, *_: Any) -> NoReturn:
        temporary.append(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{folder}/logs/x")

    monkeypatch.setattr(real_run, "_live", full)
    planned = plan(load("smoke"), RealOptions("emulated"))
    with pytest.raises(BadInput, match="logs/x: No space left on device; the run was not kept"):
        real_run.run_in_real(planned, 1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists() and not os.path.exists(temporary[0])
