"""A cluster whose nodes have addresses of their own: other machines reach the engines there, which ask for a token."""

from __future__ import annotations

import json
import pathlib
import tempfile
import urllib.error
import urllib.request

import pytest

from real.hosts import is_loopback
from tests.real.others_cluster import cluster_of_others
from tests.real.run_command import Command, command

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.slow]


def ports(run: Command) -> list[int]:
    """Of the engines that the run has started so far."""
    logs = [log.read_text() for log in run.temporary.glob("*/events/chat-*")]
    events = [json.loads(line) for log in logs for line in log.splitlines() if line.endswith("}")]
    return [event["data"]["port"] for event in events if event["kind"] == "engine.started"]


def status(url: str) -> int:
    """What an outsider gets there; 0: nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_engines_that_other_machines_reach_let_in_nobody_but_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of the cluster and of whoever uses it
    with cluster_of_others(second="127.0.0.2") as other, tempfile.TemporaryDirectory(prefix="st") as temporary:
        host = other.address.rpartition(":")[0]
        if is_loopback(host):
            pytest.skip(f"Ray's head is at {host}: this machine has no address that others reach")
        with command(tmp_path, temporary, "--engine", "emulated", "--ray", other.address) as run:
            run.wait_for_event("request.done")
            outside = [status(f"http://{host}:{port}/model_info") for port in ports(run)]
            code, out, err = run.wait()
            assert code == 0, out + err  # the run itself gets through
    assert 401 in outside and set(outside) <= {0, 401}
