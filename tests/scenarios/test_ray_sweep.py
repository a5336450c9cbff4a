"""Sweeps on a Ray cluster: a raylet that is killed costs no seed, and no seed is counted twice."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from analysis.errors import BadInput
from scenarios.console import Shell
from scenarios.load import Scenario
from scenarios.ray_workers import SeedHost
from scenarios.seeds import run_seed
from scenarios.sweep import sweep_scenario
from scenarios.workers import Lost
from tests.real.local_ray import environment
from tests.scenarios.conftest import ROOT, component_of

Make = Callable[..., Scenario]


def request_of(scenario: Scenario) -> dict[str, Any]:
    return {"text": scenario.text, "source": scenario.source, "folder": str(scenario.folder), "hang_after_s": 5.0}


# --- one host, without Ray ---


def test_a_host_answers_seed_by_seed_and_keeps_its_worker(small: Make) -> None:
    scenario = small("workload.for_s=1")
    host = SeedHost(request_of(scenario))
    host.begin()
    assert host._worker is not None
    pid = host._worker.process.pid
    results = [*host.answer([5, 6]), *host.answer([7])]
    assert [result["seed"] for result in results if isinstance(result, dict)] == [5, 6, 7]
    assert isinstance(results[2], dict) and results[2]["digest"] == run_seed(scenario, 7).digest
    assert host._worker.process.pid == pid
    host._worker.end()


def test_a_seed_that_takes_its_worker_along_is_lost_and_the_others_go_on(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEATRIAL_TEST_MARKER", str(tmp_path / "marker"))
    request = request_of(small("workload.for_s=1", component_of("ClingingOnceGateway")))
    host = SeedHost({**request, "hang_after_s": 0.3})
    host.begin()
    first, *others = host.answer([4, 5, 6])
    assert first == Lost(4, "exit code 3")
    assert [other["seed"] for other in others if isinstance(other, dict)] == [5, 6]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nowhere", "host:port"),
        ("host:port", "host:port"),
        ("127.0.0.1:99999", "host:port"),
        ("ray://127.0.0.1:10001", "host:port"),
        ("127.0.0.1:1", "nobody answers there"),
    ],
)
def test_an_address_that_is_none_is_told(small: Make, tmp_path: pathlib.Path, address: str, said: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(BadInput, match=said):
        sweep_scenario(
            small("workload.for_s=1"), "small", 5, 4,
            jobs=None, out=tmp_path / "out", sample=0, changes=[], shell=Shell(True), ray=address,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answers", [False, True])
def test_what_answers_at_an_address_and_is_no_ray_is_told(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    pytest.importorskip("ray")
    from scenarios.ray_workers import check_address

    monkeypatch.setattr("real.cluster._HEAD_ANSWERS_WITHIN_S", 3.0)  # Ray itself asks for minutes
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close_at_once() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        if answers:
            threading.Thread(target=close_at_once, daemon=True).start()
        with pytest.raises(BadInput, match="what answers there is no head of a Ray cluster"):
            check_address(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("named", "said"),
    [("127.0.0.1:1", "RAY_ADDRESS names .*:1, and nobody answers there"), ("local", "is no cluster that runs"),
     ("127.0.0.1", "--ray auto: "), ("ray://127.0.0.1:10001", "--ray auto: ")],
)  # fmt: skip
def test_a_cluster_of_the_environment_that_is_gone_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    pytest.importorskip("ray")
    from scenarios.ray_workers import check_address

    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(BadInput, match=said):
        check_address("auto")


# --- clusters of three raylets, each in a process of its own ---


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray of two nodes with a CPU each, which somebody else has started."""
    code = (
        "import sys\nfrom tests.bench.ray_sweep import cluster\n"
        "with cluster(2) as (made, nodes):\n    print(made.address, flush=True)\n    sys.stdin.read()\n"
    )
    variables = {**os.environ, **environment()}
    with tempfile.TemporaryDirectory(prefix="rs") as folder:  # short: Ray's sockets lie below it
        holder = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**variables, "RAY_TMPDIR": folder}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdout is not None
        try:
            yield holder.stdout.readline().strip()
        finally:
            holder.communicate(timeout=60)


OUTSIDE = "from protocol.serving.gateway import Gateway\nclass Mine(Gateway):\n    pass\n"


@pytest.mark.ray
@pytest.mark.own_cluster
def test_the_command_uses_a_cluster_and_leaves_it(tmp_path: pathlib.Path, cluster: str) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "outside_gateway.py").write_text(OUTSIDE)

    def sweep(ray: str, *words: str, **variables: str) -> dict[str, Any]:
        ran = subprocess.run(
            [sys.executable, "-m", "scenarios", "sweep", "minimal", "--seeds", "12", "--ray", ray, "--json", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=200,
            env={**os.environ, **environment(), "PYTHONPATH": f"{ROOT}:{modules}", **variables},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
        found: dict[str, Any] = json.loads(ran.stdout)  # nothing else is on stdout
        return found

    first = sweep(cluster, "--out", "one")
    assert (first["passed"], first["groups"], first["offline"]) == (12, [], [])
    mine = "topology.services.chat.components={gateway: 'outside_gateway:Mine'}"
    second = sweep("auto", "--out", "two", "--jobs", "1", "--set", mine, RAY_ADDRESS=cluster)
    assert (second["passed"], second["events"]) == (12, first["events"])

    command = [sys.executable, "-m", "scenarios", "sweep", "minimal", "--seeds", "100000", "--ray", cluster]
    variables = {**os.environ, **environment()}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "of 100000 seeds" in process.stderr.readline()
        process.terminate()  # as without Ray, which would print a stack and end it with exit code 15
        assert (process.wait(60), process.stderr.read()) == (-signal.SIGTERM, "")


@pytest.mark.ray
@pytest.mark.own_cluster
def test_a_raylet_killed_in_the_middle_costs_no_seed_and_counts_none_twice() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.ray_sweep", "60", "minimal", "--lose", "--no-rates", "--raylets", "2"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert (found["counted"], found["distinct"], found["lost"]) == (60, 60, []), found
    assert found["same_as_alone"]
