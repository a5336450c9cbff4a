"""The ``real:`` block: what it changes, what it may not, and what a preflight says."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable

import pytest

from analysis.errors import BadInput
from analysis.rundir import RunDir
from real.engines import sglang_flags
from scenarios import real_preflight
from scenarios.json_schema import scenario_schema
from scenarios.load import Scenario, catalog, load
from scenarios.real_preflight import RealOptions, plan
from scenarios.real_scenario import GENUINE_TRAINER, for_real
from scenarios.runner import run_in_sim
from tests.scenarios.conftest import SMALL

Make = Callable[..., Scenario]

STEPS = """\
steps:
  - {at_s: 4, do: sigstop, target: chat-0, for_s: 2}
  - {when: {event: engine.accepted, from_s: 10}, after_s: 3, do: sigkill, target: replica_of_trigger}
acceptance:"""


def _with(block: str, steps: bool = False) -> str:
    text = SMALL.replace("acceptance:", STEPS) if steps else SMALL
    return f"{text}\nreal: {block}\n"


def test_times_of_the_steps_are_scaled_and_nothing_else(small: Make) -> None:
    scenario = small(text=_with("{time_scale: 0.5}", steps=True))
    real = for_real(scenario, "emulated")
    stop, kill = real.model.steps
    assert (stop.at_s, stop.for_s, stop.after_s) == (2.0, 1.0, 0.0)
    assert kill.when is not None
    assert (kill.at_s, kill.for_s, kill.after_s, kill.when.from_s) == (None, None, 1.5, 5.0)
    assert real.model.workload == scenario.model.workload and real.model.limits == scenario.model.limits
    assert real.text == scenario.text
    assert scenario.model.steps[0].at_s == 4  # the simulated world has its own


def test_changes_are_of_one_kind_of_engine_and_in_the_text_that_is_kept(small: Make) -> None:
    scenario = small(text=_with("{set: {emulated: {workload.for_s: 2}, sglang-cpu: {real.time_scale: 0.25}}}", True))
    emulated, genuine = for_real(scenario, "emulated"), for_real(scenario, "sglang-cpu")
    assert emulated.model.workload[0].for_s == 2 and "for_s: 2\n" in emulated.text
    assert genuine.model.workload == scenario.model.workload
    assert (emulated.model.steps[0].at_s, genuine.model.steps[0].at_s) == (4, 1)


def test_genuine_engines_are_given_genuine_weights_unless_a_trainer_is_named(small: Make) -> None:
    def trainer(scenario: Scenario, kind: str) -> str | None:
        return for_real(scenario, kind).model.topology.services["chat"].components.get("trainer")

    assert trainer(small(), "emulated") is None
    assert trainer(small(), "sglang-cpu") == trainer(small(), "sglang") == GENUINE_TRAINER
    own = "topology.services.chat.components={trainer: 'scenarios.trainer:SyntheticTrainer'}"
    assert trainer(small(own), "sglang-cpu") == "scenarios.trainer:SyntheticTrainer"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{time_scale: 0}", r"small.yaml:\d+: real.time_scale: must be greater than 0"),
        ("{time_scale: 1.5}", r"small.yaml:\d+: real.time_scale: must be less than or equal to 1"),
        ("{engin: emulated}", r"small.yaml:\d+: real.engin: unknown key; did you mean 'engine'"),
        ("{engine: vllm}", r"small.yaml:\d+: real.engine: must be 'sglang', 'sglang-cpu' or 'emulated'"),
        ("{set: {emulated: {steps.0.at_s: 1}}}", r"real.set: 'steps.0.at_s' cannot be changed under 'set'"),
        ("{set: {emulated: {steps.0.do: note}}}", r"real.set: 'steps.0.do' cannot be changed under 'set'"),
        ("{set: {emulated: {steps.0.with.count: 1}}}", r"real.set: 'steps.0.with.count' cannot be changed"),
        ("{set: {emulated: {steps.late.at_s: 1}}}", r"real.set: 'steps.late.at_s' cannot be changed under 'set'"),
        ("{set: {emulated: {seed: 1}}}", r"real.set: 'seed' cannot be changed under 'set'"),
        (
            "{set: {vllm: {workload.for_s: 1}}}",
            r"small.yaml:\d+: real.set.*must be 'sglang', 'sglang-cpu' or 'emulated'",
        ),
        ("{startup_s: 5s}", r"small.yaml:\d+: real.startup_s: '5s' carries a unit"),
    ],
)
def test_a_wrong_block_is_refused_where_it_stands(small: Make, block: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        small(text=_with(block))


def test_fewer_replicas_may_be_asked_for_and_the_last_one_then_has_another_name() -> None:
    real = for_real(load("fault_injection"), "sglang-cpu").model
    asked = [step.with_["num_replicas"] for step in real.steps if step.do in ("scale_out", "scale_in")]
    elastic = real.topology.services["code"].initial_replicas
    assert asked == [elastic + 1, elastic]
    waits_for = [step.when.where for step in real.steps if step.when is not None]
    assert {"actor": f"code-{elastic}", "running": 2} in waits_for
    assert [step.do for step in real.steps] == [step.do for step in load("fault_injection").model.steps]


def test_a_change_of_an_unknown_key_names_the_block_that_has_it(small: Make) -> None:
    scenario = small(text=_with("{set: {emulated: {workload.for: 1}}}"))
    with pytest.raises(BadInput, match=r"small.yaml:\d+: real.set.emulated: .*workload.for: unknown key"):
        for_real(scenario, "emulated")


def test_a_block_goes_by_names(small: Make) -> None:
    text = _with("{set: {emulated: {steps.late.when.from_s: 5, acceptance.few.occurs.at_least: 3}}}", steps=True)
    text = text.replace("{when:", "{name: late, when:").replace(
        "acceptance:", "acceptance:\n  - {name: few, occurs: {event: gateway.moved, at_most: 2}}", 1
    )
    with pytest.raises(
        BadInput,
        match=r"small.yaml:\d+: real.set.emulated: small.yaml:\d+ with --set acceptance.few.occurs.at_least=3: "
        r"acceptance\[0\]: .*'occurs': at_least 3 is more",
    ):
        for_real(small(text=text), "emulated")
    real = for_real(small(text=text.replace("at_least: 3", "at_least: 2")), "emulated").model
    assert real.steps[1].when is not None and real.steps[1].when.from_s == 5
    with pytest.raises(BadInput, match=r"real.set.emulated: .*'lat' is the name of none; did you mean 'late'"):
        for_real(small(text=text.replace("steps.late", "steps.lat")), "emulated")


def test_every_block_of_the_catalog_is_good() -> None:
    for path in catalog():
        for kind in ("emulated", "sglang-cpu", "sglang"):
            for_real(load(path.stem), kind)


def test_editors_know_the_block() -> None:
    block = scenario_schema()["$defs"]["RealModel"]["properties"]
    assert sorted(block) == ["engine", "model", "set", "startup_s", "time_scale"]


# --- preflight ---


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_preflight, "visible_gpus", list)


@pytest.mark.ray
@pytest.mark.usefixtures("no_gpu")
def test_everything_that_is_missing_is_said_at_once(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SMALL.replace(
        "acceptance:", "steps:\n  - {at_s: 1, do: node_loss, target: {node: node-0}, for_s: 2}\nacceptance:"
    )
    scenario = small("network.loopback_latency_s=0.1", "topology.services.chat.engine=gpt-9", text=text)
    monkeypatch.setattr("real.cluster.version_problem", lambda: "Ray 3.0 is installed")
    with pytest.raises(BadInput) as refused:
        plan(scenario, RealOptions("emulated", "/nowhere/python"))
    said = str(refused.value).splitlines()
    assert len(said) == 6
    for part in (
        "cannot run small",
        "Ray 3.0 is installed",
        "node_loss",
        "loopback_latency_s",
        "/nowhere/python",
        "gpt-9",
    ):
        assert any(part in line for line in said), part


@pytest.mark.ray
def test_where_no_temporary_folder_can_be_made_it_is_told(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(BadInput, match=r"No usable temporary directory.*; set TMPDIR to a folder that can be written"):
        plan(small(), RealOptions("emulated"))


@pytest.mark.ray
@pytest.mark.usefixtures("no_gpu")
def test_the_default_engine_needs_a_gpu_or_a_word_of_the_scenario(small: Make) -> None:
    with pytest.raises(BadInput, match="no GPU is visible here.*--engine emulated.*--engine sglang-cpu"):
        plan(small(), RealOptions())
    assert plan(small(text=_with("{engine: emulated}")), RealOptions()).engines.kind == "emulated"


@pytest.mark.ray
def test_options_of_sglang_are_checked_and_an_emulated_engine_has_none(
    small: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(real_preflight, "_sglang_python", lambda *_: "/opt/python")
    asked: list[object] = []

    def check(*arguments: object, **how: object) -> None:
        asked.append((arguments, how))

    monkeypatch.setattr(sglang_flags, "check_arguments", check)
    given = ("page-size=16", "disable-radix-cache")
    settings = plan(small(), RealOptions("sglang-cpu", engine_arguments=given)).engines
    assert settings.arguments == ("--page-size=16", "--disable-radix-cache")
    assert asked == [(("/opt/python", settings.arguments), {"cpu": True})]
    with pytest.raises(BadInput, match="--engine-argument: --port is set by the project"):
        plan(small(), RealOptions("sglang-cpu", engine_arguments=("port=1",)))
    with pytest.raises(BadInput, match="--engine-argument: an emulated engine has no options of SGLang"):
        plan(small(), RealOptions("emulated", engine_arguments=given))


@pytest.mark.ray
@pytest.mark.usefixtures("no_gpu")
def test_ten_thousand_engines_are_too_many_for_this_machine() -> None:
    with pytest.raises(BadInput, match=r"10000 emulated replicas at most.*GB of memory, .* are free; run fewer"):
        plan(load("scale_10k", ["real.set={}"]), RealOptions("emulated"))


def test_memory_is_reckoned_with_the_replicas_that_there_may_be_later() -> None:
    def most(name: str, service: str, *changes: str) -> int:
        return real_preflight._most_replicas(load(name, changes), service)

    assert (most("fault_injection", "code"), most("fault_injection", "policy")) == (9, 2)
    assert most("scale_storm", "chat") == 64
    limit = "topology.services.genrm.scaling.autoscaler.max_engines=7"
    assert most("autoscaler_cycle", "genrm", limit) == 7


@pytest.mark.parametrize("name", ["publish_live_agents", "manual_1_2_1", "trace_ownership"])
def test_memory_is_reckoned_with_every_actor_that_a_deployment_starts(name: str, tmp_path: pathlib.Path) -> None:
    scenario = load(name)
    run_in_sim(scenario, 1, out=tmp_path / "run", report=False)
    started = {
        event.actor
        for event in RunDir(tmp_path / "run").read_events()
        if event.kind == "actor.spawned" and event.data["role"] == "actor"
    }
    services = scenario.model.topology.services.values()
    clients = sum(load.clients for load in scenario.model.workload)
    assert len(started) == clients + sum(real_preflight._actors(service) for service in services)


@pytest.mark.ray
def test_genuine_engines_need_as_many_gpus_as_they_ask_for(
    small: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(real_preflight, "visible_gpus", lambda: ["0"])
    with pytest.raises(BadInput, match="need 2 GPUs, 1 are visible.*real.set.sglang"):
        plan(small(), RealOptions("sglang", model=str(tmp_path)))
    monkeypatch.setattr(real_preflight, "visible_gpus", lambda: ["4", "6"])
    monkeypatch.setattr(real_preflight, "_ask", lambda *_: None)
    assert plan(small(), RealOptions(model=str(tmp_path))).gpus == ((2.0, "4,6"),)
    with pytest.raises(BadInput, match="model /no/such: no such folder"):
        plan(small(), RealOptions(model="/no/such"))
