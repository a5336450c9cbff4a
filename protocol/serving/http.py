"""HTTP as plain async handlers: a request in, an answer or a stream of server-sent events out. No socket in sight.

A server (aiohttp in the real world, a component in a simulated one) turns bytes into an :class:`HttpRequest` and back.
Every refusal and every failure becomes JSON of the shape that OpenAI's clients read, with what is known of the
outcome beside it (DESIGN.md, "Outcomes"), so that whoever retries knows whether that is harmless:
``{"error": {"message", "type", "code", "outcome", ...}}``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from protocol.errors import HttpError, Outcome, ReadTimeout, SeatrialError, portable
from protocol.messages import message

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
ONCE = "x-seatrial-idempotent"
"""A request header; ``false``: a call of unknown outcome must not be made again."""

Header = tuple[str, str]


@message
class HttpRequest:
    """A request as it came in. ``path`` without the query; names of ``headers`` in lower case.

    ``query``: name and value of each parameter, decoded. ``parts``: what stands for the ``{name}`` parts of the route.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    query: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def header(self, name: str, default: str = "") -> str:
        """The first value of a header, named in lower case."""
        return next((value for found, value in self.headers if found == name), default)


@message
class HttpAnswer:
    """A whole answer."""

    status: int
    body: str
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(slots=True)
class HttpStream:
    """A streamed answer: the data of each server-sent event. Whoever reads it closes ``events``."""

    events: AsyncGenerator[str, None]
    status: int = 200
    """As sent, 200; once the events have ended in an error event, the status that it would have been."""


Handler = Callable[[HttpRequest], Awaitable[HttpAnswer | HttpStream]]


class Refusal(Exception):
    """A request that is refused before any effect.

    Args:
        status: 4xx or 5xx.
        message: what is wrong and how it can be put right.
        kind: ``type`` of the JSON error.
        headers: further headers of the answer.
    """

    def __init__(self, status: int, message: str, kind: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers


class Routes:
    """Finds the handler of a request and makes an answer of whatever comes of it; nothing but a cancellation escapes.

    Args:
        table: handlers by (method, path). A part of a path in braces, as in ``/scale_out/{id}``, stands for any text
            without a slash; a handler finds it in the request's ``parts``. A path without braces goes first.
        max_body_bytes: of a request; a longer body is refused with 413.
        retry_after_s: what a client is told to wait (header ``Retry-After``) when a retry is harmless.
    """

    def __init__(self, table: Mapping[tuple[str, str], Handler], *, max_body_bytes: int, retry_after_s: int) -> None:
        self._table = dict(table)
        self.paths = tuple(dict.fromkeys(path for _, path in table))
        self.max_body_bytes = max_body_bytes
        self.retry_after_s = retry_after_s

    def at(self, path: str) -> Routes:
        """The table that answers for a path: this one, unless it is made of several."""
        return self

    async def handle(self, request: HttpRequest) -> HttpAnswer | HttpStream:
        """Answer a request. A stream's first event has come when this returns: errors before it have a status."""
        try:
            handler, parts = self._find(request)
            answer = await handler(dataclasses.replace(request, parts=parts) if parts else request)
            return await self._begun(answer) if isinstance(answer, HttpStream) else answer
        except Exception as error:
            return self.failed(error, repeatable=request.header(ONCE, "true").lower() == "true")

    def failed(self, error: Exception, *, repeatable: bool) -> HttpAnswer:
        """The answer for an error. ``repeatable``: the request may be made again though its outcome is unknown.

        A 4xx of a replica is passed on as it is. Else: 503 when nothing was done and a retry may work, 504 after a read
        time-out, 502 when the outcome is unknown for another reason, 500 for an error nobody foresaw.
        """
        if isinstance(error, HttpError) and error.fields["status"] < 500 and error.outcome is Outcome.NOT_DONE:
            status, text = error.fields["status"], error.fields["body"]
            return HttpAnswer(status, text if _is_json(text) else _body(error, status))
        if isinstance(error, Refusal):
            return HttpAnswer(error.status, _body(error, error.status), headers=error.headers)
        status = status_of(error)
        headers: tuple[Header, ...] = ()
        if _outcome(error) is Outcome.NOT_DONE:
            headers = (("Retry-After", str(self.retry_after_s)), ("x-should-retry", "true"))
        elif not repeatable:
            headers = (("x-should-retry", "false"),)  # OpenAI's clients make any call that gave a 5xx again
        return HttpAnswer(status, _body(error, status), headers=headers)

    def too_long(self) -> Refusal:
        """The refusal of a body that is longer than allowed; a server raises it before it has read all of one."""
        return Refusal(413, f"the body is longer than {self.max_body_bytes} bytes", "request_too_large")

    def route_of(self, path: str) -> str:
        """The route that a path belongs to, as it is in the table; the path itself where there is none."""
        if path in self.paths:
            return path
        return next((route for route in self.paths if _parts(route, path) is not None), path)

    def _find(self, request: HttpRequest) -> tuple[Handler, tuple[Header, ...]]:
        route = self.route_of(request.path)
        handler = self._table.get((request.method, route))
        if handler is None:
            methods = [method for method, path in self._table if path == route]
            if not methods:
                known = ", ".join(self.paths)
                raise Refusal(404, f"no route {request.path}; there are {known}", "not_found")
            allowed = ", ".join(methods)
            text = f"{request.path} takes {allowed}, not {request.method}"
            raise Refusal(405, text, "method_not_allowed", (("Allow", allowed),))
        if len(request.body) > self.max_body_bytes:
            raise self.too_long()
        return handler, _parts(route, request.path) or ()

    async def _begun(self, stream: HttpStream) -> HttpStream:
        try:
            first = await anext(stream.events)
        except StopAsyncIteration:
            raise SeatrialError("the stream ended without an event") from None
        except BaseException:
            await stream.events.aclose()
            raise
        begun = HttpStream(stream.events)
        begun.events = _relayed(first, stream.events, begun)
        return begun


async def _relayed(first: str, events: AsyncGenerator[str, None], stream: HttpStream) -> AsyncGenerator[str, None]:
    """The events of a stream; one that breaks ends with an error event and no ``[DONE]``, never in silence."""
    async with contextlib.aclosing(events):
        try:
            yield first
            async for event in events:
                yield event
        except Exception as error:
            stream.status = status_of(error)
            yield _body(error, stream.status)


def _parts(route: str, path: str) -> tuple[Header, ...] | None:
    """What stands in a path for the parts in braces of a route; None when the path is not of that route."""
    wanted, given = route.split("/"), path.split("/")
    if len(wanted) != len(given):
        return None
    found: list[Header] = []
    for one, text in zip(wanted, given, strict=True):
        if one[:1] == "{" and one[-1:] == "}" and text:
            found.append((one[1:-1], text))
        elif one != text:
            return None
    return tuple(found)


def json_value(request: HttpRequest, *, constant: Callable[[str], Any] | None = None) -> Any:
    """The body of a request as JSON of any kind. Raises Refusal (400).

    Args:
        constant: gives the value of ``NaN``, ``Infinity`` and ``-Infinity``, which JSON does not have, or raises
            ValueError; None: floats.
    """
    try:
        return json.loads(request.body.decode("utf-8"), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise bad_request("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def json_object(request: HttpRequest) -> dict[str, Any]:
    """The body of a request as a JSON object. Raises Refusal (400)."""
    value = json_value(request)
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def bad_request(text: str) -> Refusal:
    """A refusal with status 400."""
    return Refusal(400, text, "invalid_request_error")


def json_answer(value: Any, status: int = 200) -> HttpAnswer:
    """An answer with a JSON body."""
    return HttpAnswer(status, json.dumps(value))


def status_of(error: Exception) -> int:
    """The status of the answer for an error of a call (see :meth:`Routes.failed`)."""
    if _outcome(error) is Outcome.NOT_DONE:  # not so a NoReplica after a send whose outcome is unknown
        return 503
    if isinstance(error, ReadTimeout):
        return 504
    return 502 if isinstance(error, SeatrialError) else 500


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, Refusal):
        return Outcome.NOT_DONE
    return error.outcome if isinstance(error, SeatrialError) else Outcome.UNKNOWN


def _body(error: Exception, status: int) -> str:
    if isinstance(error, Refusal):
        told: dict[str, Any] = {"message": str(error), "type": error.kind, "code": status}
    else:
        known = portable(error)
        assert isinstance(known, SeatrialError)
        told = {"message": known.message, "type": type(known).__name__, "code": status}
        for field in ("attempts", "status"):
            if field in known.fields:
                told["upstream_status" if field == "status" else field] = known.fields[field]
    told["outcome"] = _outcome(error).value
    return json.dumps({"error": told})
