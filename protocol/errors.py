"""The errors that cross actors. Each one says whether its outcome is known (DESIGN.md, "Outcomes").

Three outcomes and no fourth: *done* (the effect happened), *not done* (refused before any effect) and *unknown*.
Most bugs this project looks for are code that treats *unknown* as one of the other two, so the outcome is part of
the type here and is carried across the wire with the message, the notes and the attached errors.
"""

from __future__ import annotations

import enum
import re
from typing import Any


class Outcome(enum.StrEnum):
    """What is known of the effect of a call."""

    DONE = "done"
    NOT_DONE = "not_done"
    UNKNOWN = "unknown"


class SeatrialError(Exception):
    """Root of the errors that arrive as the same class on the other side of a call.

    Args:
        message: for a human; names what was asked and of whom.
        outcome: what is known of the effect; defaults to the class's own.
        attached: errors that led here, as data (they survive pickling, unlike ``__cause__`` under Ray).
        fields: further keyword data of a subclass; kept in ``self.fields`` and readable as attributes.
    """

    default_outcome: Outcome = Outcome.UNKNOWN

    def __init__(
        self,
        message: str = "",
        *,
        outcome: Outcome | None = None,
        attached: tuple[BaseException, ...] = (),
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.outcome = self.default_outcome if outcome is None else outcome
        self.attached = attached
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal look-up fails. `fields` itself is absent while unpickling, hence the guard.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        return f"{self.message} [outcome {self.outcome.value}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # Explicit, because the default re-calls __init__(*args) and so loses keyword data and notes.
        state = (self.message, self.outcome, tuple(portable(e) for e in self.attached), self.fields)
        return (_rebuild, (type(self), state, tuple(getattr(self, "__notes__", ()))))


def bare(error: BaseException) -> str:
    """What an error says without its outcome, for the message of another one, which has its own."""
    return error.message if isinstance(error, SeatrialError) else str(error)


def _rebuild(cls: type[SeatrialError], state: tuple[Any, ...], notes: tuple[str, ...]) -> SeatrialError:
    message, outcome, attached, fields = state
    error = cls.__new__(cls)
    SeatrialError.__init__(error, message, outcome=outcome, attached=attached, **fields)
    for note in notes:
        error.add_note(note)
    return error


class RemoteError(SeatrialError):
    """Any foreign exception of a callee. Fields: ``type`` (qualified name), ``traceback`` (text). Outcome unknown."""


class ActorDied(SeatrialError):
    """The callee died before it answered, or was dead already. Outcome unknown unless the call was never sent."""


class CallCancelled(SeatrialError):
    """The callee was cancelled, or cancelled itself, while it handled the call. Outcome unknown."""


class NoSuchActor(SeatrialError):
    """``lookup`` of a name that no living incarnation carries."""

    default_outcome = Outcome.NOT_DONE


class NameTaken(SeatrialError):
    """``spawn`` under a name that a living actor carries."""

    default_outcome = Outcome.NOT_DONE


class SpawnFailed(SeatrialError):
    """The constructor or ``start()`` raised, or the placement could not be had. ``attached`` has the reason."""


class PlacementError(SeatrialError):
    """A placement group that does not exist, is REMOVED, or did not become CREATED in time."""

    default_outcome = Outcome.NOT_DONE


class NetworkError(SeatrialError):
    """Root of the transport errors of an HTTP call."""


class ConnectTimeout(NetworkError):
    """No connection within the connect time-out: nothing was sent, so nothing can have happened."""

    default_outcome = Outcome.NOT_DONE


class ConnectionRefused(NetworkError):
    """Nobody listens at the address."""

    default_outcome = Outcome.NOT_DONE


class ReadTimeout(NetworkError):
    """The request was sent and no answer came in time: the callee may have done it, or be doing it still."""


class ConnectionLost(NetworkError):
    """The connection broke after the request was sent."""


class HttpError(SeatrialError):
    """An answer with an error status. Fields: ``status`` (int), ``body`` (text).

    A 4xx is a refusal before any effect (not done); a 5xx says nothing about the effect (unknown).
    """

    def __init__(self, message: str = "", *, status: int, body: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("outcome", Outcome.NOT_DONE if 400 <= status < 500 else Outcome.UNKNOWN)
        super().__init__(message or f"HTTP {status}: {body[:200]}", status=status, body=body, **kwargs)


class NoReplica(SeatrialError):
    """No routable replica to send to; the request was refused before any effect."""

    default_outcome = Outcome.NOT_DONE


class GateRefused(SeatrialError):
    """Root of what a request gate refuses, before any effect (serving.md 2.2)."""

    default_outcome = Outcome.NOT_DONE


class AdmissionTimeout(GateRefused):
    """The gate stayed closed for as long as the request would wait. It was never counted in flight."""


class GatePoisoned(GateRefused):
    """A lease ended in an unknown way: no grant, drain, install or reopen until the process is rebuilt."""


class WrongEpoch(GateRefused):
    """An operation of a cycle that is over, or that does not fit where the gate is in its cycle."""


class BarrierError(SeatrialError):
    """A publication barrier refuses (*not done*), or a stage of it failed (*unknown*). Fields: ``stage``, ``failed``.

    Gates stay as they are, which is closed unless the stage was the reopening (serving.md 3.2, 3.3).
    """


class StorageError(SeatrialError):
    """Root of storage failures. Fields: ``path``."""


class StorageNotFound(StorageError):
    """Nothing at that path."""

    default_outcome = Outcome.NOT_DONE


class DiskFull(StorageError):
    """No space left. What was written before stays written."""


class CorruptExport(StorageError):
    """An export whose bytes do not match its manifest (torn write), or that has no manifest."""

    default_outcome = Outcome.NOT_DONE


class ObjectError(SeatrialError):
    """Root of failures of the object store. Fields: ``object`` (id)."""

    default_outcome = Outcome.NOT_DONE


class ObjectFreed(ObjectError):
    """The value was freed by hand, or given back by everybody who held it."""


class ObjectLost(ObjectError):
    """The process that put the value is dead, and the value with it."""


class TraceError(SeatrialError):
    """Root of what a trace store refuses, before any effect (serving.md 5.3). Fields: ``session``."""

    default_outcome = Outcome.NOT_DONE


class TraceNotFound(TraceError):
    """No such session, or the prompt does not match any trace key of it."""


class TraceConflict(TraceError):
    """A write that would replace, cut or orphan what is stored."""


class TraceReleased(TraceError):
    """A write to a session that was released: it comes late, and nobody would ever release what it leaves."""


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 4_000  # characters of a message; one of megabytes would be in every copy of its error


def message_of(error: BaseException) -> str:
    """What an error says, whatever its ``__str__`` does: bounded, and without memory addresses.

    Addresses (of ``<Request object at 0x7f...>``) differ from run to run, and evidence must not.
    """
    try:
        text = str(error)
    except Exception as failed:
        text = f"<its __str__ raised {type(failed).__name__}>"
    text = _ADDRESS.sub("", text)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def portable(error: BaseException) -> BaseException:
    """The error as it may cross: ours as they are, anything else as a RemoteError that names it."""
    if isinstance(error, SeatrialError):
        return error
    import traceback  # imported late: only failures pay for it

    name = type(error).__qualname__
    if type(error).__module__ != "builtins":
        name = f"{type(error).__module__}.{name}"
    text = "".join(_cut(line) for line in traceback.format_exception(error))
    remote = RemoteError(f"{name}: {message_of(error)}", type=name, traceback=text)
    for note in getattr(error, "__notes__", ()):
        remote.add_note(note)
    return remote
