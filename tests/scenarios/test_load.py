# ruff: noqa: E501 - one row of a table a line
"""Scenario files: what is accepted, and the one line that says what is wrong."""

from __future__ import annotations

import json
import pathlib
import re
import typing
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from analysis.errors import BadInput
from protocol.config import ComponentConfig, TraceStoreConfig
from scenarios import schema
from scenarios.cross_checks import process_names
from scenarios.faults import CATALOG, FAULTS, VERBS
from scenarios.fields import SpecModel
from scenarios.load import Scenario, catalog, load, parse
from scenarios.runner import preregistered
from scenarios.steps import MEETS
from scenarios.workloads.source import TRACES
from sim.fault_kinds import IMPLEMENTED
from tests.scenarios.conftest import ROOT

GOOD = """\
name: one
summary: One replica.
topology:
  nodes: 2
  gpus_per_node: 2
  services:
    chat:
      initial_replicas: 2
      engine: tiny-cpu
workload:
  service: chat
  arrivals: {poisson: {rate_per_s: 5}}
  prompt_tokens: {fixed: 10}
  output_tokens: {fixed: 4}
  for_s: 3
steps:
  - at_s: 1
    do: latency
    target: {link: {from: node-0, to: node-1}}
    with: {extra_s: 0.1}
    for_s: 2
  - {at_s: 2, do: note, with: {text: hello}}
acceptance:
  - nothing_lost: {}
"""
HERE = pathlib.Path(".")
_LAUGHS = "".join(f"  x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else '1'}]\n" for n in range(9))


def _parse(old: str = "", new: str = "", *changes: str) -> Any:
    assert old in GOOD
    return parse(GOOD.replace(old, new, 1) if old else GOOD, "f.yaml", HERE, changes)


def test_good_file() -> None:
    scenario = _parse()
    model = scenario.model
    assert [workload.service for workload in model.workload] == ["chat"]
    assert model.steps[0].parameters().model_dump() == {"extra_s": 0.1}
    assert [step.do for step in model.fault_steps] == ["latency"]


def test_every_scenario_of_the_catalog_is_good_and_named_as_its_file() -> None:
    names = [path.stem for path in catalog()]
    assert {"fault_injection", "smoke", "scale_10k"} <= set(names)
    for name in names:
        assert load(name).name == name


BAD = [
    # (what is replaced, by what, what the message must have)
    ("summary:", "sumary:", r"f.yaml:2: sumary: unknown key; did you mean 'summary'"),
    ("  nodes: 2\n", "  nodes: 2\n  gpus: 3\n", r"f.yaml:5: topology.gpus: unknown key; .*known: nodes"),
    ("      engine: tiny-cpu\n", "", r"f.yaml:7: topology.services.chat.engine: the key is missing"),
    ("initial_replicas: 2", "initial_replicas: many", r"f.yaml:8: topology.services.chat.initial_replicas: must be .*int"),
    ("initial_replicas: 2", "initial_replicas: 5", r"f.yaml:3: topology: the replicas need 5 GPUs; 2 nodes with 2"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      gateway: {atempts: 3}", r"f.yaml:10: .*gateway.atempts: unknown key; did"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      gateway: {attempts: 0}", r"f.yaml:10: .*gateway.attempts: must be greater"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      components: {gates: 'a:B'}", r"f.yaml:10: .*unknown component 'gates'; did"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      components: {gateway: nope}", r"f.yaml:10: .*'nope' names no class"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      components: {gateway: 'no_such:B'}", r"f.yaml:10: .*cannot import 'no_such'"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      components: {gateway: 'json:B'}", r"f.yaml:10: .*json has no class 'B'"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      components: {gateway: 'json:JSONDecoder'}",
     r"f.yaml:10: .*gateway: json:JSONDecoder has no 'async def' of generate, add_replica, health_view, which every run asks"),
    ("engine: tiny-cpu", "engine: tiny-cpu\n      gateways: 3", r"f.yaml:10: .*gateways: 3 gateways for 2 replicas"),
    ("service: chat", "service: chart", r"f.yaml:11: workload.service: unknown service 'chart'; did you mean 'chat'"),
    ("for_s: 3", "for_s: -3", r"f.yaml:15: workload.for_s: must not be negative \(given: -3\)"),
    ("for_s: 3", "for_s: 3s", r"f.yaml:15: workload.for_s: '3s' carries a unit"),
    ("for_s: 3", "for_s: .inf", r"f.yaml:15: workload.for_s: inf is not finite"),
    ("for_s: 3", "for_ms: 3", r"f.yaml:15: workload.for_ms: unknown key; did you mean 'for_s'"),
    ("  for_s: 3\n", "", r"f.yaml:10: workload: the workload never ends; give 'for_s' or 'requests'"),
    ("prompt_tokens: {fixed: 10}", "prompt_tokens: {fixed: 10, uniform: {low: 1, high: 2}}", r"f.yaml:13: .*exactly one"),
    ("prompt_tokens: {fixed: 10}", "prompt_tokens: {lognormal: {median: 9, p99: 3}}", r"f.yaml:13: .*p99 .* is below"),
    ("{poisson: {rate_per_s: 5}}", "{poison: {rate_per_s: 5}}", r"f.yaml:12: workload.arrivals.poison: unknown key; did"),
    ("{poisson: {rate_per_s: 5}}", "{poisson: {rate_per_s: 0}}", r"f.yaml:12: .*rate_per_s: must be greater than 0"),
    ("at_s: 1\n", "at_s: -1\n", r"f.yaml:17: steps\[0\].at_s: must not be negative"),
    ("at_s: 1\n", "at: 1\n", r"f.yaml:17: steps\[0\].at: unknown key; did you mean 'at_s'"),
    ("do: latency", "do: latenzy", r"f.yaml:18: steps\[0\].do: unknown fault or verb 'latenzy'; did you mean 'latency'"),
    ("    for_s: 2\n", "", r"f.yaml:17: steps\[0\]: 'latency' never ends; give it 'for_s'"),
    ("{extra_s: 0.1}", "{extra_ms: 100}", r"f.yaml:20: steps\[0\].with.extra_ms: unknown key; did you mean 'extra_s'"),
    ("{extra_s: 0.1}", "{}", r"f.yaml:17: steps\[0\].with.extra_s: the key is missing"),
    ("from: node-0", "from: nod-0", r"f.yaml:19: steps\[0\].target.link.from: unknown end of a link 'nod-0'; did you"),
    ("{link: {from: node-0, to: node-1}}", "busiest_replica", r"f.yaml:17: steps\[0\]: 'latency' befalls a link"),
    (
        "{link: {from: node-0, to: node-1}}",
        "{link: {to: node-1}}",
        r"f.yaml:17: steps\[0\]: 'latency' is between two nodes; 'from' of its link must be one name, not '\*'",
    ),
    ("to: node-1}}", 'to: "genrm-?"}}', r"f.yaml:17: steps\[0\]: .*; 'to' of its link must be one name, not 'genrm-\?'"),
    ("    target: {link: {from: node-0, to: node-1}}\n", "", r"f.yaml:17: steps\[0\]: 'latency' needs a target \(link\)"),
    ("do: note, with: {text: hello}", "do: sigkill, target: chat-9", r"f.yaml:22: steps\[1\].target: unknown target 'chat-9'"),
    (
        "do: note, with: {text: hello}", "do: sigterm, target: gateway-chat-0",
        r"f.yaml:22: steps\[1\].target: 'gateway-chat-0' is no replica; sigterm befalls replicas alone",
    ),
    (
        "do: note, with: {text: hello}", "do: sigkill, with: {part: scheduler}, target: gateway-chat-0",
        r"f.yaml:22: .* is no replica; sigkill of the scheduler befalls replicas alone",
    ),
    ("do: note, with: {text: hello}", "do: sigkill, target: chat-1, for_s: 2", r"f.yaml:22: .*it takes no 'for_s'"),
    ("do: note, with: {text: hello}", "do: sigkill, target: chat-1, must_hit: {inflight: {}}", r"f.yaml:22: .*'inflight'; did"),
    ("do: note, with: {text: hello}", "do: sigkill, target: chat-1, must_hit: {}", r"f.yaml:22: .*must_hit.*at least 1 item"),
    (
        "do: note, with: {text: hello}", "do: sigkill, target: chat-1, must_hit: {in_flight: {at_least: 0}}",
        r"f.yaml:22: .*at_least: must be greater than or equal to 1",
    ),
    ("at_s: 2, do: note", "when: {event: engine.redy}, do: note", r"f.yaml:22: .*unknown event kind 'engine.redy'; did"),
    ("at_s: 2, do: note", "when: {event: engine.ready, where: {v: 1}}, do: note", r"f.yaml:22: .*unknown field of engine.ready"),
    ("at_s: 2, do: note", "at_s: 2, when: {event: engine.ready}, do: note", r"f.yaml:22: .*exactly one of at_s, when"),
    ("nothing_lost: {}", "nothing_gained: {}", r"f.yaml:24: acceptance\[0\]: .*'nothing_gained' is unknown"),
    ("name: one", "name: One Two", r"f.yaml:1: name: 'One Two' is no name"),
    ("name: one", "name: one\nname: two", r"f.yaml:2: key 'name' is given twice"),
    ("name: one", "name: [one", r"f.yaml:\d+: no YAML"),
    ("name: one", "name: !!python/object:os.system one", r"f.yaml:1: .*cannot be read"),
    ("  nodes: 2", "  nodes: {2: 3}", r"f.yaml:4: a key must be text, not '2'"),
    ("  nodes: 2", "  ? [2]\n  : 3", r"f.yaml:4: a key must be text, not a list or a mapping"),
    ("  nodes: 2", "  <<: {nodes: 2}", r"f.yaml:4: key '<<': merging is not supported"),
    ("  nodes: 2", "  nodes: &n {x: *n}", r"f.yaml:4: nested too deeply; at most 40 levels"),
    ("  nodes: 2", "  nodes: " + "[" * 3000 + "]" * 3000, r"f.yaml: nested too deeply; at most 40 levels"),
    ("  nodes: 2", _LAUGHS, r"f.yaml:\d+: too many values"),
    ("  nodes: 2", "  nodes: !!bool x", r"f.yaml:4: 'x' cannot be read as tag:yaml.org,2002:bool"),
    ("  nodes: 2", "  nodes: !!int ''", r"f.yaml:4: '' cannot be read as"),
    ("  nodes: 2", "  nodes: 0x" + "9" * 5000, r"f.yaml:4: 0x9+... is too long a number"),
    ("  nodes: 2", "  nodes: 1000001", r"f.yaml:4: .*must be less than or equal to 1000000"),
    ("name: one", "name: &a one\nseed: &a 7", r"f.yaml:\d+: no YAML: found duplicate anchor 'a'$"),
    ("name: one", 'name: one\n"a\\nb": 7', r"f.yaml:\d+: 'a\\nb': unknown key; known: name"),
    ("name: one", "name: one\n'': 7", r"f.yaml:\d+: '': unknown key; known: name"),
    ("nothing_lost: {}", "latency_p99: {at_most_s: .inf}", r"f.yaml:24: .*'at_most_s': must be a finite number"),
    ("for_s: 3", "for_s: 1e3", r"f.yaml:\d+: workload.for_s: '1e3' is text in YAML; write 1.0e\+3$"),
    ("for_s: 3", "for_s: 1.0e+300", r"workload.for_s: must be less than or equal to 1000000000 \(given: 1e\+300\)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[f"{new.strip()[:40]}" for _, new, _ in BAD])
def test_bad_file_is_one_line_with_place_key_and_fix(old: str, new: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        _parse(old, new)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_a_file_that_is_no_mapping(text: str) -> None:
    with pytest.raises(BadInput, match="f.yaml:1: a scenario is a mapping"):
        parse(text, "f.yaml", HERE)


@pytest.mark.parametrize(
    "change",
    [
        "workload.trace.file=mine.csv",
        "workload.trace={format: azure, file: mine.csv}",
        "workload.0.trace.file=mine.csv",
    ],
)
def test_a_relative_trace_of_the_command_line_is_meant_from_the_current_folder(
    tmp_path: pathlib.Path, change: str
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "mine.csv").write_text("")
    text = GOOD[: GOOD.index("  arrivals")] + "  trace: {format: azure, file: mine.csv}\n"
    if ".0." in change:
        text = text.replace("workload:\n  service", "workload:\n- service")
    scenario = parse(text, "f.yaml", beside, [change], here)
    trace = scenario.model.workload[0].trace
    assert trace is not None and scenario.trace_path(trace.file) == here / "mine.csv"
    again = parse(scenario.text, "f.yaml", beside)  # as a worker does, or who reads run.json
    assert again.model.workload[0].trace == trace
    unchanged = parse(text, "f.yaml", beside, ["seed=3"], here).model.workload[0].trace
    assert unchanged is not None and scenario.trace_path(unchanged.file) == beside / "mine.csv"
    shipped = "AzureLLMInferenceTrace_code.csv"
    found = parse(text, "f.yaml", beside, [change.replace("mine.csv", shipped)], here)
    assert found.trace_path(shipped) == TRACES / shipped
    with pytest.raises(BadInput, match=f"no trace at {here}/absent.csv"):
        parse(text, "f.yaml", beside, [change.replace("mine.csv", "absent.csv")], here)


def test_an_engine_profile_is_meant_from_its_file_or_from_the_current_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
    monkeypatch.chdir(here)

    def engine(scenario: Scenario) -> str:
        return scenario.model.topology.services["chat"].engine

    named = GOOD.replace("engine: tiny-cpu", "engine: mine.yaml")
    assert named != GOOD
    assert engine(parse(named, "f.yaml", beside)) == "../beside/mine.yaml"
    assert engine(parse(named, "f.yaml", here)) == "mine.yaml"
    change = "topology.services.chat.engine=./mine"
    given = parse(named, "f.yaml", beside, [change], here)
    assert engine(given) == "./mine" and engine(parse(given.text, "f.yaml", beside)) == "./mine"
    assert engine(parse(GOOD, "f.yaml", beside, ["seed=3"], here)) == "tiny-cpu"
    assert engine(parse(GOOD.replace("tiny-cpu", "/x/y.yaml"), "f.yaml", beside)) == "/x/y.yaml"


def test_trace_that_is_not_there_names_those_shipped() -> None:
    text = GOOD[: GOOD.index("  arrivals")] + "  trace: {format: azure, file: nope.csv}\n"
    with pytest.raises(BadInput, match=r"f.yaml:12: workload.trace.file: no trace at .*shipped: AzureLLM"):
        parse(text, "f.yaml", HERE)
    with pytest.raises(BadInput, match=r"f.yaml:12: workload.trace.file: no trace at "):
        parse(text.replace("nope", "n" * 300), "f.yaml", HERE)


# --- the documents ---


def test_the_examples_of_the_documents_are_good_and_every_fault_and_verb_is_in_them() -> None:
    page = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    examples = [block for block in re.findall(r"```yaml[^\n]*\n(.*?)```", page, re.DOTALL) if block.startswith("name:")]
    assert examples
    for example in examples:
        scenario = parse(example.replace("mystack.gateway", "protocol.serving.gateway"), "doc", ROOT / "docs")
        assert scenario.model.steps
    named = set(re.findall(r"`([a-z_]+)`", page + (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")))
    assert {*FAULTS, *VERBS} <= named


# --- --set ---


def test_set_changes_values_items_and_defaults() -> None:
    changes = ("seed=9", "steps.0.with.extra_s=0.5", "limits.time_limit_s=7", "workload.for_s=4")
    model = _parse("", "", *changes).model
    assert (model.seed, model.limits.time_limit_s, model.workload[0].for_s) == (9, 7, 4)
    assert model.steps[0].parameters().model_dump() == {"extra_s": 0.5}


_NAMED = """\
steps:
  - {name: slower, at_s: 1, do: latency, target: {link: {from: node-0, to: node-0}}, with: {extra_s: 0.1}, for_s: 2}
  - {at_s: 2, do: note, with: {text: x}}
acceptance:
  - {name: few, occurs: {event: gateway.moved, at_most: 9}}
  - occurs: {event: gateway.picked}
  - answered_fraction: {at_least: 0.5}
"""


def named(*changes: str, tail: str = _NAMED) -> Scenario:
    return parse(GOOD.partition("steps:")[0] + tail, "named.yaml", HERE, changes)


def test_set_goes_by_the_names_of_steps_and_criteria() -> None:
    model = named("steps.slower.with.extra_s=0.5", "acceptance.few.occurs.at_most=3").model
    assert model.steps[0].parameters().model_dump() == {"extra_s": 0.5}
    assert model.acceptance[0] == {"name": "few", "occurs": {"event": "gateway.moved", "at_most": 3}}
    # The only one of its criterion goes by that, and its parameters follow.
    by_criterion = named("acceptance.answered_fraction.at_least=1").model
    assert by_criterion.acceptance[2] == {"answered_fraction": {"at_least": 1}}
    assert named("acceptance.answered_fraction={at_least: 1}").model == by_criterion
    assert named("acceptance.2.answered_fraction.at_least=1").model == by_criterion
    # A line in front changes numbers, and no names.
    before = _NAMED.replace("steps:\n", "steps:\n  - {at_s: 0.5, do: note, with: {text: before}}\n")
    moved = named("steps.slower.with.extra_s=0.5", tail=before).model
    assert moved.steps[1] == model.steps[0]


def test_names_are_for_people_and_not_for_the_judge() -> None:
    assert preregistered(named()).acceptance[0] == {"occurs": {"event": "gateway.moved", "at_most": 9}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "steps.slow.for_s=1",
            "--set steps.slow.for_s=1: steps has items 0 to 1; 'slow' is the name of none; did you mean 'slower'? known: "
            "slower",
        ),
        (
            "acceptance.occurs.at_most=1",
            r"--set acceptance.occurs.at_most=1: acceptance has 2 entries of 'occurs' \(0, 1\); give the one that is meant a "
            r"name \('name: ...' beside 'occurs:'\), or say its number",
        ),
        ("acceptance.fw.occurs.at_most=1", "'fw' is the name of none; did you mean 'few'? known: few, answered_"),
        ("acceptance.9.occurs.at_most=1", "acceptance has items 0 to 2; '9' is none"),
        ("steps.1.name=slower", r"steps\[1\].name: 'slower' is the name of steps\[0\] already; use another one"),
        ("steps.1.name=1st", r"steps\[1\].name: '1st' is no name; use a-z"),
        ("acceptance.1.name=few", r"acceptance\[1\].name: 'few' is the name of acceptance\[0\] already; use another"),
        ("acceptance.1.name=9", r"acceptance\[1\].name: 9 is no name; use a-z"),
        ("acceptance.1.name=reached", r"acceptance\[1\].name: 'reached' is the name of a criterion; use another one"),
        ("acceptance.1={name: x}", r"acceptance\[1\]: acceptance entry \{\}: must be one 'criterion: \{parameters\}'"),
        ("acceptance.few.occurs.at_least=10", r"acceptance\[0\]: .*at_least 10 is more than at_most 9.*lower at_least"),
    ],
)
def test_a_name_that_is_none_is_told_with_those_that_are(change: str, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("?", r"\?")):
        named(change)


def test_wrong_names_in_a_file_are_told_with_their_lines() -> None:
    with pytest.raises(BadInput, match=r"^named.yaml:\d+: acceptance\[0\].name: 'Few' is no name"):
        named(tail=_NAMED.replace("name: few, ", "name: Few, "))
    with pytest.raises(BadInput, match=r"^named.yaml:\d+: acceptance\[0\]: acceptance criterion 'occurs': at_least 10"):
        named(tail=_NAMED.replace("at_most: 9", "at_most: 9, at_least: 10"))


def test_text_after_set_is_the_scenario_that_ran() -> None:
    changed = _parse("", "", "seed=9")
    assert parse(changed.text, "again", HERE).model == changed.model
    assert changed.sha256 != _parse().sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed", "--set seed: write it as key.inner=value"),
        ("sed=3", "--set sed=3: sed: unknown key; did you mean 'seed'"),
        ("seed=x", r"--set seed=x: seed: must be .*int"),
        ("steps.7.at_s=1", r"--set steps.7.at_s=1: steps has items 0 to 1"),
        ("name.first=x", "--set name.first=x: name is a plain value"),
        ("seed=[", r"--set seed=\[: no YAML"),
        ("seed=2024-13-45", "--set seed=2024-13-45: '2024-13-45' cannot be read as"),
        ("seed={a: 1, a: 2}", "key 'a' is given twice"),
        ("seed=&a [*a]", "nested too deeply"),
        ("steps.\u00b2.at_s=1", "steps has items 0 to 1; '\u00b2' is none"),
        ("..=1", r"--set ..=1: write it as key.inner=value"),
        (
            "topology.services.chat.initial_replicas=50",
            r"f.yaml:\d+ with --set topology.services.chat.initial_replicas=50: topology: the replicas need 50 GPUs",
        ),
    ],
)
def test_bad_set_names_itself(change: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        _parse("", "", change)


def test_unknown_scenario_and_absent_file() -> None:
    with pytest.raises(BadInput, match="unknown scenario 'smok'; did you mean 'smoke'"):
        load("smok")
    with pytest.raises(BadInput, match=r"no_such.yaml: no such file"):
        load("no_such.yaml")
    with pytest.raises(BadInput, match="unknown scenario 'sss"):
        load("s" * 300)
    with pytest.raises(BadInput, match="cannot be read .File name too long"):
        load("s" * 300 + ".yaml")
    with pytest.raises(BadInput, match=r"/dev/zero: is longer than 1 MiB"):
        load("/dev/zero")  # nor is it read to its end


def test_a_component_whose_import_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_at_import.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wants_more.py").write_text("import no_such_module\n")
    change = "topology.services.chat.components={gateway: 'broken_at_import:Gateway'}"
    with pytest.raises(BadInput, match=r"components.gateway: importing 'broken_at_import' failed \(SystemExit: 3\)"):
        _parse("", "", change)
    with pytest.raises(BadInput, match=r"importing 'wants_more' failed \(ModuleNotFoundError: No module named 'no_such"):
        _parse("", "", change.replace("broken_at_import", "wants_more"))


# --- the table of faults ---


def test_both_halves_of_the_faults_have_the_same_names() -> None:
    assert list(FAULTS) == list(IMPLEMENTED)
    assert not set(FAULTS) & set(VERBS)


def test_every_fault_says_all_that_is_to_be_said() -> None:
    assert len({fault.colour for fault in CATALOG}) == len(CATALOG)
    for fault in CATALOG:
        assert fault.__doc__ and set(fault.must_hit) <= set(MEETS) and fault.worlds


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("{engine: vllm}", "engine: no rejection pattern of 'vllm'; add it to entrypoint.rejections, or"),
        ('{engine: y, rejections: {y: "("}}', r"rejections\['y'\]: no regular expression"),
    ],
)
def test_an_engine_whose_refusals_nobody_knows(change: str, says: str) -> None:
    for key in ("entrypoint", "session_server"):
        with pytest.raises(BadInput, match=rf"topology.services.policy.publishing.{key}: {says}"):
            load("publish_live_agents", [f"topology.services.policy.publishing.{key}={change}"])


def test_a_number_is_no_switch() -> None:
    key = "topology.services.policy.publishing.affinity"
    with pytest.raises(BadInput, match=rf"{key}.max_sessions: is no switch; write a number or a text"):
        load("publish_live_agents", [f"{key}={{max_sessions: yes}}"])
    assert load("publish_live_agents", ["topology.services.policy.publishing.update={flush: no}"])


def test_a_journal_where_none_is_kept() -> None:
    with pytest.raises(BadInput, match=r"scaling: 'lifecycle\.journal' is of kind judge.*leave it out"):
        load("rollout_elastic", ["topology.services.rollout.scaling.lifecycle.journal=journals"])
    assert load("manual_1_2_1", ["topology.services.genrm.scaling.lifecycle.journal=journals"])


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ("{kind: rollout, api: {max_history: 2}}", "'api' is not read where 'kind' is rollout: leave it out"),
        ("{rollout: {drain_sleep_s: 2}}", "'rollout' is not read where 'kind' is judge: leave it out"),
    ],
)
def test_settings_of_the_other_kind_of_scaling(scaling: str, says: str) -> None:
    with pytest.raises(BadInput, match=rf"topology.services.chat.scaling: {says}"):
        load("smoke", [f"topology.services.chat.scaling={scaling}"])


@pytest.mark.parametrize("folder", ["/journals", "../journals", "journals/", "a//b", "./a", ".", " ", "a\0b", "a\nb"])
def test_a_journal_that_no_storage_would_find_again(folder: str) -> None:
    with pytest.raises(BadInput, match=r"gateway\.journal: '.+' is no folder in storage; write names with '/' between"):
        load("smoke", [f"topology.services.chat.gateway.journal={json.dumps(folder)}"])
    assert load("smoke", ["topology.services.chat.gateway.journal=journals/of chat"])


def test_what_is_wrong_in_any_components_configuration_is_told_with_what_is_known() -> None:
    models = [model for model in vars(schema).values() if isinstance(model, type) and issubclass(model, SpecModel)]
    looked = set()
    for model in models:
        for name, field in model.model_fields.items():
            parts = [field.annotation, *typing.get_args(field.annotation)]
            for config in (part for part in parts if isinstance(part, type) and issubclass(part, ComponentConfig)):
                with pytest.raises(ValidationError, match="unknown key 'nonsense'; known: "):
                    TypeAdapter(dict[str, model]).validate_python({"x": {name: {"nonsense": 1}}})  # type: ignore[valid-type]  # made here
                looked.add(config)
    assert TraceStoreConfig in looked and len(looked) > 20


def test_a_target_that_the_kind_of_scaling_does_not_have() -> None:
    for scenario, service in (("rollout_elastic", "rollout"), ("reward_consistency", "genrm")):
        names = process_names(load(scenario).model)
        assert f"scale-{service}-0" in names and (f"manager-{service}-0" in names) == (service == "genrm")
