"""One HTTP route as data: what serves it and what describes it (`protocol.openapi`) read the same table.

A control API answers every request with JSON, errors as ``{"error": CODE, "detail": TEXT}``; what the server itself
refuses, or what is lost on the way to the component behind it, says beside that whether anything was done.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from pydantic import BaseModel

from protocol.errors import Outcome, ReadTimeout, SeatrialError
from protocol.serving.http import Handler, HttpAnswer, HttpRequest, Refusal, Routes, bad_request, json_value, status_of


@dataclasses.dataclass(frozen=True)
class Route:
    """One route.

    ``handler``: method of the component, called with ``fixed``, then the parts of the path in braces, then the body
    (where there may be one), and by name with what the query gives. ``errors``: status to the codes that it may have.
    ``ok``: type of the answer with 200; ``str`` is text.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    handler: str
    summary: str
    ok: Any
    fixed: tuple[str, ...] = ()
    body: Any = None
    body_optional: bool = False
    query: type[BaseModel] | None = None
    errors: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    error_types: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    """Status to the type of its body, where a component's own error has more fields than usual."""
    slow: bool = False
    """It may take minutes: the longer time-out applies."""


@dataclasses.dataclass
class HttpErrorBody:
    """What the server of a control API answers itself. ``outcome``: ``not_done`` or ``unknown``."""

    error: str
    detail: str
    outcome: str


SERVER_ERRORS: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("INVALID_REQUEST_ERROR",),
    401: ("AUTHENTICATION_ERROR",),
    404: ("NOT_FOUND",),
    405: ("METHOD_NOT_ALLOWED",),
    408: ("REQUEST_TIMEOUT",),
    413: ("REQUEST_TOO_LARGE",),
    500: ("INTERNAL",),
    501: ("NOT_IMPLEMENTED",),
    502: ("OUTCOME_UNKNOWN",),
    503: ("UNAVAILABLE",),
    504: ("TIMEOUT",),
}
"""Codes of :class:`HttpErrorBody` by status."""


class ApiAnswer(Protocol):
    """What a handler of a control API gives back (:class:`protocol.scaling.bodies.ApiReply`)."""

    @property
    def status(self) -> int:
        """Of HTTP."""
        ...

    @property
    def body(self) -> Any:
        """A JSON value."""
        ...


class ControlRoutes(Routes):
    """Serves the routes of a control API.

    Args:
        routes: the table.
        ask: calls the component: route, arguments, arguments by name. Gives an :class:`ApiAnswer`.
        max_body_bytes: of a request.
        retry_after_s: what a client is told to wait when nothing was done.
        more: handlers beside those of the table.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        ask: Callable[[Route, tuple[Any, ...], dict[str, Any]], Awaitable[Any]],
        *,
        max_body_bytes: int,
        retry_after_s: int,
        more: Mapping[tuple[str, str], Handler] | None = None,
    ) -> None:
        table: dict[tuple[str, str], Handler] = {(one.method, one.path): self._serving(one) for one in routes}
        super().__init__({**table, **(more or {})}, max_body_bytes=max_body_bytes, retry_after_s=retry_after_s)
        self._ask = ask

    def _serving(self, route: Route) -> Handler:
        async def handler(request: HttpRequest) -> HttpAnswer:
            arguments = (*route.fixed, *(text for _, text in request.parts))
            if route.body is not None and (request.body.strip() or not route.body_optional):
                arguments = (*arguments, json_value(request, constant=_no_number))
            reply: ApiAnswer = await self._ask(route, arguments, _query(route, request))
            return HttpAnswer(reply.status, json.dumps(reply.body, allow_nan=False))

        return handler

    def failed(self, error: Exception, *, repeatable: bool) -> HttpAnswer:
        """As of the class below, in the shape of a control API."""
        answer = super().failed(error, repeatable=repeatable)
        if isinstance(error, Refusal):
            code, detail, outcome = error.kind.upper(), str(error), Outcome.NOT_DONE
        else:
            known = error if isinstance(error, SeatrialError) else None
            outcome = Outcome.UNKNOWN if known is None else known.outcome
            detail = f"{type(error).__name__}: {error if known is None else known.message}"
            if outcome is Outcome.NOT_DONE:
                code = "UNAVAILABLE"
            elif isinstance(error, ReadTimeout):
                code = "TIMEOUT"
            else:
                code = "INTERNAL" if known is None else "OUTCOME_UNKNOWN"
        status = error.status if isinstance(error, Refusal) else status_of(error)
        body = HttpErrorBody(code, detail, outcome.value)
        return HttpAnswer(status, json.dumps(dataclasses.asdict(body)), headers=answer.headers)


class Mounted(Routes):
    """Several tables of handlers under prefixes of one server. The longest prefix of a path gets it.

    Args:
        mounts: prefix (``""`` or ``/name``) to its table. One without any prefix gets what no other takes.
    """

    def __init__(self, mounts: Mapping[str, Routes]) -> None:
        first = next(iter(mounts.values()))
        super().__init__({}, max_body_bytes=first.max_body_bytes, retry_after_s=first.retry_after_s)
        self._mounts = dict(sorted(mounts.items(), key=lambda one: -len(one[0])))
        self.paths = tuple(prefix + path for prefix, table in mounts.items() for path in table.paths)

    def at(self, path: str) -> Routes:
        """The table that a path belongs to; this one where there is none."""
        found = self._mount(path)
        return self if found is None else self._mounts[found]

    async def handle(self, request: HttpRequest) -> Any:
        """Hand a request to its table."""
        prefix = self._mount(request.path)
        if prefix is None:
            return await super().handle(request)
        below = request.path[len(prefix) :] or "/"
        return await self._mounts[prefix].handle(dataclasses.replace(request, path=below))

    def _mount(self, path: str) -> str | None:
        for prefix in self._mounts:
            if path == prefix or path.startswith(f"{prefix}/"):
                return prefix
        return None


def _query(route: Route, request: HttpRequest) -> dict[str, str]:
    """The query, as text. Raises Refusal (400): an unknown parameter, or one given twice. Values are the handler's."""
    known = {} if route.query is None else route.query.model_fields
    given: dict[str, str] = {}
    for name, value in request.query:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise bad_request(f"no query parameter {name!r}; {route.path} takes {takes}")
        if name in given:
            raise bad_request(f"the query parameter {name!r} is given twice")
        given[name] = value
    return given


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
