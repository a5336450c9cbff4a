"""The models of a scenario's workloads: what arrives, when, and of what size. Part of ``scenarios/schema.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from scenarios.fields import (
    Count,
    CountOrZero,
    Crowd,
    Fraction01,
    Name,
    Positive,
    Rate,
    Seconds,
    SomeSeconds,
    SpecModel,
    TokenCount,
    Tokens,
    exactly_one,
)


class TraceModel(SpecModel):
    """A public request trace, replayed."""

    format: Literal["azure", "mooncake", "burstgpt"]
    file: str
    """Beside the scenario file, an absolute path, or a trace shipped with the package."""
    speed_up: Positive = 1.0
    """2.0: twice as fast as recorded."""
    limit: Count | None = None
    """At most this many requests."""


class RateModel(SpecModel):
    rate_per_s: Rate


class ClosedLoopModel(SpecModel):
    """Sessions that each send their next request when the one before is answered."""

    sessions: Crowd
    think_s: Seconds = 0.0
    """From an answer to the session's next request."""
    turns: Count | None = None
    """Requests of a session; unlimited where only ``for_s`` ends it."""


class HttpAgentsModel(SpecModel):
    """Agents that speak HTTP to session servers, as clients of two formats do. Shares are of sessions or of turns."""

    anthropic: Fraction01 = 0.5
    """Of the sessions: those that speak Anthropic's format; the others speak OpenAI's."""
    stream: Fraction01 = 0.5
    """Of the turns."""
    leave: Fraction01 = 0.0
    """Of the turns: those whose client leaves before the end, before the head, between two events, inside one or just
    before the end marker; the conversation then goes on without that turn."""
    evaluation: Fraction01 = 0.0
    """Of the turns: sent with ``return_token_ids: false``, which nobody records; the conversation goes on without."""
    integer_ids: Fraction01 = 0.0
    """Of the sessions: those whose id is a number in the body."""
    other_calls: Fraction01 = 0.0
    """Of the turns: before those something is called that is no generation."""


class AgentsModel(SpecModel):
    """Episodes of agents: turns of one session, each with the whole conversation before it as its prompt."""

    sessions: Crowd
    """Episodes in all."""
    at_once: Crowd | None = None
    """Episodes open at a time; all by default."""
    turns: Count
    think_s: Seconds = 0.0
    """From an answer to the next turn: the agent's tools. Drawn between half and one and a half times of it."""
    late: Fraction01 = 0.0
    """Of the episodes that are over, how many send one request more, which must be refused."""
    http: HttpAgentsModel | None = None
    """The agents speak HTTP to the service's session servers, one for a session's whole life; ``late`` does not go."""

    @model_validator(mode="after")
    def _nobody_late(self) -> AgentsModel:
        if self.http is not None and self.late:
            raise PydanticCustomError("http_late", "'late' does not go with 'http'; leave one of them out", {})
        return self


class JudgementsModel(SpecModel):
    """Inputs that are judged again and again, in one arm after the other: do all replicas say the same?"""

    cases: Crowd = 50
    """Inputs: half of them named ``pos-..``, half ``neg-..``; which is which only the judge can say."""
    repeats: Crowd = 8
    """Replies to each case in each arm, one after the other, so that replicas take turns."""
    arms: Annotated[list[Literal["greedy", "sampled"]], Field(min_length=1)] = ["greedy", "sampled"]
    temperature: Positive = 0.1
    """Of the arm ``sampled``."""
    replicas: Crowd = 1
    """The first arm begins when so many replicas are routed to."""
    at_once: Crowd = 1
    """Cases that are under way at a time."""
    seed: CountOrZero | None = None
    """A seed that the caller names; none: it leaves that to the ingress."""


class UniformModel(SpecModel):
    low: TokenCount
    high: TokenCount

    @model_validator(mode="after")
    def _ordered(self) -> UniformModel:
        if self.high < self.low:
            raise PydanticCustomError(
                "order", "high ({high}) is below low ({low})", {"high": self.high, "low": self.low}
            )
        return self


class LognormalModel(SpecModel):
    median: Tokens
    p99: Tokens
    at_most: TokenCount | None = None
    """Draws above are cut to this."""

    @model_validator(mode="after")
    def _ordered(self) -> LognormalModel:
        if self.p99 < self.median:
            raise PydanticCustomError(
                "order", "p99 ({p99}) is below the median ({median})", {"p99": self.p99, "median": self.median}
            )
        return self


class TokensModel(SpecModel):
    """How many tokens: exactly one of these."""

    fixed: TokenCount | None = None
    uniform: UniformModel | None = None
    lognormal: LognormalModel | None = None

    @model_validator(mode="after")
    def _one(self) -> TokensModel:
        exactly_one(self, ("fixed", "uniform", "lognormal"), "a number of tokens")
        return self


class TrainingModel(SpecModel):
    """A training loop: rollouts whose samples are generated by one service and judged by the workload's own."""

    rollout_service: Name
    """Generates the samples, and loads the weights of each step."""
    steps: Count
    samples: Crowd = 8
    """Of each rollout; their sizes are ``prompt_tokens`` and ``output_tokens``."""
    judged: Annotated[list[CountOrZero], Field(min_length=1)] = [8]
    """How many samples of each rollout have an answer to judge, by rollout; the last one counts for all after it."""
    judge_prompt_tokens: TokensModel
    judge_output_tokens: TokensModel
    first_train_s: Seconds
    """From the first rollout to its step's new weights: compilers and caches begin cold."""
    train_s: Seconds
    after_s: Seconds
    """From the new weights to the end of the step: checkpoints, logs, evaluation."""


class EpisodesModel(SpecModel):
    """Groups of episodes, produced for a learner. ``prompt_tokens`` is what a turn adds to the conversation."""

    groups: Crowd
    """New ones in all; some are rolled out more than once."""
    members: Annotated[int, Field(ge=1, le=1024)] = 2
    """Rollouts of a group."""
    turns: Count
    think_s: Seconds = 0.0
    """From an answer to the next turn: the agent's tools. Drawn between half and one and a half times of it."""
    traced: Fraction01 = 1.0
    """Of the groups, how many have sessions in the trace store; the others own their references themselves."""
    request_aware: Fraction01 = 1.0
    """Of the groups, how many record with each segment which request it is of and which version it was generated by."""
    expert_bytes: CountOrZero = 65536
    """Nominal size of the expert choices of a segment; 0: a dense model, which has none."""
    aborted: Fraction01 = 0.0
    """Of the attempts, how many are broken off before a turn, to be continued later."""
    failed: Fraction01 = 0.0
    """Of the attempts that came to their end, how many are judged to have failed."""
    repeated: Fraction01 = 0.0
    """Of the turns, how many are answered and recorded a second time: the same words, and not the same record."""
    window_tokens: Count = 400
    """Of a longer conversation only so many tokens are sent to an engine; the trace has all of it."""


class ArrivalsModel(SpecModel):
    """When requests arrive: exactly one of these."""

    poisson: RateModel | None = None
    constant: RateModel | None = None
    closed_loop: ClosedLoopModel | None = None
    agents: AgentsModel | None = None
    """Needs a service with ``publishing``; ``prompt_tokens`` is then what a turn adds to the conversation."""
    rollouts: EpisodesModel | None = None
    """Needs a service with ``rollouts`` and gates; ``prompt_tokens`` as for agents."""
    judgements: JudgementsModel | None = None
    """Needs a service with ``judge``; ``output_tokens`` is the most that a reply may have."""
    training: TrainingModel | None = None
    """A training loop whose judge is the workload's service."""

    @model_validator(mode="after")
    def _one(self) -> ArrivalsModel:
        exactly_one(self, tuple(type(self).model_fields), "arrivals")
        return self


class PhaseModel(SpecModel):
    """What the sessions of a closed loop ask for from some time on: each goes over to it with its next request."""

    from_s: SomeSeconds
    """After the beginning of the workload."""
    prompt_tokens: TokensModel
    output_tokens: TokensModel
    shared_prefix_tokens: CountOrZero = 0
    """So many tokens at the beginning of all these prompts are the same text."""


class WorkloadModel(SpecModel):
    """The requests that a service gets: a trace, or drawn arrivals with drawn sizes."""

    service: Name
    trace: TraceModel | None = None
    arrivals: ArrivalsModel | None = None
    prompt_tokens: TokensModel | None = None
    output_tokens: TokensModel | None = None
    phases: list[PhaseModel] = []
    """Of a closed loop, by time; before the first one ``prompt_tokens`` and ``output_tokens`` count."""
    from_s: Seconds = 0.0
    """The workload begins so long after the start of the run's workload."""
    for_s: SomeSeconds | None = None
    """Drawn arrivals end so long after they began."""
    requests: Count | None = None
    """Drawn arrivals end after this many."""
    clients: Crowd = 1
    """Client actors that share the arrivals and the gateways: client ``k`` talks to gateway ``k``, and in turn to every
    ``clients``-th after it; where there are fewer gateways than clients, to gateway ``k`` modulo their number."""
    ignore_eos: bool = True
    idempotent: bool = True
    """Whether a request may be sent again when its outcome is unknown."""
    patience_s: SomeSeconds = 600.0
    """A client gives up on an answer after this time; the outcome is then unknown."""

    @model_validator(mode="after")
    def _complete(self) -> WorkloadModel:
        exactly_one(self, ("trace", "arrivals"), "workload")
        loop = None if self.arrivals is None else self.arrivals.closed_loop
        times = [phase.from_s for phase in self.phases]
        if times and (loop is None or times != sorted(set(times))):
            raise PydanticCustomError("phases", "'phases' go with a closed loop, and their from_s must rise", {})
        drawn = ("prompt_tokens", "output_tokens", "for_s", "requests")
        if self.trace is not None:
            for name in drawn:
                if getattr(self, name) is not None:
                    raise PydanticCustomError(
                        "trace_has", "'{name}' does not go with a trace; use its limit and speed_up", {"name": name}
                    )
            return self
        for name in drawn[:2]:
            if getattr(self, name) is None:
                raise PydanticCustomError("needs", "'{name}' is missing; drawn arrivals need it", {"name": name})
        assert self.arrivals is not None
        if self.arrivals.rollouts is not None:
            if self.for_s is not None or self.requests is not None:
                raise PydanticCustomError(
                    "rollouts_end", "'for_s' and 'requests' do not go with rollouts; give them 'groups' and 'turns'", {}
                )
            return self
        if self.arrivals.agents is not None:
            if self.for_s is not None or self.requests is not None:
                raise PydanticCustomError(
                    "agents_end", "'for_s' and 'requests' do not go with agents; give them 'sessions' and 'turns'", {}
                )
            return self
        if self.arrivals.judgements is not None or self.arrivals.training is not None:
            if self.for_s is not None or self.requests is not None or self.clients != 1:
                raise PydanticCustomError(
                    "own_end",
                    "'for_s', 'requests' and 'clients' do not go with judgements and training; they have their own", {},
                )  # fmt: skip
            return self
        if self.for_s is None and self.requests is None and (loop is None or loop.turns is None):
            raise PydanticCustomError("endless", "the workload never ends; give 'for_s' or 'requests'", {})
        if loop is not None and self.requests is not None:
            raise PydanticCustomError(
                "closed_requests", "'requests' does not go with a closed loop; give it 'turns'", {}
            )
        return self
