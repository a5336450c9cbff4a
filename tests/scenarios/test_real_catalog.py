"""Every catalog scenario on emulated engines: planned from the same file, or refused with exactly this reason.

Nothing is started: a preflight only looks. The machine is one of 32 GB.
"""

from __future__ import annotations

import re

import pytest

from analysis.errors import BadInput
from scenarios import real_preflight
from scenarios.load import CATALOG, catalog, load
from scenarios.real_preflight import RealOptions, plan
from scenarios.steps import StepModel

pytestmark = pytest.mark.ray

_RANKS = (
    "topology.services.{}.publishing.update.transport: {!r} needs training ranks beside the engines, which no real run "
    "has; use 'disk'"
)
REFUSED = {
    "prefix_cache_across_versions": [_RANKS.format("group", "nccl")],
    "publish_by_ranks": [
        _RANKS.format("colocated", "ipc"),
        _RANKS.format("separate", "nccl"),
        _RANKS.format("registered", "checkpoint_engine"),
    ],
}
"""What the simulated world alone has: training ranks, which hand weights on without a disk."""
PLANNED = sorted(path.stem for path in catalog() if path.stem not in REFUSED)


@pytest.fixture(autouse=True)
def thirty_two_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_preflight, "_available_mb", lambda: 32_000.0)
    monkeypatch.setattr(real_preflight, "visible_gpus", list)


@pytest.mark.parametrize("name", PLANNED)
def test_it_is_planned_with_the_steps_that_it_has(name: str) -> None:
    scenario = load(name)
    planned = plan(scenario, RealOptions("emulated")).scenario.model

    def done(step: StepModel) -> object:
        """What befalls whom and what must be met by it; the times are scaled, and fewer replicas are asked for."""
        parameters = {key: value for key, value in step.with_.items() if key != "num_replicas"}
        event = None if step.when is None else (step.when.event, step.when.phase)
        return step.do, step.target, parameters, step.must_hit, event

    assert [done(step) for step in planned.steps] == [done(step) for step in scenario.model.steps]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused_for_what_no_real_run_has_and_nothing_else(name: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan(load(name), RealOptions("emulated"))
    first, *reasons = str(refused.value).splitlines()
    assert first == f"--backend real --engine emulated: cannot run {name}"
    placed = re.compile(rf" +\S*{re.escape(CATALOG.name)}/{name}\.yaml:\d+: (.*)")
    said = [placed.fullmatch(reason) for reason in reasons]
    assert [None if one is None else one[1] for one in said] == REFUSED[name]


def test_with_weights_from_the_disk_what_was_refused_is_planned() -> None:
    by_disk = "topology.services.group.publishing.update={transport: disk}"
    assert plan(load("prefix_cache_across_versions", [by_disk]), RealOptions("emulated")).engines.kind == "emulated"
