"""Behaviours of a real engine (../shared/spec/engines.md, section 3) that a protocol can notice, one test each."""

from __future__ import annotations

import pytest

from sim.engine import EngineNotListening
from sim.engine_types import DETOKENIZER_DEATH_NS, SCHEDULER_DEATH_NS, AdminResult
from tests.sim.engine_world import MS, S, World, tiny


@pytest.fixture
def world() -> World:
    return World()


def half_way(world: World, rid: str = "r-0", new: int = 300) -> None:
    """Submit a long request and stop the clock while it decodes."""
    world.submit(rid, 20, new)
    world.run_for(300 * MS)
    assert rid not in world.results


# --- start, costs, queue ----------------------------------------------------------------------------------------------


def test_starts_after_its_startup_time_and_refuses_connections_before() -> None:
    world = World(started=False)
    ready: list[int] = []
    world.engine.start(on_ready=lambda: ready.append(world.env.now))
    assert world.engine.ready() == 503
    with pytest.raises(EngineNotListening):
        world.submit("r-0")
    world.run()
    assert ready == [2 * S] and world.engine.ready() == 200


def test_a_lone_request_costs_exactly_what_the_profile_says(world: World) -> None:
    began = world.env.now
    world.submit("r-0", 20, 10)
    world.run()
    result = world.results["r-0"]
    prefill = 4_000_000 + 100_000 + 20 * 20_000 + 20 * 20 // 2  # ns: base, request, tokens, pairs
    decode = sum(2_000_000 + 100_000 + 100 * (20 + n) for n in range(1, 10))
    assert result.queue_ns == 1 * MS  # the way to the scheduler
    assert result.ttft_ns == 1 * MS + prefill
    assert result.e2e_ns == 1 * MS + prefill + decode
    assert result.finished_at_ns == began + result.e2e_ns
    assert (result.finish_reason, result.completion_tokens) == ("length", 10)


def test_a_batch_shares_steps_so_that_two_requests_take_less_than_twice_as_long() -> None:
    alone, pair = World(), World()
    alone.submit("r-0", 20, 100)
    pair.submit("r-0", 20, 100)
    pair.submit("r-1", 20, 100)
    alone.run()
    pair.run()
    assert alone.results["r-0"].e2e_ns < pair.results["r-1"].e2e_ns < 1.2 * alone.results["r-0"].e2e_ns


def test_without_ignore_eos_it_stops_where_the_model_would(world: World) -> None:
    world.submit("r-0", 20, 50, ignore_eos=False, eos_after=7)
    world.submit("r-1", 20, 50, ignore_eos=True, eos_after=7)
    world.run()
    assert (world.results["r-0"].finish_reason, world.results["r-0"].completion_tokens) == ("stop", 7)
    assert (world.results["r-1"].finish_reason, world.results["r-1"].completion_tokens) == ("length", 50)


def test_queues_beyond_max_running_requests_first_come_first_served() -> None:
    world = World(tiny(max_running_requests=2))
    for index in range(5):
        world.submit(f"r-{index}", 20, 20)
    world.run()
    ends = [world.results[f"r-{index}"].finished_at_ns for index in range(5)]
    assert ends == sorted(ends) and ends[1] < ends[2]
    assert world.results["r-4"].queue_ns > world.results["r-2"].queue_ns > world.results["r-0"].queue_ns


def test_a_long_prompt_is_prefilled_in_chunks_before_decoding_goes_on() -> None:
    world = World(tiny(chunked_prefill_size=64))
    world.submit("long", 400, 5)
    world.run()
    chunks = 7  # 6 of 64 tokens and one of 16
    assert world.results["long"].ttft_ns >= 1 * MS + chunks * 4_100_000 + 400 * 20_000


def test_streaming_tells_cumulative_counts_and_costs_the_same() -> None:
    plain, streaming = World(), World()
    seen: list[int] = []
    plain.submit("r-0", 20, 30)
    streaming.submit("r-0", 20, 30, on_token=lambda rid, count: seen.append(count))
    plain.run()
    streaming.run()
    assert seen == list(range(1, 31))
    assert plain.results == streaming.results


def test_an_idle_engine_schedules_nothing(world: World) -> None:
    world.submit("r-0")
    world.run()
    assert world.env.peek() == float("inf")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_400(world: World) -> None:
    world.submit("r-0", 600, 10)
    world.run()
    result = world.results["r-0"]
    assert result.status == 400
    assert result.error == "The input (600 tokens) is longer than the model's context length (512 tokens)."


def test_prompt_plus_new_tokens_beyond_the_context_is_400_and_not_truncated(world: World) -> None:
    world.submit("r-0", 500, 13)
    world.submit("r-1", 500, 12)
    world.run()
    assert world.results["r-0"].status == 400
    assert (
        "You requested a total of 513 tokens: 500 tokens from the input messages and 13" in world.results["r-0"].error
    )
    assert world.results["r-1"].completion_tokens == 12


def test_a_duplicate_live_rid_is_400_and_a_finished_one_may_come_again(world: World) -> None:
    world.submit("r-0", 20, 30)
    errors: list[str] = []
    world.engine.submit("r-0", 20, 30, done=lambda result: errors.append(result.error))
    world.run()
    assert errors == ["Duplicate request ID detected: r-0"]
    again: list[int] = []
    world.engine.submit("r-0", 20, 30, done=lambda result: again.append(result.status))
    world.run()
    assert again == [200]


# --- abort ------------------------------------------------------------------------------------------------------------


def test_abort_matches_the_rid_as_a_prefix(world: World) -> None:
    for rid in ("rid-1", "rid-10", "rid-2"):
        world.submit(rid, 20, 100)
    world.run_for(100 * MS)
    world.engine.abort("rid-1")
    world.run()
    reasons = {rid: result.finish_reason for rid, result in world.results.items()}
    assert reasons == {"rid-1": "abort", "rid-10": "abort", "rid-2": "length"}
    assert 0 < world.results["rid-1"].completion_tokens < 100 and world.results["rid-1"].status == 200


def test_abort_of_an_unknown_or_empty_rid_is_200_and_aborts_nothing(world: World) -> None:
    half_way(world)
    world.engine.abort("r-", done=world.reply)
    world.engine.abort("", done=world.reply)
    world.run()
    assert [reply.status for _, reply in world.replies] == [200, 200]
    assert world.results["r-0"].finish_reason == "length"


def test_abort_all_reaches_waiting_requests_too() -> None:
    world = World(tiny(max_running_requests=1))
    world.submit("a", 20, 100)
    world.submit("b", 20, 100)
    world.run_for(50 * MS)
    world.engine.abort(abort_all=True)
    world.run()
    assert {r.finish_reason for r in world.results.values()} == {"abort"}
    assert world.results["b"].completion_tokens == 0 and world.results["b"].spans == ()
    assert world.engine.scheduler.is_idle and world.engine.scheduler.used_tokens == 0


def test_a_vanished_client_is_noticed_late(world: World) -> None:
    world = World(tiny(context_length=4000))
    began = world.env.now
    world.submit("plain", 20, 3900)
    world.engine.submit("stream", 20, 3900, done=world.done, on_token=lambda rid, count: None)
    world.run_for(400 * MS)
    world.engine.client_gone("plain", streaming=False)
    world.engine.client_gone("stream", streaming=True)
    world.run_for(4 * S)
    assert 700 * MS <= world.results["stream"].finished_at_ns - began < 710 * MS
    assert 4 * S <= world.results["plain"].finished_at_ns - began < 4 * S + 10 * MS  # 3.6 s of wasted decode


def test_a_client_that_is_gone_as_its_request_comes_is_noticed_at_the_first_look() -> None:
    world = World(tiny(context_length=4000))
    world.submit("plain", 20, 3900)
    began = world.env.now
    world.engine.client_gone("plain", streaming=False)
    world.run_for(5 * S)
    assert 4 * S <= world.results["plain"].finished_at_ns - began < 4 * S + 10 * MS


@pytest.mark.parametrize(("streaming", "look"), [(False, 4 * S), (True, 300 * MS)])
def test_a_client_that_leaves_a_stopped_engine_is_noticed_after_it_goes_on(streaming: bool, look: int) -> None:
    world = World(tiny(context_length=4000))
    world.engine.freeze()
    world.submit("late", 20, 3900)
    world.run_for(1 * S)
    world.engine.client_gone("late", streaming=streaming)
    world.run_for(1 * S)
    world.engine.thaw()
    began = world.env.now
    world.run_for(6 * S)
    assert look <= world.results["late"].finished_at_ns - began < look + 10 * MS
    assert world.results["late"].finish_reason == "abort"


def test_what_a_vanished_client_ends_of_others_is_evidence(world: World) -> None:
    for rid in ("rid-1", "rid-10", "other"):
        world.submit(rid, 20, 480)
    world.run_for(100 * MS)
    for rid in ("rid-1", "other"):
        world.engine.client_gone(rid, streaming=True)
    world.run_for(1 * S)
    assert [world.results[rid].finish_reason for rid in ("rid-1", "rid-10", "other")] == ["abort"] * 3
    asked = [payload for _, what, payload in world.log if what == "engine.abort_asked"]
    assert asked == [repr({"request": "rid-1", "everything": False})]


def test_a_flush_that_makes_a_refused_one_good_is_evidence(world: World) -> None:
    half_way(world)
    world.engine.pause("in_place")
    world.run_for(10 * MS)
    for number in (1, 2):  # the second changes nothing any more
        world.engine.load_weights("1", 1000, "hash-1", done=world.reply)
        world.run_for(1 * S)
        assert not world.replies[-1][1].success, number
    world.engine.resume()
    world.run_for(5 * S)
    for _ in range(2):
        world.engine.flush_cache(done=world.reply)
        world.run_for(100 * MS)
        assert world.replies[-1][1].success
    told = [what for _, what, _ in world.log if what in ("engine.weights", "engine.flushed")]
    assert told == ["engine.weights", "engine.weights", "engine.flushed"]


# --- pause ------------------------------------------------------------------------------------------------------------


def test_pause_abort_ends_in_flight_with_partial_output_and_answers_at_the_1_s_poll(world: World) -> None:
    half_way(world)
    began = world.env.now
    world.engine.pause("abort", done=world.reply)
    world.run_for(2 * S)
    result = world.results["r-0"]
    assert result.status == 200 and result.finish_reason == "abort" and 0 < result.completion_tokens < 300
    assert result.finished_at_ns - began < 10 * MS
    ((answered, reply),) = world.replies
    assert 1 * S <= answered - began < 1010 * MS and reply.status == 200


def test_pause_abort_of_an_idle_engine_answers_at_once(world: World) -> None:
    began = world.env.now
    world.engine.pause("abort", done=world.reply)
    world.run_for(1 * S)
    assert world.replies[0][0] - began == 2_500_000


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_in_place_and_retract_answer_in_2_to_3_ms_and_keep_requests_silent(world: World, mode: str) -> None:
    half_way(world)
    began = world.env.now
    world.engine.pause(mode, done=world.reply)
    world.run_for(60 * S)
    assert 2 * MS <= world.replies[0][0] - began <= 3 * MS
    assert world.results == {}
    world.engine.resume()
    world.run()
    result = world.results["r-0"]
    assert (result.finish_reason, result.completion_tokens) == ("length", 300)
    assert result.num_retractions == (1 if mode == "retract" else 0)


def test_an_unknown_pause_mode_is_400_and_pauses_nothing(world: World) -> None:
    world.engine.pause("gently", done=world.reply)
    world.run_for(1 * S)
    assert world.replies[0][1].status == 400 and not world.engine.paused


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_new_requests_block_during_a_pause_in_every_mode_and_are_counted_nowhere(world: World, mode: str) -> None:
    world.engine.pause(mode)
    world.run_for(100 * MS)
    world.submit("new", 20, 5)
    world.run_for(30 * S)
    assert world.results == {}
    assert world.engine.load_figures() == {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
    world.engine.resume()
    world.run()
    assert world.results["new"].finish_reason == "length"


def test_pause_and_continue_are_idempotent(world: World) -> None:
    half_way(world)
    for _ in range(2):
        world.engine.pause("retract", done=world.reply)
        world.run_for(100 * MS)
    for _ in range(2):
        world.engine.resume(done=world.reply)
        world.run_for(100 * MS)
    world.run()
    assert [reply.status for _, reply in world.replies] == [200] * 4
    assert world.results["r-0"].num_retractions == 1


def test_an_abort_during_an_in_place_pause_is_silent_until_the_pause_ends(world: World) -> None:
    half_way(world)
    world.engine.pause("in_place")
    world.run_for(100 * MS)
    world.engine.abort("r-0", done=world.reply)
    world.run_for(30 * S)
    assert world.replies[0][1].status == 200 and world.results == {}
    world.engine.resume()
    world.run()
    assert world.results["r-0"].finish_reason == "abort"
    assert world.engine.scheduler.used_tokens == 0


def test_pause_abort_after_pause_in_place_never_answers_and_locks_continue_out(world: World) -> None:
    half_way(world)
    world.engine.pause("in_place")
    world.run_for(100 * MS)
    world.engine.pause("abort", done=world.reply)
    world.engine.resume(done=world.reply)
    load(world)
    world.run_for(600 * S)
    assert world.replies == [] and world.results == {}


def test_continue_waits_for_the_pause_before_it(world: World) -> None:
    half_way(world)
    began = world.env.now
    world.engine.pause("abort", done=world.reply)
    world.engine.resume(done=world.reply)
    world.submit("next", 20, 5)
    world.run()
    first, second = (answered - began for answered, _ in world.replies)
    assert 1 * S <= first <= second < 1010 * MS
    assert world.results["next"].finish_reason == "length"


@pytest.mark.parametrize(("mode", "status"), [("abort", 200), ("retract", 200), ("in_place", 400)])
def test_flush_while_paused(world: World, mode: str, status: int) -> None:
    half_way(world)
    world.engine.pause(mode)
    world.run_for(2 * S)
    world.engine.flush_cache(done=world.reply)
    world.run_for(1 * S)
    assert world.replies[0][1].status == status
    if status == 400:
        assert world.replies[0][1].message == "Flush cache failed."


def test_flush_of_a_busy_engine_is_400_and_of_an_idle_one_200(world: World) -> None:
    half_way(world)
    world.engine.flush_cache(done=world.reply)
    world.run()
    world.engine.flush_cache(done=world.reply)
    world.run()
    assert [reply.status for _, reply in world.replies] == [400, 200]


def test_loads_are_stale_while_paused(world: World) -> None:
    for index in range(3):
        world.submit(f"r-{index}", 20, 200)
    world.run_for(100 * MS)
    world.engine.pause("retract")
    world.run_for(10 * S)
    figures = world.engine.load_figures()
    assert (figures["num_running_reqs"], figures["num_waiting_reqs"]) == (3, 0)
    assert (len(world.engine.scheduler.running), len(world.engine.scheduler.waiting)) == (0, 3)


# --- weights ----------------------------------------------------------------------------------------------------------


def load(world: World, version: str = "v2", **more: object) -> None:
    world.engine.load_weights(version, 4_000_000, f"hash-{version}", done=world.reply, **more)  # type: ignore[arg-type]


def test_an_idle_load_takes_base_and_size_over_bandwidth_and_new_tokens_carry_the_version(world: World) -> None:
    began = world.env.now
    load(world)
    world.run()
    assert world.replies == [
        (began + 1 * MS + 7 * MS + 4 * MS, AdminResult(200, True, "Succeeded to update model weights."))
    ]
    world.submit("r-0", 20, 10)
    world.run()
    assert world.results["r-0"].weight_versions == (("v2", 0, 10),)
    assert world.results["r-0"].weight_hashes == (("hash-v2", 0, 10),)


def test_the_served_name_follows_the_path_of_the_load(world: World) -> None:
    load(world, model_path="/exports/v2")
    world.run()
    assert world.engine.model_path == "/exports/v2"


def test_a_load_without_pause_waits_for_in_flight_and_later_requests_get_the_new_version(world: World) -> None:
    half_way(world)
    load(world)
    world.submit("later", 20, 5)
    world.run()
    first, later = world.results["r-0"], world.results["later"]
    assert first.weight_versions == (("default", 0, 300),) and later.weight_versions == (("v2", 0, 5),)
    assert first.finished_at_ns < world.replies[0][0] < later.finished_at_ns


def test_a_load_with_abort_all_ends_in_flight_and_succeeds(world: World) -> None:
    half_way(world)
    load(world, abort_all_requests=True)
    world.run()
    assert world.results["r-0"].finish_reason == "abort"
    assert world.replies[0][1].status == 200 and world.engine.version == "v2"


def test_in_place_pause_with_flush_answers_400_but_weights_and_version_have_changed(world: World) -> None:
    half_way(world)
    world.engine.pause("in_place")
    world.run_for(100 * MS)
    load(world, flush_cache=True)
    world.run_for(100 * MS)
    reply = world.replies[0][1]
    assert (reply.status, reply.success) == (400, False) and reply.message.startswith("Weights were updated, but")
    assert (world.engine.version, world.engine.weight_hash) == ("v2", "hash-v2")
    world.engine.resume()
    world.run()
    assert [span[0] for span in world.results["r-0"].weight_versions] == ["default", "v2"]


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
def test_a_load_under_pause_gives_two_spans_that_meet(world: World, mode: str, flush: bool) -> None:
    half_way(world)
    world.engine.pause(mode)
    world.run_for(100 * MS)
    load(world, flush_cache=flush)
    world.run_for(100 * MS)
    assert world.replies[0][1].status == 200
    assert world.replies[0][1].num_paused_requests == 1
    world.engine.resume()
    world.run()
    old, new = world.results["r-0"].weight_versions
    assert old[0] == "default" and new[0] == "v2"
    assert old[1] == 0 and old[2] == new[1] and new[2] == 300 and 0 < old[2] < 300
    assert world.results["r-0"].num_retractions == (1 if mode == "retract" else 0)


def test_a_missing_path_is_400_after_1_3_s_and_the_old_weights_serve_on(world: World) -> None:
    began = world.env.now
    load(world, failure="No such file or directory: '/exports/v2'")
    world.run()
    answered, reply = world.replies[0]
    assert (reply.status, reply.success) == (400, False) and answered - began == 1_301 * MS
    assert world.engine.version == "default"


def test_update_weight_version_changes_the_label_and_not_the_weights(world: World) -> None:
    half_way(world)
    world.engine.update_weight_version("v2", abort_all_requests=False)
    world.run()
    result = world.results["r-0"]
    assert [span[0] for span in result.weight_versions] == ["default", "v2"]
    assert result.weight_hashes == (("tiny-cpu:default", 0, 300),)


def test_update_weight_version_aborts_everything_by_default(world: World) -> None:
    half_way(world)
    world.engine.update_weight_version("v2")
    world.run()
    assert world.results["r-0"].finish_reason == "abort" and world.engine.version == "v2"


def test_a_load_without_a_version_leaves_the_old_label_on_new_weights(world: World) -> None:
    world.engine.load_weights(None, 4_000_000, "hash-v2")
    world.run()
    world.submit("r-0")
    world.run()
    assert world.results["r-0"].spans == (("default", 0, 10, "hash-v2"),)


def test_a_cache_hit_across_a_weight_change_is_told(world: World) -> None:
    blocks = (1, 2, 3)
    world.submit("old", 100, 5, blocks)
    world.run()
    load(world, flush_cache=False)
    world.run()
    world.submit("new", 100, 5, blocks)
    world.run()
    assert (world.results["new"].cached_tokens, world.results["new"].stale_cached_tokens) == (96, 96)
    load(world, "v3", flush_cache=True)
    world.run()
    world.submit("clean", 100, 5, blocks)
    world.run()
    assert (world.results["clean"].cached_tokens, world.results["clean"].stale_cached_tokens) == (0, 0)


# --- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True])
def test_health_generates_and_takes_a_second_at_least(world: World, busy: bool) -> None:
    if busy:
        half_way(world, new=480)
    began = world.env.now
    answers: list[tuple[int, int]] = []
    world.engine.health(lambda status: answers.append((world.env.now - began, status)))
    world.run()
    assert answers == [(1 * S, 200)]


def test_health_fails_with_503_after_20_s_of_pause_and_then_ready_says_so(world: World) -> None:
    world.engine.pause("in_place")
    answers: list[tuple[int, int]] = []
    began = world.env.now
    world.engine.health(lambda status: answers.append((world.env.now - began, status)))
    world.run_for(30 * S)
    assert answers == [(20 * S, 503)]
    world.engine.resume()
    world.run_for(1 * S)
    assert world.engine.unhealthy and world.engine.ready() == 503
    world.engine.health(lambda status: answers.append((world.env.now, status)))
    world.run_for(2 * S)
    assert answers[-1][1] == 200 and world.engine.ready() == 200


def test_ready_is_503_while_paused(world: World) -> None:
    world.engine.pause("retract")
    assert world.engine.ready() == 503
    world.engine.resume()
    assert world.engine.ready() == 200


def test_health_without_generation_is_an_instant_200_even_while_paused() -> None:
    world = World(tiny(health_generates=False))
    world.engine.pause("in_place")
    answers: list[int] = []
    generated: list[int] = []
    world.engine.health(answers.append)
    world.engine.health_generate(generated.append)
    world.run_for(10 * MS)
    assert answers == [200]
    world.run_for(30 * S)
    assert generated == [503]


def test_a_wedged_engine_answers_http_but_its_health_fails_and_nothing_is_lost(world: World) -> None:
    half_way(world)
    world.engine.wedge()
    answers: list[int] = []
    world.engine.health(answers.append)
    world.run_for(60 * S)
    assert answers == [503] and world.results == {}
    assert world.engine.load_figures()["num_running_reqs"] == 1
    world.engine.unwedge()
    world.run()
    assert world.results["r-0"].completion_tokens == 300


# --- signals ----------------------------------------------------------------------------------------------------------


def test_sigterm_of_an_idle_engine_exits_at_its_next_poll_and_fails_health_at_once(world: World) -> None:
    world.run_for(12 * S)
    began = world.env.now
    answers: list[tuple[int, int]] = []
    world.engine.sigterm()
    world.engine.health(lambda status: answers.append((world.env.now - began, status)))
    world.run()
    assert answers[0][1] == 503 and answers[0][0] < 10 * MS
    assert world.exits == [(world.engine.ready_ns + 15_700 * MS, "sigterm")]  # a poll every 5 s
    assert not world.engine.alive


def test_after_sigterm_new_requests_are_still_accepted_and_hold_the_exit(world: World) -> None:
    world = World(tiny(context_length=4000))
    began = world.env.now
    world.engine.sigterm()
    world.run_for(4 * S)
    world.submit("late", 20, 1500)
    world.run()
    assert world.results["late"].finish_reason == "length"
    assert world.results["late"].finished_at_ns > began + 5 * S
    assert world.exits == [(world.engine.ready_ns + 10_700 * MS, "sigterm")]


def test_sigterm_after_a_failed_health_check_waits_60_s_for_a_core_dump(world: World) -> None:
    world.engine.pause("in_place")
    world.engine.health(lambda status: None)
    world.run_for(21 * S)
    world.engine.resume()
    world.submit("last", 20, 100)
    world.engine.sigterm()
    world.run()
    assert world.results["last"].finish_reason == "length"
    assert world.exits == [(world.engine.ready_ns + 85_700 * MS, "sigterm_forced")]  # from the poll at 25 s on


@pytest.mark.parametrize(("child", "delay"), [("scheduler", SCHEDULER_DEATH_NS), ("detokenizer", DETOKENIZER_DEATH_NS)])
def test_the_death_of_a_child_is_silence_and_then_the_exit(world: World, child: str, delay: int) -> None:
    half_way(world)
    began = world.env.now
    world.engine.lose_child(child)  # type: ignore[arg-type]
    world.submit("after", 20, 5)
    world.run()
    assert world.exits == [(began + delay, f"{child}_died")] and world.results == {}


def test_after_kill_nothing_fires(world: World) -> None:
    half_way(world)
    world.engine.health(lambda status: world.log.append((world.env.now, "health", status)))
    world.engine.pause("abort", done=world.reply)
    world.engine.load_weights("v2", 1, "h", done=world.reply)
    world.submit("held", 20, 5)
    world.engine.sigterm()
    before = len(world.log)
    world.engine.kill()
    world.run()
    assert world.log[before:] == [] and world.replies == [] and world.results == {} and world.exits == []
    with pytest.raises(EngineNotListening):
        world.submit("dead", 20, 5)


def test_calls_on_a_killed_engine_wake_nothing(world: World) -> None:
    half_way(world)
    world.engine.kill()
    world.engine.slow(2_000_000)
    world.engine.wedge()
    world.engine.unwedge()
    world.engine.serve(lambda: world.log.append((world.env.now, "served", None)))
    before = len(world.log)
    world.run()
    assert world.log[before:] == []


def test_kill_from_inside_a_callback_stops_the_rest_of_that_instant(world: World) -> None:
    for index in range(3):
        world.engine.submit(f"r-{index}", 20, 10, done=lambda result: (world.done(result), world.engine.kill()))
    world.run()
    assert list(world.results) == ["r-0"]


def test_sigstop_stops_progress_timers_and_answers_and_sigcont_goes_on(world: World) -> None:
    half_way(world)
    answers: list[int] = []
    world.engine.health(lambda status: answers.append(world.env.now))
    world.engine.freeze()
    world.submit("buffered", 20, 5)
    served: list[int] = []
    world.engine.serve(lambda: served.append(world.env.now))
    world.run_for(100 * S)
    assert world.results == {} and answers == [] and served == []
    thawed = world.env.now
    world.engine.thaw()
    world.run()
    assert served == [thawed + 2] and thawed <= answers[0] < thawed + 1 * S + 1
    assert world.results["r-0"].completion_tokens == 300 and world.results["buffered"].completion_tokens == 5
    assert world.results["r-0"].e2e_ns > 100 * S


def test_slow_stretches_further_iterations(world: World) -> None:
    world.submit("normal", 20, 100)
    world.run()
    world.engine.slow(3_000_000)
    world.submit("slow", 20, 100)
    world.run()
    ratio = (world.results["slow"].e2e_ns - 1 * MS) / (world.results["normal"].e2e_ns - 1 * MS)
    assert ratio == pytest.approx(3.0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_when_memory_runs_out_the_request_with_the_fewest_tokens_is_retracted() -> None:
    world = World(
        tiny(
            context_length=500, kv_capacity_tokens=620, new_token_ratio_init_ppm=10_000, new_token_ratio_min_ppm=10_000
        )
    )
    world.submit("first", 100, 250, ignore_eos=False)
    world.run_for(100 * MS)
    world.submit("second", 100, 250, ignore_eos=False)
    world.run()
    assert world.results["first"].num_retractions == 0 and world.results["second"].num_retractions >= 1
    assert {r.completion_tokens for r in world.results.values()} == {250}
    assert world.engine.scheduler.used_tokens == 0


def test_of_equal_outputs_the_longest_prompt_is_retracted() -> None:
    world = World(
        tiny(
            context_length=500, kv_capacity_tokens=620, new_token_ratio_init_ppm=10_000, new_token_ratio_min_ppm=10_000
        )
    )
    world.submit("old", 100, 250, ignore_eos=False)
    world.run_for(50 * MS)
    world.submit("long", 120, 150, ignore_eos=False)
    world.submit("short", 40, 150, ignore_eos=False)
    world.run()
    assert world.results["short"].num_retractions == 0 and world.results["long"].num_retractions >= 1


def test_ignore_eos_requests_are_admitted_only_if_their_whole_output_fits() -> None:
    world = World(tiny(context_length=500, kv_capacity_tokens=620))
    for index in range(4):
        world.submit(f"r-{index}", 100, 250)
    world.run()
    assert all(result.num_retractions == 0 for result in world.results.values())
    assert world.results["r-3"].queue_ns > world.results["r-0"].e2e_ns


def test_shared_prefixes_are_computed_once_and_shorten_the_wait(world: World) -> None:
    blocks = tuple(range(10))
    world.submit("cold", 330, 5, blocks)
    world.run()
    world.submit("warm", 330, 5, blocks)
    world.run()
    assert (world.results["cold"].cached_tokens, world.results["warm"].cached_tokens) == (0, 320)
    assert world.results["warm"].ttft_ns < world.results["cold"].ttft_ns / 1.5


def test_at_least_one_prompt_token_is_computed_even_when_all_is_cached(world: World) -> None:
    blocks = (1, 2)
    for rid in ("a", "b"):
        world.submit(rid, 64, 5, blocks)
        world.run()
    assert world.results["b"].cached_tokens == 32


def test_bad_counts_are_refused_by_name(world: World) -> None:
    with pytest.raises(ValueError, match="request r-0: 0 prompt"):
        world.submit("r-0", 0, 5)
    with pytest.raises(ValueError, match="slow: factor 0 ppm"):
        world.engine.slow(0)
