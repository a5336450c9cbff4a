"""Checks of weight updates by training ranks, and of registrations at a proxy, on histories of a few events."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.analysis.history import History


class Weights(History):
    """One service of two replicas, two ranks, updates within 10 s."""

    def __init__(self) -> None:
        super().__init__()
        self(
            "publishing.deployed", at="driver/0", service="s", controller="controller-s", router="affinity-s",
            entrypoints=[[f"entrypoint-s-{n}", f"gate-s-{n}", f"s-{n}"] for n in range(2)], prepare_timeout_s=10.0,
            resume_timeout_s=10.0,
        )  # fmt: skip
        self("weights.deployed", at="driver/0", service="s", transport="ipc", ranks=["rank-0", "rank-1"], trainer="t",
             timeout_s=10.0)  # fmt: skip
        self("publication.asked", at="driver/0", service="s", model_step=0)
        self._number = 0

    def call(self, target: str, method: str, *, at: str, took_ms: int | None = 1, inc: int = 0) -> None:
        self._number += 1
        sent = self("call.sent", at=at, call=self._number, target=target, target_inc=inc, method=method)
        if took_ms is not None:
            self("call.done", at=at, call=self._number, outcome="done", error="", ms=sent.t_ns // 10**6 + took_ms)

    def memory(self, action: str, *tags: str, resident: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        self("engine.memory", at="s-0/0", action=action, tags=list(tags), resident=list(resident))

    def weights(self, version: str, weight_hash: str, at: str = "s-0/0", *, ok: bool = True) -> None:
        self("engine.weights", at=at, version=version, weight_hash=weight_hash, ok=ok, detail="", in_flight=0)

    def bucket(self, bucket: int, of: int, weight_hash: str) -> None:
        self("engine.bucket", at="s-0/0", route="/r", bucket=bucket, of=of, weight_hash=weight_hash)

    def row(self, name: str) -> Any:
        return self.end().judged(name)


def truth(*contents: bytes) -> str:
    hashes = "\n".join(hashlib.sha256(one).hexdigest() for one in contents)
    return hashlib.sha256(hashes.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("served", "result"), [(truth(b"one", b"two"), "pass"), ("mixed:1234", "fail")])
def test_an_engine_serves_what_was_exported(served: str, result: str) -> None:
    h = Weights()
    for name, data in (("b.bin", b"two"), ("a.bin", b"one"), ("manifest.json", b"{}")):
        h("storage.written", at="exporter/0", path=f"exports/.tmp-1/{name}", size=1,
          sha256=hashlib.sha256(data).hexdigest(), fsync=True, writer="e")  # fmt: skip
    h("storage.renamed", at="exporter/0", old="exports/.tmp-1", new="exports/00000001-7")
    h.weights("7", served)
    assert h.row("serves_the_trainers_weights").result == result


@pytest.mark.parametrize(
    ("version", "weight_hash", "result"),
    [("2", "y", "pass"), ("1", "x", "pass"), ("2", "x", "fail"), ("1", "y", "fail")],
)
def test_label_and_weights_change_together(version: str, weight_hash: str, result: str) -> None:
    h = Weights()
    h.weights("1", "x")
    h.weights(version, weight_hash)
    assert h.row("label_follows_weights").result == result


@pytest.mark.parametrize(("whole", "result"), [(True, "pass"), (False, "fail")])
def test_nothing_is_accepted_between_the_first_bucket_and_the_last(whole: bool, result: str) -> None:
    h = Weights()
    h("engine.bucket", at="s-0/0", route="/r", bucket=0, of=2, weight_hash="mixed")
    if whole:
        h.weights("1", "x")
    h.sent("r1")
    h.accepted("r1", at="s-0/0")
    assert h.row("nothing_runs_on_part_weights").result == result


def _a_part_then_a_failed_load(h: Weights) -> None:
    h.bucket(0, 2, "mixed")
    h.weights("0", "mixed", ok=False)


def _released_then_a_failed_load(h: Weights) -> None:
    h.memory("released", "weights", resident=("kv_cache",))
    h.weights("0", "released", ok=False)


def _a_part_and_released_then_a_failed_load(h: Weights) -> None:
    h.bucket(0, 2, "mixed")
    h.memory("released", "weights", resident=("kv_cache",))
    h.weights("0", "released", ok=False)


def _all_parts_and_no_flush(h: Weights) -> None:
    h.bucket(0, 2, "mixed")
    h.bucket(1, 2, "x")
    h.weights("1", "x", ok=False)


def _another_load_and_no_flush(h: Weights) -> None:
    h.bucket(0, 2, "mixed")
    h.weights("1", "x", ok=False)


def _the_only_part_and_no_flush(h: Weights) -> None:
    h.bucket(0, 1, "x")
    h.weights("1", "x", ok=False)


def _a_failed_load_of_whole_weights(h: Weights) -> None:
    h.bucket(0, 2, "mixed")
    h.bucket(1, 2, "x")
    h.weights("1", "x")
    h.weights("1", "x", ok=False)


@pytest.mark.parametrize(
    ("what", "result"),
    [
        (_a_part_then_a_failed_load, "fail"),
        (_released_then_a_failed_load, "fail"),
        (_a_part_and_released_then_a_failed_load, "fail"),
        (_all_parts_and_no_flush, "pass"),
        (_another_load_and_no_flush, "pass"),
        (_the_only_part_and_no_flush, "pass"),
        (_a_failed_load_of_whole_weights, "pass"),
    ],
)
def test_a_failed_load_makes_weights_whole_only_if_it_was_the_flush_that_failed(what: Any, result: str) -> None:
    h = Weights()
    h("engine.ready", at="s-0/0", version="0", weight_hash="old")
    what(h)
    h.sent("r1")
    h.accepted("r1", at="s-0/0")
    assert h.row("nothing_runs_on_part_weights").result == result


@pytest.mark.parametrize(("took_ms", "result"), [(9_000, "pass"), (15_000, "pass"), (17_000, "fail"), (None, "fail")])
def test_every_rank_leaves_in_time(took_ms: int | None, result: str) -> None:
    h = Weights()
    h.call("rank-1", "update", at="publisher/0", took_ms=took_ms)
    h.call("rank-0", "update", at="publisher/0", took_ms=1)
    if took_ms is None:
        h("run.step", at="world/0", step=0, do="note", asked_ns=0, phase="", held=False, late_ns=0, ms=60_000)
    assert h.row("every_rank_leaves").result == result


@pytest.mark.parametrize(
    ("order", "result"),
    [
        (("released", "take", "weights", "offload", "kv"), "pass"),
        (("released", "take", "offload", "kv", "weights"), "fail"),
        (("released", "take", "weights", "kv", "offload"), "fail"),
        (("released", "take", "failed", "offload", "kv"), "fail"),
    ],
)
def test_kv_memory_comes_last(order: tuple[str, ...], result: str) -> None:
    h = Weights()
    for what in order:
        if what == "released":
            h.memory("released", "kv_cache", "weights", resident=())
        elif what == "kv":
            h.memory("resumed", "kv_cache")
        elif what == "weights":
            h.weights("1", "x")
        elif what == "failed":
            h.weights("0", "released", ok=False)
        else:
            h.call("rank-0", what, at="publisher/0")
    assert h.row("memory_order").result == result


@pytest.mark.parametrize(("inc", "wait_ms", "result"), [(1, 20_000, "pass"), (0, 1_000, "pass"), (0, 20_000, "fail")])
def test_updates_go_to_the_process_that_lives(inc: int, wait_ms: int, result: str) -> None:
    h = Weights()
    ready = h("engine.ready", at="s-0/1", version="1", weight_hash="x")
    h("run.step", at="world/0", step=0, do="note", asked_ns=0, phase="", held=False, late_ns=0,
      ms=ready.t_ns // 10**6 + wait_ms)  # fmt: skip
    h.call("s-0", "/update_weights_from_tensor", at="rank-0/0", inc=inc)
    assert h.row("updates_meet_the_living").result == result


def test_an_update_says_nothing_where_nobody_has_seen_which_process_lives() -> None:
    h = Weights()
    h.call("s-0", "/update_weights_from_tensor", at="rank-0/0")
    assert (h.row("updates_meet_the_living").result, h.row("updates_meet_the_living").judged) == ("inconclusive", 0)


class Proxy(History):
    def __init__(self) -> None:
        super().__init__()
        self("proxy.deployed", at="driver/0", service="s", proxy="proxy-s", registrations="reg-s",
             urls=[["s-0", "http://a"]], connect_attempts=5)  # fmt: skip

    def post(self, route: str, effect: str, url: str = "http://a", session: str = "") -> None:
        self("proxy.post", at="proxy-s/0", service="s", route=route, url=url, session=session, effect=effect, table=1)

    def attempt(self, operation: str, attempt: int) -> None:
        self("admin.attempt", at="reg-s/0", operation=operation, route="/v1/models/new", target="proxy-s",
             attempt=attempt, outcome="done", error="")  # fmt: skip

    def row(self, name: str) -> Any:
        return self.end().judged(name)


@pytest.mark.parametrize(("between", "result"), [("deleted", "pass"), ("", "fail")])
def test_a_backend_is_registered_once_between_deletions(between: str, result: str) -> None:
    h = Proxy()
    h.post("new", "registered")
    if between:
        h.post("delete", between)
    h.post("new", "registered" if between else "duplicate")
    assert h.row("proxy_registered_once").result == result


@pytest.mark.parametrize(("attempts", "result"), [(("a1", "b1"), "pass"), (("a1", "a2"), "fail"), (("a6",), "fail")])
def test_an_operation_is_delivered_once_and_tried_five_times(attempts: tuple[str, ...], result: str) -> None:
    h = Proxy()
    for one in attempts:
        h.post("new", "busy")
        h.attempt(one[0], int(one[1]))
    assert h.row("proxy_post_delivered_once").result == result


@pytest.mark.parametrize(
    ("effects", "table", "result"),
    [
        (("deleted_all", "registered"), ["http://a"], "pass"),
        (("deleted_all", "registered", "deleted_all"), ["http://a"], "fail"),
        (("deleted_all", "registered"), [], "fail"),
    ],
)
def test_the_proxy_has_the_fleet(effects: tuple[str, ...], table: list[str], result: str) -> None:
    h = Proxy()
    for effect in effects:
        h.post("delete" if effect.startswith("del") else "new", effect)
    h("proxy.snapshot", at="driver/0", service="s", table=table, routable=["http://a"])
    assert h.row("proxy_follows_the_fleet").result == result


@pytest.mark.parametrize(
    ("probed", "retired", "result"), [(True, True, "pass"), (True, False, "fail"), (False, True, "fail")]
)
def test_a_probe_comes_first_and_its_session_is_retired(probed: bool, retired: bool, result: str) -> None:
    h = Proxy()
    h.post("chat", "answered" if probed else "failed", url="", session="probe-1")
    if retired:
        h("call.sent", at="reg-s/0", call=1, target="controller-s", method="retire_route_sessions")
        h("call.done", at="reg-s/0", call=1, outcome="done", error="")
    h("proxy.forwarded", at="proxy-s/0", service="s", session="session-1", request="r", url="http://a")
    assert h.row("proxy_probe").result == result
