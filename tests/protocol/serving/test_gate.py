"""The request gate: leases, settlement, one cycle of a barrier, poison, epochs (serving.md 2.1 to 2.3, 2.6, 2.7)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pydantic
import pytest

from protocol.config import GateConfig
from protocol.errors import AdmissionTimeout, GatePoisoned, GateRefused, Outcome, WrongEpoch
from protocol.serving.gate import RequestGate, SettlementReceipt
from tests.protocol.fake import FakeBackend, FakeHandle, run
from tests.protocol.serving.world import raised

SAFE = SettlementReceipt(True, True, "completed")
OPEN = GateConfig(initially_closed=False, initial_model_step=3)


async def gate_of(world: FakeBackend, config: GateConfig = OPEN) -> FakeHandle:
    return await world.spawn(RequestGate, config, name="gate")


NAMES = itertools.count(1)


def ask(gate: FakeHandle, timeout_s: float = 1, name: str = "") -> Any:
    """A request of session s for a lease of a name of its own."""
    return gate.request("s", timeout_s, name or f"lease-{next(NAMES)}")


async def drained(gate: FakeHandle, epoch: int) -> None:
    await gate.seal(epoch)
    await gate.drain(epoch, 10)


async def published(gate: FakeHandle, epoch: int, model_step: int) -> None:
    await drained(gate, epoch)
    await gate.install_version(epoch, model_step)
    await gate.reopen(epoch)


def test_a_lease_has_the_id_that_was_asked_for_and_the_version_and_epoch_of_its_grant() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        first, second = await ask(gate), await ask(gate)
        assert first.request_id != second.request_id
        assert (first.session_id, first.epoch, first.model_step) == ("s", 0, 3)
        for lease in (first, second):
            await gate.settle(lease.request_id, SAFE)
        await published(gate, 1, 4)
        third = await ask(gate)
        assert (third.epoch, third.model_step) == (1, 4)
        assert (await gate.snapshot()).active == (third.request_id,)

    run(body)


def test_it_is_born_closed_and_opened_by_the_first_publication() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world, GateConfig())
        assert isinstance(await raised(ask(gate, 2)), AdmissionTimeout)
        await published(gate, 1, 0)
        assert (await ask(gate, 2)).model_step == 0

    run(body)
    with pytest.raises(pydantic.ValidationError, match="initial_model_step"):
        GateConfig(initially_closed=False)


def test_a_waiter_is_not_in_flight_and_a_late_one_is_in_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        await gate.seal(1)
        waiter = asyncio.get_running_loop().create_task(ask(gate, 5))
        await asyncio.sleep(1)
        await gate.drain(1, 1)  # though somebody waits
        error = await raised(waiter)
        assert isinstance(error, AdmissionTimeout) and error.outcome is Outcome.NOT_DONE
        snapshot = await gate.snapshot()
        assert not snapshot.active and not snapshot.failures and not world.of("gate.granted")

    run(body)


def test_who_waited_before_the_seal_is_granted_only_after_the_reopening() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world, GateConfig())
        early = asyncio.get_running_loop().create_task(ask(gate, 50))
        await asyncio.sleep(0)
        await published(gate, 1, 7)
        await gate.seal(2)  # in the same instant, before the waiter has run
        await asyncio.sleep(1)
        assert not early.done()
        await gate.drain(2, 1)
        await gate.install_version(2, 8)
        await gate.reopen(2)
        assert (await early).model_step == 8

    run(body)


def test_drain_waits_for_the_last_lease() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        leases = [await ask(gate) for _ in range(3)]
        await gate.seal(1)
        drain = asyncio.get_running_loop().create_task(gate.drain(1, 60))
        for lease in leases:
            await asyncio.sleep(1)
            assert not drain.done()
            assert isinstance(await raised(gate.install_version(1, 4)), GateRefused)
            await gate.settle(lease.request_id, SAFE)
        await drain
        await gate.install_version(1, 4)

    run(body)


def test_a_drain_that_times_out_poisons() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate)
        await gate.seal(1)
        assert isinstance(await raised(gate.drain(1, 5)), GatePoisoned)
        await gate.settle(lease.request_id, SAFE)  # too late
        assert (await gate.snapshot()).failures
        assert isinstance(await raised(gate.drain(1, 5)), GatePoisoned)

    run(body)


@pytest.mark.parametrize(
    "receipt",
    [
        None,
        SettlementReceipt(False, False, "x"),
        SettlementReceipt(False, True, "x"),
        SettlementReceipt(True, False, "x"),
    ],
)
def test_an_unsafe_or_missing_receipt_poisons_for_ever(receipt: SettlementReceipt | None) -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate)
        await gate.settle(lease.request_id, receipt)
        for call in (
            ask(gate),
            gate.seal(1),
            gate.drain(0, 1),
            gate.install_version(0, 4),
            gate.reopen(0),
            gate.seal(2),
        ):
            error = await raised(call)
            assert isinstance(error, GatePoisoned) and error.outcome is Outcome.NOT_DONE
        snapshot = await gate.snapshot()
        assert not snapshot.open and not snapshot.active and len(snapshot.failures) == 1

    run(body)


def test_poison_wakes_those_who_wait() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease, other = await ask(gate), await ask(gate)
        await gate.seal(1)
        loop = asyncio.get_running_loop()
        waiter, drain = loop.create_task(ask(gate, 500)), loop.create_task(gate.drain(1, 500))
        await asyncio.sleep(1)
        await gate.settle(lease.request_id, None)
        assert isinstance(await raised(waiter), GatePoisoned) and isinstance(await raised(drain), GatePoisoned)
        assert loop.time() < 2
        await gate.settle(other.request_id, SAFE)
        # Grants are settlements, poison included, and what is active (G-I4).
        assert len(world.of("gate.granted")) == len(world.of("gate.settled")) == 2

    run(body)


def test_a_failed_but_recorded_attempt_is_safe() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate)
        await gate.settle(lease.request_id, SettlementReceipt(True, True, "failed"))
        await published(gate, 1, 4)

    run(body)


def test_settling_again_changes_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate)
        await gate.settle(lease.request_id, SAFE)
        assert isinstance(await raised(gate.settle(lease.request_id, None)), GateRefused)
        assert not (await gate.snapshot()).failures

    run(body)


def test_every_operation_is_idempotent_in_its_epoch() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        for _ in range(2):
            await drained(gate, 1)
        for _ in range(2):
            await gate.install_version(1, 4)
        for _ in range(2):
            await gate.reopen(1)
        await gate.install_version(1, 4)  # as resume_requests does again after a partial reopening
        assert [data["what"] for data in world.of("gate.changed")] == ["sealed", "drained", "installed", "reopened"]
        assert isinstance(await raised(gate.install_version(1, 5)), GateRefused)

    run(body)


def test_an_older_epoch_has_no_effect() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        await drained(gate, 5)
        before = await gate.snapshot()
        for call in (gate.seal(4), gate.drain(4, 1), gate.install_version(4, 9), gate.reopen(4), gate.reopen(6)):
            assert isinstance(await raised(call), WrongEpoch)
        assert await gate.snapshot() == before
        await gate.install_version(5, 4)
        await gate.reopen(5)
        assert isinstance(await raised(gate.seal(5)), WrongEpoch)  # that cycle is over
        assert (await gate.snapshot()).open

    run(body)


def test_an_abandoned_cycle_is_superseded_by_a_newer_one() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate)
        await gate.seal(1)
        old = asyncio.get_running_loop().create_task(gate.drain(1, 100))
        await asyncio.sleep(1)
        await gate.seal(2)
        await gate.settle(lease.request_id, SAFE)
        assert isinstance(await raised(old), WrongEpoch)
        assert not (await gate.snapshot()).drained
        await gate.drain(2, 1)

    run(body)


def test_order_within_a_cycle() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        assert isinstance(await raised(gate.drain(0, 1)), WrongEpoch)  # not sealed
        assert isinstance(await raised(gate.reopen(0)), WrongEpoch)
        await gate.seal(1)
        assert isinstance(await raised(gate.install_version(1, 4)), GateRefused)
        assert isinstance(await raised(gate.reopen(1)), GateRefused)
        await gate.drain(1, 1)
        assert isinstance(await raised(gate.reopen(1)), GateRefused)
        assert isinstance(await raised(gate.install_version(1, 2)), GateRefused)  # older than what it had
        await gate.install_version(1, 3)
        await gate.reopen(1)

    run(body)


def test_a_request_must_say_whose_it_is() -> None:
    async def body(world: FakeBackend) -> None:
        assert isinstance(await raised((await gate_of(world)).request("", 1, "lease-1")), GateRefused)

    run(body)


def test_a_lease_that_is_asked_for_again_is_the_same_also_once_the_gate_is_sealed() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        lease = await ask(gate, name="mine")
        assert await ask(gate, name="mine") == lease and len(world.of("gate.granted")) == 1
        await gate.seal(1)
        assert await ask(gate, name="mine") == lease  # else the drain would wait for a lease that is nobody's
        await gate.settle("mine", SAFE)
        await gate.drain(1, 1)
        await gate.install_version(1, 4)
        await gate.reopen(1)
        assert isinstance(await raised(ask(gate, name="mine")), GateRefused)  # it comes late
        assert not (await gate.snapshot()).active

    run(body)


def test_two_waiting_requests_for_one_lease_are_granted_one() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world, GateConfig())
        both = [asyncio.get_running_loop().create_task(ask(gate, 50, "mine")) for _ in range(2)]
        await asyncio.sleep(1)
        await published(gate, 1, 0)
        first, second = await asyncio.gather(*both)
        assert first == second and (await gate.snapshot()).active == ("mine",)

    run(body)


def test_what_was_never_granted_is_refused_once_it_is_given_up() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        assert isinstance(await raised(gate.settle("mine", SettlementReceipt(True, True, "never sent"))), GateRefused)
        assert isinstance(await raised(ask(gate, name="mine")), GateRefused)
        assert not (await gate.snapshot()).failures

    run(body)


def test_an_unknown_end_under_an_earlier_incarnation_poisons_this_one_once() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        for _ in range(2):
            assert isinstance(await raised(gate.settle("of-before", None)), GateRefused)
        assert len((await gate.snapshot()).failures) == 1
        assert isinstance(await raised(gate.seal(1)), GatePoisoned)

    run(body)


def test_so_many_ends_are_remembered_and_no_more() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        for number in range(5_000):
            await gate.settle((await ask(gate, name=f"n-{number}")).request_id, SAFE)
        assert len(gate.target._ended) + len(gate.target._ended_before) <= 2048
        assert isinstance(await raised(ask(gate, name="n-4000")), GateRefused)

    run(body)


def test_only_a_lease_that_is_not_active_is_looked_for_among_those_that_have_ended() -> None:
    async def body(world: FakeBackend) -> None:
        gate = await gate_of(world)
        await ask(gate, name="mine")
        has_ended, looks = gate.target._has_ended, []

        def looked(name: str) -> bool:
            looks.append(name)
            return bool(has_ended(name))

        gate.target._has_ended = looked
        await gate.settle("mine", SAFE)
        assert looks == []  # at every settlement
        assert isinstance(await raised(gate.settle("mine", None)), GateRefused)
        assert looks == ["mine"] and not (await gate.snapshot()).failures

    run(body)
