"""What can never work is refused before the run, with file, line, key and what to do; what may work is not."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest

from analysis.errors import BadInput
from scenarios.load import Scenario, catalog, load
from scenarios.real_scenario import for_real
from scenarios.runner import preflight, run_in_sim
from tests.scenarios.conftest import SMALL, Command

Make = Callable[..., Scenario]
_LOOP = "workload.arrivals={closed_loop: {sessions: 4}}"


def _with(*steps: str) -> str:
    return SMALL.replace("acceptance:", "steps:\n" + "".join(f"  - {step}\n" for step in steps) + "acceptance:")


_STEPS = [
    (
        ["{at_s: 1, do: sigkill, target: client-chat-0-0}"],
        r"small.yaml:16: steps\[0\].target: client-chat-0-0 is the load",
    ),
    (
        ["{at_s: 1, do: restart_empty, target: client-chat-0-0}"],
        "is the load itself.*have the fault befall a component",
    ),
    (
        ["{at_s: 1, do: node_loss, target: {node: node-0}, for_s: 2}"],
        r"small.yaml:16: steps\[0\].target: on node-0 are the driver.*lose another node",
    ),
    (["{at_s: 1, do: node_loss, target: {node: node-0}, with: {zombie: true}, for_s: 2}"], "on node-0 are the driver"),
    (
        ["{at_s: 1, do: sigkill, target: chat-0, must_hit: {hits: {at_least: 1}}}"],
        r"small.yaml:16: steps\[0\].must_hit.hits: 'sigkill' never meets 'hits'.*ask for in_flight or processes",
    ),
    (
        ["{at_s: 1, do: request_lost, target: {link: {to: chat-0}}, for_s: 1, must_hit: {in_flight: {at_least: 1}}}"],
        "'request_lost' never meets 'in_flight'.*ask for hits",
    ),
    (["{at_s: 1, do: placement_stuck, for_s: 1, must_hit: {processes: {}}}"], "never meets 'processes'.*ask for hits"),
    (
        ["{at_s: 1, do: clock_skew, target: {node: node-0}, with: {step_s: 1}, for_s: 1, must_hit: {in_flight: {}}}"],
        "'clock_skew' never meets 'in_flight'.*ask for processes or hits",
    ),
    (
        ["{at_s: 1, do: sigkill, target: chat-0, must_hit: {processes: {at_least: 2}}}"],
        r"steps\[0\].must_hit.processes: at_least 2 can never be met: the target is one process; ask for 1 at most",
    ),
    (
        ["{at_s: 1, do: reply_lost, target: {link: {to: chat-0}}, with: {count: 2}, must_hit: {hits: {at_least: 3}}}"],
        r"must_hit.hits: at_least 3 can never be met: the fault ends with its hit number 2 \('count'\)",
    ),
    (
        ["{at_s: 1, do: torn_export, must_hit: {hits: {at_least: 2}}}"],
        "at_least 2 can never be met: the fault ends with its hit number 1",
    ),
    (
        ["{at_s: 1, do: restart_empty, target: chat-0}", "{at_s: 1.0, do: restart_empty, target: chat-0}"],
        r"small.yaml:17: steps\[1\]: steps\[0\] restarts chat-0 at the same instant.*a later time",
    ),
    (
        ["{at_s: 1, do: export, with: {version: a/b}}"],
        r"small.yaml:16: steps\[0\].with.version: 'a/b' cannot be a part",
    ),
    (['{at_s: 1, do: export, with: {version: "a\\nb"}}'], "cannot be a part of a file's name"),
]


@pytest.mark.parametrize(("steps", "message"), _STEPS)
def test_a_step_that_can_never_do_its_work_is_refused(small: Make, steps: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        preflight(small(text=_with(*steps)), "sim")


@pytest.mark.parametrize(
    "steps",
    [
        ["{at_s: 1, do: sigstop, target: client-chat-0-0, for_s: 1}"],
        # The workload may be over by then.
        ["{at_s: 9, do: sigkill, target: client-chat-0-0, must_hit: {processes: {at_least: 1}}}"],
        ["{at_s: 1, do: clock_skew, target: {node: node-0}, with: {step_s: 1}, for_s: 1}"],
        ["{at_s: 1, do: metrics_nan, target: chat-0, for_s: 1, must_hit: {hits: {}, in_flight: {}, processes: {}}}"],
        ["{at_s: 1, do: reply_lost, target: {link: {to: chat-0}}, with: {count: 2}, must_hit: {hits: {at_least: 2}}}"],
        ["{at_s: 1, do: request_lost, target: {link: {to: chat-0}}, for_s: 9, must_hit: {hits: {at_least: 99}}}"],
        ["{at_s: 1, do: restart_empty, target: chat-0}", "{at_s: 1, do: restart_empty, target: chat-1}"],
        ["{at_s: 1, do: restart_empty, target: chat-0}", "{at_s: 2, do: restart_empty, target: chat-0}"],
        ["{at_s: 1, do: restart_empty, target: any_replica}", "{at_s: 1, do: restart_empty, target: any_replica}"],
        [
            "{at_s: 1, do: restart_empty, target: chat-0}",
            "{at_s: 1, do: restart_empty, target: chat-0, must_hit: {processes: {at_least: 1}}}",
        ],
        ["{at_s: 1, do: export, with: {version: v2.0-rc..1}}"],
    ],
)
def test_what_may_work_is_not_refused(small: Make, steps: list[str]) -> None:
    preflight(small(text=_with(*steps)), "sim")


def test_without_a_gateway_of_ours_nobody_must_answer_on_the_first_node(small: Make) -> None:
    step = "{at_s: 9, do: node_loss, target: {node: node-0}, for_s: 2}"
    own = "topology.services.chat.components={gateway: 'tests.scenarios.components:PlainGateway'}"
    preflight(small(own, text=_with(step)), "sim")


_KILL = "{{at_s: 1, do: sigkill, target: {}, must_hit: {{in_flight: {{at_least: {}}}}}}}"


@pytest.mark.parametrize("target", ["chat-0", "busiest_replica", "any_replica"])
def test_no_more_is_in_flight_than_there_are_sessions(small: Make, target: str) -> None:
    preflight(small(_LOOP, text=_with(_KILL.format(target, 4))), "sim")
    with pytest.raises(
        BadInput, match=r"must_hit.in_flight: at_least 5 can never be met: the load of 'chat' never has"
    ):
        preflight(small(_LOOP, text=_with(_KILL.format(target, 5))), "sim")
    with pytest.raises(BadInput, match="at_least 8 can never be met.*ask for 7 at most"):
        preflight(small("workload.requests=7", text=_with(_KILL.format(target, 8))), "sim")


@pytest.mark.parametrize(
    "changes",
    [
        [],  # requests come whether or not the ones before them were answered
        [_LOOP, "workload.patience_s=10"],  # a session that has given up sends the next one
        [_LOOP, "topology.services.chat.gateway={read_timeout_s: 20}"],
        [_LOOP, "network.links=[{from: node-0, to: node-0, latency_s: 0.1, loss: 0.1}]"],
        [_LOOP, "topology.services.chat.components={gateway: 'tests.scenarios.components:PlainGateway'}"],
    ],
)
def test_how_much_can_be_in_flight_is_not_known_of_every_load(small: Make, changes: list[str]) -> None:
    preflight(small(*changes, text=_with(_KILL.format("chat-0", 5))), "sim")


def test_after_another_fault_requests_may_pile_up(small: Make) -> None:
    wedge = "{at_s: 0.5, do: wedge, target: chat-0, for_s: 1}"
    preflight(small(_LOOP, text=_with(wedge, _KILL.format("chat-0", 5))), "sim")
    gateway = _KILL.format("gateway-chat-0", 5)  # which is asked by its prober too
    preflight(small(_LOOP, text=_with(gateway)), "sim")


# --- folders and versions


@pytest.mark.parametrize("folder", ["", "/tmp", "../out", "a//b", "a/./b"])
@pytest.mark.parametrize("key", ["export.prefix", "recovery.export_prefix", "scaling.rollout.export_prefix"])
def test_exports_stay_inside_of_the_storage(small: Make, key: str, folder: str) -> None:
    part, _, rest = key.partition(".")
    name = rest.rpartition(".")[2]
    value = f"{{{name}: '{folder}'}}" if "." not in rest else f"{{kind: rollout, rollout: {{{name}: '{folder}'}}}}"
    message = rf"topology.services.chat.{re.escape(key)}: ({re.escape(repr(folder))} is no folder in storage|is empty)"
    with pytest.raises(BadInput, match=message):
        small(f"topology.services.chat.{part}={value}")


def test_a_new_rollout_replica_must_find_the_exports(small: Make) -> None:
    scaling = "topology.services.chat.scaling={kind: rollout, rollout: {export_prefix: others}}"
    with pytest.raises(
        BadInput, match=r"scaling.rollout.export_prefix \('others'\) and export.prefix \('exports'\) differ"
    ):
        preflight(small(scaling), "sim")
    own = ["export={prefix: others}", "recovery={export_prefix: others}"]
    preflight(small(scaling, *(f"topology.services.chat.{one}" for one in own)), "sim")


def test_the_first_version_is_a_name_too(small: Make) -> None:
    with pytest.raises(BadInput, match=r"topology.services.chat.weights.version: '../v1' cannot be a part"):
        preflight(small("topology.services.chat.weights={version: ../v1}"), "sim")


# --- sizes


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        (["workload.output_tokens={fixed: 600}"], 640),
        (["workload.output_tokens={uniform: {low: 500, high: 501}}"], 540),
        (["workload.prompt_tokens={fixed: 512}", "workload.output_tokens={lognormal: {median: 9, p99: 9}}"], 513),
    ],
)
def test_a_load_that_no_engine_takes_is_refused(small: Make, changes: list[str], tokens: int) -> None:
    message = (
        rf"workload.output_tokens: prompt and output have {tokens} tokens at least, and tiny-cpu has a context of 512"
    )
    with pytest.raises(BadInput, match=message):
        preflight(small(*changes), "sim")
    preflight(small(*changes), "real")  # a genuine engine has another


def test_a_part_of_a_load_may_be_too_long(small: Make) -> None:
    preflight(small("workload.output_tokens={uniform: {low: 472, high: 900}}"), "sim")
    preflight(small("workload.output_tokens={fixed: 472}"), "sim")
    long = "workload.phases=[{from_s: 1, prompt_tokens: {fixed: 9}, output_tokens: {fixed: 900}}]"
    preflight(small(_LOOP, long), "sim")
    workload = SMALL[SMALL.index("workload:\n") + 10 : SMALL.index("acceptance")].replace("\n  ", "\n    ")
    both = f"workload:\n  - {workload.strip()}\n  - {workload.strip()}\n".replace(
        "low: 10, high: 60", "low: 600, high: 600", 1
    )
    text = SMALL[: SMALL.index("workload:")] + both + SMALL[SMALL.index("acceptance") :]
    preflight(small(text=text), "sim")
    with pytest.raises(BadInput, match=r"small.yaml:13: workload\[0\].output_tokens: prompt and output have 640"):
        preflight(
            small(text=text.replace("low: 10, high: 60", "fixed: 600").replace("uniform: {fixed: 600}", "fixed: 600")),
            "sim",
        )


# --- the whole


def test_the_command_says_it_in_one_line(command: Command, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(_with("{at_s: 1, do: sigkill, target: client-chat-0-0}"))
    for words in (["validate", path], ["run", path, "--backend", "sim"], ["sweep", path]):
        done = command(*words)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
        assert done.stderr.startswith("error: small.yaml:16: steps[0].target: client-chat-0-0 is the load itself")
    assert [one.name for one in tmp_path.iterdir()] == ["small.yaml"]


def test_nothing_of_the_catalog_is_refused() -> None:
    for path in catalog():
        scenario = load(path.stem)
        preflight(scenario, "sim")
        for kind in ("emulated", "sglang-cpu", "sglang"):
            preflight(for_real(scenario, kind), "real")


def test_what_is_refused_would_not_have_passed(small: Make) -> None:
    """The preflight left out: none of these runs passes, whatever it shows."""
    for steps, _ in _STEPS:
        if "node_loss" in steps[0] or "export, with" in steps[0] or "clock_skew" in steps[0]:
            continue  # the first two need more than this scenario has
        assert run_in_sim(small(text=_with(*steps)), 5).verdict.result != "pass", steps
