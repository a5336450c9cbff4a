"""Skipping ahead must not change anything: the full log with the fast path on and off is equal, byte for byte."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import engine_metrics
from sim.engine_types import EngineResult
from sim.profiles import EngineProfile
from tests.sim.engine_world import MS, S, World, tiny

PRESSURE: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small_memory": {"kv_capacity_tokens": 600},
    "few_slots": {"max_running_requests": 3},
    "small_chunks": {"chunked_prefill_size": 48, "max_prefill_tokens": 64},
    "odd_costs": {
        "decode_base_ps": 1_234_567_891,
        "decode_per_context_token_ps": 777,
        "decode_per_request_ps": 13,
        "request_intake_ns": 1,
    },
    "free_context": {"decode_per_context_token_ps": 0},
    "wandering_pace": {"pace_spread_ppm": 400_000, "pace_period_ns": 37_000_001},
    "eager_admission": {
        "kv_capacity_tokens": 640,
        "new_token_ratio_init_ppm": 50_000,
        "new_token_ratio_min_ppm": 10_000,
    },
}


def play(profile: EngineProfile, script: list[tuple[int, str, Any]], fast_path: bool) -> bytes:
    """Run a script of (time, action, arguments) and return everything observable as bytes."""
    world = World(profile, fast_path=fast_path)
    engine = world.engine
    began = world.env.now
    serial = [0]

    def act(name: str, what: Any) -> None:
        if not engine.listening and name != "kill":
            return
        if name == "submit":
            rid, prompt, new, blocks, eos = what
            world.submit(rid, prompt, new, blocks, ignore_eos=eos is None, eos_after=eos)
        elif name == "stream":
            world.engine.submit(
                what,
                30,
                25,
                done=world.done,
                on_token=lambda rid, n: world.log.append((world.env.now, "token", (rid, n))),
            )
        elif name == "resubmit_on_done":

            def again(result: Any) -> None:
                world.done(result)
                serial[0] += 1
                if serial[0] < 6 and engine.listening:
                    engine.submit(f"{what}+{serial[0]}", 25, 12, done=again)

            engine.submit(what, 25, 12, done=again)
        elif name == "load":
            version, flush, abort, failure = what
            engine.load_weights(
                version,
                4_000_000,
                f"hash-{version}",
                flush_cache=flush,
                abort_all_requests=abort,
                failure=failure,
                done=world.reply,
            )
        elif name == "pause":
            engine.pause(what, done=world.reply)
        elif name == "abort":
            engine.abort(what, abort_all=what == "*", done=world.reply)
        elif name == "read":
            world.log.append((world.env.now, "page", engine_metrics.metrics_page(engine)))
            world.log.append((world.env.now, "loads", repr(engine_metrics.loads(engine))))
        elif name == "health":
            engine.health(lambda status: world.log.append((world.env.now, "health", status)))
        elif name in ("resume", "flush_cache"):
            getattr(engine, name)(done=world.reply)
        elif name == "label":
            engine.update_weight_version(what, abort_all_requests=False, done=world.reply)
        elif name == "slow":
            engine.slow(what)
        else:
            getattr(engine, name)()

    for time, name, what in script:
        world.at(began + time, lambda name=name, what=what: act(name, what))
    world.run(until=began + 400 * S)
    if engine.alive:
        world.log.append((world.env.now, "page", engine_metrics.metrics_page(engine)))
    return "\n".join(map(repr, world.log)).encode()


def random_script(seed: int) -> list[tuple[int, str, Any]]:
    rng = random.Random(seed)
    script: list[tuple[int, str, Any]] = []
    hopeful = rng.choice((0.2, 0.95))  # without ignore_eos, admission hopes for an early end, and retracts when wrong
    span = rng.choice((200, 2_000, 20_000)) * MS
    for index in range(rng.randint(5, 60)):
        prompt = rng.choice((1, 5, 31, 32, 33, 100, 300, 490))
        blocks = tuple(rng.choice((0, 1)) * 100 + n for n in range(-(-prompt // 32))) if rng.random() < 0.5 else None
        eos = rng.randint(1, 400) if rng.random() < hopeful else None
        script.append((rng.randrange(span), "submit", (f"r{index}", prompt, rng.randint(1, 200), blocks, eos)))
    for turn in range(rng.randint(0, 12)):
        name, what = rng.choice(
            (
                ("pause", "abort"),
                ("pause", "in_place"),
                ("pause", "retract"),
                ("resume", None),
                ("flush_cache", None),
                ("abort", "r1"),
                ("abort", "*"),
                ("abort", "r7"),
                ("read", None),
                ("read", None),
                ("health", None),
                ("load", (f"v{rng.randint(1, 3)}", True, False, "")),
                ("load", (f"v{rng.randint(1, 3)}", False, False, "")),
                ("load", ("v9", True, True, "")),
                ("load", ("v8", True, False, "no such path")),
                ("label", "label-only"),
                ("slow", 2_500_000),
                ("slow", 1_000_000),
                ("freeze", None),
                ("thaw", None),
                ("wedge", None),
                ("unwedge", None),
                ("stream", f"s{turn}"),
                ("resubmit_on_done", f"again{turn}"),
            )
        )
        script.append((rng.randrange(span), name, what))
        if name in ("pause", "freeze", "wedge") and rng.random() < 0.9:
            undo = {"pause": "resume", "freeze": "thaw", "wedge": "unwedge"}[name]
            script.append((rng.randrange(span, 2 * span), undo, None))
    if rng.random() < 0.1:
        script.append((rng.randrange(span), "kill", None))
    return script


@pytest.mark.parametrize("pressure", PRESSURE)
@pytest.mark.parametrize("block", range(4))
def test_fixed_seeds_give_equal_logs(pressure: str, block: int) -> None:
    profile = tiny(**{"context_length": 500, **PRESSURE[pressure]})
    for seed in range(block * 25, block * 25 + 25):
        script = random_script(seed)
        fast, slow = play(profile, script, True), play(profile, script, False)
        assert fast == slow, f"seed {seed}: {_first_difference(fast, slow)}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3_000_000_000), st.integers(1, 300), st.integers(1, 150)), min_size=1, max_size=25
    ),
    base=st.integers(1, 5_000_000_000),
    context=st.integers(0, 3_000_000),
    intake=st.integers(1, 5_000_000),
    capacity=st.integers(502, 3_000),
    reads=st.lists(st.integers(0, 5_000_000_000), max_size=5),
)
def test_any_costs_and_arrivals_give_equal_logs(
    arrivals: list[tuple[int, int, int]], base: int, context: int, intake: int, capacity: int, reads: list[int]
) -> None:
    profile = tiny(
        context_length=500,
        decode_base_ps=base,
        decode_per_context_token_ps=context,
        request_intake_ns=intake,
        kv_capacity_tokens=capacity,
    )
    script: list[tuple[int, str, Any]] = [
        (time, "submit", (f"r{index}", prompt, new, None, None)) for index, (time, prompt, new) in enumerate(arrivals)
    ]
    script += [(time, "read", None) for time in reads]
    assert play(profile, script, True) == play(profile, script, False)


@pytest.mark.parametrize("action", ["submit", "freeze", "wedge", "read", "slow", "load"])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_what_falls_on_a_boundary_to_the_nanosecond_is_seen_as_step_by_step(action: str, offset: int) -> None:
    profile = tiny(decode_base_ps=1_234_567_891, request_intake_ns=1_000)
    ticks: list[int] = []
    world = World(profile)
    began = world.env.now
    world.engine.submit("r", 20, 60, done=None, on_token=lambda rid, n: ticks.append(world.env.now - began))
    world.run()
    what = {"submit": ("s", 20, 9, None, None), "slow": 3_000_000, "load": ("v2", False, False, "")}.get(action)
    for tick in ticks[1:-1:7]:
        due = tick + offset - (0 if action in ("freeze", "wedge", "read") else 1_000)
        script: list[tuple[int, str, Any]] = [(0, "submit", ("r", 20, 60, None, None)), (due, action, what)]
        if action in ("freeze", "wedge"):
            script.append((due + 50 * MS, {"freeze": "thaw", "wedge": "unwedge"}[action], None))
        assert play(profile, script, True) == play(profile, script, False), tick


def test_a_request_due_at_a_boundary_is_in_and_one_a_nanosecond_later_waits_for_the_next() -> None:
    profile = tiny(request_intake_ns=1_000)
    world = World(profile)
    began = world.env.now
    ticks: list[int] = []
    world.engine.submit("r", 20, 60, done=None, on_token=lambda rid, n: ticks.append(world.env.now - began))
    world.run()
    queues = []
    for late in (0, 1):
        world = World(profile)
        world.submit("r", 20, 60)
        world.at(began + ticks[20] - 1_000 + late, lambda world=world: world.submit("s", 20, 5))
        world.run()
        queues.append(world.results["s"].queue_ns)
    assert queues[0] == 1_000 and queues[1] == 1_000 - 1 + ticks[21] - ticks[20]


def test_the_fast_path_is_taken_at_all() -> None:
    def events(fast_path: bool) -> int:
        world = World(fast_path=fast_path)
        world.submit("r", 20, 400)
        world.run()
        return next(world.env._eid)

    assert events(True) < 20
    assert events(False) > 400


def test_the_scripts_meet_what_could_break_the_fast_path() -> None:
    """Equality proves little if nothing happened: retraction, aborts, hits of both kinds, spans that meet."""
    seen = dict.fromkeys(("retracted", "aborted", "cached", "stale", "two versions", "refused"), 0)
    for changes in PRESSURE.values():
        profile = tiny(**{"context_length": 500, **changes})
        for seed in range(25):
            for line in play(profile, random_script(seed), True).splitlines():
                _, what, payload = eval(line, {"__builtins__": {}})
                if what == "done":
                    result = EngineResult(*payload)
                    seen["retracted"] += result.num_retractions > 0
                    seen["aborted"] += result.finish_reason == "abort"
                    seen["cached"] += result.cached_tokens > 0
                    seen["stale"] += result.stale_cached_tokens > 0
                    seen["two versions"] += len(result.weight_versions) > 1
                    seen["refused"] += result.status == 400
    assert min(seen.values()) > 10, seen


def test_the_same_script_gives_the_same_digest_twice() -> None:
    script = random_script(7)
    digests = {hashlib.sha256(play(tiny(), script, True)).hexdigest() for _ in range(2)}
    assert len(digests) == 1


def _first_difference(left: bytes, right: bytes) -> str:
    for a, b in zip(left.splitlines(), right.splitlines(), strict=False):
        if a != b:
            return f"fast {a[:300]!r} / slow {b[:300]!r}"
    return "one log is longer"
