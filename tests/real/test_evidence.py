"""What the processes of a real run write down: whole after a SIGKILL, and ordered by cause."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from protocol.errors import ActorDied
from protocol.evidence import Event, decode
from tests.real.components import Claimant

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def events_of(folder: pathlib.Path) -> dict[str, list[Event]]:
    """The events of each process, by the name of its file."""
    return {
        path.stem: [decode(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((folder / "events").iterdir())
    }


def test_no_event_is_lost_by_a_death(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        for name, method in (("killed", "claim_and_die"), ("crashed", "claim_and_crash")):
            actor = await backend.spawn(Claimant, name=name)
            with pytest.raises(ActorDied):
                await getattr(actor, method)(500)
        actor = await backend.spawn(Claimant, name="a/odd name")
        await actor.claim(500)
        await backend.kill(actor)

    run_real(body, folder=str(tmp_path))
    files = events_of(tmp_path)
    assert sorted(files) == ["a%2Fodd%20name-1", "crashed-1", "driver-0", "killed-1"]
    for name, last in (("killed-1", "killed"), ("crashed-1", "crashed")):
        events = files[name]
        assert [event.kind for event in events] == ["actor.spawned", *["gateway.routable"] * 500, "actor.died"]
        assert events[-1].data["reason"] == last
        assert [event.n for event in events] == list(range(1, 503))
    assert "as planned" in files["crashed-1"][-1].data["detail"]
    assert len(files["a%2Fodd%20name-1"]) == 501
    (death,) = [event for event in files["driver-0"] if event.kind == "actor.died"]
    assert (death.actor, death.inc, death.data["reason"]) == ("a/odd name", 1, "killed")


def test_events_carry_their_causes(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        first = await backend.spawn(Claimant, name="first")
        second = await backend.spawn(Claimant, name="second")
        await first.pass_on(second)

    run_real(body, folder=str(tmp_path))
    files = events_of(tmp_path)
    events = [event for name in files for event in files[name]]
    by_id = {event.id: event for event in events}
    assert len(by_id) == len(events)
    for event in events:
        if event.cause is not None:
            assert by_id[event.cause].lc < event.lc, event
    for name in files:  # a process's own clock only rises
        assert [event.lc for event in files[name]] == sorted({event.lc for event in files[name]})

    (claimed,) = [event for event in files["second-1"] if event.kind == "gateway.routable"]
    sent = by_id[claimed.cause or ""]
    assert (sent.kind, sent.actor, sent.data["target"], sent.data["method"]) == (
        "call.sent",
        "first",
        "second",
        "claim",
    )
    assert by_id[sent.cause or ""].actor == "driver"
    done = {event.data["call"]: event for event in events if event.kind == "call.done"}
    calls = [event for event in events if event.kind == "call.sent"]
    assert sorted(event.data["call"] for event in calls) == sorted(done)
    assert done[sent.data["call"]].cause == claimed.id
    assert {event.data["outcome"] for event in done.values()} == {"done"}


def test_a_wait_that_is_given_up_is_the_end_of_its_call(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        actor = await backend.spawn(Claimant, name="slow")
        call = actor.wait(0.5)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await call
        await call  # the answer is not lost

    run_real(body, folder=str(tmp_path))
    ends = [event.data for event in events_of(tmp_path)["driver-0"] if event.kind == "call.done"]
    assert [(end["outcome"], end["error"]) for end in ends] == [("unknown", "CancelledError")]
