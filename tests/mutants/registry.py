"""What a mutant declares beforehand, and the list of all of them.

A mutant differs from its twin in one defect. Caught means: the declared check says *fail* with witness events, and the
twin passes that check under the same seeds (DESIGN.md, "Evidence and verdicts"). They run with copy skipping off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from tests.mutants.autoscaler_change_scenarios import AUTOSCALER_CHANGE_SCENARIOS
from tests.mutants.autoscaler_scenarios import AUTOSCALER_SCENARIOS
from tests.mutants.judge_scenarios import JUDGE_SCENARIOS
from tests.mutants.publishing_part_scenarios import PUBLISHING_PART_SCENARIOS
from tests.mutants.publishing_scenarios import PUBLISHING_SCENARIOS
from tests.mutants.rollout_scaling_scenarios import ROLLOUT_SCALING_SCENARIOS
from tests.mutants.scale_proof_scenarios import SCALE_PROOF_SCENARIOS
from tests.mutants.scale_restart_scenarios import SCALE_RESTART_SCENARIOS
from tests.mutants.scaling_scenarios import SCALING_SCENARIOS
from tests.mutants.scenarios import SCENARIOS
from tests.mutants.session_scenarios import SESSION_SCENARIOS
from tests.mutants.surprise_scenarios import SURPRISE_SCENARIOS
from tests.mutants.traces_scenarios import TRACES_SCENARIOS
from tests.mutants.weight_scenarios import WEIGHT_SCENARIOS

_ALL_SCENARIOS = {
    **SCENARIOS,
    **SCALING_SCENARIOS,
    **SCALE_PROOF_SCENARIOS,
    **SCALE_RESTART_SCENARIOS,
    **AUTOSCALER_SCENARIOS,
    **AUTOSCALER_CHANGE_SCENARIOS,
    **PUBLISHING_SCENARIOS,
    **PUBLISHING_PART_SCENARIOS,
    **JUDGE_SCENARIOS,
    **ROLLOUT_SCALING_SCENARIOS,
    **SURPRISE_SCENARIOS,
    **SESSION_SCENARIOS,
    **TRACES_SCENARIOS,
    **WEIGHT_SCENARIOS,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong variant.

    Args:
        name: unique; also the name in the museum.
        source: where the defect is from: a finding (M8), a hazard (H4), a spec section, a variant (P-1).
        component: a name under ``components`` of a service, or ``module:attribute`` of any module.
        twin: the right class (or function), and cls the wrong one.
        scenario: a key of ``SCENARIOS`` or of one of the other tables above.
        check: row of the verdict that must say fail; ``occurs`` stands for ``occurs(...)``.
        seeds: tried in order; each must catch it.
    """

    name: str
    source: str
    component: str
    twin: Any
    cls: Any
    scenario: str
    check: str
    seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def defect(self) -> str:
        """What is wrong, in one line: the first of the class's docstring."""
        return (self.cls.__doc__ or "").strip().partition("\n")[0]

    @property
    def is_component(self) -> bool:
        """Whether it goes into the scenario; otherwise into the simulated world."""
        return ":" not in self.component

    def scenario_text(self, *, twin: bool = False) -> str:
        """The scenario as YAML, with the wrong class in its place, or with the right one."""
        data = yaml.safe_load(_ALL_SCENARIOS[self.scenario])
        if self.is_component and not twin:
            for service in data["topology"]["services"].values():
                service.setdefault("components", {})[self.component] = f"{self.cls.__module__}:{self.cls.__name__}"
        text: str = yaml.safe_dump(data, sort_keys=False, width=120)
        return text

    def patch(self, *, twin: bool = False) -> tuple[tuple[str, Any], ...]:
        """What to put in place in the simulated world: (``module:attribute``, class) pairs; empty for a component."""
        if self.is_component:
            return ()
        return ((self.component, self.twin if twin else self.cls),)

    def is_its_check(self, row: str) -> bool:
        """Whether a row of a verdict is the declared check."""
        return row == self.check or row.startswith(self.check + "(")


def all_mutants() -> Iterator[Mutant]:
    """Every mutant, by group."""
    from tests.mutants import (
        admins,
        autoscaler_changes,
        autoscalers,
        engines,
        exporters,
        gateways,
        judges,
        loops,
        probers,
        proxies,
        publishing,
        publishing_more,
        publishing_parts,
        recoveries,
        rollout_scalers,
        scale_ends,
        scale_proofs,
        scale_restarts,
        scalers,
        session_servers,
        surprises,
        traces,
        weights,
    )

    groups = (
        gateways, admins, probers, recoveries, exporters, engines, loops, scalers, autoscalers, publishing, judges,
        rollout_scalers, autoscaler_changes,
        session_servers, surprises, traces, proxies, publishing_more, weights, scale_ends, scale_proofs, scale_restarts,
        publishing_parts,
    )  # fmt: skip
    for group in groups:
        yield from group.MUTANTS
