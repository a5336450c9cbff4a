"""Steps of a scenario: what is done to a run, when, to whom, and what it must meet."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from protocol.evidence import KINDS
from scenarios.faults import FAULTS, VERBS, FaultSpec
from scenarios.fields import Count, Name, Seconds, SomeSeconds, SpecModel, check_known, exactly_one


class EventModel(SpecModel):
    """An event of a kind, with fields as given."""

    event: str
    """An event kind (``docs/evidence.md``)."""
    where: dict[str, str | int | float | bool] = {}
    """Fields that must be equal; ``actor`` and ``inc`` may be named too."""

    @model_validator(mode="after")
    def _declared(self) -> Self:
        check_known(self.event, KINDS, "event kind")
        fields = (*KINDS[self.event].fields, "actor", "inc")
        for field in self.where:
            check_known(field, fields, f"field of {self.event}")
        return self


class WhenModel(EventModel):
    """The event that fires a step."""

    nth: Count = 1
    from_s: Seconds = 0.0
    """Events before this time do not count."""
    after: EventModel | None = None
    """Events before the first one that is like this do not count. In real time: that the driver has not seen then."""
    phase: Literal["before", "after"] = "after"
    """Before or after the effect of the event; every event is emitted before its effect."""


SELECTORS = ("any_replica", "busiest_replica", "newest_replica", "oldest_replica", "replica_of_trigger")


class LinkTarget(SpecModel):
    """From whom to whom: a node, an actor, a replica, or a selector; ``*`` for any."""

    source: str = Field("*", alias="from")
    target: str = Field("*", alias="to")


class TargetModel(SpecModel):
    """What a fault befalls. A text is short for ``{process: text}``; selectors choose when the step fires."""

    process: str | None = None
    """A selector, the name of a replica (``genrm-3``) or of an actor (``gateway-genrm-0``)."""
    service: Name | None = None
    """Of which a selector chooses; needed where there are several. With ``replica_of_trigger`` only events of this
    service's replicas count."""
    link: LinkTarget | None = None
    node: str | None = None
    """A node's name."""
    path: str | None = None
    """Storage faults: files under this prefix."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"process": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> TargetModel:
        if sum(part is not None for part in (self.process, self.link, self.node, self.path)) != 1:
            raise PydanticCustomError("target", "a target is exactly one of process, link, node, path", {})
        return self


class BoundModel(SpecModel):
    at_least: Count = 1


MEETS = ("in_flight", "hits", "processes")
"""What ``must_hit`` can ask: requests in flight and processes (or the process) at the injection, hits by the end."""


class StepModel(SpecModel):
    """Something that is done to the run: a fault or a verb, at a time or at an event."""

    name: Name | None = None
    """What ``--set`` and ``real.set`` call it, in place of its number: ``steps.NAME.with.count``."""
    at_s: Seconds | None = None
    when: WhenModel | None = None
    after_s: Seconds = 0.0
    """From the event to the step."""
    do: str
    with_: dict[str, Any] = Field({}, alias="with")
    target: TargetModel | None = None
    must_hit: Annotated[dict[str, BoundModel], Field(min_length=1)] | None = None
    """What the fault must meet, or the run is inconclusive; a default is in the fault's class."""
    for_s: SomeSeconds | None = None
    """How long the fault lasts."""

    @field_validator("do")
    @classmethod
    def _known_verb(cls, value: str) -> str:
        return check_known(value, (*FAULTS, *VERBS), "fault or verb")

    @property
    def fault(self) -> type[FaultSpec] | None:
        return FAULTS.get(self.do)

    def parameters(self) -> SpecModel:
        """The checked content of ``with``."""
        return (FAULTS.get(self.do) or VERBS[self.do]).model_validate(self.with_)

    @model_validator(mode="after")
    def _complete(self) -> StepModel:
        exactly_one(self, ("at_s", "when"), "a step")
        if self.after_s and self.when is None:
            raise PydanticCustomError("after_s", "'after_s' goes with 'when'; use 'at_s' alone for a time", {})
        fault = self.fault
        if fault is None:
            for name in ("target", "must_hit", "for_s"):
                if getattr(self, name) is not None:
                    raise PydanticCustomError(
                        "not_a_fault", "'{name}' goes with a fault; '{do}' is none", {"name": name, "do": self.do}
                    )
        else:
            self._check_fault(fault)
        return self

    def _check_fault(self, fault: type[FaultSpec]) -> None:
        part = {"process": "process", "link": "link", "node": "node", "storage": "path"}.get(fault.target)
        if part is None:
            if self.target is not None:
                raise PydanticCustomError("target", "'{do}' takes no target", {"do": self.do})
        elif self.target is None:
            if fault.target != "storage":
                raise PydanticCustomError("target", "'{do}' needs a target ({part})", {"do": self.do, "part": part})
        elif getattr(self.target, part) is None:
            raise PydanticCustomError(
                "target", "'{do}' befalls a {part}; the target names none", {"do": self.do, "part": part}
            )
        link = self.target.link if self.target is not None else None
        if fault.between_nodes and link is not None:
            for key, end in (("from", link.source), ("to", link.target)):
                if set("*?[") & set(end):
                    raise PydanticCustomError(
                        "target",
                        "'{do}' is between two nodes; '{key}' of its link must be one name, not '{end}' "
                        "(a node, or a process for its node; take a step for each pair)",
                        {"do": self.do, "key": key, "end": end},
                    )
        if fault.healing == "recovered":
            if self.for_s is not None:
                raise PydanticCustomError(
                    "for_s", "'{do}' is not taken back, so it takes no 'for_s'; recovery brings the process back",
                    {"do": self.do},
                )  # fmt: skip
        elif self.for_s is None and not (
            fault.healing == "spent" and ("count" in self.with_ or self.do == "torn_export")
        ):
            raise PydanticCustomError(
                "for_s", "'{do}' never ends; give it 'for_s'{count}",
                {"do": self.do, "count": " or with: {count: N}" if fault.healing == "spent" else ""},
            )  # fmt: skip
        for name in self.must_hit or ():
            check_known(name, MEETS, "thing to meet in must_hit")
