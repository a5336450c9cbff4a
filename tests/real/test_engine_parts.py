"""Parts of the engines of the real world that need neither Ray nor an engine."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from protocol.messages import AdminReply, GenerateRequest, WeightUpdate
from protocol.ports import EngineSpec
from real.engines import bodies, headers
from real.engines.generations import StreamWatch
from real.engines.kinds import command, environment
from real.engines.leftovers import Leftovers, clear_engine_folders, clear_leftovers, new_engine_folder
from real.engines.prompts import prompt
from real.engines.served import Ending, Served, ending_of
from real.engines.settings import EngineSettings
from real.engines.sockets import reserve
from real.engines.weights import Weights
from tests.real.engine_world import gone
from tests.real.local_ray import ROOT


def test_an_update_without_a_version_names_none() -> None:
    assert "weight_version" not in bodies.weight_update(WeightUpdate("p", ""))
    assert bodies.weight_update(WeightUpdate("p", "7"))["weight_version"] == "7"


@pytest.mark.parametrize(
    ("status", "text", "message", "success"),
    [
        (200, "Cache flushed.", "Cache flushed.", True),
        (200, '{"success": false, "message": "busy"}', "busy", False),
        (200, '{"status": "ok"}', '{"status": "ok"}', True),
        (400, '{"message": "paused"}', "paused", False),
        (400, "[]", "[]", False),
    ],
)
def test_what_an_admin_answer_says(status: int, text: str, message: str, success: bool) -> None:
    assert bodies.admin_reply(status, text) == AdminReply(status, message, success)


def test_prompts_share_what_their_blocks_share() -> None:
    a = prompt(GenerateRequest("a", 70, 1, prefix_blocks=(1, 2)), 32)
    b = prompt(GenerateRequest("b", 70, 1, prefix_blocks=(1, 2)), 32)
    c = prompt(GenerateRequest("c", 50, 1, prefix_blocks=(1, 3)), 32)
    assert (len(a), len(b), len(c)) == (70, 70, 50)
    assert a[:64] == b[:64] and a[64:] != b[64:]
    assert a[:32] == c[:32] and a[32:50] != c[32:]
    assert a == prompt(GenerateRequest("a", 70, 9, prefix_blocks=(1, 2)), 32)
    assert all(1000 <= token < 1256 for token in a)
    assert prompt(GenerateRequest("d", 5, 1, prefix_blocks=(1, 2)), 32) == a[:5]


def test_headers_carry_any_name() -> None:
    assert headers.process_of(headers.process_text("odd / näme", 3)) == ("odd / näme", 3)
    assert headers.process_of("") == headers.process_of("somebody") == ("", 0)
    cause = headers.cause_text("odd näme/1/7")
    assert cause.isascii()
    assert headers.cause_and_clock({headers.CAUSE: cause, headers.CLOCK: "12"}) == ("odd näme/1/7", 12)
    assert headers.cause_and_clock({}) == (None, 0)


def test_what_an_answer_says_of_itself() -> None:
    meta = {
        "finish_reason": {"type": "abort"}, "completion_tokens": 9, "cached_tokens": 4, "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 5}, {"version": "2", "start": 5, "end": 9}],
    }  # fmt: skip
    assert ending_of({"meta_info": meta}) == Ending("abort", 9, 4, (("1", 0, 5), ("2", 5, 9)))
    plain = {"finish_reason": {"type": "length"}, "completion_tokens": 3, "weight_version": "2"}
    assert ending_of({"meta_info": plain}) == Ending("length", 3, 0, (("2", 0, 3),))
    chat = {
        "choices": [{"finish_reason": "stop"}], "metadata": {"weight_version": "2"},
        "usage": {"completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}},
    }  # fmt: skip
    assert ending_of(chat) == Ending("stop", 6, 2, (("2", 0, 6),))


def test_an_answer_waits_for_the_change_that_explains_it() -> None:
    async def body() -> None:
        served = Served("1", "one")
        new = Ending("length", 4, 3, (("2", 0, 4),))
        await served.explained(new)  # nothing is under way: it can only be recorded as it is
        assert served.spans(new, served.epoch) == [["2", 0, 4, ""]]
        untold, before = Ending("stop", 4, 0, (("", 0, 4),)), served.epoch
        assert served.spans(untold, before) == [["1", 0, 4, "one"]]
        served.change_begins()
        await served.explained(Ending("length", 4, 0, (("1", 0, 4),)))
        waiting = asyncio.ensure_future(served.explained(new))
        await asyncio.sleep(0)
        assert not waiting.done()
        served.changed("2", "two", flushed=False)
        served.change_ended()
        await waiting
        assert served.spans(untold, before) == []  # either may have computed it
        assert served.spans(untold, served.epoch) == [["2", 0, 4, "two"]]
        assert served.spans(new, before) == [["2", 0, 4, "two"]] and served.version == "2"
        assert served.stale_cached_tokens(new) is None
        assert served.stale_cached_tokens(new._replace(cached_tokens=0)) == 0
        served.flushed()
        assert served.stale_cached_tokens(new) == 0
        served.relabelled("3")
        assert served.spans(new._replace(versions=(("3", 0, 4),)), before) == [["3", 0, 4, "two"]]

    asyncio.run(body())


def watched(*documents: Any) -> list[tuple[Any, Any]]:
    watch = StreamWatch()
    seen = []
    for document in documents:
        data = document if isinstance(document, str) else json.dumps(document)
        watch.look(f"data: {data}\n\n".encode())
        seen.append((watch.ending, watch.refusal))
    assert watch.over and watch.done
    return seen


def test_the_end_of_a_stream_is_found() -> None:
    meta = {"completion_tokens": 2, "weight_version": "1"}
    last = {"meta_info": {**meta, "finish_reason": {"type": "length"}}}
    seen = watched({"meta_info": {**meta, "finish_reason": None}}, last, "[DONE]")
    assert seen == [(None, None), (ending_of(last), None), (None, None)]

    chunk = {"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "metadata": {"weight_version": "1"}}
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    assert watched(chunk, chunk, end, "[DONE]")[-1] == (Ending("stop", 2, 0, (("1", 0, 2),)), None)
    assert watched(chunk, end, usage, "[DONE]")[-1] == (Ending("stop", 5, 0, (("1", 0, 5),)), None)

    refused = watched({"error": {"message": "too long", "code": 400}}, "[DONE]")
    assert refused == [(None, (400, "too long")), (None, None)]


def test_a_reserved_port_is_had_once() -> None:
    first = 29000 + os.getpid() % 900
    one = reserve("127.0.0.1", first)
    two = reserve("127.0.0.1", first)
    try:
        assert one.port < two.port
        with socket.socket() as caller:  # bound and not listened to: a caller is refused
            assert caller.connect_ex(("127.0.0.1", one.port)) != 0
        one.bound.close()
        assert reserve("127.0.0.1", first).port not in (one.port, two.port)  # the lock stays with its holder
    finally:
        one.close()
        two.close()
    again = reserve("127.0.0.1", first)
    assert again.port == one.port
    again.close()


def test_leftovers_are_found_after_their_owner_was_killed(tmp_path: pathlib.Path) -> None:
    folder, file = tmp_path / "temporary", tmp_path / "shared-memory"
    folder.mkdir()
    (folder / "socket").touch()
    file.touch()
    listed = Leftovers(str(tmp_path), "a/b", 1)
    for path in (folder, file, tmp_path / "gone-already"):
        listed.add(str(path))
    clear_leftovers(str(tmp_path))
    assert not folder.exists() and not file.exists()
    assert list((tmp_path / "engines").iterdir()) == []


def test_an_engines_folder_is_found_by_its_run_wherever_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, machines = "run-18fab0c0ffee0000-123456", tmp_path / "run", tmp_path / "machine"
    folder.mkdir()
    machines.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machines))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))  # Ray is the run's own: what is removed with its folder needs no name
    assert os.path.dirname(new_engine_folder(run, str(folder))) == str(folder)
    for others in (None, str(tmp_path / "an operator's")):
        monkeypatch.delenv("RAY_TMPDIR") if others is None else monkeypatch.setenv("RAY_TMPDIR", others)
        made = new_engine_folder(run, str(folder))
        assert os.path.dirname(made) == str(machines) and len(os.path.basename(made)) <= 28
        pathlib.Path(made, "socket").touch()
    another = new_engine_folder(run + "7", str(folder))
    clear_engine_folders(run)
    assert [str(path) for path in machines.iterdir()] == [another]


LEASHED = """
import subprocess, sys, os
sleeper = subprocess.Popen([sys.executable, {leash!r}, str(os.getpid()), "sleep", "60"])
print(sleeper.pid, flush=True)
sys.stdin.read()
"""


def test_a_leashed_process_dies_with_its_parent() -> None:
    leash = str(ROOT / "real" / "engines" / "leash.py")
    parent = subprocess.Popen(
        [sys.executable, "-c", LEASHED.format(leash=leash)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    sleeper = int(parent.stdout.readline())
    command_line = pathlib.Path(f"/proc/{sleeper}/cmdline")
    deadline = time.monotonic() + 10
    while b"sleep\0" not in command_line.read_bytes()[:6]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    assert gone([sleeper], within_s=5)

    orphan = subprocess.run([sys.executable, leash, "1", "sleep", "60"], capture_output=True, text=True, timeout=10)
    assert orphan.returncode == 1 and "the parent died" in orphan.stderr


@pytest.mark.parametrize("kind", ["emulated", "sglang-cpu", "sglang"])
def test_every_kind_is_told_its_weights_and_its_port(kind: Any, tmp_path: pathlib.Path) -> None:
    settings = EngineSettings(kind, "/env/bin/python", "some/model", ("--extra",))
    weights = Weights(str(tmp_path), "7", "abc", 123)
    for given in (None, weights):
        line = command(settings, EngineSpec("profile"), given, name="e", port=20001, temporary=str(tmp_path))
        assert line[0] == "/env/bin/python" and line[-1] == "--extra"
        assert line[line.index("--port") + 1] == "20001" and line[line.index("--host") + 1] == "127.0.0.1"
        version = "--weights-version" if kind == "emulated" else "--weight-version"
        if given is not None:
            assert line[line.index(version) + 1] == "7"
        if kind != "emulated":
            assert line[line.index("--model-path") + 1] == ("some/model" if given is None else str(tmp_path))
    found = environment(settings, ("/user/code",), str(tmp_path))
    assert ("/user/code" in found.get("PYTHONPATH", "")) == (kind == "emulated")
