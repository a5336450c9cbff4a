"""Scenarios in the real world, by the command that a user types: verdicts, and nothing left of any of them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from analysis.rundir import RunDir, verify_manifest
from analysis.verdict import judge_run
from real.warden import shared_memory_of
from tests.real.others_cluster import OthersCluster, cluster_of_others
from tests.real.run_command import TINY, command, until

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster]
EMULATED = ("--engine", "emulated")


@pytest.fixture
def temporary() -> Iterator[str]:
    """A short path: Ray's sockets lie below it, and pytest's own folders are too long for them."""
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        yield folder


OUTSIDE = """
import json
import ray
from protocol.ports import backend
from protocol.serving.gateway import Gateway

class OwnGateway(Gateway):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        raylet = ray.get_runtime_context().get_node_id()
        with open(REPORT, "a") as report:
            report.write(json.dumps({"node": backend().node, "raylet": raylet, "file": __file__}) + "\\n")
"""
WITH_OUTSIDE = ("--set", "topology.services.chat.components={gateway: 'outside:OwnGateway'}",
                "--set", "topology.services.chat.gateways=2", "--set", "workload.clients=2")  # fmt: skip


def outside(folder: pathlib.Path) -> pathlib.Path:
    """A folder of a user's own modules. Each of its gateways says in ``folder``/report where it is, and from where."""
    modules = folder / "elsewhere"
    modules.mkdir()
    (modules / "outside.py").write_text(OUTSIDE.replace("REPORT", repr(str(folder / "report"))))
    return modules


HOLDING = """
import mmap
from protocol.serving.gateway import Gateway

class OwnGateway(Gateway):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        with open("SHARED", "w+b") as file:
            file.truncate(4096)
            self._held = mmap.mmap(file.fileno(), 4096)
"""
"""A user's class with shared memory that has a name, which is not unlinked when its maker is killed."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run that has ended: what the command said, and what it left outside its run directory."""

    code: int
    out: str
    err: str
    left: list[str]
    directory: RunDir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run to its end, with a class of a user's own."""
    folder = tmp_path_factory.mktemp("whole")
    with tempfile.TemporaryDirectory(prefix="st") as temporary:
        with command(folder, temporary, *EMULATED, "--json", *WITH_OUTSIDE, modules=outside(folder)) as run:
            run.wait_for_event("request.done")
            code, out, err = run.wait()
            assert run.out.exists(), out + err
            return Ended(code, out, err, run.left(), RunDir.open(run.out))


def test_a_run_leaves_a_whole_directory_and_nothing_else(whole: Ended) -> None:
    assert whole.code == 0, whole.out + whole.err
    assert whole.left == []
    said = json.loads(whole.out)
    assert (said["backend"], said["result"], said["left_behind"], said["not_done"]) == ("real", "pass", [], [])
    directory = whole.directory
    assert verify_manifest(directory) == []
    assert judge_run(directory).as_json() == json.loads(directory.verdict.read_text())
    assert directory.info().backend == "real"
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "events.jsonl", "logs", "manifest.json", "report.html", "run.json", "trace.json", "verdict.json",
    ]  # fmt: skip
    events = list(directory.read_events())
    assert [events[0].kind, events[1].kind, events[-1].kind] == ["actor.spawned", "run.started", "run.finished"]
    assert events[1].data["world"] == "real" and events[1].data["clock_error_ns"] > 0
    nodes = {event.data["node"] for event in events if event.kind == "actor.spawned"}
    assert nodes == {"node-0", "node-1"}
    engines = {event.actor: event.data["node"] for event in events if event.kind == "actor.spawned"
               and event.data["role"] == "engine"}  # fmt: skip
    assert engines == {"chat-0": "node-0", "chat-1": "node-1"}
    assert not [event for event in events if event.kind in ("run.tail", "run.anomaly", "leak.found")]
    assert {path.name for path in (directory.path / "logs").glob("chat-*")} >= {"chat-0-1.log", "chat-1-1.log"}


def test_nothing_is_left_of_a_driver_that_is_killed(
    tmp_path: pathlib.Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)  # other tests have set it for a Ray of their own
    shared = f"/dev/shm/{pathlib.Path(temporary).name}"
    (tmp_path / "outside.py").write_text(HOLDING.replace("SHARED", shared))
    own = ("--set", "topology.services.chat.components={gateway: 'outside:OwnGateway'}")
    with command(tmp_path, temporary, *EMULATED, *own, modules=tmp_path) as run:
        run.wait_for_event("request.done")
        running = run.processes()
        memory = {path for pid in running for path in shared_memory_of(pid)}
        assert shared in memory
        assert any("raylet" in said for said in running.values())
        assert any("real.emulated" in said for said in running.values())
        assert any("ray::ActorHost" in said for said in running.values())
        driver = os.getpriority(os.PRIO_PROCESS, run.process.pid)
        assert {said: nice for pid, said in running.items() if (nice := _niceness(pid)) not in (driver, None)} == {}
        sockets = _listening(set(running))
        assert len(sockets) > 4
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        until(lambda: not run.left(), 10)
    assert not [path for path in memory if os.path.exists(path)]
    # A process that is ending has given back its memory, by which it is known as the run's, before its sockets.
    until(lambda: not sockets & _listening(None), 10)
    assert sorted(path.name for path in run.out.iterdir()) == ["live.json", "run.json"]  # no evidence was taken over
    assert not pathlib.Path(json.loads((run.out / "live.json").read_text())["folder"]).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_judged_inconclusive_and_cleaned_up(
    tmp_path: pathlib.Path, temporary: str, number: signal.Signals
) -> None:
    with command(tmp_path, temporary, *EMULATED) as run:
        run.wait_for_event("request.done")
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.send_signal(number)
        code, out, err = run.wait(60)
        assert code == 3, out + err
        assert run.left() == []
    assert "interrupted" in out
    finished = list(RunDir.open(run.out).read_events())[-1]
    assert (finished.kind, finished.data["reason"], finished.data["detail"]) == ("run.finished", "crash", "interrupted")
    assert judge_run(RunDir.open(run.out)).result == "inconclusive"


@pytest.mark.parametrize(
    ("number", "there"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)],
    ids=["SIGINT with one node", "SIGTERM with one node", "SIGTERM with both nodes"],
)
def test_a_run_that_is_interrupted_while_ray_starts_leaves_nothing(
    tmp_path: pathlib.Path, temporary: str, number: signal.Signals, there: int
) -> None:
    with command(tmp_path, temporary, *EMULATED) as run:
        run.wait_until(lambda: len(list(run.temporary.glob("seatrial-*/ray/session_2*/sockets/raylet*"))) >= there)
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.send_signal(number)
        code, out, err = run.wait(60)
        assert (code, out) == (3, ""), out + err
        assert run.left() == [] and not run.out.exists()  # so that the same command can be given again
    assert err.splitlines()[-1] == "interrupted; what was written so far is no verdict" and "Traceback" not in err, err


def test_the_end_of_ray_itself_ends_the_run_while_its_evidence_can_be_kept(
    tmp_path: pathlib.Path, temporary: str
) -> None:
    with command(tmp_path, temporary, *EMULATED, "--no-report") as run:
        run.wait_for_event("request.done")
        (server,) = [pid for pid, said in run.processes().items() if said.split()[0].endswith("/gcs_server")]
        os.kill(server, signal.SIGKILL)
        code, out, err = run.wait(100)
        assert code == 3, out + err
        assert run.left() == []
    assert "Ray's gcs_server of node-0 has ended, and no fault did that" in out
    assert judge_run(RunDir.open(run.out)).result == "inconclusive"


def test_an_engine_that_dies_at_its_start_fails_the_deployment_at_once(tmp_path: pathlib.Path, temporary: str) -> None:
    text = TINY.replace("engine: tiny-cpu", "engine: broken.yaml")
    profile = pathlib.Path(tmp_path, "broken.yaml")
    text = text.replace("broken.yaml", str(profile))
    shipped = pathlib.Path(__file__).resolve().parents[2] / "sim" / "profiles" / "tiny-cpu.yaml"
    profile.write_text(shipped.read_text().replace("name: tiny-cpu", "name: broken"))
    # It is there when the preflight looks, and gone when the engines do.
    with command(tmp_path, temporary, *EMULATED, text=text) as run:
        until(lambda: any(run.temporary.glob("*/events")) or run.process.poll() is not None, 60)
        profile.unlink()
        code, out, err = run.wait(90)
        assert (code, out) == (2, ""), out + err
        assert run.left() == [] and not run.out.exists()
    assert re.search(r"error: tiny: chat-\d died while it started", err), err
    assert "real.emulated: " in err and "broken.yaml" in err  # its own last words


def test_a_users_class_from_elsewhere_runs_on_every_node(whole: Ended) -> None:
    born = [event for event in whole.directory.read_events() if event.kind == "actor.spawned"]
    assert {(e.actor, e.data["cls"], e.data["node"]) for e in born if e.actor.startswith("gateway")} == {
        ("gateway-chat-0", "outside.OwnGateway", "node-0"), ("gateway-chat-1", "outside.OwnGateway", "node-1"),
    }  # fmt: skip


def test_a_time_limit_ends_a_real_run_and_names_who_waits(tmp_path: pathlib.Path, temporary: str) -> None:
    stuck = ("--set", "steps=[{at_s: 1, do: wedge, target: chat-0, for_s: 90}]", "--set", "limits.time_limit_s=25")
    slow = ("--set", "topology.services.chat.health.stall_window_s=80")  # nobody notices the wedge
    with command(tmp_path, temporary, *EMULATED, *stuck, *slow) as run:
        code, out, err = run.wait()
        assert code == 1, out + err
        assert run.left() == []
    events = list(RunDir.open(run.out).read_events())
    assert (events[-1].kind, events[-1].data["reason"]) == ("run.finished", "time_limit")
    waits = [event.data for event in events if event.kind == "run.wait"]
    assert any(wait["waiter"] == "gateway-chat-0/1" and wait["should_wake"] == "chat-0/1" for wait in waits), waits
    assert "the run ended early (time_limit): 25 s are over in phase workload" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no GPU is visible here.*--engine emulated.*--engine sglang-cpu"),
        ((*EMULATED, "--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: nobody answers there"),
        ((*EMULATED, "--engine-python", "/nowhere/python"), "--engine-python /nowhere/python: cannot be run"),
        (("--engine", "sglang-cpu", "--engine-python", "/nowhere/python"), "/nowhere/python: no Python interpreter"),
        ((*EMULATED, "--set", "topology.services.chat.initial_replicas=4000", "--set", "topology.gpus_per_node=4000"),
         "4000 emulated replicas at most.*GB of memory"),
        ((*EMULATED, "--set", "network.link_latency_s=0.1"), "use a 'latency' fault"),
        ((*EMULATED, "--explore"), "--explore and --hang-after go with --backend sim"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_message_and_nothing_is_started(
    tmp_path: pathlib.Path, temporary: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with command(tmp_path, temporary, *arguments) as run:
        code, out, err = run.wait(60)
        assert (code, out) == (2, "")
        assert re.search(message, err.replace("\n", " ")), err
        assert not run.out.exists() and run.left() == []


def _niceness(pid: int) -> int | None:
    """As ``ps -o ni`` has it; None: the process has ended."""
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return None


def _listening(pids: set[int] | None) -> set[str]:
    """The sockets on which processes listen (None: all), as the kernel numbers them: a port is soon another's."""
    found = set()
    for line in subprocess.run(["ss", "-ltnpeH"], capture_output=True, text=True, check=True).stdout.splitlines():
        if pids is None or any(int(pid) in pids for pid in re.findall(r"pid=(\d+)", line)):
            found.update(re.findall(r"\bino:\d+", line))
    return found


@pytest.fixture
def other_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[OthersCluster]:
    """A Ray of two nodes that is not the run's to end."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of the cluster and of whoever uses it
    with cluster_of_others() as made:
        yield made


def test_a_cluster_of_others_is_used_and_left_as_it_was(
    tmp_path: pathlib.Path, temporary: str, other_cluster: OthersCluster
) -> None:
    address = other_cluster.address
    host, port = address.rsplit(":", 1)
    modules = outside(tmp_path)  # no node of that cluster knows them

    def engine_folders() -> list[pathlib.Path]:
        return sorted(other_cluster.temporary.glob("engine-*"))

    with command(tmp_path, temporary, *EMULATED, "--ray", address, *WITH_OUTSIDE, modules=modules) as run:
        code, out, err = run.wait()
        assert code == 0, out + err
        assert run.left() == []
    born = [event.data for event in RunDir.open(run.out).read_events() if event.kind == "actor.spawned"]
    assert {data["node"] for data in born} == {"node-0", "node-1"}
    gateways = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert sorted(gateway["node"] for gateway in gateways) == ["node-0", "node-1"]
    assert len({gateway["raylet"] for gateway in gateways}) == 2
    # Not from where the driver has it, which this machine happens to have too.
    brought = [pathlib.Path(gateway["file"]).relative_to(other_cluster.ray) for gateway in gateways]
    assert all("runtime_resources" in path.parts for path in brought)
    assert other_cluster.actors_and_groups() == [] and engine_folders() == []
    (tmp_path / "second").mkdir()
    with command(tmp_path / "second", temporary, *EMULATED, "--ray", address) as run:
        run.wait_for_event("request.done")
        running = " ".join(run.processes().values())
        assert "real.emulated" in running and "ray::ActorHost" in running and "ray::EngineHost" in running
        assert engine_folders()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        until(lambda: not run.left(), 15)
        until(lambda: not other_cluster.actors_and_groups(), 30)
        assert engine_folders() == []
    with socket.create_connection((host, int(port)), timeout=5):
        pass  # Ray itself goes on
    small = ("--set", "topology.gpus_per_node=2")
    (tmp_path / "third").mkdir()
    with command(tmp_path / "third", temporary, *EMULATED, "--ray", address, *small) as run:
        code, _, err = run.wait()
        assert code == 2 and "has 1 GPUs, the scenario needs 2" in err, err
        assert run.left() == [] and not run.out.exists()
