"""Facts about a serving engine that a protocol can notice, each as a body for every arm.

Source: ../shared/spec/engines.md, section 3. The first line of a fact's docstring is its row in docs/engines.md. A fact
gets a ``Stage`` whose engine is idle, unpaused and has an empty cache, and may leave it in any state but dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from protocol.errors import ConnectionRefused, HttpError, NetworkError
from tests.contract.engine_stage import BLOCK, Stage

SOON_S = 0.6
"""A reply that waits for nothing comes within this, on a busy machine too."""


async def fact_health_takes_a_second(stage: Stage) -> None:
    """GET /health generates: 200 with an empty body after 1.0 s at least, /health_generate too."""
    for route in ("/health", "/health_generate"):
        began = stage.now
        assert await stage.client.get(route) == (200, "")
        assert 1.0 <= stage.now - began < 2.0


async def fact_a_probe_with_one_second_never_succeeds(stage: Stage) -> None:
    """A /health probe with a time-out of 1 s never succeeds."""
    in_vain = 0
    while in_vain < 3:
        began = stage.now
        try:
            await stage.client.get("/health", read_timeout_s=1.0)
        except NetworkError:
            in_vain += 1
        else:  # a client that runs late finds the answer and its time-out at once
            assert stage.now - began > 1.0


async def fact_get_load_is_gone(stage: Stage) -> None:
    """GET /get_load is 404."""
    status, _ = await stage.client.get("/get_load")
    assert status == 404


async def fact_pages(stage: Stage) -> None:
    """/model_info tells the version now; /server_info has over 500 keys, and always the version of the start."""
    reply, _ = await stage.admin("/update_weight_version", new_version="label-2")
    assert reply.status == 200
    for page in ("/model_info", "/get_model_info"):
        assert (await stage.page(page))["weight_version"] == "label-2"
    for page in ("/server_info", "/get_server_info"):
        info = await stage.page(page)
        assert len(info) > 500 and info["max_req_input_len"] == stage.context - 6
        assert info["weight_version"] == "default"
    models = await stage.page("/v1/models")
    assert models["object"] == "list" and models["data"][0]["owned_by"] == "sglang"


async def fact_metrics(stage: Stage) -> None:
    """GET /metrics has running, queued, KV use, throughput and counters under ``sglang:``."""
    await stage.client.generate(stage.request())
    status, page = await stage.client.get("/metrics")
    assert status == 200
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "prompt_tokens_total"):
        assert f"sglang:{name}{{" in page, (name, page[:500])


async def fact_an_answer_tells_versions_and_times(stage: Stage) -> None:
    """A result has its finish reason, counts, one version span over all tokens, and times that add up."""
    result = await stage.client.generate(stage.request(50, prompt=30))
    assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == ("length", 30, 50)
    assert [(span.start, span.end) for span in result.spans] == [(0, 50)]
    assert result.spans[0].version == result.weight_version
    assert result.num_retractions == 0 and 0 <= result.queue_time_s <= result.e2e_latency_s


async def fact_a_stream_is_cumulative(stage: Stage) -> None:
    """A stream of /generate has cumulative ids, versions in the last event alone, and ends with [DONE]."""
    tokens = stage.lasting(2)  # an engine that gets no processor for a while tells what it has then in one event
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    asked = {"input_ids": [1000] * 10, "sampling_params": sampling}
    *events, done = [event async for event in stage.events("/generate", asked)]
    assert done == "[DONE]"
    parsed = [json.loads(event) for event in events]
    lengths = [len(event["output_ids"]) for event in parsed]
    assert lengths == sorted(lengths) and lengths[-1] == tokens and len(lengths) > 5
    assert parsed[-1]["output_ids"][: lengths[0]] == parsed[0]["output_ids"]
    assert [bool(event["meta_info"].get("weight_versions")) for event in parsed] == [False] * (len(parsed) - 1) + [True]
    counts = [count async for count in stage.client.stream(stage.request(60))]
    assert counts == sorted(counts) and counts[-1] == 60


async def fact_a_known_prefix_is_cached(stage: Stage) -> None:
    """A prompt that begins like an earlier one has cached tokens, and none after a flush."""
    blocks = (7, 8, 9)
    first = await stage.client.generate(stage.request(4, prompt=4 * BLOCK, blocks=blocks))
    again = await stage.client.generate(stage.request(4, prompt=4 * BLOCK, blocks=blocks))
    assert first.cached_tokens == 0 and 3 * BLOCK <= again.cached_tokens < 4 * BLOCK
    reply, _ = await stage.admin("/flush_cache")
    assert reply.status == 200
    assert (await stage.client.generate(stage.request(4, prompt=4 * BLOCK, blocks=blocks))).cached_tokens == 0


async def fact_too_long_is_refused(stage: Stage) -> None:
    """A prompt longer than the context is 400, and so is a prompt whose output would not fit."""
    for prompt, tokens in ((stage.context + 88, 8), (stage.context - 20, 40)):
        with pytest.raises(HttpError) as caught:
            await stage.client.generate(stage.request(tokens, prompt=prompt))
        assert caught.value.status == 400
    asked = {"input_ids": [1000] * (stage.context + 88)}
    with pytest.raises(HttpError) as caught:
        await stage.client.forward("/generate", json.dumps(asked))
    text = (
        f"The input ({stage.context + 88} tokens) is longer than the model's context length ({stage.context} tokens)."
    )
    assert json.loads(caught.value.body)["error"]["message"] == text


async def fact_a_refused_stream_is_200(stage: Stage) -> None:
    """A stream that is too long is answered 200, with one event that has the error and code 400, then [DONE]."""
    event, done = [event async for event in stage.events("/generate", {"input_ids": [1000] * (stage.context + 88)})]
    error = json.loads(event)["error"]
    assert (error["code"], error["retryable"], done) == (400, False, "[DONE]")


async def fact_unknown_sampling_key(stage: Stage) -> None:
    """An unknown key of sampling_params is 400."""
    asked = {"input_ids": [1000], "sampling_params": {"max_tokens": 4}}
    with pytest.raises(HttpError) as caught:
        await stage.client.forward("/generate", json.dumps(asked))
    assert caught.value.status == 400


async def fact_a_live_id_is_refused(stage: Stage) -> None:
    """A request id that is live is 400 "Duplicate request ID detected"; the first one goes on; later it may return."""
    first = stage.start(3.0, rid="twice-000")
    await stage.until_running()
    with pytest.raises(HttpError, match="Duplicate request ID detected") as caught:
        await stage.client.generate(stage.request(8, rid="twice-000"))
    assert caught.value.status == 400
    assert (await first).finish_reason == "length"
    assert (await stage.client.generate(stage.request(8, rid="twice-000"))).finish_reason == "length"


async def fact_abort_matches_prefixes(stage: Stage) -> None:
    """/abort_request aborts every id that begins with the one given; partial output, HTTP 200."""
    hit = [stage.start(2.0, rid=rid) for rid in ("pre-1", "pre-10")]
    spared = stage.start(2.0, rid="pre-2")
    await asyncio.sleep(0.5)
    reply, took = await stage.admin("/abort_request", rid="pre-1")
    assert (reply.status, reply.body) == (200, "") and took < SOON_S
    results = await asyncio.wait_for(asyncio.gather(*hit), 1.0)
    assert [result.finish_reason for result in results] == ["abort", "abort"]
    assert all(0 < result.completion_tokens < stage.lasting(2.0) for result in results)
    assert not spared.done()
    assert (await spared).finish_reason == "length"


async def fact_abort_of_nothing(stage: Stage) -> None:
    """Aborting an unknown or an empty id is 200 and aborts nothing; ``abort_all`` aborts everything."""
    tasks = [stage.start(2.0) for _ in range(2)]
    await asyncio.sleep(0.3)
    for rid in ("no-such-id", ""):
        reply, _ = await stage.admin("/abort_request", rid=rid)
        assert reply.status == 200
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in tasks)
    await stage.admin("/abort_request", abort_all=True)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 1.0)
    assert [result.finish_reason for result in results] == ["abort", "abort"]


async def fact_pause_abort(stage: Stage) -> None:
    """Pause mode abort: what is in flight ends with 200 and its partial output; the reply takes 1.0 s; flush is 200."""
    task = stage.start(4.0)
    await asyncio.sleep(0.4)
    took = await stage.pause("abort")
    assert 1.0 <= took < 2.0
    assert task.done()
    result = await task
    assert result.finish_reason == "abort" and 0 < result.completion_tokens < stage.lasting(4.0)
    assert (await stage.admin("/flush_cache"))[0].status == 200


async def fact_pause_abort_idle(stage: Stage) -> None:
    """Pause mode abort of an idle engine is answered at once; pausing again and continuing twice are 200."""
    assert await stage.pause("abort") < SOON_S
    assert await stage.pause("abort") < SOON_S
    await stage.resume()
    await stage.resume()


async def fact_pause_in_place(stage: Stage) -> None:
    """Pause mode in_place: fast reply, silence, flush 400; then all goes on, complete and not retracted."""
    task = stage.start(1.0)
    await asyncio.sleep(0.4)
    assert await stage.pause("in_place") < SOON_S
    reply, _ = await stage.admin("/flush_cache")
    assert reply.status == 400 and reply.body.startswith("Flush cache failed.")
    await asyncio.sleep(1.2)
    assert not task.done()
    await stage.resume()
    result = await task
    assert (result.finish_reason, result.completion_tokens) == ("length", stage.lasting(1.0))
    assert result.num_retractions == 0


async def fact_pause_retract(stage: Stage) -> None:
    """Pause mode retract: fast reply, silence, flush 200; then recomputed, complete, num_retractions 1."""
    task = stage.start(1.0)
    await asyncio.sleep(0.4)
    assert await stage.pause("retract") < SOON_S
    await asyncio.sleep(1.2)
    assert not task.done()
    assert (await stage.admin("/flush_cache"))[0].status == 200
    await stage.resume()
    result = await task
    assert (result.finish_reason, result.completion_tokens) == ("length", stage.lasting(1.0))
    assert result.num_retractions == 1


async def fact_a_paused_stream_is_silent(stage: Stage) -> None:
    """A stream gives no events during a pause in place, and goes on after it."""
    times: list[float] = []

    async def read() -> int:
        last = 0
        async for count in stage.client.stream(stage.request(stage.lasting(1.0))):
            times.append(stage.now)
            last = count
        return last

    task = stage.task(read())
    await asyncio.sleep(0.4)
    await stage.pause("in_place")
    await asyncio.sleep(0.3)
    before = len(times)
    await asyncio.sleep(0.8)
    assert 0 < before == len(times)
    await stage.resume()
    assert await task == stage.lasting(1.0)


async def fact_an_unknown_mode(stage: Stage) -> None:
    """An unknown pause mode is 400 and pauses nothing."""
    reply, _ = await stage.admin("/pause_generation", mode="gently")
    assert 400 <= reply.status < 500
    assert (await stage.client.get("/ready"))[0] == 200


async def fact_ready_tells_a_pause(stage: Stage) -> None:
    """GET /ready is 503 during a pause of any mode, at once, and 200 after it."""
    for mode in ("abort", "in_place", "retract"):
        await stage.pause(mode)
        began = stage.now
        assert (await stage.client.get("/ready"))[0] == 503
        assert stage.now - began < SOON_S
        await stage.resume()
        assert (await stage.client.get("/ready"))[0] == 200


async def fact_requests_are_held_during_a_pause(stage: Stage) -> None:
    """A request that comes during a pause of any mode waits, is counted nowhere, and is served after it."""
    for mode in ("abort", "in_place", "retract"):
        await stage.pause(mode)
        task = stage.task(stage.client.generate(stage.request()))
        await asyncio.sleep(0.5)
        assert not task.done()
        loads = (await stage.page("/v1/loads"))["loads"][0]
        assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (0, 0)
        await stage.resume()
        assert (await asyncio.wait_for(task, 2.0)).finish_reason == "length"


async def fact_loads_are_stale_during_a_pause(stage: Stage) -> None:
    """/v1/loads during a pause shows what was running before it, after a retraction too."""
    tasks = [stage.start(1.0) for _ in range(3)]
    await asyncio.sleep(0.5)
    await stage.pause("retract")
    await asyncio.sleep(0.2)
    loads = (await stage.page("/v1/loads"))["loads"][0]
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (3, 0)
    await stage.resume()
    await asyncio.gather(*tasks)


async def fact_a_load_changes_version_and_name(stage: Stage) -> None:
    """/update_weights_from_disk of an idle engine: new tokens have the new version, /v1/models the new path."""
    path = await stage.export("1001")
    reply, took = await stage.load(path, "1001")
    assert reply.status == 200 and reply.success and took < 3.0
    result = await stage.client.generate(stage.request())
    assert [span.version for span in result.spans] == ["1001"]
    assert (await stage.page("/v1/models"))["data"][0]["id"].endswith(path)


async def fact_a_load_waits_for_what_is_in_flight(stage: Stage) -> None:
    """A load without a pause waits for what is in flight; a request sent meanwhile waits and gets the new version."""
    path = await stage.export("1002")
    first = stage.start(4.0)
    await asyncio.sleep(0.4)
    old = (await stage.page("/model_info"))["weight_version"]
    load = stage.task(stage.load(path, "1002"))
    await asyncio.sleep(0.3)
    later = stage.task(stage.client.generate(stage.request()))
    await asyncio.sleep(0.2)
    assert not load.done() and not later.done() and not first.done()
    assert [span.version for span in (await first).spans] == [old]
    assert (await asyncio.wait_for(load, 3.0))[0].status == 200
    assert [span.version for span in (await later).spans] == ["1002"]


async def fact_a_load_can_abort(stage: Stage) -> None:
    """A load with abort_all_requests ends what is in flight as aborted, and succeeds."""
    path = await stage.export("1003")
    task = stage.start(4.0)
    await asyncio.sleep(0.4)
    reply, took = await stage.load(path, "1003", abort_all_requests=True)
    assert reply.status == 200 and took < 3.0
    assert (await task).finish_reason == "abort"


async def fact_a_load_during_retract_is_clean(stage: Stage) -> None:
    """Paused by retract, a load with a flush succeeds at once; the output has a span of each version."""
    path = await stage.export("1004")
    old = (await stage.page("/model_info"))["weight_version"]
    task = stage.start(4.0)
    await asyncio.sleep(0.5)
    await stage.pause("retract")
    reply, _ = await stage.load(path, "1004")
    assert reply.status == 200 and reply.success
    assert not task.done()
    await stage.resume()
    result = await task
    assert [span.version for span in result.spans] == [old, "1004"]
    assert result.spans[0].start == 0 and result.spans[0].end == result.spans[1].start
    assert result.spans[1].end == result.completion_tokens == stage.lasting(4.0)
    assert result.num_retractions == 1


async def fact_a_load_in_place_keeps_the_cache(stage: Stage) -> None:
    """Paused in place, a load without a flush succeeds; the output has a span of each version."""
    path = await stage.export("1005")
    old = (await stage.page("/model_info"))["weight_version"]
    task = stage.start(4.0)
    await asyncio.sleep(0.5)
    await stage.pause("in_place")
    reply, _ = await stage.load(path, "1005", flush_cache=False)
    assert reply.status == 200 and reply.success
    await stage.resume()
    result = await task
    assert [span.version for span in result.spans] == [old, "1005"] and result.num_retractions == 0


async def fact_a_refused_flush_has_changed_the_weights(stage: Stage) -> None:
    """Paused in place, a load with a flush is 400; tokens are of the new version all the same; /model_info is not."""
    path = await stage.export("1006")
    old = await stage.page("/model_info")
    task = stage.start(4.0)
    await asyncio.sleep(0.5)
    await stage.pause("in_place")
    reply, _ = await stage.load(path, "1006")
    assert reply.status == 400 and not reply.success
    assert reply.body.startswith("Weights were updated, but")
    await stage.resume()
    result = await task
    assert [span.version for span in result.spans][1:] == ["1006"] and result.weight_version == "1006"
    assert (await stage.client.generate(stage.request())).weight_version == "1006"
    now = await stage.page("/model_info")
    assert now["weight_version"] == old["weight_version"] != "1006" and now["model_path"] == old["model_path"]


async def fact_a_missing_path_changes_nothing(stage: Stage) -> None:
    """A load from a missing path is 400 without success, and the old weights are served."""
    old = (await stage.client.generate(stage.request())).weight_version
    reply, _ = await stage.load("exports/none-such", "1007")
    assert reply.status == 400 and not reply.success
    assert (await stage.client.generate(stage.request())).weight_version == old


async def fact_a_missing_path_takes_a_second(stage: Stage) -> None:
    """A load from a missing path is answered after 1.3 s: it is looked for as the name of a model on a hub."""
    _, took = await stage.load("exports/none-such", "1008")
    assert took >= 1.0, took


async def fact_the_label_alone(stage: Stage) -> None:
    """/update_weight_version changes the label alone."""
    reply, _ = await stage.admin("/update_weight_version", new_version="label-1")
    assert reply.status == 200
    assert (await stage.client.generate(stage.request())).weight_version == "label-1"


async def fact_a_gone_stream_is_noticed_soon(stage: Stage) -> None:
    """The generation of a streaming client that goes away is gone 0.3 s later."""
    stream = stage.client.stream(stage.request(stage.lasting(6.0)))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert await stage.until_idle(1.5) < 1.0


async def fact_a_gone_client_is_noticed_late(stage: Stage) -> None:
    """The generation of a waiting client that goes away runs on until a check every 4 s after it came."""
    task = stage.start(9.0)
    await asyncio.sleep(0.7)
    assert await stage.running() == 1
    task.cancel()
    await asyncio.sleep(2.0)
    assert await stage.running() == 1
    assert 0.5 < await stage.until_idle(2.6)  # 3.3 s after it went


async def fact_a_chat(stage: Stage) -> None:
    """/v1/chat/completions has OpenAI's shape, honours ``rid``, and tells the version in its metadata."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answer = json.loads(await stage.client.forward("/v1/chat/completions", json.dumps({**asked, "rid": "chat-0001"})))
    assert (answer["id"], answer["object"]) == ("chat-0001", "chat.completion")
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 12
    version = answer["metadata"]["weight_version"]
    assert answer["metadata"]["weight_versions"] == [{"version": version, "start": 0, "end": 12}]
    options = {"stream_options": {"include_usage": True}}
    *events, done = [event async for event in stage.events("/v1/chat/completions", {**asked, **options})]
    parsed = [json.loads(event) for event in events]
    assert done == "[DONE]" and parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parsed[-1]["usage"]["completion_tokens"] == 12
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in parsed if event["choices"]]
    assert "".join(deltas) == choice["message"]["content"]


async def fact_a_chat_that_is_too_long(stage: Stage) -> None:
    """A chat that is too long is 400 with object "error" and type BadRequestError, streamed or not."""
    words = "hello " * (stage.context + 88)
    for stream in (False, True):
        asked = {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "stream": stream}
        with pytest.raises(HttpError) as caught:
            if stream:
                [event async for event in stage.events("/v1/chat/completions", asked)]
            else:
                await stage.client.forward("/v1/chat/completions", json.dumps(asked))
        body = json.loads(caught.value.body)
        assert (caught.value.status, body["object"], body["type"]) == (400, "error", "BadRequestError")


async def fact_health_fails_during_a_pause(stage: Stage) -> None:
    """GET /health during a pause takes 20 s and is 503; /ready stays 503 after the pause until /health is 200."""
    await stage.pause("in_place")
    began = stage.now
    assert (await stage.client.get("/health"))[0] == 503
    assert 19.0 < stage.now - began < 22.0
    await stage.resume()
    assert (await stage.client.get("/ready"))[0] == 503
    assert (await stage.client.get("/health"))[0] == 200
    assert (await stage.client.get("/ready"))[0] == 200


# --- facts that end the engine: each has one of its own ---


async def fact_connecting_is_refused_while_it_starts(stage: Stage) -> None:
    """An engine that starts refuses connections, and answers nothing but 503 before it is ready."""
    address = await stage.backend.engines.launch(stage.spec, name="starter")
    starter = Stage(stage.backend, stage.hands, address, stage.spec)
    seen = await starter.until_ready()
    assert seen[0] is None and set(seen) <= {None, 503}


async def fact_sigterm_lets_go_slowly(stage: Stage) -> None:
    """After SIGTERM /health is 503 at once, requests go on, new ones are taken; gone at a 5 s poll that finds none."""
    first = stage.start(6.0)  # a poll finds it
    await asyncio.sleep(0.3)
    await stage.hands.sigterm(stage.backend, stage.address.name)
    async with asyncio.timeout(4.0):
        while (await stage.client.get("/health"))[0] != 503:
            await asyncio.sleep(0.05)
    assert not first.done()  # at once, as time passes for the engine too
    assert (await stage.client.generate(stage.request())).finish_reason == "length"
    assert (await first).completion_tokens == stage.lasting(6.0)
    ended = stage.now
    assert await gone(stage, 14.0)
    took = stage.now - ended
    assert took < 8.5, took  # polls come every 5 s, from its start on


async def fact_sigterm_waits_for_traffic(stage: Stage) -> None:
    """After SIGTERM steady traffic holds the process open past a poll."""
    began = stage.now

    async def ask() -> None:
        while stage.now - began < 7.0:
            assert (await stage.client.generate(stage.request(stage.lasting(0.4)))).finish_reason == "length"

    traffic = [stage.task(ask()) for _ in range(3)]  # so many that one is always in flight
    await asyncio.sleep(0.1)
    await stage.hands.sigterm(stage.backend, stage.address.name)
    await asyncio.gather(*traffic)
    assert await gone(stage, 14.0)


async def fact_sigkill_of_the_main_process(stage: Stage) -> None:
    """SIGKILL of the main process breaks every connection at once; then connecting is refused."""
    took = await silence(stage, "main")
    assert took < 2.0, took  # 0.05 s on a machine that is idle
    with pytest.raises(ConnectionRefused):
        await stage.client.get("/ready")


async def fact_sigkill_of_the_scheduler(stage: Stage) -> None:
    """SIGKILL of the scheduler: clients, new ones too, hang 5.9 s before all connections break."""
    took = await silence(stage, "scheduler")
    assert 5.0 < took < 8.0, took
    assert await gone(stage, 3.0)


async def fact_sigkill_of_the_detokenizer(stage: Stage) -> None:
    """SIGKILL of the detokenizer: clients, new ones too, hang 66 s before all connections break."""
    took = await silence(stage, "detokenizer")
    assert 60.0 < took < 75.0, took
    assert await gone(stage, 3.0)


async def silence(stage: Stage, part: str) -> float:
    """Kill a part with requests in flight, one of them new; how long until the last of them hears of it."""
    tasks = [stage.start(20.0), stage.task(drained(stage))]
    await asyncio.sleep(0.4)
    began = stage.now
    await stage.hands.kill(stage.backend, stage.address.name, part)  # type: ignore[arg-type]
    if part != "main":
        tasks.append(stage.task(stage.client.generate(stage.request())))
    ends: list[float] = []
    for number, task in enumerate(tasks):
        try:
            answer = await task
        except NetworkError:
            ends.append(stage.now - began)
        else:
            pytest.fail(f"task {number} of {len(tasks)}, {stage.now - began:.2f} s after the kill: {answer}")
    assert part == "main" or ends[0] > ends[-1] - 1.0, f"not all at once: {ends}"
    return ends[-1]


async def drained(stage: Stage) -> None:
    async for _ in stage.client.stream(stage.request(stage.lasting(20.0))):
        pass


async def gone(stage: Stage, within_s: float) -> bool:
    """Wait until the process is gone and its port refuses connections."""
    async with asyncio.timeout(within_s):
        while await stage.backend.engines.alive(stage.address.name):
            await asyncio.sleep(0.05)
    with contextlib.suppress(ConnectionRefused):
        await stage.client.get("/ready")
        return False
    return True


SHARED = [value for name, value in sorted(globals().items()) if name.startswith("fact_")]
ENDING = [
    fact_connecting_is_refused_while_it_starts,
    fact_sigterm_lets_go_slowly,
    fact_sigterm_waits_for_traffic,
    fact_sigkill_of_the_main_process,
    fact_sigkill_of_the_scheduler,
    fact_sigkill_of_the_detokenizer,
]
SHARED = [fact for fact in SHARED if fact not in ENDING]
