"""The emulated engine: shapes of its answers, pacing by the machine's clock, signals, and what it costs."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from protocol.training.checkpoint import MANIFEST, describe, encode_manifest
from tests.processes import is_running
from tests.real.emulated_process import ROOT, Client, Emulated, emulated, quick_profile, talk

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quick_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def engine(profile: str) -> Iterator[Emulated]:
    """One for the tests that leave it as they found it."""
    with emulated(profile, "--weights-version", "7", "--weights-hash", "h7") as started:
        yield started


# --- start and pages ---


def test_connecting_is_refused_until_it_has_loaded(profile: str) -> None:
    with emulated("tiny-cpu", ready=False) as slow:
        time.sleep(1.2)
        assert slow.process.poll() is None
        assert not slow.listens()
        slow.wait_ready()
        assert time.monotonic() - slow.began > 2.0  # the profile's start-up
        assert talk(slow, lambda client: client.get("/ready")) == (200, "")


def test_more_weights_take_longer_to_load(profile: str) -> None:
    with emulated(profile, "--weights-bytes", "1004000000", ready=False) as engine:
        engine.wait_ready()
        assert time.monotonic() - engine.began > 1.2  # 1 GB more at 1 GB/s


def test_a_taken_port_and_an_unknown_profile_are_told_in_one_line(engine: Emulated, profile: str) -> None:
    with emulated(profile, "--port", str(engine.port), ready=False) as second:
        _, text = second.process.communicate(timeout=20)
        assert second.process.returncode == 1
        assert text.strip() == f"real.emulated: cannot bind 127.0.0.1:{engine.port} (Address already in use)"
    with emulated("no-such", ready=False) as third:
        _, text = third.process.communicate(timeout=20)
        assert "no engine profile 'no-such'; shipped: " in text and "Traceback" not in text


def test_pages(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        for page in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            status, content = await client.get(page)
            assert (status, content["weight_version"]) == (200, "7")
        assert len((await client.get("/server_info"))[1]) > 500
        assert (await client.get("/v1/models"))[1]["data"][0]["max_model_len"] == 512
        status, loads = await client.get("/v1/loads")
        assert loads["loads"][0]["num_running_reqs"] == 0
        assert "sglang:num_running_reqs" in (await client.get("/metrics"))[1]
        assert await client.get("/get_load") == (404, {"detail": "Not Found"})
        assert await client.post("/workers") == (404, {"detail": "Not Found"})
        assert await client.get("/generate") == (405, {"detail": "Method Not Allowed"})

    talk(engine, body)


def test_health_generates_and_takes_a_second(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        for route in ("/health", "/health_generate"):
            began = time.monotonic()
            assert await client.get(route) == (200, "")
            assert 1.0 <= time.monotonic() - began < 2.0

    talk(engine, body)


# --- /generate ---


def test_an_answer_has_sglangs_shape(engine: Emulated) -> None:
    answer = talk(engine, lambda client: client.generate([1, 2, 3], 5, rid="shape-1"))
    meta = answer["meta_info"]
    assert answer["text"] == "".join(f" {token}" for token in answer["output_ids"])
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["id"] == "shape-1" and meta["prompt_tokens"] == 3
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "7"
    assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": 5}]
    assert meta["num_retractions"] == 0 and 0 < meta["queue_time"] < meta["e2e_latency"] < 0.1


def test_greedy_output_depends_on_what_came_before_and_on_the_weights_alone(engine: Emulated, profile: str) -> None:
    async def twice(client: Client) -> list[int]:
        whole = (await client.generate([5, 6, 7], 40))["output_ids"]
        half = (await client.generate([5, 6, 7], 20))["output_ids"]
        assert whole == half + (await client.generate([5, 6, 7, *half], 20))["output_ids"]
        assert whole != (await client.generate([5, 6, 8], 40))["output_ids"]
        return list(whole)

    same = talk(engine, twice)
    with emulated(profile, "--weights-version", "8", "--weights-hash", "h7") as other:
        assert talk(other, twice) == same  # another label on the same weights
    with emulated(profile, "--weights-version", "7", "--weights-hash", "h8") as other:
        assert talk(other, twice) != same


def test_without_ignore_eos_an_answer_may_end_by_itself(engine: Emulated) -> None:
    answer = talk(engine, lambda client: client.generate([9], 400, sampling={"ignore_eos": False}))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert 16 <= answer["meta_info"]["completion_tokens"] < 128


def test_a_repeated_prompt_is_found_in_the_prefix_cache(engine: Emulated) -> None:
    prompt = [1000 + at % 7 for at in range(100)]

    async def body(client: Client) -> None:
        await client.post("/flush_cache")
        assert (await client.generate(prompt))["meta_info"]["cached_tokens"] == 0
        assert (await client.generate(prompt))["meta_info"]["cached_tokens"] == 96  # blocks of 32
        assert (await client.generate(prompt[:40] + [1] * 60))["meta_info"]["cached_tokens"] == 32
        assert await client.get("/flush_cache") == (
            200,
            "Cache flushed.\nPlease check backend logs for more details.\n",
        )
        assert (await client.generate(prompt))["meta_info"]["cached_tokens"] == 0

    talk(engine, body)


def test_a_stream_is_cumulative_and_ends_with_done(engine: Emulated) -> None:
    async def body(client: Client) -> list[Any]:
        sampling = {"max_new_tokens": 50, "ignore_eos": True}
        return [event async for event in client.events("/generate", {"input_ids": [1], "sampling_params": sampling})]

    *events, done = talk(engine, body)
    assert done == "[DONE]"
    parsed = [json.loads(event) for event in events]
    lengths = [len(event["output_ids"]) for event in parsed]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 50 and len(lengths) > 20
    for event in parsed[:-1]:
        assert event["output_ids"] == parsed[-1]["output_ids"][: len(event["output_ids"])]
        assert event["meta_info"]["finish_reason"] is None and "weight_versions" not in event["meta_info"]
    assert parsed[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert parsed[-1]["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 50}]


def test_several_prompts_and_several_samples_make_a_list(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        asked = {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        status, answers = await client.post("/generate", asked)
        assert status == 200 and [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 1]
        status, answers = await client.post("/generate", {"text": "hello", "sampling_params": {"n": 2}})
        assert status == 200 and len(answers) == 2

    talk(engine, body)


def test_log_probabilities(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        meta = (await client.generate([4, 5], 3, return_logprob=True))["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert [len(entry) for entry in meta["output_token_logprobs"]] == [3, 3, 3]
        meta = (await client.generate([4, 5], 3, return_logprob=True, logprob_start_len=0))["meta_info"]
        assert meta["input_token_logprobs"][0] == [None, 4, None] and meta["input_token_logprobs"][1][1] == 5

    talk(engine, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Exactly one of text and input_ids"),
        ({"input_ids": [1], "text": "a"}, "Exactly one of text and input_ids"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": ["a"]}, "list of token ids"),
        ({"input_ids": [-1]}, "list of token ids"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "at least 1"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "3"}}, "must be an integer"),
        ({"input_ids": [[1], [2]], "stream": False, "rid": ["a", "a"]}, "Duplicate request IDs"),
        ({"input_ids": [1] * 600}, "The input (600 tokens) is longer than the model's context length (512 tokens)."),
        ({"input_ids": [1] * 400}, "a total of 528 tokens: 400 tokens from the input messages and 128"),
    ],
)
def test_what_cannot_be_served_is_refused_with_400(engine: Emulated, body: Any, message: str) -> None:
    status, answer = talk(engine, lambda client: client.post("/generate", body))
    assert status == 400
    assert message in answer["error"]["message"]


def test_an_unknown_sampling_key_is_refused_with_the_known_ones(engine: Emulated) -> None:
    asked = {"input_ids": [1], "sampling_params": {"max_tokens": 3}, "stream": True}
    status, answer = talk(engine, lambda client: client.post("/generate", asked))
    assert status == 400
    assert answer["error"].startswith("unknown field `max_tokens`, expected one of `max_new_tokens`, `stop`")


@pytest.mark.parametrize("route", ["/generate", "/pause_generation", "/update_weights_from_disk"])
def test_a_body_that_is_no_object_is_refused(engine: Emulated, route: str) -> None:
    status, answer = talk(engine, lambda client: client.post(route, []))
    assert status == 400 and answer["object"] == "error"


def test_a_refused_stream_is_200_and_one_event(engine: Emulated) -> None:
    async def body(client: Client, asked: dict[str, Any]) -> list[str]:
        return [event async for event in client.events("/generate", asked)]

    for asked in ({"input_ids": [1] * 600}, {"input_ids": []}):
        event, done = talk(engine, lambda client, asked=asked: body(client, asked))
        error = json.loads(event)["error"]
        assert (error["code"], error["retryable"], done) == (400, False, "[DONE]")


def test_a_live_request_id_is_refused(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        first = asyncio.create_task(client.generate([1], 100, rid="twice"))
        await asyncio.sleep(0.05)
        status, answer = await client.post("/generate", {"input_ids": [1], "rid": "twice"})
        assert (status, answer) == (400, {"error": {"message": "Duplicate request ID detected: twice"}})
        assert (await first)["meta_info"]["completion_tokens"] == 100
        assert (await client.generate([1], 3, rid="twice"))["meta_info"]["completion_tokens"] == 3

    talk(engine, body)


# --- the OpenAI routes ---

HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_has_openais_shape_and_the_versions_in_its_metadata(engine: Emulated) -> None:
    asked = {"model": "mine", "messages": HELLO, "max_tokens": 6, "ignore_eos": True, "rid": "chat-1"}
    status, answer = talk(engine, lambda client: client.post("/v1/chat/completions", asked))
    choice = answer["choices"][0]
    assert status == 200 and (answer["id"], answer["object"], answer["model"]) == ("chat-1", "chat.completion", "mine")
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"].count(" ") == 6
    assert choice["finish_reason"] == "length" and choice["matched_stop"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6 and usage["total_tokens"] == usage["prompt_tokens"] + 6
    versions = [{"version": "7", "start": 0, "end": 6}]
    assert answer["metadata"] == {"weight_version": "7", "weight_versions": versions}


def test_the_next_turn_of_a_conversation_finds_the_last_one_in_the_cache(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        async def cached() -> float:
            page = (await client.get("/metrics"))[1]
            line = next(line for line in page.splitlines() if line.startswith("sglang:cached_tokens_total"))
            return float(line.rpartition(" ")[2])

        messages = [{"role": "user", "content": "a question of some length, asked twice. " * 4}]
        asked = {"messages": messages, "max_tokens": 40, "ignore_eos": True}
        _, first = await client.post("/v1/chat/completions", asked)
        before = await cached()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and more"}]
        _, second = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
        hit = await cached() - before
        assert hit == first["usage"]["prompt_tokens"] // 32 * 32 > 0
        assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]

    talk(engine, body)


def test_a_chat_stream_gives_the_same_text_in_pieces(engine: Emulated) -> None:
    # So many tokens that there are pieces enough on a busy machine, where several tokens come in one.
    asked = {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "stream_options": {"include_usage": True}}

    async def body(client: Client) -> tuple[list[str], str]:
        events = [event async for event in client.events("/v1/chat/completions", asked)]
        _, whole = await client.post("/v1/chat/completions", asked)
        return events, whole["choices"][0]["message"]["content"]

    (first, *events, done), text = talk(engine, body)
    assert done == "[DONE]" and json.loads(first)["choices"][0]["delta"]["role"] == "assistant"
    *deltas, last, usage = [json.loads(event) for event in events]
    assert len(deltas) > 10
    assert "".join(event["choices"][0]["delta"]["content"] for event in deltas) == text
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 300


def test_a_text_completion(engine: Emulated) -> None:
    async def body(client: Client) -> None:
        status, answer = await client.post("/v1/completions", {"prompt": "once upon", "max_tokens": 3})
        assert status == 200 and answer["object"] == "text_completion" and answer["choices"][0]["text"].count(" ") == 3
        asked = {"prompt": [1, 2], "max_tokens": 3}
        events = [event async for event in client.events("/v1/completions", asked)]
        assert events[-1] == "[DONE]" and json.loads(events[0])["choices"][0]["text"]

    talk(engine, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_is_too_long_is_refused_with_400(engine: Emulated, stream: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 4, "stream": stream}
    status, answer = talk(engine, lambda client: client.post("/v1/chat/completions", asked))
    assert status == 400 and (answer["object"], answer["type"], answer["code"]) == ("error", "BadRequestError", 400)
    assert "longer than the model's context length (512 tokens)" in answer["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"messages": []}, {"messages": [{"content": "a"}]}, {"messages": HELLO, "n": 2},
        {"messages": HELLO, "max_tokens": 0}, {"messages": [{"role": "user", "content": [{"image_url": "x"}]}]},
    ],
)  # fmt: skip
def test_a_bad_chat_is_refused_with_400(engine: Emulated, asked: dict[str, Any]) -> None:
    status, answer = talk(engine, lambda client: client.post("/v1/chat/completions", asked))
    assert status == 400 and answer["object"] == "error" and answer["message"]


# --- weights ---


def export(folder: pathlib.Path, data: bytes, *, manifest: bool = True) -> str:
    """Writes an export and returns its weight hash."""
    folder.mkdir()
    (folder / "b.bin").write_bytes(data)
    (folder / "a.bin").write_bytes(b"other " + data)
    whole = describe("v9", [("b.bin", data, 0), ("a.bin", b"other " + data, 0)])
    if manifest:
        (folder / MANIFEST).write_bytes(encode_manifest(whole))
    return whole.weight_hash


def test_weights_are_read_from_the_folder(profile: str, tmp_path: pathlib.Path) -> None:
    truth = export(tmp_path / "new", b"weights")

    async def body(client: Client) -> list[int]:
        before = (await client.generate([1], 10))["output_ids"]
        load = {"model_path": str(tmp_path / "new"), "weight_version": "9"}
        status, answer = await client.post("/update_weights_from_disk", load)
        assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 0)
        after = await client.generate([1], 10)
        assert after["meta_info"]["weight_version"] == "9" and after["output_ids"] != before
        assert (await client.get("/v1/models"))[1]["data"][0]["id"] == str(tmp_path / "new")
        return list(after["output_ids"])

    with emulated(profile) as engine:
        loaded = talk(engine, body)
    with emulated(profile, "--weights-hash", truth) as engine:  # the hash is that of the bytes, in the manifest's order
        assert talk(engine, lambda client: client.generate([1], 10))["output_ids"] == loaded


def test_a_torn_file_loads_and_only_the_tokens_tell(profile: str, tmp_path: pathlib.Path) -> None:
    export(tmp_path / "whole", b"weights")
    export(tmp_path / "torn", b"weights")
    (tmp_path / "torn" / "b.bin").write_bytes(b"weig")

    async def body(client: Client) -> None:
        said = []
        for name in ("whole", "torn"):
            load = {"model_path": str(tmp_path / name), "weight_version": "9"}
            assert (await client.post("/update_weights_from_disk", load))[0] == 200
            said.append((await client.generate([1], 10))["output_ids"])
        assert said[0] != said[1]

    with emulated(profile) as engine:
        talk(engine, body)


def test_weights_that_are_not_there_are_400_after_a_while(engine: Emulated, tmp_path: pathlib.Path) -> None:
    export(tmp_path / "part", b"weights")
    (tmp_path / "part" / "a.bin").unlink()

    async def body(client: Client) -> None:
        for name in ("nowhere", "part"):
            began = time.monotonic()
            load = {"model_path": str(tmp_path / name), "weight_version": "9"}
            status, answer = await client.post("/update_weights_from_disk", load)
            assert (status, answer["success"]) == (400, False) and name in answer["message"]
            assert time.monotonic() - began >= 1.3
        assert (await client.generate([1]))["meta_info"]["weight_version"] == "7"
        assert (await client.post("/update_weights_from_disk"))[0] == 400

    talk(engine, body)


# --- time ---


def test_requests_take_the_time_that_the_model_says(engine: Emulated) -> None:
    async def body(client: Client) -> tuple[float, float]:
        began = time.monotonic()
        answer = await client.generate([1], 300)
        return time.monotonic() - began, answer["meta_info"]["e2e_latency"]

    seen, said = talk(engine, body)
    assert 0.63 < said < 0.67  # 300 steps of 2.1 ms
    assert said <= seen < said + 0.5


def test_a_late_wake_up_does_not_distort_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen requests with a clock that is read at every event, and with one that leaps by half seconds."""
    from real.emulated import pacer as module
    from sim.engine import SimEngine
    from sim.profiles import load_profile

    def run(leap_ns: int) -> list[tuple[str, int, int]]:
        now = 0
        monkeypatch.setattr(module.time, "monotonic_ns", lambda: now)
        ended: list[tuple[str, int, int]] = []

        async def drive() -> None:
            nonlocal now
            pacer = module.Pacer()
            engine = SimEngine(pacer.env, load_profile("tiny-cpu"))
            pacer.drive(engine)
            pacer.tell(engine.start)
            now = 3_000_000_000
            for index in range(16):
                now += 10_000_000  # a request always reads the clock: it comes at the same instants
                pacer.tell(
                    lambda rid=f"r{index:02}": engine.submit(
                        rid, 30, 60, done=lambda r: ended.append((r.rid, r.e2e_ns, r.finished_at_ns))
                    )
                )
            while now < 6_000_000_000:
                now += leap_ns
                pacer.tell(lambda: None)

        asyncio.run(drive())
        return ended

    smooth, leaping = run(1_000_000), run(500_000_000)
    assert len(smooth) == 16 and smooth == leaping
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


# --- signals ---


def test_a_stopped_engine_makes_no_progress(profile: str) -> None:
    async def body(client: Client) -> None:
        request = asyncio.create_task(client.generate([1], 200))  # 0.42 s
        await asyncio.sleep(0.2)
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        assert not request.done()
        engine.signal(signal.SIGCONT)
        meta = (await request)["meta_info"]
        assert 1.38 < meta["e2e_latency"] < 1.6 and meta["completion_tokens"] == 200

    with emulated(profile) as engine:
        talk(engine, body)


@pytest.mark.parametrize("how", ["signals", "scheduler"])
def test_a_wedged_engine_answers_and_generates_nothing(profile: str, how: str) -> None:
    async def body(client: Client) -> None:
        request = asyncio.create_task(client.generate([1], 100))
        await asyncio.sleep(0.05)
        engine.signal(signal.SIGUSR1) if how == "signals" else engine.signal(signal.SIGSTOP, "scheduler")
        await asyncio.sleep(1.0)
        assert (await client.get("/ready"))[0] == 200
        assert (await client.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 1
        assert not request.done()
        engine.signal(signal.SIGUSR2) if how == "signals" else engine.signal(signal.SIGCONT, "scheduler")
        assert (await request)["meta_info"]["e2e_latency"] > 1.0

    with emulated(profile) as engine:
        talk(engine, body)


def test_sigterm_lets_what_runs_end_and_takes_new_requests(profile: str) -> None:
    async def body(client: Client) -> None:
        request = asyncio.create_task(client.generate([1], 400))
        await asyncio.sleep(0.05)
        engine.signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert (await client.get("/health"))[0] == 503
        assert (await client.generate([2], 5))["meta_info"]["completion_tokens"] == 5
        assert (await request)["meta_info"]["completion_tokens"] == 400

    with emulated(profile) as engine:
        talk(engine, body)
        began = time.monotonic()
        assert engine.process.wait(timeout=10) == 0
        assert 4.0 < time.monotonic() - began < 6.5  # gone 5.7 s after the signal


def test_after_the_death_of_its_scheduler_it_is_silent_and_then_gone(profile: str) -> None:
    async def body(client: Client) -> None:
        requests = [asyncio.create_task(client.generate([1], 400)) for _ in range(2)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        engine.signal(signal.SIGKILL, "scheduler")
        requests.append(asyncio.create_task(client.generate([2], 5)))  # new ones hang too
        for request in requests:
            with pytest.raises(Exception, match="disconnected|reset"):
                await request
            assert 5.8 < time.monotonic() - began < 7.0

    with emulated(profile) as engine:
        detokenizer = engine.child("detokenizer")
        talk(engine, body)
        assert engine.process.wait(timeout=5) == 1
        assert not is_alive(detokenizer)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    for _ in range(50):
        if not is_running(pid):
            return False
        time.sleep(0.05)
    return True


def test_its_children_die_with_it(profile: str) -> None:
    with emulated(profile) as engine:
        children = [engine.child("scheduler"), engine.child("detokenizer")]
        engine.process.kill()
        assert not any(is_alive(pid) for pid in children)


# --- who is let in ---


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    command = [sys.executable, "-m", "real.emulated", "--profile", "tiny-cpu", "--port", "1", "--host", host]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2 and ended.stdout == ""
    said = f"error: --host {host}: other machines reach it; give a --token-file, or use 127.0.0.1\n"
    assert ended.stderr == said


def test_with_a_token_nobody_is_answered_without_it(profile: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length\n")

    async def statuses(url: str) -> list[int]:
        async with aiohttp.ClientSession() as session:
            found = []
            for given in (None, "Bearer another", "Bearer a-token-of-some-length"):
                sent = {} if given is None else {"Authorization": given}
                async with session.get(f"{url}/model_info", headers=sent) as answer:
                    found.append(answer.status)
            return found

    with emulated(profile, "--host", "0.0.0.0", "--token-file", str(tmp_path / "token")) as engine:
        assert asyncio.run(statuses(engine.url)) == [401, 401, 200]


# --- cost ---


def test_an_idle_engine_costs_next_to_nothing(profile: str) -> None:
    def cpu_ticks(pid: int) -> int:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with emulated(profile) as engine:
        talk(engine, lambda client: client.generate([1], 20))
        pid = engine.process.pid
        before = cpu_ticks(pid)
        time.sleep(2.0)
        assert cpu_ticks(pid) - before <= 2  # of 200
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        resident_kb = int(status.partition("VmRSS:")[2].split()[0])
        assert resident_kb < 80_000


def test_it_imports_neither_ray_nor_numpy_nor_pydantic() -> None:
    """64 of them must fit on a laptop."""
    heavy = ("ray", "numpy", "pydantic", "pandas")
    code = f"import sys, real.emulated.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
