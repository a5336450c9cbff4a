"""Wrong seeds, wrong engine options, wrong backends for attention (scaling.md 8)."""

from __future__ import annotations

import dataclasses

from protocol.ports import EngineOptions
from protocol.serving.determinism import Sampling, attention_backend, request_seed
from protocol.serving.judge import Judge, JudgeCall
from scenarios.deploy import engine_options
from scenarios.schema import ServiceModel
from tests.mutants.registry import Mutant


def _without_the_switch(spec: ServiceModel, random_seed: int | None) -> EngineOptions | None:
    right = engine_options(spec)
    return None if right is None else dataclasses.replace(right, deterministic=False, random_seed=random_seed)


def seeds_by_rank(spec: ServiceModel) -> EngineOptions | None:
    """Gives every engine the seed of its rank and leaves sampling to it."""
    return _without_the_switch(spec, None)


def one_server_seed(spec: ServiceModel) -> EngineOptions | None:
    """Gives every engine the same seed, and trusts that their histories are the same too."""
    return _without_the_switch(spec, 42)


def seeds_without_the_switch(spec: ServiceModel) -> EngineOptions | None:
    """Sends a seed with every request to engines that are not in deterministic mode, where it has no effect."""
    return _without_the_switch(spec, 7)


class SendsNoSeed(Judge):
    """Sends no seed of its own: what a request is sampled with does not follow from its content."""

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        return call.seed


class SeedsTheGreedy(Judge):
    """Sends a seed with greedy requests too."""

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        warm = dataclasses.replace(sampling, temperature=max(sampling.temperature, 0.1))
        return request_seed(self._config.model_path, call.input_ids, warm, call.seed)


class OverwritesTheCallers(Judge):
    """Puts its own seed in place of the caller's."""

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        return request_seed(self._config.model_path, call.input_ids, sampling, None)


class HashesTheInputAlone(Judge):
    """Makes the seed of the input alone: another temperature, the same seed."""

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        plain = Sampling()
        return None if sampling.greedy else request_seed(self._config.model_path, call.input_ids, plain, call.seed)


class HashesWithoutTheModel(Judge):
    """Leaves the model out of what the seed is made of."""

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        return request_seed("", call.input_ids, sampling, call.seed)


def takes_the_engines_choice(deterministic: bool, gpu: str | None, of_user: str, of_instance: str) -> str:
    """Names no attention backend: the engine chooses one without a prefix cache."""
    return of_instance or of_user


def the_probe_wins(deterministic: bool, gpu: str | None, of_user: str, of_instance: str) -> str:
    """Puts what goes with the GPU in place of what the user set for all engines."""
    return of_instance or attention_backend(deterministic, gpu, "", "")


def _options(name: str, source: str, wrong: object, scenario: str) -> Mutant:
    return Mutant(name, source, "scenarios.deploy:engine_options", engine_options, wrong, scenario, "judgements_agree")


def _judge(name: str, source: str, cls: type, scenario: str) -> Mutant:
    return Mutant(name, source, "judge", Judge, cls, scenario, "seed_from_content")


def _backend(name: str, source: str, wrong: object, scenario: str, check: str) -> Mutant:
    place = "protocol.serving.determinism:attention_backend"
    return Mutant(name, source, place, attention_backend, wrong, scenario, check)


MUTANTS = (
    _options("seeds by rank", "M38", seeds_by_rank, "judges"),
    _options("one server seed", "M38b", one_server_seed, "judges_apart"),
    _options("seeds without the switch", "M38c", seeds_without_the_switch, "judges"),
    _judge("no seed of its own", "M38", SendsNoSeed, "judges"),
    _judge("greedy with a seed", "M38d", SeedsTheGreedy, "judges"),
    _judge("the caller's seed overwritten", "M38d", OverwritesTheCallers, "judges_seeded"),
    _judge("a seed of the input alone", "M38d", HashesTheInputAlone, "judges"),
    _judge("a seed without the model", "M38d", HashesWithoutTheModel, "judges"),
    _backend("the engine's own backend", "M39", takes_the_engines_choice, "judges_wedged", "answered_fraction"),
    _backend("the probe wins", "M39b", the_probe_wins, "judges_named", "occurs"),
)
