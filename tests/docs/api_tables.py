"""The tables of docs/api.md, made from the same tables of routes as the OpenAPI document: routes, bodies, errors."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from protocol.openapi import ROUTES, ApiName, default_document
from protocol.serving.http_routes import SERVER_ERRORS, Route

_MEANS = {
    "UNKNOWN_MODEL": "the body names a model that is not configured",
    "INVALID_RANGE": "the target is below the number of protected replicas",
    "REJECTED": "rollout replicas: the target is below the number of initial ones; `status` says `REJECTED` too",
    "NOT_CANCELLABLE": "a replica of the scale-out has been connected, or it is over; it goes on",
    "CONFLICT": "another operation of the model is at work, or over but not clean",
    "IDEMPOTENCY_CONFLICT": "the key was used with another body; use a new key",
    "INVALID_TYPE": "a field has a wrong type; `detail` says what to send (num_replicas: an integer from 1 to 10**12)",
    "DISCOVERY_FAILED": "the gateway does not answer; nothing was admitted",
    "CAPACITY_UNKNOWN": "the manager does not say how many there are; nothing was admitted",
    "NOT_KEPT": "the answer could not be put on record; ask again with the same key, or look at the status",
    "UNKNOWN_OPERATION": "no operation of this direction has the id (without a journal ids are lost with the process)",
    "LIFECYCLE_RUNNING": "the operation is not over, or its manager is still at work on it; try again later",
    "IN_FLIGHT": "calls are in flight on the victim; try again later",
    "MANAGER_UNKNOWN": "the manager does not answer; try again",
    "NO_RECONCILE_HOOK": "a manager of your own lacks a method that a reconcile needs; an operator must look",
    "STATE_LOST": "the manager does not know the operation any more; an operator must look",
    "VICTIM_UNKNOWN": "nobody can say who the victim is, or that it is idle; try again",
    "INVALID_SAMPLING": "no seed repeats such sampling; `detail` says what to send",
    "UPSTREAM_REFUSED": "a replica answered 4xx; `detail` is what it said",
    "UPSTREAM_ODD": "a replica's answer is no JSON object",
    "INVALID_BODY": "a field has a wrong type or value, or there is not exactly one prompt",
    "UNKNOWN_SERVICE": "the service is not scaled here; `detail` lists those that are",
    "INVALID_CONFIG": "a value is out of range, or two of them contradict each other; nothing has changed",
    "INVALID_PATCH": "the patch is no JSON object, or nested too deeply",
    "TARGET_BUSY": "a service whose operation is not over cannot be moved or taken out; nothing has changed",
    "INVALID_REQUEST_ERROR": "the body is no JSON in UTF-8, or the query has a parameter that the route does not take",
    "AUTHENTICATION_ERROR": "a token is set, and the request does not bring it",
    "NOT_FOUND": "no such route; `detail` lists those that exist",
    "METHOD_NOT_ALLOWED": "the route takes other methods, see the header `Allow`",
    "REQUEST_TIMEOUT": "the body did not arrive within 60 s",
    "REQUEST_TOO_LARGE": "the body is longer than 16 MiB",
    "INTERNAL": "an error that nobody foresaw; the outcome is unknown",
    "NOT_IMPLEMENTED": "a component of your own lacks the method",
    "OUTCOME_UNKNOWN": "the connection broke, a process died, or a replica answered 5xx: it may have been done",
    "UNAVAILABLE": "nothing was done; `Retry-After` says when to ask again",
    "TIMEOUT": "no answer in time: it may have been done",
}  # fmt: skip


def routes_table(api: ApiName) -> str:
    """The routes of one API with what they take, answer and refuse."""
    rows = [(_route(route), route.summary, _takes(route), _gives(route), _refuses(route)) for route in ROUTES[api]]
    return "\n".join(_table(("route", "what", "takes", "answers", "own errors"), rows))


def bodies_list() -> str:
    """Every body with its fields, as the document has them."""
    return "\n".join(_bodies(default_document()["components"]["schemas"]))


def errors_table() -> str:
    """Every code of the control APIs: where it comes from and what it means."""
    where: dict[tuple[int, str], list[str]] = {}
    for api in ("scale", "rollout", "autoscaler"):
        for route in ROUTES[api]:  # type: ignore[index]  # the three names are of the type
            for status, codes in route.errors.items():
                for code in codes:
                    where.setdefault((status, code), []).append(f"`{route.method} {route.path}`")
    for status, codes in SERVER_ERRORS.items():
        for code in codes:
            where.setdefault((status, code), []).append("any")
    rows = [
        (str(status), f"`{code}`", _MEANS[code], ", ".join(dict.fromkeys(routes)))
        for (status, code), routes in sorted(where.items())
    ]
    return "\n".join(_table(("status", "`error`", "means", "routes"), rows))


def _bodies(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, shape in schemas.items():
        if "properties" not in shape:
            continue
        says = " ".join(shape.get("description", "").split("\n\n")[0].replace("``", "`").split())
        needed = set(shape.get("required", ()))
        fields = ", ".join(f"`{field}`{'' if field in needed else '?'}" for field in shape["properties"])
        yield f"- **{name}**: {fields}.{' ' + says if says else ''}"


def _route(route: Route) -> str:
    return f"`{route.method} {route.path}`"


def _takes(route: Route) -> str:
    parts = []
    if route.body is not None:
        name = "AutoscalerConfigPatch" if route.method == "PATCH" else route.body.__name__
        parts.append(f"{name}{' (may be absent)' if route.body_optional else ''}")
    if route.query is not None:
        parts += [f"`?{name}=`" for name in route.query.model_fields]
    return ", ".join(parts)


def _gives(route: Route) -> str:
    if route.ok is str:
        return "text"
    if typing.get_origin(route.ok) is dict:
        return "a JSON object"
    return " or ".join(one.__name__ for one in typing.get_args(route.ok) or (route.ok,))


def _refuses(route: Route) -> str:
    return ", ".join(f"{status} `{code}`" for status, codes in sorted(route.errors.items()) for code in codes)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
