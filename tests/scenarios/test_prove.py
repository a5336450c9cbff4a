"""The replay proof: clean for what replays, and it finds what does not."""

from __future__ import annotations

import gc
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from analysis.errors import BadInput
from scenarios.load import Scenario
from scenarios.prove import OtherProcess, first_difference, prove_scenario
from scenarios.replay import Replay, replay
from tests.processes import is_running
from tests.scenarios import components
from tests.scenarios.conftest import ROOT, Command, component_of

Make = Callable[..., Scenario]


def test_a_small_scenario_replays_in_every_way(small: Make) -> None:
    proof = prove_scenario(small(), 5, 2, [sys.executable], lambda line: None)
    assert proof.clean, list(proof.lines())
    assert len(proof.ways) == 7 and set(proof.ways.values()) == {2}
    assert sum("drawn" in way for way in proof.ways) == 2 and not proof.unfinished
    assert list(proof.lines())[-1].startswith("PASS: small, seeds 5 to 6")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_replay_elsewhere_does_not_outlive_its_proof(tmp_path: pathlib.Path, number: int) -> None:
    words = ["-m", "scenarios", "prove", "smoke", "--seeds", "1", "--set", "workload.for_s=100"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = ""
        while "collection at every allocation" not in line:
            line = process.stdout.readline()
            assert line
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().split()):
            time.sleep(0.01)
        time.sleep(2)  # well into its first seed
        process.send_signal(number)  # to the proof alone
        process.communicate(timeout=30)
    assert process.returncode == (3 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 10
    while is_running(int(child[0])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(child[0]))


@pytest.mark.slow
def test_order_by_hash_is_found_in_another_process_and_both_sides_shown(small: Make) -> None:
    scenario = small("topology.services.chat.components={gateway: 'tests.scenarios.components:HashOrderGateway'}")
    proof = prove_scenario(scenario, 5, 1, [], lambda line: None)
    parted = {one.way.split(",")[0]: one for one in proof.divergences}
    # Whatever this process's own hash seed is, the children's is 4242 for both.
    assert set(parted) <= {"new process"} and not proof.clean
    one = parted["new process"]
    assert one.where.startswith("first different ") and one.reference != one.other
    assert any(line.startswith("FAIL") for line in proof.lines())


@pytest.mark.slow
def test_what_differs_only_in_the_runs_of_a_sweep_is_found_in_every_new_process(small: Make) -> None:
    scenario = small("topology.services.chat.components={gateway: 'tests.scenarios.components:DrawnHashOrderGateway'}")
    proof = prove_scenario(scenario, 5, 1, [sys.executable], lambda line: None)
    assert proof.result == "fail" and len(proof.divergences) == 2
    assert all("orders and delays drawn" in one.way for one in proof.divergences)
    assert {one.way.split(",")[0] for one in proof.divergences} == {"new process", f"interpreter {sys.executable}"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (component_of("FallingGateway"), "seed 5: the run did not complete: crash: .*FallingGateway.* did not start"),
        ("limits.time_limit_s=4", "seed 5: the run did not complete: time_limit: "),
    ],
)
def test_a_run_that_did_not_complete_proves_nothing(small: Make, change: str, said: str) -> None:
    proof = prove_scenario(small(change), 5, 1, [], lambda line: None)
    assert (proof.result, proof.clean, proof.divergences) == ("inconclusive", False, [])
    assert [one.explored for one in proof.unfinished] == [False, True]
    lines = list(proof.lines())
    assert lines[-1].startswith("INCONCLUSIVE: small, seeds 5, ") and any(re.search(said, line) for line in lines)
    assert proof.as_json()["unfinished"][0]["seed"] == 5


def test_a_proof_of_runs_that_do_not_complete_exits_with_3(command: Command, small_file: pathlib.Path) -> None:
    proved = command("prove", small_file, "--set", "limits.time_limit_s=4", "--json")
    assert proved.returncode == 3 and json.loads(proved.stdout)["result"] == "inconclusive", proved.stderr


@pytest.mark.slow
def test_what_a_run_leaves_at_class_level_is_found_in_one_process(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components.LeakyGateway, "runs", 0)
    scenario = small("topology.services.chat.components={gateway: 'tests.scenarios.components:LeakyGateway'}")
    proof = prove_scenario(scenario, 5, 1, [], lambda line: None)
    assert "again in this process, after the other seeds" in {one.way for one in proof.divergences}


def test_checkpoints_bracket_and_digests_tell_seeds_apart(small: Make) -> None:
    one, other = replay(small(), 5), replay(small(), 6)
    assert one.digest != other.digest and one.checkpoints != other.checkpoints
    assert [events for events, _ in one.checkpoints] == sorted(events for events, _ in one.checkpoints)
    assert one.checkpoints[-1][0] == one.events


def test_the_spool_has_iterations_events_and_draws(small: Make) -> None:
    spool = io.BytesIO()
    done = replay(small(), 5, spool=spool)
    lines = spool.getvalue().splitlines()
    assert sum(line.startswith(b"{") for line in lines) == done.events
    assert any(line.startswith(b"iteration at ") for line in lines) and any(
        line.startswith(b"draws ") for line in lines
    )
    assert done == replay(small(), 5)  # spooling changes nothing


def test_collection_at_every_allocation_happens_and_is_taken_back(small: Make) -> None:
    before = gc.get_stats()[0]["collections"]
    replay(small("workload.for_s=0.2"), 5)
    plain = gc.get_stats()[0]["collections"] - before
    thresholds = gc.get_threshold()
    replay(small("workload.for_s=0.2"), 5, collect=True)
    assert gc.get_stats()[0]["collections"] - before - plain > 1000 + 10 * plain
    assert gc.get_threshold() == thresholds and gc.isenabled() and gc.disable.__name__ == "disable"


def test_only_so_many_seeds_are_replayed_with_collections(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, tuple[list[int], list[int]]] = {}

    def ask(self: OtherProcess, seeds: list[int], spool: str) -> Iterator[Replay]:
        asked[self.name] = (list(seeds), list(self._collected))
        for seed in seeds:
            yield replay(self.scenario, seed, **self.options)

    monkeypatch.setattr(OtherProcess, "_ask", ask)
    proof = prove_scenario(small("workload.for_s=0.1"), 5, 5, [sys.executable], lambda line: None)
    assert proof.clean and list(asked.values()) == [
        ([9, 8, 7, 6, 5], []),
        ([9, 8, 7, 6, 5], [5, 6, 7]),
        ([7, 6, 5], [5, 6, 7]),
        ([9, 8, 7, 6, 5], []),
        ([9, 8, 7, 6, 5], []),
    ]


def test_first_difference(tmp_path: pathlib.Path) -> None:
    def compare(ours: bytes, theirs: bytes) -> tuple[str, str, str] | None:
        (tmp_path / "a").write_bytes(ours)
        (tmp_path / "b").write_bytes(theirs)
        return first_difference(tmp_path / "a", tmp_path / "b")

    assert compare(b"{1}\n{2}\n", b"{1}\n{2}\n") is None
    assert compare(b"{1}\n{2}\n", b"{1}\n{3}\n") == ("first different event after event 1", "{2}", "{3}")
    assert compare(b"{1}\ndraws 1\n", b"{1}\ndraws 2\n") == (
        "first different draws after event 1",
        "draws 1",
        "draws 2",
    )
    assert compare(b"{1}\n", b"") == ("first different event after event 0", "{1}", "(the run has ended)")


def test_an_interpreter_is_tried_before_anything_is_replayed(small: Make, tmp_path: pathlib.Path) -> None:
    """It comes last in the proof, and a proof of many seeds takes hours."""
    lacking = tmp_path / "lacking"
    lacking.write_text("#!/bin/sh\necho ModuleNotFoundError: no simpy >&2\nexit 1\n")
    lacking.chmod(0o755)
    for python, says in (
        (str(tmp_path / "nopython"), "nopython: cannot be started"),
        (str(lacking), "lacking: cannot replay: ModuleNotFoundError: no simpy"),
        ("/bin/true", "/bin/true: cannot replay: it is no Python interpreter"),
    ):
        noted: list[str] = []
        with pytest.raises(BadInput, match=says):
            prove_scenario(small(), 5, 1, [sys.executable, python], noted.append)
        assert noted == []


def test_an_interpreter_that_is_none_or_lacks_the_package_is_named(small: Make, tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="nopython: cannot be started"):
        list(OtherProcess(small(), "x", str(tmp_path / "nopython")).replays([5]))
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho ModuleNotFoundError: no simpy >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(BadInput, match="fake: the replay failed there: ModuleNotFoundError: no simpy"):
        list(OtherProcess(small(), "x", str(fake)).replays([5]))
