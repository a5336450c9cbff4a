"""A real run whose control APIs are called from outside, and which the monitor follows while it goes on."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.real.run_command import ROOT, Command, command, until
from tests.real.test_http_scaling import Client

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster]

WATCHED = """\
name: watched
summary: >
  A replica is added by a client from outside, and removed by the autoscaler once that one lets it; a rollout replica is
  added and removed by the same client.
seed: 3
topology:
  nodes: 1
  gpus_per_node: 4
  services:
    genrm:
      initial_replicas: 1
      engine: tiny-cpu
      scaling:
        autoscaler:
          max_engines: 2
          metrics_interval_secs: 0.5
          evaluation_interval_secs: 1
          scale_out_cooldown_secs: 1
          scale_in_cooldown_secs: 1
          scale_out_policy: {token_usage_threshold: 1.0, condition_duration_secs: 60}
          scale_in_policy: {token_usage_threshold: 0.9, throughput_variance_threshold: 1000, condition_duration_secs: 3}
    policy:
      initial_replicas: 1
      engine: tiny-cpu
      scaling: {kind: rollout, rollout: {drain_sleep_s: 0.5, export_prefix: policy-exports}}
      export: {prefix: policy-exports}
      recovery: {export_prefix: policy-exports}
workload:
  service: genrm
  arrivals: {constant: {rate_per_s: 4}}
  prompt_tokens: {fixed: 40}
  output_tokens: {fixed: 20}
  for_s: 50
acceptance:
  - answered_fraction: {at_least: 1.0}
  - reached: {state: ACTIVE, within_s: 45}
  - reached: {state: COMPLETED, within_s: 60}
limits: {time_limit_s: 150, converge_within_s: 40, shadow_s: 20}
real: {startup_s: 1}
"""


@pytest.fixture
def temporary() -> Iterator[str]:
    """A short path: Ray's sockets lie below it, and pytest's own folders are too long for them."""
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        yield folder


def monitor(*arguments: str) -> str:
    command = [sys.executable, "-m", "scenarios", "monitor", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def figure(text: str, name: str) -> str:
    found = re.search(rf"(?:│ |  ){re.escape(name)} +(.*?)(?:   |  │|$)", text, re.MULTILINE)
    assert found is not None, text
    return found[1].strip()


def address(run: Command) -> str:
    assert run.process.stderr is not None
    for line in run.process.stderr:
        if found := re.search(r"control APIs on (http://\S+),", line):
            return found[1]
    raise AssertionError("the command ended without saying where the APIs are")


def rollout_replicas_come_and_go(client: Client) -> None:
    """Of the service ``policy``: one more, one at an address where nobody is, and one less again."""
    at = "/policy/scale_out"
    status, admitted = client.ask("POST", at, {"num_replicas": 2, "idempotency_key": "one-more"})
    assert (status, admitted["status"]) == (200, "PENDING")
    over = client.until(f"{at}/{admitted['request_id']}", "status", "ACTIVE")
    assert over["created"] == 1 and over["cleanup_required"] is False
    assert client.ask("DELETE", f"{at}/{admitted['request_id']}")[1]["error"] == "NOT_CANCELLABLE"
    assert client.ask("GET", "/policy/metrics")[1]["num_engines"] == 2
    for host in ("a..b", "127.0.0.1"):
        status, admitted = client.ask("POST", at, {"engine_urls": [f"http://{host}:1"]})
        assert client.until(f"{at}/{admitted['request_id']}", "status", "FAILED")["failure_category"] == "connect"
    status, admitted = client.ask("POST", "/policy/scale_in", {"num_replicas": 1})
    over = client.until(f"/policy/scale_in/{admitted['request_id']}", "status", "COMPLETED")
    assert over["removed"] == 1 and over["cleanup_required"] is False
    assert client.ask("GET", "/policy/health")[1]["status"] == "healthy"


def test_a_run_is_scaled_over_http_and_watched(tmp_path: pathlib.Path, temporary: str) -> None:
    with command(tmp_path, temporary, "--engine", "emulated", "--http", "0", text=WATCHED) as run:
        url = address(run)
        client = Client(url)
        assert set(client.ask("GET", "/openapi.json")[1]["paths"]) >= {
            "/genrm/scale_out",
            "/genrm/autoscaler/status",
            "/policy/scale_out/{id}",
        }
        until(lambda: client.ask("GET", "/genrm/engines")[1]["engines"][0]["served"] > 0, 30)

        # By its directory, where its processes still write.
        followed = monitor(str(run.out), "--once", "--service", "genrm")
        assert "over" not in followed.splitlines()[0]
        assert (figure(followed, "engines"), figure(followed, "ready"), figure(followed, "min / max")) == (
            "1",
            "1",
            "1 / 2",
        )

        # Nothing is removed before it has been looked at.
        assert client.ask("PATCH", "/genrm/autoscaler/config", {"enabled": False})[1]["enabled"] is False
        body = {"num_replicas": 2, "idempotency_key": "from-outside"}
        status, admitted = client.ask("POST", "/genrm/scale_out", body)
        assert (status, admitted["status"]) == (200, "PENDING")
        assert client.ask("POST", "/genrm/scale_out", body)[1]["request_id"] == admitted["request_id"]
        client.until(f"/genrm/scale_out/{admitted['request_id']}", "status", "ACTIVE")
        status, said = client.ask("POST", "/genrm/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}})
        assert (status, said["completion_tokens"], said["finish_reason"]) == (200, 5, "length")
        ports = {one["port"] for one in client.ask("GET", "/genrm/engines")[1]["engines"]}
        assert said["engine_port"] in ports and len(ports) == 2
        assert figure(monitor(f"{url}/genrm", "--once"), "engines") == "2"

        assert client.ask("POST", "/genrm/autoscaler/enable")[1]["enabled"] is True
        rollout_replicas_come_and_go(client)

        def removed() -> bool:
            history = client.ask("GET", "/genrm/autoscaler/scale_history?service=genrm")[1]["history"]
            return any(one["action"] == "scale_in" and one["status"] == "COMPLETED" for one in history)

        until(removed, 40)
        looked = monitor(f"{url}/genrm/autoscaler", "--once")
        assert figure(looked, "min / max") == "1 / 2" and re.search(
            r"✔ +\S+ +scale_in +2 → 1 +COMPLETED +false", looked
        )
        code, out, err = run.wait()
        assert code == 0, out + err
        assert run.left() == []
    assert not (run.out / "live.json").exists()
    over = monitor(str(run.out), "--service", "genrm")
    assert "over: completed" in over and re.search(r"✔ +\S+ +scale_in +2 → 1 +COMPLETED +false", over)
    assert json.loads((run.out / "verdict.json").read_text())["result"] == "pass"


def test_a_scenario_without_a_control_api_has_nothing_to_serve(tmp_path: pathlib.Path, temporary: str) -> None:
    with command(tmp_path, temporary, "--engine", "emulated", "--http", "0") as run:
        code, _, err = run.wait()
        assert code == 2 and "--http: no service of this scenario has a control API" in err
    assert not run.out.exists()
