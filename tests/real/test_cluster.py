"""What is said of Ray before it is started, and clocks of other machines."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import pytest

from analysis.errors import BadInput
from real.cluster import NICENESS, environment, folder_problem, last_words, version_problem
from real.engines.settings import EngineSettings
from real.evidence import ProcessLog


def test_a_ray_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(version: str | None) -> Callable[[str], str]:
        def look(package: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        return look

    for version, said in (("2.60.1", ""), ("2.61.0", "Ray 2.61.0 is installed"), ("2.6.0", "Ray 2.6.0"), (None, "pip")):
        monkeypatch.setattr(importlib.metadata, "version", found(version))
        assert said in version_problem() and bool(said) == bool(version_problem())


def test_what_rays_daemons_have_died_of_is_told(tmp_path: pathlib.Path) -> None:
    logs = tmp_path / "session_2026-11-30_20-19-01_211451_24426" / "logs"
    logs.mkdir(parents=True)
    assert last_words(tmp_path) == []
    (logs / "gcs_server.out").write_text("[2026-11-30 20:19:05,001 I 7 7] (gcs_server) started\nno [2026 E 7 7] line\n")
    (logs / "raylet.out").write_text(
        "[2026-11-30 20:19:17,390 E 8 8] (raylet) a.cc:1: an agent does not answer\n"
        "[2026-11-30 20:19:47,388 C 8 8] (raylet) b.cc:2: Check failed: no port in 30000 ms\n*** stack ***\n"
    )
    assert last_words(tmp_path) == [
        "[2026-11-30 20:19:47,388 C 8 8] (raylet) b.cc:2: Check failed: no port in 30000 ms"
    ]


def test_a_folder_that_is_too_deep_for_sockets_is_refused() -> None:
    assert folder_problem("/tmp/seatrial-12345678") == ""
    assert "set TMPDIR to a shorter one" in folder_problem("/tmp/" + "a" * 60)


def test_a_clusters_own_secret_differs_from_run_to_run_and_is_not_given_to_others() -> None:
    first, second = (environment("run", "/tmp/x", own_cluster=True) for _ in range(2))
    assert len(first["RAY_AUTH_TOKEN"]) == 64 and first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert not [name for name in environment("run", "/tmp/x", own_cluster=False) if name.startswith("RAY_AUTH")]


def test_workers_of_an_own_cluster_lower_themselves_only_where_somebody_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NICENESS, raising=False)
    assert environment("run", "/tmp/x", own_cluster=True)[NICENESS] == "0"
    assert NICENESS not in environment("run", "/tmp/x", own_cluster=False)  # the operator's to say
    monkeypatch.setenv(NICENESS, "5")
    assert environment("run", "/tmp/x", own_cluster=True)[NICENESS] == "5"


@pytest.mark.ray
@pytest.mark.parametrize("where", ["real.cluster.connected_problem", "real.guard.post_guard"])
@pytest.mark.parametrize("error", ["RuntimeEnvSetupError", "ActorDiedError", "GetTimeoutError"])
def test_a_cluster_of_others_that_starts_nothing_is_one_message(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    import ray.exceptions

    from scenarios.load import load
    from scenarios.real_preflight import RealPlan
    from scenarios.real_run import run_in_real
    from scenarios.real_scenario import for_real

    def nothing(*_: object) -> str:
        return ""

    def fails(*_: object) -> str:
        raise getattr(ray.exceptions, error)()

    for name in ("real.cluster.connect", "real.cluster.disconnect", "real.cluster.connected_problem"):
        monkeypatch.setattr(name, nothing)
    monkeypatch.setattr(where, fails)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    plan = RealPlan(for_real(load("smoke"), "emulated"), [], EngineSettings("emulated", sys.executable), "h:1", ())
    with pytest.raises(BadInput, match=f"^--ray h:1: it starts nothing for this run: {error}: "):
        run_in_real(plan, 1, out=tmp_path / "run")
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


@pytest.mark.ray
@pytest.mark.parametrize("ahead_ns", [-7_000_000, 0, 3_000_000_000])
def test_the_quickest_exchange_says_how_far_a_clock_is_ahead(ahead_ns: int) -> None:
    from real.clocks import estimate

    exchanges = []
    for there, back in ((900_000, 5_000), (30_000, 90_000), (400_000, 400_000), (10_000, 70_000)):
        before = 1_000_000_000
        exchanges.append((before, before + there + ahead_ns, before + there + back))
    offset_ns, error_ns = estimate(exchanges)
    assert error_ns == 40_000 and abs(offset_ns - ahead_ns) <= error_ns


def test_a_machine_whose_clock_is_ahead_writes_the_times_of_the_run(tmp_path: pathlib.Path) -> None:
    started_ns = time.monotonic_ns()
    for name, ahead_ns in (("here", 0), ("there", -2_000_000_000)):  # 'there' reads two seconds less
        log = ProcessLog(str(tmp_path), name, 1, started_ns, ahead_ns)
        log.emit("gateway.routable", replica="r", replica_inc=1)
        log.close()
    here, there = (
        json.loads((tmp_path / "events" / f"{name}-1.jsonl").read_text())["t_ns"] for name in ("here", "there")
    )
    assert 0 <= here < 1_000_000_000 and 2_000_000_000 <= there < 3_000_000_000
